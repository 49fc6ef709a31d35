# SPDX-License-Identifier: Apache-2.0
"""Gradients set by hand where a backward would add to them, and a backward inside a backward: errors, then recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.runtime.gradients.ledger import GradientAccountingError
from unit.common import DistributedTest
from unit.graphs import (
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    my_batch,
    run_micro_step,
)


def right_afterwards(engine: Any, form: str) -> None:
    """After ``zero_grad`` the engine computes what plain autograd does."""
    engine.zero_grad()
    expected = expected_gradients(engine.module, encoder_twice, lambda rank: [make_batch(rank, 0, 0)], 1)
    run_micro_step(engine, encoder_twice, form, my_batch(engine, 0, 0))
    assert_gradients(engine, expected, torch.float32)
    engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
class TestBackwardMisuse(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    def test_a_gradient_set_before_forward(self, stage: int, form: str) -> None:
        """It would be added to what backward computes, whichever parameter has it."""
        engine = make_engine(make_model(), stage)
        batch = my_batch(engine, 0, 0)
        for parameter in engine.module.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)
            with pytest.raises(GradientAccountingError, match="no backward produced"):
                engine(batch.x)
            right_afterwards(engine, form)

    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    def test_gradients_set_after_forward(self, stage: int, form: str) -> None:
        engine = make_engine(make_model(), stage)
        loss = engine(my_batch(engine, 0, 0).x).square().mean()
        for parameter in engine.module.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)
        partitioned = stage == 3 and form == "tensor.backward"  # torch itself sees that the shape is another one
        with pytest.raises(RuntimeError, match="size of tensor" if partitioned else "no backward produced"):
            engine.backward(loss) if form == "engine.backward" else loss.backward()
        right_afterwards(engine, form)

    def test_a_backward_inside_a_backward(self, stage: int) -> None:
        engine = make_engine(make_model(), stage)
        batch = my_batch(engine, 0, 0)
        other = engine(batch.y).square().mean()
        hidden = engine(batch.x)
        hidden.register_hook(backward_of(engine, other))
        with pytest.raises(RuntimeError, match="inside a backward of the same engine"):
            engine.backward(hidden.square().mean())
        right_afterwards(engine, "engine.backward")


def backward_of(engine: Any, loss: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        engine.backward(loss)

    return hook
