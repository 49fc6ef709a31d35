# SPDX-License-Identifier: Apache-2.0
"""Stage 3: weights that are used outside of the forward of any module. They are whole there under GatheredParameters or
when they stay whole anyway; else the backward says that they were not. Never a wrong number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
    send_backward,
    two_backwards,
)

forms = pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
THRESHOLD = "stage3_param_persistence_threshold"


def squares(module: nn.Module) -> Tensor:
    return sum(parameter.square().sum() for parameter in module.parameters())


def norms(module: nn.Module) -> Tensor:
    return sum(parameter.norm() for parameter in module.parameters())


def flattened(module: nn.Module) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in module.parameters()]).exp().mean()


def of_the_head(module: nn.Module) -> Tensor:
    return (module.heads[1].weight * 3).sum()


PENALTIES = (squares, norms, flattened, of_the_head)
NEED_WEIGHTS_IN_BACKWARD = (squares, norms)


def penalized(penalty: Callable[[nn.Module], Tensor]) -> Callable:
    def losses(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
        yield mse(call(batch.x), batch.target) + 0.25 * penalty(module)

    return losses


def expected_of(engine: Any, losses: Callable, window: int) -> dict[str, Tensor]:
    return expected_gradients(engine.module, losses, lambda rank: [make_batch(rank, window)], 1)


def trains_on(engine: Any, form: str) -> None:
    for window in (20, 21):
        expected = expected_of(engine, encoder_twice, window)
        run_micro_step(engine, encoder_twice, form, my_batch(engine, window))
        assert_gradients(engine, expected, torch.float32, "afterwards")
        engine.step()
        assert engine.was_step_applied()


class TestPenalties(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    @forms
    @pytest.mark.parametrize("threshold", [0, 12])
    def test_of_partitioned_weights_is_an_error(self, form: str, threshold: int) -> None:
        engine = make_engine(make_model(), 3, zero={THRESHOLD: threshold})
        for window, penalty in enumerate(PENALTIES):
            with pytest.raises(RuntimeError, match=r"' was used while it was partitioned.*GatheredParameters"):
                run_micro_step(engine, penalized(penalty), form, my_batch(engine, window))
            engine.zero_grad()
            trains_on(engine, form)

    @forms
    @pytest.mark.parametrize("threshold", [0, 12])
    def test_of_weights_that_are_held_is_right(self, form: str, threshold: int) -> None:
        engine = make_engine(make_model(), 3, zero={THRESHOLD: threshold})
        for window, penalty in enumerate(PENALTIES):
            losses = penalized(penalty)
            expected = expected_of(engine, losses, window)
            with GatheredParameters(engine.module.parameters()):
                run_micro_step(engine, losses, form, my_batch(engine, window))
            assert_gradients(engine, expected, torch.float32, penalty.__name__)
            engine.step()
            assert engine.was_step_applied()
        trains_on(engine, form)

    @forms
    @pytest.mark.parametrize("threshold", [0, 12])
    def test_of_weights_that_are_let_go_of_before_the_backward(self, form: str, threshold: int) -> None:
        """Right where backward needs no weight, else an error: autograd has saved the parameter itself."""
        engine = make_engine(make_model(), 3, zero={THRESHOLD: threshold})
        for window, penalty in enumerate(PENALTIES):
            losses = penalized(penalty)
            expected = expected_of(engine, losses, window)
            with GatheredParameters(engine.module.parameters()):
                (loss,) = losses(engine, engine.module, my_batch(engine, window))
            if penalty in NEED_WEIGHTS_IN_BACKWARD:
                with pytest.raises(RuntimeError, match="size of tensor|invalid gradient"):
                    send_backward(engine, loss, form)
                engine.zero_grad()
                continue
            send_backward(engine, loss, form)
            assert_gradients(engine, expected, torch.float32, penalty.__name__)
            engine.step()
        trains_on(engine, form)

    @forms
    def test_of_weights_that_stay_whole_is_right(self, form: str) -> None:
        """From the first forward on, over steps; nothing gathers them for the test's sake."""
        copies, engines = [], []
        for stage in (2, 3):
            engines.append(make_engine(make_model(), stage, zero={THRESHOLD: 10**5} if stage == 3 else {}))
            run_micro_step(engines[-1], two_backwards, form, my_batch(engines[-1], 50))  # through every module
            engines[-1].step()
            for window in range(2 * len(PENALTIES)):
                penalty = PENALTIES[window % len(PENALTIES)]
                run_micro_step(engines[-1], penalized(penalty), form, my_batch(engines[-1], window))
                engines[-1].step()
                assert engines[-1].was_step_applied()
            with GatheredParameters(engines[-1].module.parameters()):
                copies.append([parameter.detach().clone() for parameter in engines[-1].module.parameters()])
        for one, other in zip(*copies):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class TestGraphsFromBeforeAStep(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @forms
    @pytest.mark.parametrize("threshold", [0, 12, 10**5])
    def test_are_refused(self, form: str, threshold: int) -> None:
        """Their backward needs weights that are gone."""
        engine = make_engine(make_model(), 3, zero={THRESHOLD: threshold})
        for window in range(2):
            batch = my_batch(engine, window)
            old = mse(engine(batch.x), batch.target)
            run_micro_step(engine, encoder_twice, form, batch)
            engine.step()
            with pytest.raises(RuntimeError, match="modified"):
                send_backward(engine, old, form)
            engine.zero_grad()
        trains_on(engine, form)
