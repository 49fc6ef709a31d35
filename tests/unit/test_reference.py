# SPDX-License-Identifier: Apache-2.0
"""The gradient reference against gradients worked out by hand, and the comparison against ways to compare nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from unit.reference import max_relative_error, reference_gradients
from unit.simple_model import SimpleModel, rank_batches


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


class Scale(nn.Module):
    """One weight w; the loss of x is w * x, its gradient x."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def test_gradient_is_the_mean_over_ranks_and_micro_steps() -> None:
    batches = [[torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(10.0), torch.tensor(31.0)]]
    gradients = reference_gradients(Scale(), lambda model, x: model(x), batches)
    assert gradients["weight"].item() == (1 + 2 + 10 + 31) / 4
    assert gradients["weight"].dtype == torch.float64


def test_several_losses_of_one_batch_add_up() -> None:
    gradients = reference_gradients(Scale(), lambda model, x: [model(x), model(3 * x)], [[torch.tensor(2.0)]])
    assert gradients["weight"].item() == 8.0


def test_parameters_are_rounded_to_the_training_dtype_first() -> None:
    value = 1.0 + 2.0**-12  # Not a bfloat16, which would be 1.
    gradients = reference_gradients(Scale(value), lambda m, x: m(x) ** 2, [[torch.tensor(1.0)]], torch.bfloat16)
    assert gradients["weight"].item() == 2.0
    exact = reference_gradients(Scale(value), lambda m, x: m(x) ** 2, [[torch.tensor(1.0)]])
    assert exact["weight"].item() == 2.0 * value


def test_the_model_is_left_as_it_is() -> None:
    model = SimpleModel(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference_gradients(model, loss_of, [list(rank_batches(0, 2, 3, 5))])
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_function_that_makes_the_model_is_called() -> None:
    assert reference_gradients(Scale, lambda m, x: m(x), [[torch.tensor(4.0)]])["weight"].item() == 4.0


def test_unused_parameters_have_zeros_and_frozen_ones_are_left_out() -> None:
    model = SimpleModel(4, empty_grad=True, nlayers=2)
    model.linears[0].weight.requires_grad_(False)
    gradients = reference_gradients(model, loss_of, [list(rank_batches(r, 1, 3, 4)) for r in range(2)])
    assert gradients.keys() == {
        "linears.0.bias",
        "linears.1.weight",
        "linears.1.bias",
        "linear2.weight",
        "linear2.bias",
    }
    assert not gradients["linear2.weight"].any() and gradients["linears.1.weight"].any()


@pytest.mark.parametrize("batches", [[], [[]], [[torch.tensor(1.0)], []]])
def test_uneven_or_no_micro_steps_are_refused(batches: list[list[Tensor]]) -> None:
    with pytest.raises(ValueError, match="micro-steps"):
        reference_gradients(Scale(), lambda model, x: model(x), batches)


def test_rank_batches_differ_and_repeat() -> None:
    drawn = [next(iter(rank_batches(rank, 2, 3, 4)))[0] for rank in (0, 1, 0)]
    first, second = rank_batches(0, 2, 3, 4)
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert not torch.equal(first[0], second[0])


def test_the_worst_parameter_is_named() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    actual = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.05])}
    name, error = max_relative_error(actual, expected)
    assert name == "a" and error == pytest.approx(0.1)
    assert max_relative_error(expected, expected)[1] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_an_infinite_error(value: float) -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(1)}
    assert max_relative_error({"a": torch.tensor([1.0, value]), "b": torch.ones(1)}, expected) == ("a", math.inf)


def test_a_zero_reference_wants_zero() -> None:
    expected = {"used": torch.ones(2), "unused": torch.zeros(2)}
    tiny = {"used": torch.ones(2), "unused": torch.full((2,), 1e-9)}
    assert max_relative_error(tiny, expected) == ("unused", math.inf)
    assert max_relative_error(tiny, expected, zero_tolerance=1e-8)[1] == 0.0
    assert max_relative_error(expected, expected)[1] == 0.0


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, r"actual lacks \['b'\], expected lacks \['a'\]"),
        ({}, {}, "no element"),
        ({"a": torch.ones(0)}, {"a": torch.ones(0)}, "no element"),
        ({"a": torch.zeros(3)}, {"a": torch.zeros(3)}, "every parameter is zero"),
        ({"a": torch.ones(3)}, {"a": torch.ones(1, 3)}, "shape"),
        ({"a": None}, {"a": torch.ones(3)}, "a: there is no actual value"),
    ],
)
def test_a_comparison_that_proves_nothing_is_refused(
    actual: dict[str, Tensor], expected: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        max_relative_error(actual, expected)
