# SPDX-License-Identifier: Apache-2.0
"""Facts about torch's autograd engine on which gradient reduction is built. When one of these fails under a new torch,
the design has to be looked at, not the test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.runtime.gradients import autograd_internals as autograd


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def log_firings(log: list[str], name: str, target: nn.Parameter) -> None:
    target.register_post_accumulate_grad_hook(lambda _: log.append(name))


class Recorder:
    """A callback that can be weakly referenced."""

    def __init__(self, log: list[str], name: str = "end") -> None:
        self.log, self.name = log, name

    def __call__(self) -> None:
        self.log.append(self.name)


def fail(_: Tensor) -> None:
    raise ZeroDivisionError("on purpose")


# -------------------------------------------------- firings


@pytest.mark.parametrize("uses", [1, 2, 5])
def test_hook_fires_once_per_graph_task_however_often_the_parameter_is_used(uses: int) -> None:
    log: list[str] = []
    weight = parameter(2.0)
    log_firings(log, "w", weight)
    loss = sum((weight * (i + 1)).sum() for i in range(uses))
    loss.backward(retain_graph=True)
    assert log == ["w"]
    assert weight.grad.item() == uses * (uses + 1) / 2
    loss.backward()
    assert log == ["w", "w"], "another backward is another graph task"


def test_a_parameter_outside_the_graph_does_not_fire() -> None:
    log: list[str] = []
    used, unused = parameter(), parameter()
    log_firings(log, "used", used)
    log_firings(log, "unused", unused)
    used.sum().backward()
    assert log == ["used"] and unused.grad is None


def test_a_custom_function_that_returns_none_may_fire_the_hook_without_a_gradient() -> None:
    class Dropping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    log: list[str] = []
    x, dropped = parameter(), parameter()
    log_firings(log, "x", x)
    log_firings(log, "dropped", dropped)
    Dropping.apply(x, dropped).sum().backward()
    assert sorted(log) in (["dropped", "x"], ["x"])  # torch 2.13 fires, torch 2.4 does not
    assert dropped.grad is None and x.grad.item() == 1.0


@pytest.mark.parametrize(("under_checkpoint", "outside", "firings"), [(1, 0, 1), (2, 0, 2), (1, 1, 2), (2, 3, 3)])
def test_a_reentrant_checkpoint_fires_by_itself(under_checkpoint: int, outside: int, firings: int) -> None:
    log: list[str] = []
    weight = parameter(3.0)
    log_firings(log, "w", weight)
    x = torch.ones(1, requires_grad=True)
    total = torch.zeros(1)
    for _ in range(under_checkpoint):
        total = total + checkpoint(lambda v: v * weight, x, use_reentrant=True)
    for _ in range(outside):
        total = total + x * weight
    total.sum().backward()
    assert len(log) == firings
    assert weight.grad.item() == under_checkpoint + outside


def test_a_non_reentrant_checkpoint_stays_in_the_outer_task() -> None:
    log: list[str] = []
    weight = parameter()
    log_firings(log, "w", weight)
    x = torch.ones(1, requires_grad=True)
    (checkpoint(lambda v: v * weight, x, use_reentrant=False) + x * weight).sum().backward()
    assert log == ["w"]


def test_a_nested_task_may_fire_before_any_hook_of_the_outer_one() -> None:
    log: list[str] = []
    early, late = parameter(), parameter()
    log_firings(log, "inner", early)
    log_firings(log, "outer", late)
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda v: v * early, x * late, use_reentrant=True).sum().backward()
    assert log == ["inner", "outer"]


def test_backward_with_inputs_fires_for_the_subset_only() -> None:
    log: list[str] = []
    a, b = parameter(2.0), parameter(3.0)
    log_firings(log, "a", a)
    log_firings(log, "b", b)
    (a * b).sum().backward(inputs=[a])
    assert log == ["a"] and a.grad.item() == 3.0 and b.grad is None


def test_autograd_grad_fires_tensor_hooks_but_no_accumulate_hook() -> None:
    log: list[str] = []
    weight = parameter(2.0)
    log_firings(log, "accumulated", weight)
    weight.register_hook(lambda _: log.append("tensor"))
    (gradient,) = torch.autograd.grad((weight * 5).sum(), [weight])
    assert log == ["tensor"] and gradient.item() == 5.0 and weight.grad is None
    log.clear()
    (weight * 5).sum().backward()
    assert log == ["tensor", "accumulated"], "the tensor hook runs before the gradient is accumulated"


# -------------------------------------------------- graph tasks and their callbacks


def test_graph_task_ids_tell_tasks_apart() -> None:
    seen: dict[str, int] = {}
    inner, outer = parameter(), parameter()
    inner.register_post_accumulate_grad_hook(lambda _: seen.update(inner=autograd.current_graph_task_id()))
    outer.register_post_accumulate_grad_hook(lambda _: seen.update(outer=autograd.current_graph_task_id()))
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda v: v * inner, x * outer, use_reentrant=True).sum().backward()
    first_outer = seen["outer"]
    assert seen["inner"] > seen["outer"] > autograd.NO_GRAPH_TASK, "identifiers grow: a nested task began later"
    (outer * 1).sum().backward()
    assert seen["outer"] > seen["inner"] > first_outer
    assert autograd.current_graph_task_id() == autograd.NO_GRAPH_TASK


def test_a_queued_callback_belongs_to_the_current_task() -> None:
    log: list[str] = []
    inner, outer = parameter(), parameter()

    def at_inner(_: Tensor) -> None:
        log.append("inner fires")
        autograd.queue_callback(Recorder(log, "inner task ends"))

    def at_outer(_: Tensor) -> None:
        log.append("outer fires")
        autograd.queue_callback(Recorder(log, "outer task ends"))

    inner.register_post_accumulate_grad_hook(at_inner)
    outer.register_post_accumulate_grad_hook(at_outer)
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda v: v * inner, x * outer, use_reentrant=True).sum().backward()
    assert log == ["inner fires", "inner task ends", "outer fires", "outer task ends"]


def test_callbacks_run_after_every_firing_of_their_task() -> None:
    log: list[str] = []
    weights = [parameter() for _ in range(4)]
    weights[-1].register_post_accumulate_grad_hook(lambda _: autograd.queue_callback(Recorder(log)))
    for i, weight in enumerate(weights):
        log_firings(log, f"w{i}", weight)
    product = weights[0]
    for weight in weights[1:]:
        product = product * weight
    product.sum().backward()
    assert sorted(log[:-1]) == ["w0", "w1", "w2", "w3"] and log[-1] == "end"


def test_after_an_exception_callbacks_never_run_and_are_released() -> None:
    log: list[str] = []
    references: list[weakref.ref] = []
    reached, broken = parameter(2.0), parameter(3.0)

    def at_reached(_: Tensor) -> None:
        callback = Recorder(log)
        references.append(weakref.ref(callback))
        autograd.queue_callback(callback)
        assert references[-1]() is not None

    reached.register_post_accumulate_grad_hook(at_reached)
    middle = broken * 1
    middle.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (reached * middle.exp()).sum().backward()
    gc.collect()
    assert references and log == [], "the callback must not have run"
    assert references[0]() is None, "the dead task must have let go of it"
    assert reached.grad is not None and broken.grad is None, ".grad keeps the partial values"
    (parameter() * 2).sum().backward()
    assert log == [], "nor does it run at the end of a later task"


def test_an_exception_in_a_nested_task_ends_the_outer_one_too() -> None:
    log: list[str] = []
    inner, outer = parameter(), parameter()
    outer.register_post_accumulate_grad_hook(lambda _: log.append("outer fires"))
    inner.register_post_accumulate_grad_hook(fail)
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda v: v * inner, x * outer, use_reentrant=True).sum().backward()
    assert log == [] and inner.grad is not None
    assert autograd.current_graph_task_id() == autograd.NO_GRAPH_TASK


# -------------------------------------------------- the node that encloses a nested task


def nested(depth: int, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if depth == 0:
        return body(x)
    return checkpoint(lambda v: nested(depth - 1, body, v), x, use_reentrant=True)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_enclosing_node_is_the_outermost_checkpoint(depth: int) -> None:
    seen: list[object] = []
    weight = parameter()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(autograd.enclosing_backward_node()))
    out = nested(depth, lambda v: v * weight, torch.ones(1, requires_grad=True))
    out.sum().backward()
    (node,) = seen
    if depth == 0:
        assert node is None
    else:
        assert node is out.grad_fn, "the checkpoint's node in the outermost graph"


def test_a_custom_function_that_calls_no_engine_encloses_nothing() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return 2 * gradient

    seen: list[object] = []
    weight = parameter()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(autograd.enclosing_backward_node()))
    Twice.apply(weight).sum().backward()
    assert seen == [None]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_follows_the_node_runs_later_in_the_outer_task(depth: int) -> None:
    log: list[str] = []
    tasks: dict[str, int] = {}
    inner, outer = parameter(), parameter()

    def follows() -> None:
        log.append("after node")
        tasks["after node"] = autograd.current_graph_task_id()
        assert autograd.enclosing_backward_node() is None
        autograd.queue_callback(Recorder(log))

    def at_inner(_: Tensor) -> None:
        log.append("inner fires")
        tasks["inner"] = autograd.current_graph_task_id()
        assert autograd.register_after_node(autograd.enclosing_backward_node(), follows)

    inner.register_post_accumulate_grad_hook(at_inner)
    outer.register_post_accumulate_grad_hook(lambda _: tasks.update(outer=autograd.current_graph_task_id()))
    log_firings(log, "outer fires", outer)
    x = torch.ones(1, requires_grad=True)
    nested(depth, lambda v: v * inner, x * outer).sum().backward()
    assert log == ["inner fires", "after node", "outer fires", "end"]
    assert tasks["after node"] == tasks["outer"] != tasks["inner"]


def test_handles_of_the_following_hook_remove_it() -> None:
    log: list[str] = []
    inner = parameter()

    def at_inner(_: Tensor) -> None:
        for handle in autograd.register_after_node(autograd.enclosing_backward_node(), lambda: log.append("after")):
            handle.remove()

    inner.register_post_accumulate_grad_hook(at_inner)
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda v: v * inner, x * 1, use_reentrant=True).sum().backward()
    assert inner.grad is not None and log == []


# -------------------------------------------------- many tensors at once, and torch without the private calls


@pytest.mark.parametrize("without_foreach", [False, True])
def test_copies_and_sums_of_many_tensors_cast(without_foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without_foreach:
        monkeypatch.setattr(autograd, "_foreach_copy", None)
        monkeypatch.setattr(autograd, "_foreach_add", None)
    sources = [torch.randn(n).bfloat16() for n in (1, 7, 64)]
    targets = [torch.full((n,), 2.0) for n in (1, 7, 64)]
    autograd.add_each(targets, sources, 0.5)
    for target, source in zip(targets, sources):
        assert torch.equal(target, 2.0 + 0.5 * source.float())
    autograd.copy_each(targets, sources)
    for target, source in zip(targets, sources):
        assert torch.equal(target, source.float())
    autograd.copy_each([], [])
    autograd.add_each([], [], 1.0)


def test_what_is_said_where_torch_lacks_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autograd.can_queue_callbacks() and autograd.can_count_nodes_to_run()
    monkeypatch.setattr(autograd, "_graph_task_id", None)
    assert autograd.current_graph_task_id() == autograd.NO_GRAPH_TASK
    assert not autograd.can_queue_callbacks() and not autograd.can_count_nodes_to_run()
