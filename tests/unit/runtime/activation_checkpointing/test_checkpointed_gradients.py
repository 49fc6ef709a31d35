# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of this package inside an engine: the gradient is that of plain autograd in float64 without any.

A block with a frozen weight, a low-rank adapter beside it and dropout inside is used once or several times in one loss,
each use under another kind of checkpoint, in the engine's forward and around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import deepspeed
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    Losses,
    ReusableNet,
    assert_gradients,
    expected_gradients,
    full_gradients,
    make_batch,
    make_engine,
    mse,
    my_batch,
    run_micro_step,
    whole_copy,
)
from unit.reference import max_relative_error, reference_gradients
from unit.runtime.activation_checkpointing.held_bytes import HeldBytes
from unit.runtime.activation_checkpointing.settings import all_ranks_share_one_model, unconfigured

ck = deepspeed.checkpointing

Use = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
FORMS = pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class AdaptedNet(ReusableNet):
    """Core with a frozen weight and an adapter. ``use`` says how the forward runs its core."""

    def __init__(self, seed: int = 7) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))
        self.core[0].weight.requires_grad_(False)

    def block(self, x: Tensor) -> Tensor:
        return dropout(self.core(x) + self.adapter(x))

    def forward(self, x: Tensor, head: int = 0, use: Use | None = None) -> Tensor:
        hidden = self.encoder(x)
        return self.heads[head]((use or plain)(self.block, hidden))


def dropout(x: Tensor) -> Tensor:
    """Draws the same numbers in every dtype, which torch's does not."""
    return x * (torch.rand(x.shape) > 0.3).to(device=x.device, dtype=x.dtype) / 0.7


