# SPDX-License-Identifier: Apache-2.0
"""Where a user-visible backward ends: once, after everything, also when its first event is in a nested graph task."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.gradients.backward_scope import BackwardScope, watch_end


class Watched:
    """Parameters whose first firing opens a scope, as the engine does it, with a log of what happened."""

    def __init__(self, *names: str) -> None:
        self.log: list[str] = []
        self.scope: BackwardScope | None = None
        self.parameters = {name: nn.Parameter(torch.ones(1)) for name in names}
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._fired(name))

    def _fired(self, name: str) -> None:
        self.log.append(name)
        if self.scope is None:
            self.scope = BackwardScope(announced=False)
            watch_end(self.scope, self._ended)

    def _ended(self, scope: BackwardScope) -> None:
        assert scope is self.scope
        scope.release()
        self.log.append("end")

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.parameters[name]


def reentrant(weight: nn.Parameter, x: Tensor) -> Tensor:
    return checkpoint(lambda v: v * weight, x, use_reentrant=True)


def leaf() -> Tensor:
    return torch.ones(1, requires_grad=True)


def test_a_plain_backward_ends_once_after_all_firings() -> None:
    watched = Watched("a", "b", "c")
    (watched["a"] * watched["b"] * watched["c"]).sum().backward()
    assert sorted(watched.log[:-1]) == ["a", "b", "c"] and watched.log[-1] == "end"


@pytest.mark.parametrize("checkpoints", [1, 2, 3])
def test_a_first_event_in_a_nested_task_ends_with_the_outer_one(checkpoints: int) -> None:
    watched = Watched("outer", "inner")
    x = leaf() * watched["outer"]
    for _ in range(checkpoints):
        x = reentrant(watched["inner"], x)
    x.sum().backward()
    assert watched.log == ["inner"] * checkpoints + ["outer", "end"]


def test_checkpoints_in_checkpoints() -> None:
    watched = Watched("outer", "middle", "inner")

    def block(x: Tensor) -> Tensor:
        return reentrant(watched["inner"], x * watched["middle"])

    checkpoint(block, leaf() * watched["outer"], use_reentrant=True).sum().backward()
    assert watched.log == ["inner", "middle", "outer", "end"]


def test_a_checkpoint_at_the_very_start_of_the_graph_is_the_last_to_run() -> None:
    watched = Watched("late", "early")
    (reentrant(watched["early"], leaf()) * watched["late"]).sum().backward()
    assert watched.log == ["late", "early", "end"]


def test_only_checkpoints_over_an_input_that_needs_no_parameter() -> None:
    watched = Watched("inner")
    sum(reentrant(watched["inner"], leaf()) for _ in range(2)).sum().backward()
    assert watched.log == ["inner", "inner", "end"]


def test_a_running_backward_is_known_to_run_and_a_failed_one_is_known_to_have_failed() -> None:
    watched = Watched("a")
    broken = nn.Parameter(torch.ones(1))
    seen: list[bool] = []

    def look_and_fail(_: Tensor) -> None:
        seen.append(watched.scope.is_certainly_running())
        raise ZeroDivisionError("on purpose")

    middle = broken * 1
    middle.register_hook(look_and_fail)
    with pytest.raises(ZeroDivisionError):
        (watched["a"] * middle.exp()).sum().backward()
    gc.collect()
    assert seen == [True] and watched.log == ["a"]
    assert not watched.scope.is_certainly_running()


def test_a_failure_between_the_nested_task_and_the_rest_leaves_a_waiting_scope() -> None:
    watched = Watched("outer", "inner")
    x = leaf() * watched["outer"]
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reentrant(watched["inner"], x).sum().backward()
    gc.collect()
    assert watched.log == ["inner"]
    assert watched.scope.first_task > autograd.NO_GRAPH_TASK
    assert not watched.scope.is_certainly_running()
    watched.scope.release()
    assert watched.scope.handles == []


def test_announced_scopes_run_until_released_and_leave_the_list() -> None:
    scope = BackwardScope(announced=True)
    assert scope.is_certainly_running()
    BackwardScope.running.append(scope)
    other = BackwardScope(announced=True)
    BackwardScope.running.append(other)
    scope.release()
    assert BackwardScope.running == [other], "two equal scopes are not the same scope"
    other.release()
    other.release()
    assert BackwardScope.running == []


def test_where_torch_cannot_tell_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_queue_callback", None)
    watched = Watched("a")
    watched["a"].sum().backward()
    assert watched.log == ["a"] and not watched.scope.is_certainly_running()
