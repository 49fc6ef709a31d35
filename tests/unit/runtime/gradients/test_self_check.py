# SPDX-License-Identifier: Apache-2.0
"""The gradient self-check: silent about right gradients, it finds every way to break them and says what is wrong.

The record it keeps must not depend on what the reducer does, so that the same tests break the reducer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.gradients.autograd_internals import accumulate_grad_nodes
from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.ledger import GradientAccountingError, Ledger, ParameterRecord
from deepspeed.runtime.gradients.reducer import GradientReducer
from deepspeed.runtime.gradients.self_check import OBSERVERS, GradientCheckError, Observer, StepReport
from deepspeed.runtime.gradients.self_check_explain import named_factor
from deepspeed.runtime.gradients.self_check_record import fold
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad
from unit.common import DistributedTest
from unit.graphs import ReusableNet, make_batch
from unit.runtime.gradients import test_mutations as mutations
from unit.runtime.gradients.test_mutations import MUTATIONS, Mutation

STEPS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Reports(Observer):
    """Collects what checks report while it is in use."""

    def __init__(self) -> None:
        self.all: list[StepReport] = []

    def on_report(self, check: Any, report: StepReport) -> None:
        self.all.append(report)

    @property
    def last(self) -> StepReport:
        return self.all[-1]


@contextmanager
def reports() -> Iterator[Reports]:
    collected = Reports()
    OBSERVERS.append(collected)
    try:
        yield collected
    finally:
        OBSERVERS.remove(collected)


def make_engine(stage: int, dtype: str = "fp32", gas: int = STEPS, check: Any = True, **top: Any) -> Any:
    torch.manual_seed(3)
    model = ReusableNet()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 0},
        **top,
    }
    if check is not None:
        config["gradient_check"] = {"enabled": True} if check is True else {"enabled": True, **check}
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"loss_scale": 256.0} if dtype == "fp16" else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch_of(engine: Any, position: int, dtype: str = "fp32") -> Any:
    return make_batch(engine.global_rank, position, dtype=DTYPES[dtype])


def loss_of(engine: Any, position: int, dtype: str = "fp32", head: int = 0) -> Tensor:
    batch = batch_of(engine, position, dtype)
    return (engine(batch.x, head) - batch.target).float().square().mean()


def train_window(engine: Any, dtype: str = "fp32", gas: int = STEPS) -> None:
    for position in range(gas):
        engine.backward(loss_of(engine, position, dtype))
        engine.step()


# ---------------------------------------------------------------------------------------------------- right ones


class Interrupted(Exception):
    """Ends a backward."""


def interrupted(engine: Any, dtype: str, announced: bool) -> None:
    """A backward that dies when the head and the core have delivered, and the encoder has not."""

    def interrupt(_: Tensor) -> None:
        raise Interrupted

    module, batch = engine.module, batch_of(engine, 77, dtype)
    hidden = module.encoder(batch.x) if engine.zero_optimization_stage() < 3 else engine.module.encoder(batch.x)
    hidden = hidden * 1.0
    hidden.register_hook(interrupt)
    loss = module.heads[0](module.core(hidden)).float().square().mean()
    with pytest.raises(Interrupted):
        engine.backward(loss) if announced else loss.backward()


def window_of_many_kinds(engine: Any, dtype: str) -> None:
    """Every way to deliver contributions, in one window of four micro-steps."""
    stage, scaled = engine.zero_optimization_stage(), dtype == "fp16"
    module = engine.module
    # one graph, two backwards, one of them with a division of the caller's own
    loss = loss_of(engine, 0, dtype)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss / STEPS, scale_wrt_gas=False)
    engine.step()
    # nested reentrant checkpoint, around the engine, a gradient that nobody accumulates
    batch = batch_of(engine, 1, dtype)
    x = batch.x.clone().requires_grad_()
    inner = checkpoint(lambda v: checkpoint(module.core, module.encoder(v), use_reentrant=True), x, use_reentrant=True)
    side = checkpoint(module.encoder, x, use_reentrant=False)
    if stage < 3:
        torch.autograd.grad(side.float().square().sum(), [x], retain_graph=True)
    loss = inner.float().square().mean() + side.float().mean() + loss_of(engine, 2, dtype, head=1)
    engine.scale(loss).backward() if scaled else loss.backward()
    if stage < 2:
        interrupted(engine, dtype, announced=True)
        with engine.no_sync():
            engine.backward(loss_of(engine, 3, dtype))
        if not scaled:
            interrupted(engine, dtype, announced=False)
    engine.step()
    # frozen for a while, thawed again before the window ends
    module.encoder.requires_grad_(False)
    engine.backward(loss_of(engine, 4, dtype))
    module.encoder.requires_grad_(True)
    engine.step()
    if stage > 0:
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 5, dtype))
            engine.backward(loss_of(engine, 6, dtype, head=1))
    output = engine(batch_of(engine, 7, dtype).x)
    if scaled:
        engine.backward(output.float().mean())
    else:
        output.backward(torch.ones_like(output) / (1 + engine.global_rank))
    engine.step()


class TestRightGradients(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_nothing_is_said_about_them(self, stage: int) -> None:
        for dtype in DTYPES:
            engine = make_engine(stage, dtype)
            with reports() as collected:
                window_of_many_kinds(engine, dtype)
                train_window(engine, dtype)
            assert len(collected.all) == 2 and all(report.right for report in collected.all)
            results = collected.all[0].results
            assert [r.name for r in results] == [name for name, _ in engine.module.named_parameters()]
            assert all(r.verdict == "right" and r.allowed < 0.1 for r in results)
            assert any(abs(r.factor - 1.0) < 1e-2 for r in results), "something was compared"
            engine.destroy()

    def test_a_window_that_was_dropped_does_not_count(self) -> None:
        for stage in (1, 2):
            engine = make_engine(stage)
            with reports() as collected:
                engine.backward(loss_of(engine, 9, head=1))
                engine.zero_grad()
                engine.backward(loss_of(engine, 8))
                engine.optimizer.zero_grad()
                train_window(engine)
            assert collected.last.right and len(collected.last.backwards) == STEPS
            engine.destroy()

    def test_one_loss_over_two_engines(self) -> None:
        first, second = make_engine(1, gas=1), make_engine(2, gas=2)
        with reports() as collected:
            for _ in range(2):
                first.backward(loss_of(first, 0) * loss_of(second, 1), scale_wrt_gas=False)
                first.step()
                second.step()
        assert len(collected.all) == 3 and all(report.right for report in collected.all)
        first.destroy()
        second.destroy()

    def test_a_sum_over_ranks_instead_of_a_mean(self) -> None:
        engine = make_engine(1, gradient_allreduce_op="sum")
        with reports() as collected:
            train_window(engine)
        assert collected.last.right
        engine.destroy()

    def test_an_overflow_on_one_rank_is_no_mismatch(self) -> None:
        for dtype in ("fp16", "bf16"):
            engine = make_engine(2, dtype, gas=1)
            with reports() as collected:
                loss = loss_of(engine, 0, dtype)
                engine.backward(loss * (float("inf") if engine.global_rank else 1.0))
                engine.step()
            assert collected.last.right and collected.last.skipped and engine.skipped_steps == 1
            engine.destroy()


# ---------------------------------------------------------------------------------------------------- broken ones

# By a contribution that is only counted no gradient is changed. What is wrong with gathered weights, autograd has
# computed with.
NO_GRADIENT = ("firing_counted_twice",)
GATHERED = (
    "released_memory_is_reused",
    "released_in_use",
    "stale_shard_gathered",
    "persistent_weights_left_stale",
    "padding_read",
    "wrong_slice_kept",
    "weights_not_awaited",
)
BROKEN = [m for m in MUTATIONS if m.apply.__name__ not in (*NO_GRADIENT, *GATHERED)]
FOUND_BEFORE = (GradientAccountingError, mutations.BufferInFlightError)


class TestBrokenReduction(DistributedTest):
    """Each mutation is found out within the three updates of the scenario, the accounts being switched off."""

    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("mutation", BROKEN, ids=lambda mutation: mutation.apply.__name__)
    def test_it_is_found_out(self, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DS_GRADIENT_CHECK", "1")
        mutations.born_full_of_nan(monkeypatch)
        mutation.apply(monkeypatch)
        monkeypatch.setattr(Ledger, "check_closed", lambda self: None)
        with mutations.delayed_transport(), pytest.raises((GradientCheckError, *FOUND_BEFORE)):
            mutations.worst_error(mutation.stages[len(mutation.apply.__name__) % len(mutation.stages)])

    def test_the_scenario_is_right_when_nothing_is_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DS_GRADIENT_CHECK", "1")
        with reports() as collected:
            assert mutations.worst_error(1) < mutations.TOLERANCE
        assert len(collected.all) == len(mutations.WINDOWS) and all(report.right for report in collected.all)


def message_of(engine: Any, dtype: str = "fp32", gas: int = STEPS) -> str:
    """Train a window, which must be refused: what was said."""
    before = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    with pytest.raises(GradientCheckError) as error:
        train_window(engine, dtype, gas)
    after = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before), "nothing is updated"
    engine.zero_grad()
    engine.micro_steps = 0  # the refused step() has not counted
    return str(error.value)


class TestWhatIsSaid(DistributedTest):
    """Scales, lost contributions, and where."""

    world_size = 2
    reuse_dist_env = True

    def test_a_forgotten_division_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(2)
        mutations.no_accumulation_scale(monkeypatch)
        said = message_of(engine)
        assert "4 x what autograd delivered: as if the division by gradient_accumulation_steps=4 had not" in said
        assert "encoder.0.weight (group 0)" in said and "on ranks 0, 1" in said
        assert "micro-step 3, backward 3 (engine.backward)" in said and "the global norm is" in said
        monkeypatch.undo()
        train_window(engine)  # the engine goes on
        mutations.no_world_division(monkeypatch)
        said = message_of(engine)
        assert "by the number of ranks, 2 had not happened" in said, said
        engine.destroy()

    def test_a_loss_scale_that_differs_from_the_one_divided_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(1, "fp16", gas=1)
        monkeypatch.setattr(type(engine.optimizer), "scale_if_loss", lambda self, loss: loss.float() * 64.0)
        assert re.search(r"0\.25 x what autograd delivered", message_of(engine, "fp16", gas=1))
        engine.destroy()

    def test_the_contribution_that_was_lost_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(1)
        real = ParameterRecord.take_gradient

        def take_gradient(self: ParameterRecord) -> Tensor | None:
            gradient = real(self)
            lost = self.name == "core.0.weight" and engine.global_rank == 1 and engine.micro_steps % STEPS == 2
            return gradient * 0.0 if lost else gradient

        monkeypatch.setattr(ParameterRecord, "take_gradient", take_gradient)
        said = message_of(engine)
        assert "1 of 8 parameters" in said
        contribution = "the contribution of rank 1 in micro-step 2, backward 2 (engine.backward)"
        assert f"{contribution} counts 0 times: it was lost" in said
        engine.destroy()

    def test_a_single_wrong_element_is_found_and_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for stage, dtype in ((0, "bf16"), (1, "bf16"), (3, "fp32")):
            engine = make_engine(stage, dtype)
            real = GradientReducer.synchronize

            def synchronize(self: GradientReducer, real: Any = real) -> list[GradientShard]:
                shards = real(self)
                if self.channel.rank == 0:
                    shards[0].flat()[3] *= 1.5
                return shards

            monkeypatch.setattr(GradientReducer, "synchronize", synchronize)
            said = message_of(engine, dtype)
            monkeypatch.undo()
            assert re.search(r"encoder\.0\.weight .*1 of 30 elements, on rank 0; element \[0, 3\] is", said), said
            engine.destroy()

    def test_padding_and_elements_that_nobody_steps_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(3)
        real = GradientReducer.synchronize

        def synchronize(self: GradientReducer) -> list[GradientShard]:
            shards = real(self)
            if self.channel.rank == 1:
                shards[0].flat()[-1] = 5.0  # the last parameter has three elements
            return shards

        monkeypatch.setattr(GradientReducer, "synchronize", synchronize)
        assert "1 elements of padding, which no parameter owns, are not zero" in message_of(engine)
        monkeypatch.undo()
        engine.destroy()
        engine = make_engine(1)
        bias = engine.module.core[0].bias
        bias.data = bias.data.clone()  # not a view of the flat weights any more: no update reaches it
        assert re.search(r"core\.0\.bias .*6 of its 6 elements are stepped on by no rank", message_of(engine))
        engine.destroy()

    def test_a_warning_lets_training_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make_engine(2, check={"on_mismatch": "warn"})
        mutations.no_accumulation_scale(monkeypatch)
        with reports() as collected:
            train_window(engine)
        assert not collected.last.right and engine.global_steps == 1
        engine.destroy()


# ---------------------------------------------------------------------------------------------------- which updates


def hooks_of(engine: Any) -> int:
    """Hooks in front of AccumulateGrad nodes; the reducer's are behind them."""
    check = engine._stepper.gradient_check
    return 0 if check is None else sum(entry.handle is not None for entry in check.record.entries)