def plain(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return part(x)


def reentrant(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ck.checkpoint(part, x)


def recomputed(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ck.non_reentrant_checkpoint(part, x)


def nested(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ck.checkpoint(lambda a: part(ck.checkpoint(part, part(a))), x)


def nested_kinds(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Either kind in the other one, and torch's own in both."""
    inner = ck.checkpoint(lambda a: ck.non_reentrant_checkpoint(part, a) + part(a), x)
    outer = ck.non_reentrant_checkpoint(lambda a: part(ck.checkpoint(part, a)), inner)
    return torch_checkpoint(lambda a: ck.checkpoint(part, a), outer, use_reentrant=True)


def without_grad_in(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ck.checkpoint(part, x.detach()) + x


USES = (plain, reentrant, recomputed, nested, nested_kinds, without_grad_in)
PAIRS = {
    torch.float32: tuple(pair for pair in itertools.product(USES, repeat=2) if pair != (plain, plain)),
    torch.bfloat16: ((reentrant, recomputed), (without_grad_in, reentrant), (plain, reentrant), (recomputed, plain)),
}


def uncheckpointed(use: Use) -> Use:
    """The same arithmetic."""
    return {
        nested: lambda part, x: part(part(part(x))),
        nested_kinds: lambda part, x: (lambda h: part(part(part(h))))(part(x) + part(x)),
        without_grad_in: lambda part, x: part(x.detach()) + x,
    }.get(use, plain)


def pairs_of(stage: int, dtype: torch.dtype) -> Callable[[Batch], tuple[Use, Use]]:
    """Every pair once over the windows, a different one in each micro-step and, up to stage 2, on each rank. At stage 3
    ranks gather weights together and must run the same modules."""
    pairs = PAIRS[dtype]
    per_rank = 7 if stage < 3 else 0
    return lambda batch: pairs[(batch.window + per_rank * batch.rank + 3 * batch.micro_step) % len(pairs)]


def pair_of(batch: Batch, choose: Callable[[Batch], tuple[Use, Use]], replaced: bool) -> tuple[Use, Use]:
    pair = choose(batch)
    return tuple(uncheckpointed(use) for use in pair) if replaced else pair  # type: ignore[return-value]


def losses_of(
    name: str, choose: Callable[[Batch], tuple[Use, Use]], replaced: bool
) -> Callable[[Callable, nn.Module, Batch], Iterable[Tensor]]:
    """``replaced``: the losses of the reference, without checkpoints."""

    def one_after_the_other(call: Callable, module: AdaptedNet, batch: Batch) -> Iterable[Tensor]:
        first, second = pair_of(batch, choose, replaced)
        torch.manual_seed(batch.window + 10 * batch.rank + 100 * batch.micro_step)
        hidden = second(module.block, first(module.block, module.encoder(batch.x)))
        yield mse(module.heads[0](hidden), batch.target)

    def branches_and_outside(call: Callable, module: AdaptedNet, batch: Batch) -> Iterable[Tensor]:
        """Through the engine, through the bare module, and the block as it is."""
        first, second = pair_of(batch, choose, replaced)
        torch.manual_seed(batch.window + 10 * batch.rank + 100 * batch.micro_step)
        loss = mse(call(batch.x, use=first), batch.target)
        loss = loss + module(batch.y, head=1, use=second).square().mean()
        yield loss + module.block(module.encoder(batch.x + batch.y)).square().mean()

    def two_backwards(call: Callable, module: AdaptedNet, batch: Batch) -> Iterable[Tensor]:
        first, second = pair_of(batch, choose, replaced)
        torch.manual_seed(batch.window + 10 * batch.rank + 100 * batch.micro_step)
        yield mse(call(batch.x, use=first), batch.target)
        yield mse(module(batch.y, head=1, use=second), batch.target)

    def nothing_behind(call: Callable, module: AdaptedNet, batch: Batch) -> Iterable[Tensor]:
        """The first parameters that get a gradient get it inside of a checkpoint's backward."""
        first, second = pair_of(batch, choose, replaced)
        torch.manual_seed(batch.window + 10 * batch.rank + 100 * batch.micro_step)
        yield second(module.block, first(module.block, module.encoder(batch.x))).square().mean()

    graphs = (one_after_the_other, branches_and_outside, two_backwards, nothing_behind)
    return {f.__name__: f for f in graphs}[name]


def expected_in(dtype: torch.dtype, module: nn.Module, losses: Losses, batches: list[Batch]) -> dict[str, Tensor]:
    """Mean over the batches of what plain autograd computes: in float64, or, where the engine trains in bf16, in bf16,
    since the rounding inside of these graphs is up to 2 % by itself. Collective."""
    computed = torch.float64 if dtype is torch.float32 else dtype
    module = whole_copy(module).cpu().to(computed)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters() if p.requires_grad}
    for batch in batches:
        for loss in losses(module, module, batch.map(lambda tensor: tensor.to(computed))):
            module.zero_grad()
            loss.backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.double() / len(batches)
    return total


GRAPHS = ("one_after_the_other", "branches_and_outside", "two_backwards", "nothing_behind")


class TestCheckpointedGradients(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    @STAGES
    @FORMS
    @DTYPES
    def test_every_pair(self, stage: int, form: str, dtype: torch.dtype) -> None:
        """Pair and graph change with each window; where activations wait changes too."""
        engine = make_engine(AdaptedNet(), stage, dtype, accumulation=2, zero={"overlap_comm": stage == 2})
        ends: list[int] = []
        engine._stepper.backward_state.register_grad_acc_post_hook(lambda: ends.append(1))
        choose = pairs_of(stage, dtype)
        with unconfigured():
            for window in range(max(len(PAIRS[dtype]), 2 * len(GRAPHS))):
                graph = GRAPHS[(window + window // len(PAIRS[dtype]) + stage) % len(GRAPHS)]
                losses, reference = losses_of(graph, choose, replaced=False), losses_of(graph, choose, replaced=True)
                ck.configure(None, contiguous_checkpointing=window % 2 == 1, num_checkpoints=1 + window % 4)
                batches = [make_batch(r, window, step, dtype) for r in range(self.world_size) for step in range(2)]
                expected = expected_in(dtype, engine.module, reference, batches)
                ends.clear()
                run_micro_step(engine, losses, form, my_batch(engine, window, 0, dtype))
                engine.step()
                run_micro_step(engine, losses, form, my_batch(engine, window, 1, dtype))
                assert len(ends) == (4 if graph == "two_backwards" else 2), f"window {window}: {len(ends)} ends"
                worst, error = max_relative_error(full_gradients(engine), expected)
                assert error <= {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype], f"window {window}: {worst}, {error}"
                engine.step()
                assert engine.was_step_applied()

    @STAGES
    @pytest.mark.parametrize("use", [reentrant, recomputed, nested_kinds], ids=lambda use: use.__name__)
    def test_backward_of_an_output(self, stage: int, use: Use) -> None:
        """``output.backward(gradient)`` of a tensor that is no scalar, for some iterations."""
        engine = make_engine(AdaptedNet(), stage)

        def reference(call: Callable, module: AdaptedNet, batch: Batch) -> Iterable[Tensor]:
            torch.manual_seed(batch.window)
            yield (call(batch.x, use=uncheckpointed(use)) * batch.target).sum()

        for window in range(3):
            expected = expected_gradients(engine.module, reference, lambda r, w=window: [make_batch(r, w)], 1)
            batch = my_batch(engine, window)
            torch.manual_seed(window)
            engine(batch.x, use=use).backward(gradient=batch.target)
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()

    @STAGES
    def test_memory_stays_flat_over_branches(self, stage: int) -> None:
        """The runs in backward leave nothing behind: one activation a step would be seen."""
        engine = make_engine(AdaptedNet(), stage)
        pairs = ((nested_kinds, reentrant), (nested, recomputed))
        losses = losses_of("branches_and_outside", lambda batch: pairs[batch.window % 2], replaced=False)
        held: list[int] = []
        with unconfigured(), HeldBytes() as counter:
            ck.configure(None, contiguous_checkpointing=True, num_checkpoints=4)
            for window in range(12):
                run_micro_step(engine, losses, "engine.backward", my_batch(engine, window))
                engine.step()
                held.append(counter.now())
        activation = 8 * 6 * 4
        assert held[3] > 4 * activation, "the buffer at least is counted"
        assert max(held[8:]) < max(held[:4]) + activation, held


class TestPartitionedActivationsInAnEngine(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @STAGES
    @FORMS
    @DTYPES
    def test_ranks_that_share_the_model(self, stage: int, form: str, dtype: torch.dtype) -> None:
        """The engine's own config asks for it; both ranks get the same data."""
        config = {"partition_activations": True, "contiguous_memory_optimization": stage == 1, "number_checkpoints": 4}
        with unconfigured():
            engine = self.engine(stage, dtype, config)
            assert (ck.mp_size, ck.PARTITION_ACTIVATIONS) == (2, True)
            for window, use in enumerate((reentrant, recomputed, nested, nested_kinds)):
                batch = make_batch(0, window, 0, dtype)

                def loss_of(model: Callable, batch: Batch, use: Use = use) -> Tensor:
                    torch.manual_seed(5)
                    return mse(model(batch.x, use=use), batch.target)

                def reference_loss(model: Callable, pair: tuple[Tensor, Tensor], use: Use = use) -> Tensor:
                    torch.manual_seed(5)
                    return mse(model(pair[0], use=uncheckpointed(use)), pair[1])

                pairs = [[(batch.x, batch.target)]]
                expected = reference_gradients(whole_copy(engine.module), reference_loss, pairs, dtype)
                run_micro_step(engine, lambda call, _, b: [loss_of(call, b)], form, batch)
                worst, error = max_relative_error(full_gradients(engine), expected)
                assert error <= {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype], f"{worst} is off by {error:.2g}"
                engine.step()

    def engine(self, stage: int, dtype: torch.dtype, section: dict[str, Any]) -> Any:
        model = AdaptedNet()
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 50},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": dtype is torch.bfloat16},
                "activation_checkpointing": section,
            },
            mpu=all_ranks_share_one_model(),
        )[0]
