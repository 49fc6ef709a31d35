# SPDX-License-Identifier: Apache-2.0
"""A part of the model used several times in one loss, each use under another kind of checkpoint.

A reentrant checkpoint runs a graph task of its own, in which the part's parameters fire once more; they may fire
before or after anything else of the backward.
"""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    assert_gradients,
    expected_gradients,
    make_batch,
    make_engine,
    make_model,
    mse,
    my_batch,
    run_micro_step,
)


def plain(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)


def recomputed(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)


def reentrant(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=True)


def nested(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda a: part(checkpoint(part, part(a), use_reentrant=True)), x, use_reentrant=True)


def recomputed_reentrant(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda a: checkpoint(part, a, use_reentrant=False) + part(a), x, use_reentrant=True)


USES = (plain, recomputed, reentrant, nested, recomputed_reentrant)
PAIRS = tuple(itertools.product(USES, repeat=2))


ranks_alike = False
"""Whether all ranks use the same pair: stage 3 gathers weights where they are used, so ranks must use them alike."""


def pair_of(batch: Batch) -> tuple[Callable, Callable]:
    """Every pair once over the windows, a different one on each rank and in each micro-step."""
    rank = 0 if ranks_alike else batch.rank
    return PAIRS[(batch.window + 7 * rank + 3 * batch.micro_step) % len(PAIRS)]


def through_the_engine_as_well(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """Autograd runs what was made last first: the uses fire before anything of the outer graph."""
    first, second = pair_of(batch)
    loss = mse(call(batch.x), batch.target)
    x, y = (tensor[:, :1] * torch.ones_like(tensor[:1, :1]).expand(1, 6) for tensor in (batch.x, batch.y))
    uses = first(module.core, x.clone().requires_grad_()) * second(module.core, y.clone().requires_grad_())
    yield loss + uses.square().mean()


def one_after_the_other(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """No use passes through the engine."""
    first, second = pair_of(batch)
    yield mse(module.heads[0](second(module.core, first(module.core, module.encoder(batch.x)))), batch.target)


def in_two_backwards(call: Callable, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    first, second = pair_of(batch)
    yield mse(module.heads[0](first(module.core, module.encoder(batch.x))), batch.target)
    yield mse(module.heads[1](second(module.core, module.encoder(batch.y))), batch.target)


class TestCheckpointedReuse(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
    @pytest.mark.parametrize("form", ["engine.backward", "tensor.backward"])
    @pytest.mark.parametrize("losses", [through_the_engine_as_well, one_after_the_other, in_two_backwards])
    def test_every_pair_on_one_engine(self, stage: int, form: str, losses: Callable) -> None:
        """The graph changes with each window: what the last backward looked like is no guide to the next."""
        global ranks_alike
        ranks_alike = stage == 3
        zero = {"overlap_comm": stage >= 2, "stage3_param_persistence_threshold": 0}
        engine = make_engine(make_model(), stage, accumulation=2, zero=zero)
        ends = []
        engine._stepper.backward_state.register_grad_acc_post_hook(lambda: ends.append(1))
        for window in range(len(PAIRS)):
            expected = expected_gradients(
                engine.module, losses, lambda rank, w=window: [make_batch(rank, w, step) for step in range(2)], 2
            )
            ends.clear()
            run_micro_step(engine, losses, form, my_batch(engine, window, 0))
            engine.step()
            run_micro_step(engine, losses, form, my_batch(engine, window, 1))
            assert len(ends) == (4 if losses is in_two_backwards else 2), f"window {window}: {len(ends)} ends"
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            engine.step()
            assert engine.was_step_applied()
