# SPDX-License-Identifier: Apache-2.0
"""Who decides when gradients are reduced and used: no_sync, coalescing, boundaries set by hand, unmanaged accumulation,
``zero_grad`` in the middle of a window, and backwards that raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed.comm as dist
from deepspeed.runtime.gradients.ledger import GradientAccountingError
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    full_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
    send_backward,
    two_backwards,
    weights_of,
)

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
forms = pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])


def expected_of(engine: Any, losses: Callable, window: int, micro_steps: Iterable[int], divisor: float) -> Any:
    steps = list(micro_steps)
    return expected_gradients(
        engine.module, losses, lambda rank: [make_batch(rank, window, step) for step in steps], divisor
    )


def issued(engine: Any) -> int:
    return engine._stepper.reducer.transport.collectives_issued


def buckets(engine: Any) -> int:
    return len(engine._stepper.reducer.buckets)


class TestNoSync(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @forms
    @pytest.mark.parametrize("stage", [0, 1], ids=lambda stage: f"stage{stage}")
    @pytest.mark.parametrize("outside", [0, 1], ids=["all inside", "last outside"])
    def test_backwards_stay_local_until_after(self, stage: int, form: str, outside: int) -> None:
        engine = make_engine(make_model(), stage)
        for window in range(2):
            expected = expected_of(engine, encoder_twice, window, range(3), 1)
            before = issued(engine)
            for micro_step in range(3 - outside):
                with engine.no_sync():
                    run_micro_step(engine, encoder_twice, form, my_batch(engine, window, micro_step))
            assert issued(engine) == before, "a collective inside no_sync()"
            for micro_step in range(3 - outside, 3):
                run_micro_step(engine, encoder_twice, form, my_batch(engine, window, micro_step))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            assert issued(engine) == before + buckets(engine)
            engine.step()
            assert engine.was_step_applied()

    def test_gradients_inside_are_this_ranks_own(self) -> None:
        engine = make_engine(make_model(), 1, accumulation=2)
        with engine.no_sync():
            run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0))
            local = full_gradients(engine)
        mine = expected_gradients(
            engine.module, encoder_twice, lambda rank: [make_batch(rank, 0)] * (rank == dist.get_rank()), 1
        )
        for name, gradient in mine.items():
            torch.testing.assert_close(local[name].cpu().double(), gradient, rtol=1e-5, atol=1e-7)

    def test_refusals(self) -> None:
        for stage in (2, 3):
            engine = make_engine(make_model(), stage)
            with pytest.raises(AssertionError, match=f"stage {stage}"), engine.no_sync():
                pass
        engine = make_engine(make_model(), 1)
        with engine.no_sync():
            with pytest.raises(AssertionError, match="no_sync"), engine.no_sync():
                pass
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()


class TestCoalesce(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @forms
    @pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
    def test_one_round_at_the_exit(self, stage: int, form: str) -> None:
        engine = make_engine(make_model(), stage)
        for window in range(2):
            expected = expected_of(engine, two_backwards, window, range(3), 1)
            before = issued(engine)
            with engine.coalesce_grad_reduction():
                for micro_step in range(3):
                    run_micro_step(engine, two_backwards, form, my_batch(engine, window, micro_step))
                assert issued(engine) == before
            assert issued(engine) == before + buckets(engine)
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            assert issued(engine) == before + buckets(engine)
            engine.step()

    @pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
    def test_before_a_boundary_and_plain_backwards_in_one_window(self, stage: int) -> None:
        engine = make_engine(make_model(), stage, accumulation=2)
        expected = expected_of(engine, encoder_twice, 0, range(3), 2)
        with engine.coalesce_grad_reduction():
            for micro_step in range(2):
                run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0, micro_step))
        engine.step()
        run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0, 2))
        assert_gradients(engine, expected, torch.float32)
        engine.step()
        assert engine.global_steps == 1

    def test_refusals(self) -> None:
        with pytest.raises(NotImplementedError, match="no_sync"):
            with make_engine(make_model(), 0).coalesce_grad_reduction():
                pass
        engine = make_engine(make_model(), 1)
        with engine.no_sync(), pytest.raises(AssertionError, match="no_sync"):
            with engine.coalesce_grad_reduction():
                pass
        with pytest.raises(AssertionError, match="managed_gradient_accumulation"):
            with make_engine(make_model(), 1, managed_gradient_accumulation=False).coalesce_grad_reduction():
                pass


class TestCallersWindows(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @stages
    @forms
    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_unmanaged(self, stage: int, form: str, accumulation: int) -> None:
        """Three backwards and a step, then five; each step uses all and only the gradients since the one before."""
        engine = make_engine(make_model(), stage, accumulation=accumulation, managed_gradient_accumulation=False)
        samples = 0
        for window, count in enumerate((3, 5, 1)):
            expected = expected_of(engine, encoder_twice, window, range(count), accumulation)
            weights = weights_of(engine.module)
            for micro_step in range(count):
                run_micro_step(engine, encoder_twice, form, my_batch(engine, window, micro_step))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
            assert engine.was_step_applied() and engine.global_steps == window + 1
            samples += 8 * dist.get_world_size() * count
            assert engine.global_samples == samples
            for name, after in weights_of(engine.module).items():
                moved = (weights[name] - after).cpu().double() / 0.125
                torch.testing.assert_close(
                    moved, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )

    def test_unmanaged_refuses_boundaries(self) -> None:
        engine = make_engine(make_model(), 1, managed_gradient_accumulation=False)
        with pytest.raises(AssertionError, match="every step"):
            engine.set_gradient_accumulation_boundary(True)

    @stages
    @forms
    def test_boundary_set_by_hand(self, stage: int, form: str) -> None:
        """``step()`` does nothing but count until the boundary is set."""
        engine = make_engine(make_model(), stage, accumulation=2)
        for window in range(2):
            expected = expected_of(engine, two_backwards, window, range(3), 2)
            for micro_step in range(3):
                last = micro_step == 2
                engine.set_gradient_accumulation_boundary(last)
                run_micro_step(engine, two_backwards, form, my_batch(engine, window, micro_step))
                if last:
                    assert_gradients(engine, expected, torch.float32, f"window {window}")
                engine.step()
                assert engine.was_step_applied() is last
        assert engine.global_steps == 2

    @stages
    @forms
    def test_boundary_set_after_the_backwards(self, stage: int, form: str) -> None:
        """Nothing that was kept back before the boundary was announced is lost."""
        engine = make_engine(make_model(), stage)
        expected = expected_of(engine, encoder_twice, 0, range(3), 1)
        engine.set_gradient_accumulation_boundary(False)
        for micro_step in range(3):
            run_micro_step(engine, encoder_twice, form, my_batch(engine, 0, micro_step))
        engine.set_gradient_accumulation_boundary(True)
        weights = weights_of(engine.module)
        engine.step()
        for name, after in weights_of(engine.module).items():
            moved = (weights[name] - after).cpu().double() / 0.125
            torch.testing.assert_close(moved, expected[name], rtol=1e-4, atol=1e-5)

    @stages
    def test_caller_divides(self, stage: int) -> None:
        """``scale_wrt_gas=False`` leaves a loss as it is, also beside others that are divided."""
        engine = make_engine(make_model(), stage, accumulation=2)
        for window in range(2):
            expected = expected_of(engine, encoder_twice, window, range(2), 2)
            first = next(iter(encoder_twice(engine, engine.module, my_batch(engine, window, 0))))
            returned = engine.backward(first / 2, scale_wrt_gas=False)
            torch.testing.assert_close(returned, first.detach() / 2)
            engine.step()
            second = next(iter(encoder_twice(engine, engine.module, my_batch(engine, window, 1))))
            torch.testing.assert_close(engine.backward(second), second.detach() / 2)
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()

    @stages
    @forms
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_zero_grad_drops_the_window(self, stage: int, form: str, accumulation: int) -> None:
        engine = make_engine(make_model(), stage, accumulation=accumulation)
        for window in range(3):
            run_micro_step(engine, two_backwards, form, my_batch(engine, 90 + window))
            engine.zero_grad()
            expected = expected_of(engine, encoder_twice, window, range(accumulation), accumulation)
            for micro_step in range(accumulation):
                if micro_step:
                    engine.step()
                run_micro_step(engine, encoder_twice, form, my_batch(engine, window, micro_step))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()

    @stages
    def test_step_without_backward(self, stage: int) -> None:
        engine = make_engine(make_model(), stage)
        with pytest.raises(RuntimeError, match="without backward"):
            engine.step()
        run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0))
        engine.step()
        with pytest.raises(RuntimeError, match="without backward"):
            engine.step()

    @stages
    def test_gradient_set_by_hand_is_refused(self, stage: int) -> None:
        engine = make_engine(make_model(), stage, accumulation=2)
        run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0, 0))
        engine.step()
        bias = engine.module.heads[1].bias  # not used by this graph
        bias.grad = torch.ones_like(bias)
        with pytest.raises(GradientAccountingError, match=r"heads\.1\.bias"):
            run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0, 1))
            engine.step()


class Broken(RuntimeError):
    """What the failing backward raises."""


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken("in the middle of backward")


def broken_after_head(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """The heads and the core receive gradients, then backward raises, before the encoder."""
    hidden = RaiseInBackward.apply(module.encoder(batch.x))
    yield mse(module.heads[0](module.core(hidden)) + module.heads[1](hidden), batch.target)


def broken_at_once(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    yield RaiseInBackward.apply(mse(call(batch.x), batch.target))


def whole_weights(stage: int) -> dict[str, Any]:
    """At stage 3, a rank that fails alone can be survived only where no weight has to be gathered meanwhile."""
    return {"stage3_param_persistence_threshold": 10**5} if stage == 3 else {}


def fails(engine: Any, losses: Callable, form: str, batch: Batch) -> None:
    with pytest.raises(Broken):
        for loss in losses(engine, engine.module, batch):
            send_backward(engine, loss, form)


class TestAbortedBackward(DistributedTest):
    """Never half a gradient: training goes on as if the backward had not been, or ``step()`` refuses on all ranks."""

    world_size = 2
    reuse_dist_env = True

    @stages
    @forms
    @pytest.mark.parametrize("broken", [broken_after_head, broken_at_once])
    @pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
    @pytest.mark.parametrize("elements", [50, 10**6], ids=["several buckets", "one bucket"])
    def test_on_every_rank(self, stage: int, form: str, broken: Callable, warm: bool, elements: int) -> None:
        for accumulation in (1, 2):
            engine = make_engine(make_model(), stage, accumulation=accumulation, zero={"reduce_bucket_size": elements})
            for window in range(warm):
                for micro_step in range(accumulation):
                    run_micro_step(engine, encoder_twice, form, my_batch(engine, 50 + window, micro_step))
                    engine.step()
            expected = expected_of(engine, encoder_twice, 0, range(accumulation), accumulation)
            for micro_step in range(accumulation - 1):
                run_micro_step(engine, encoder_twice, form, my_batch(engine, 0, micro_step))
                engine.step()
            fails(engine, broken, form, my_batch(engine, 70))
            run_micro_step(engine, encoder_twice, form, my_batch(engine, 0, accumulation - 1))
            weights = weights_of(engine.module)
            try:
                assert_gradients(engine, expected, torch.float32, f"accumulation {accumulation}")
                engine.step()
                assert engine.was_step_applied()
            except GradientAccountingError as error:
                assert elements == 50 and broken is broken_after_head, "nothing can have reached a collective"
                assert "aborted" in str(error)
                with pytest.raises(GradientAccountingError, match="aborted"):
                    engine.step()
                assert all(torch.equal(now, weights[name]) for name, now in weights_of(engine.module).items())
            self.trains_on(engine, form, accumulation)

    def trains_on(self, engine: Any, form: str, accumulation: int) -> None:
        """After ``zero_grad`` and with a boundary counted from here, a whole window is right."""
        engine.zero_grad()
        engine.micro_steps = 0
        expected = expected_of(engine, encoder_twice, 3, range(accumulation), accumulation)
        for micro_step in range(accumulation):
            if micro_step:
                engine.step()
            run_micro_step(engine, encoder_twice, form, my_batch(engine, 3, micro_step))
        assert_gradients(engine, expected, torch.float32, "after zero_grad")
        engine.step()
        assert engine.was_step_applied()

    @stages
    @forms
    def test_on_one_rank_which_tries_again(self, stage: int, form: str) -> None:
        """Rank 1 raises before anything is reduced, and repeats the micro-step."""
        engine = make_engine(make_model(), stage, zero=whole_weights(stage))
        for window in range(3):
            expected = expected_of(engine, encoder_twice, window, [0], 1)
            if dist.get_rank() == 1:
                fails(engine, broken_at_once, form, my_batch(engine, 70 + window))
            run_micro_step(engine, encoder_twice, form, my_batch(engine, window))
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
            assert engine.was_step_applied()

    @stages
    def test_on_one_rank_in_the_middle(self, stage: int) -> None:
        """Rank 1 raises when some buckets are out: no rank may step, and all of them go on after ``zero_grad``."""
        engine = make_engine(make_model(), stage, zero=whole_weights(stage))
        run_micro_step(engine, two_backwards, "engine.backward", my_batch(engine, 50))
        engine.step()
        weights = weights_of(engine.module)
        if dist.get_rank() == 1:
            fails(engine, broken_after_head, "engine.backward", my_batch(engine, 0))
        else:
            run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, 0))
        with pytest.raises(GradientAccountingError, match="rank 1.*aborted"):
            engine.step()
        assert all(torch.equal(now, weights[name]) for name, now in weights_of(engine.module).items())
        self.trains_on(engine, "engine.backward", 1)