class TestWhichUpdates(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_without_it_there_is_not_one_hook(self) -> None:
        plain = torch.autograd.backward
        engine = make_engine(1, check=None)
        assert engine._stepper.gradient_check is None and torch.autograd.backward is plain
        seen: list[int] = []
        (node,) = accumulate_grad_nodes([engine.module.encoder[0].weight])
        train_window(engine)
        assert node.metadata == {} and not seen
        engine.destroy()

    def test_every_and_steps(self) -> None:
        plain = torch.autograd.backward
        engine = make_engine(2, gas=1, check={"every": 3, "steps": 2})
        hooked, total = [], len(list(engine.module.parameters()))
        with reports() as collected:
            for _ in range(8):
                hooked.append(hooks_of(engine))
                assert (torch.autograd.backward is not plain) == (hooked[-1] > 0)
                train_window(engine, gas=1)
        assert [report.update for report in collected.all] == [1, 4]
        assert hooked == [total, 0, 0, total, 0, 0, 0, 0]
        assert engine._stepper.gradient_check.record.nbytes == 0
        engine.destroy()
        assert torch.autograd.backward is plain

    def test_parameters(self) -> None:
        engine = make_engine(1, check={"parameters": ["heads.1.*", "core.?.bias"]})
        with reports() as collected:
            train_window(engine)
        assert [r.name for r in collected.last.results] == ["core.0.bias", "heads.1.weight", "heads.1.bias"]
        assert hooks_of(engine) == 3
        engine.destroy()
        with pytest.raises(ValueError, match="gradient_check.parameters .* matches none of the 8 trained parameters"):
            make_engine(1, check={"parameters": ["decoder.*"]})

    def test_tolerance(self) -> None:
        engine = make_engine(1, "bf16", check={"tolerance": 1e-9})
        with pytest.raises(GradientCheckError, match="allowed 1e-09"):
            train_window(engine, "bf16")
        engine.destroy()

    def test_gradients_that_the_caller_wrote_are_not_compared(self) -> None:
        for stage in (0, 2):
            engine = make_engine(stage)
            bias, weight = engine.module.core[0].bias, engine.module.core[0].weight
            with reports() as collected:
                for position in range(STEPS):
                    engine.backward(loss_of(engine, position))
                    if position == STEPS - 1:
                        safe_set_full_grad(bias, torch.ones(6))
                        if stage == 0:
                            weight.grad = weight.grad * 0.5
                    engine.step()
                train_window(engine)
            edited = [r.name for r in collected.all[0].results if r.verdict == "edited"]
            assert edited == ["core.0.weight", "core.0.bias"][stage // 2 :]
            assert all(r.verdict == "right" for r in collected.last.results), "the next window is compared whole"
            engine.destroy()

    def test_memory_while_a_window_is_recorded(self) -> None:
        engine = make_engine(1)
        numel = sum(p.numel() for p in engine.module.parameters())
        engine.backward(loss_of(engine, 0) + loss_of(engine, 0, head=1))
        record = engine._stepper.gradient_check.record
        sketches = 4 * 64 * len(record.entries)
        assert record.nbytes == 6 * numel + sketches
        engine.destroy()


class TestOneRank(DistributedTest):
    world_size = 1

    def test_stages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for stage in (0, 1, 2, 3):
            engine = make_engine(stage)
            with reports() as collected:
                train_window(engine)
            assert collected.last.right
            mutations.no_accumulation_scale(monkeypatch)
            assert "gradient_accumulation_steps=4 had not happened" in message_of(engine)
            monkeypatch.undo()
            engine.destroy()


# ---------------------------------------------------------------------------------------------------- the parts


def test_a_hook_in_front_of_the_node_sees_contributions_alone_and_not_those_of_autograd_grad() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    weight.register_hook(lambda gradient: gradient * 10)
    (node,) = accumulate_grad_nodes([weight])
    seen: list[tuple[float, bool]] = []
    node.register_prehook(lambda gradients: seen.append((gradients[0].item(), weight.grad is None)))
    weight.register_post_accumulate_grad_hook(lambda w: seen.append((-w.grad.item(), False)))
    for _ in range(2):
        (weight * 3).sum().backward()
    assert seen == [(30.0, True), (-30.0, False), (30.0, False), (-60.0, False)], "after tensor hooks, before .grad"
    torch.autograd.grad((weight * 3).sum(), [weight])
    assert len(seen) == 4


def test_factors_have_names() -> None:
    assert named_factor(4.0, 4, 2, 1.0) == "as if the division by gradient_accumulation_steps=4 had not happened"
    assert named_factor(1 / 3, 4, 3, 1.0) == "as if it had been divided twice by the number of ranks, 3"
    assert named_factor(1024.0, 4, 3, 1024.0) == "as if the division by the loss scale, 1024 had not happened"
    assert named_factor(0.0, 4, 3, 1.0) == "as if nothing of it had reached the optimizer"
    assert named_factor(1.7, 4, 3, 1.0) == ""
    assert " or as if every contribution" in named_factor(2.0, 2, 3, 1.0)


def test_a_sketch_is_linear_and_keeps_small_tensors_whole() -> None:
    a, b = torch.randn(131), torch.randn(131)
    assert torch.allclose(fold(a) + 2 * fold(b), fold(a + 2 * b), atol=1e-5)
    small = torch.arange(5.0)
    assert torch.equal(fold(small)[:5], small) and not fold(small)[5:].any()
