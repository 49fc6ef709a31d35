# SPDX-License-Identifier: Apache-2.0
"""The naive reducer by itself: it is a specification, so it is checked against plain autograd and by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.runtime.gradients.reference import NaiveReducer
from unit.common import DistributedTest
from unit.reference import max_relative_error, reference_gradients
from unit.simple_model import SimpleModel, rank_batches


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


class TestByItself(DistributedTest):
    world_size = 2

    def test_trains_like_plain_autograd_over_all_data(self) -> None:
        torch.manual_seed(0)
        model = SimpleModel(7, empty_grad=True, nlayers=2)
        exact = copy.deepcopy(model).double()
        optimizer, exact_optimizer = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, exact))
        rank = torch_dist.get_rank()
        with NaiveReducer(model.named_parameters(), accumulation_steps=3) as reducer:
            for window in range(3):
                batches = [list(rank_batches(r, 3, 4, 7, seed=window)) for r in range(2)]
                expected = reference_gradients(exact, loss_of, batches)
                for batch in batches[rank]:
                    loss_of(model, batch).backward()
                reducer.write_gradients()
                actual = {name: parameter.grad for name, parameter in model.named_parameters()}
                assert max_relative_error(actual, expected)[1] < 1e-4
                assert not model.linear2.weight.grad.any()
                for name, parameter in exact.named_parameters():
                    parameter.grad = expected[name]
                optimizer.step()
                exact_optimizer.step()

    def test_a_rank_may_contribute_nothing(self) -> None:
        used = weight(2.0)
        with NaiveReducer([("w", used)], dtype=torch.float64) as reducer:
            if torch_dist.get_rank() == 1:
                (3 * used).sum().backward()
            assert reducer.average()["w"].tolist() == [1.5]
            assert reducer.average()["w"].tolist() == [0.0], "the next window begins empty"


def contributions(use: Any) -> tuple[int, float]:
    """How often a parameter of value 1 contributed in ``use(parameter)``, and the sum."""
    parameter = weight()
    with NaiveReducer([("w", parameter)]) as reducer:
        use(parameter)
        count = reducer.contributions["w"]
        return count, reducer.average()["w"].item()


def test_uses_in_one_graph_are_one_contribution() -> None:
    assert contributions(lambda w: (2 * w + 3 * w).sum().backward()) == (1, 5.0)


def test_each_backward_and_each_reentrant_checkpoint_contributes() -> None:
    def twice(w: nn.Parameter) -> None:
        loss = (2 * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def reentrant(w: nn.Parameter) -> None:
        x = torch.ones(1, requires_grad=True)
        first = checkpoint(lambda x: x * w, x, use_reentrant=True)
        (first + checkpoint(lambda x: 2 * x * w, x, use_reentrant=True) + w).sum().backward()

    assert contributions(twice) == (2, 4.0)
    assert contributions(reentrant) == (3, 4.0)


def test_autograd_grad_contributes_nothing() -> None:
    assert contributions(lambda w: torch.autograd.grad((2 * w).sum(), w)) == (0, 0.0)


def test_hooks_of_the_user_come_first() -> None:
    def use(w: nn.Parameter) -> None:
        w.register_hook(lambda gradient: 10 * gradient)
        w.sum().backward()

    assert contributions(use) == (1, 10.0)


def test_gradients_left_in_grad_are_not_counted_again() -> None:
    def use(w: nn.Parameter) -> None:
        w.grad = torch.full_like(w, 100.0)
        w.sum().backward()

    assert contributions(use) == (1, 1.0)


def test_a_custom_function_without_a_gradient_contributes_nothing() -> None:
    class Dropping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    x = torch.ones(1, requires_grad=True)
    assert contributions(lambda w: Dropping.apply(x, w).sum().backward()) == (0, 0.0)


def test_weight_and_contributions_by_hand() -> None:
    parameter = weight()
    reducer = NaiveReducer([("w", parameter), ("frozen", weight().requires_grad_(False))], 2, listen=False)
    parameter.sum().backward()
    reducer.contribute("w", torch.tensor([4.0], dtype=torch.bfloat16))
    reducer.weight = 0.5
    reducer.contribute("w", torch.tensor([4.0]))
    assert reducer.average() == {"w": torch.tensor([3.0])}


@pytest.mark.parametrize("close", [False, True])
def test_close_stops_listening(close: bool) -> None:
    parameter = weight()
    reducer = NaiveReducer([("w", parameter)])
    if close:
        reducer.close()
    parameter.sum().backward()
    assert reducer.contributions["w"] == (not close)


def test_sparse_gradients_are_summed() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    with NaiveReducer(table.named_parameters()) as reducer:
        table(torch.tensor([0, 0, 2])).sum().backward()
        assert reducer.average()["weight"].tolist() == [[2, 2], [0, 0], [1, 1]]
