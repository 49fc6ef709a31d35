# SPDX-License-Identifier: Apache-2.0
"""count_used_parameters_in_backward: torch's own answer for the current graph task."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.utils import (
    check_internal_apis_for_count_used_parameters,
    count_used_parameters_in_backward,
)


def count_at_first_hook(loss: torch.Tensor, watched: torch.Tensor, parameters: list[nn.Parameter], **kwargs) -> int:
    counts: list[int] = []
    handle = watched.register_hook(lambda _: counts.append(count_used_parameters_in_backward(parameters)))
    loss.backward(**kwargs)
    handle.remove()
    assert counts
    return counts[0]


def test_counts_a_parameter_once_however_often_it_is_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    unused = nn.Linear(3, 3)
    parameters = [*model.parameters(), *unused.parameters()]
    assert check_internal_apis_for_count_used_parameters()
    out = model(model(torch.randn(2, 3)))
    assert count_at_first_hook(out.sum(), out, parameters) == 6
    out = model[0](torch.randn(2, 3))
    assert count_at_first_hook(out.sum(), out, parameters) == 2


def test_frozen_parameters_and_the_inputs_argument_are_respected() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    a.bias.requires_grad_(False)
    parameters = [*a.parameters(), *b.parameters()]
    out = b(a(torch.randn(1, 2)))
    assert count_at_first_hook(out.sum(), out, parameters, retain_graph=True) == 3
    assert count_at_first_hook(out.sum(), out, parameters, inputs=[a.weight]) == 1
    assert b.weight.grad is not None and a.weight.grad is not None


def test_a_nested_graph_task_counts_for_itself() -> None:
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = [*inner.parameters(), *outer.parameters()]
    counts: dict[str, int] = {}
    inner.weight.register_hook(lambda _: counts.update(inner=count_used_parameters_in_backward(parameters)))
    outer.weight.register_hook(lambda _: counts.update(outer=count_used_parameters_in_backward(parameters)))
    out = outer(torch.randn(1, 2))
    checkpoint(inner, out, use_reentrant=True).sum().backward()
    assert counts == {"inner": 2, "outer": 2}


def test_outside_of_a_backward_it_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="during a backward"):
        count_used_parameters_in_backward([nn.Parameter(torch.ones(1))])


def test_without_torchs_private_call_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_will_execute", None)
    assert not check_internal_apis_for_count_used_parameters()
    with pytest.raises(RuntimeError, match="version of torch"):
        count_used_parameters_in_backward([nn.Parameter(torch.ones(1))])
