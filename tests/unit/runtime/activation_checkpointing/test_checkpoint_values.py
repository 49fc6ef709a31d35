# SPDX-License-Identifier: Apache-2.0
"""A checkpoint computes what the function computes: results, gradients, random numbers, whatever goes in and comes out.

One process and no engine; each test runs a function plainly and under both kinds of checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.activation_checkpointing.argument_structure import flatten
from deepspeed.runtime.gradients import autograd_internals

ck = deepspeed.checkpointing

KINDS = {
    "reentrant": ck.checkpoint,
    "non_reentrant": ck.non_reentrant_checkpoint,
    "reentrant in slots": ck.checkpoint,
    "non_reentrant in slots": ck.non_reentrant_checkpoint,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def checkpoint_of(kind: str) -> Callable[..., Any]:
    if kind.endswith("in slots"):
        ck.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
    return KINDS[kind]


class Block(nn.Module):
    """Linear, tanh and dropout over a width of 6."""

    def __init__(self, seed: int = 0, dropout: float = 0.4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


def an_input(seed: int = 3) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def outcome(
    run: Callable[..., Any], loss_of: Callable[..., Tensor], parameters: list[Tensor], seed: int = 11
) -> list[Tensor]:
    """Loss, gradients, and the random numbers that come after forward and after backward."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    loss = loss_of(run)
    after_forward = torch.rand(2)
    loss.backward()
    grads = [torch.full_like(p, float("nan")) if p.grad is None else p.grad.clone() for p in parameters]
    return [loss.detach(), after_forward, torch.rand(2), *grads]


def check_same(kind: str, loss_of: Callable[..., Tensor], parameters: list[Tensor]) -> None:
    """Bitwise: it is the same arithmetic in the same order."""
    expected = outcome(plainly, loss_of, parameters)
    assert any(bool(grad.nan_to_num().count_nonzero()) for grad in expected[3:]), "the comparison proves nothing"
    actual = outcome(checkpoint_of(kind), loss_of, parameters)
    for position, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)), f"entry {position}: {a} instead of {b}"


@kinds
def test_one_block_with_dropout(kind: str) -> None:
    block, x = Block(), an_input()
    check_same(kind, lambda run: run(block, x).square().sum(), [x, *block.parameters()])


@kinds
def test_block_reused_nested_and_outside(kind: str) -> None:
    block, other, x = Block(), Block(1), an_input()

    def loss_of(run: Callable[..., Any]) -> Tensor:
        inner = run(lambda a: other(run(block, block(a))), x * 2)
        return (run(block, inner) + block(x)).square().sum()

    first = outcome(plainly, loss_of, [x, *block.parameters(), *other.parameters()])
    second = outcome(checkpoint_of(kind), loss_of, [x, *block.parameters(), *other.parameters()])
    for a, b in zip(first, second, strict=True):  # contributions come in another order
        torch.testing.assert_close(a, b)
    assert torch.equal(first[2], second[2]), "random numbers after backward"


@kinds
def test_input_without_gradient_still_trains_the_block(kind: str) -> None:
    block, x = Block(), an_input().detach()
    check_same(kind, lambda run: run(block, x).square().sum(), list(block.parameters()))


@kinds
def test_integer_input(kind: str) -> None:
    table = nn.Embedding(5, 6)
    check_same(kind, lambda run: run(table, torch.tensor([1, 3, 3])).square().sum(), [table.weight])


@kinds
def test_nothing_trains(kind: str) -> None:
    block = Block().requires_grad_(False)
    assert not checkpoint_of(kind)(block, an_input().detach()).requires_grad


@kinds
def test_low_rank_adapter_beside_a_frozen_layer(kind: str) -> None:
    base, down, up = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 6)
    x = an_input()
    check_same(
        kind, lambda run: run(lambda a: base(a) + up(down(a)), x).square().sum(), [*down.parameters(), up.weight]
    )
    assert base.weight.grad is None


class Named(NamedTuple):
    scale: float
    x: Tensor


@dataclasses.dataclass
class Record:
    note: str
    x: Tensor


class Output(collections.OrderedDict):
    """Like the outputs of model libraries: items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


@kinds
def test_nested_arguments_and_results(kind: str) -> None:
    block, x, y = Block(), an_input(), an_input(4)

    def function(named: Named, *, record: Record, pair: tuple[Any, ...], nothing: None) -> Any:
        assert (named.scale, record.note, pair[0], nothing) == (3.0, "kept", "text", None)
        h = block(named.x * named.scale + record.x + pair[1][0])
        out = Output()
        out["h"], out["n"] = h, 7
        return {"out": out, "top": torch.max(h, dim=1), "record": Record("r", 2 * h), "list": [h.sum(), 5], "i": h > 0}

    def loss_of(run: Callable[..., Any]) -> Tensor:
        out = run(function, Named(3.0, x), record=Record("kept", y), pair=("text", [x]), nothing=None)
        assert (type(out["out"]), out["out"].n, out["record"].note, out["list"][1]) == (Output, 7, "r", 5)
        assert out["i"].dtype is torch.bool and not out["i"].requires_grad
        return (out["out"].h * out["record"].x).sum() + out["top"].values.sum() + out["list"][0]

    check_same(kind, loss_of, [x, y, *block.parameters()])


@kinds
@pytest.mark.parametrize("wrap", [tuple, list], ids=["tuple", "list"])
def test_one_result_keeps_its_container(kind: str, wrap: type) -> None:
    block, x = Block(), an_input()
    result = checkpoint_of(kind)(lambda a: wrap([block(a)]), x)
    assert type(result) is wrap and len(result) == 1


@kinds
def test_first_run_sees_the_callers_containers_and_the_second_does_not(kind: str) -> None:
    block, x, seen = Block(), an_input(), []

    def function(a: Tensor, into: list[Any]) -> Tensor:
        into.append(len(into))
        return block(a) * len(into)

    check_same(kind, lambda run: (seen.clear(), run(function, x, seen))[1].square().sum(), [x, *block.parameters()])
    assert seen == [0]


@kinds
def test_results_that_are_unused_or_repeated_or_the_input(kind: str) -> None:
    block, x = Block(), an_input()

    def function(a: Tensor) -> tuple[Tensor, ...]:
        h = block(a)
        return h.exp(), h, h, a, a[:2]

    def loss_of(run: Callable[..., Any]) -> Tensor:
        _, first, second, same, part = run(function, x * 1)
        return (first * second.cos()).sum() + same.square().sum() + part.sum()

    check_same(kind, loss_of, [x, *block.parameters()])


@kinds
def test_result_that_does_not_depend_on_the_input(kind: str) -> None:
    x = an_input()
    result = checkpoint_of(kind)(lambda a: a.detach() * 2, x)
    (x.sum() + result.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@kinds
def test_returned_parameter_stays_a_leaf(kind: str) -> None:
    block, x = Block(), an_input()
    check_same(
        kind,
        lambda run: (lambda out: (out[0] @ out[1] @ out[2]).square().sum())(
            run(lambda a: (block(a), block.linear.weight, block.linear.weight.t()), x)
        ),
        [x, *block.parameters()],
    )
    assert block.linear.weight.is_leaf


@kinds
def test_backward_twice_over_a_kept_graph(kind: str) -> None:
    block, x = Block(), an_input()

    def loss_of(run: Callable[..., Any]) -> Tensor:
        loss = run(block, x).square().sum()
        loss.backward(retain_graph=True)
        return loss

    check_same(kind, loss_of, [x, *block.parameters()])


@kinds
def test_backward_twice_over_a_released_graph_is_refused(kind: str) -> None:
    loss = checkpoint_of(kind)(Block(), an_input()).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@kinds
@pytest.mark.parametrize("enabled", [True, False])
def test_second_run_under_the_autocast_of_the_first(kind: str, enabled: bool) -> None:
    block, x = Block(), an_input()
    seen = []

    def function(a: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return block(a).float()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        loss = checkpoint_of(kind)(function, x).square().sum()
    with torch.autocast("cpu", dtype=torch.float16, enabled=not enabled):
        loss.backward()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0] == (enabled, torch.bfloat16)


@kinds
def test_named_random_states_are_replayed(kind: str) -> None:
    block, x, tracker = Block(), an_input(), ck.get_cuda_rng_tracker()

    def function(a: Tensor) -> Tensor:
        h = block(a)
        with tracker.fork():
            h = block.dropout(h)
        return block.dropout(h)

    def loss_of(run: Callable[..., Any]) -> Tensor:
        ck.model_parallel_cuda_manual_seed(5)
        return run(function, run(function, x)).square().sum()

    check_same(kind, loss_of, [x, *block.parameters()])
    expected = outcome(plainly, loss_of, [x])
    after = tracker.get_states()["model-parallel-rng"]
    assert len(expected) == 4
    outcome(KINDS[kind], loss_of, [x])
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after)


@kinds
def test_nothing_is_kept_without_grad(kind: str) -> None:
    block, x, calls = Block(dropout=0.0), an_input(), []
    with torch.no_grad():
        result = checkpoint_of(kind)(lambda a: (calls.append(1), block(a))[1], x)
    assert not result.requires_grad and len(calls) == 1
    assert torch.equal(result, block(x))


@kinds
def test_function_that_raises_leaves_nothing_behind(kind: str) -> None:
    block, x = Block(), an_input()

    def fails_when_run_again(a: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006 - counts over both runs
        calls.append(1)
        with ck.get_cuda_rng_tracker().fork():
            torch.rand(3)
            if len(calls) == 2:
                raise ArithmeticError("in the second run")
        return block(a)

    ck.model_parallel_cuda_manual_seed(5)
    loss = checkpoint_of(kind)(fails_when_run_again, x).sum()
    before, named = torch.get_rng_state(), ck.get_cuda_rng_tracker().get_states()
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ck.get_cuda_rng_tracker().get_states()["model-parallel-rng"], named["model-parallel-rng"])
    check_same(kind, lambda run: run(block, x).square().sum(), [x, *block.parameters()])


@kinds
def test_under_saved_tensor_hooks_of_the_caller(kind: str) -> None:
    block, x = Block(), an_input()

    def loss_of(run: Callable[..., Any]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(block, x * 2).square().sum()

    check_same(kind, loss_of, [x, *block.parameters()])


def test_stored_argument_is_the_one_from_before_the_function_changed_it() -> None:
    """The function runs on the caller's tensor, which it overwrites; what is stored must be older."""
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=1)
    weight = nn.Parameter(torch.tensor(2.0))

    def function(a: Tensor) -> Tensor:
        result = a.clone() * weight
        a.data.mul_(100.0)
        return result

    ck.checkpoint(function, an_input() * 1).sum().backward()
    torch.testing.assert_close(weight.grad, an_input().sum().detach())


def test_argument_that_is_not_stored_and_was_changed_is_refused() -> None:
    block, x = Block(), an_input() * 1
    loss = ck.checkpoint(block, x).sum()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_partial_backward() -> None:
    block, x = Block(dropout=0.0), an_input()
    expected = torch.autograd.grad(block(x).sum(), [x, block.linear.weight])
    for options in ({"inputs": [x]}, None):
        loss = ck.checkpoint(block, x).sum()
        with pytest.raises(RuntimeError, match="non_reentrant_checkpoint"):
            loss.backward(**options) if options else torch.autograd.grad(loss, [x])
        assert block.linear.weight.grad is None and x.grad is None
    for run in (ck.non_reentrant_checkpoint, lambda *args: ck.checkpoint(*args, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(run(block, x).sum(), [x, block.linear.weight]), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivative_is_refused_where_it_would_be_wrong() -> None:
    block, x = Block(dropout=0.0), an_input()
    ck.checkpoint(block, x).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        x.grad.square().sum().backward()


def test_second_derivative_through_a_checkpoint_that_is_not_reentrant() -> None:
    block, x = Block(dropout=0.0), an_input()
    grads = []
    for run in (plainly, ck.non_reentrant_checkpoint):
        (slope,) = torch.autograd.grad(run(block, x).square().sum(), [x], create_graph=True)
        grads.append(torch.autograd.grad(slope.square().sum(), [x, block.linear.weight]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_function_that_returns_something_else_the_second_time_is_an_error() -> None:
    calls = []

    def function(a: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return (a * 2,) * len(calls)

    with pytest.raises(RuntimeError, match="returned 1 values.*again"):
        ck.checkpoint(function, an_input())[0].sum().backward()


def test_result_that_hides_tensors() -> None:
    class Hiding:
        def __init__(self, x: Tensor) -> None:
            self.inside = {"x": x}

    x = an_input()
    with pytest.raises(TypeError, match="Hiding.*non_reentrant_checkpoint"):
        ck.checkpoint(lambda a: Hiding(a * 2), x)
    ck.non_reentrant_checkpoint(lambda a: Hiding(a * 2), x).inside["x"].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_without_torchs_check_of_partial_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback serves partial backwards instead of getting them wrong."""
    monkeypatch.setattr(autograd_internals, "_runs_whole_graph", None)
    block, x = Block(dropout=0.0), an_input()
    (grad,) = torch.autograd.grad(ck.checkpoint(block, x).sum(), [x])
    assert torch.equal(grad, torch.autograd.grad(block(x).sum(), [x])[0])
    assert block.linear.weight.grad is None


def test_stands_in_for_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", ck.checkpoint)
    block, x = Block(), an_input()
    for options in ({"use_reentrant": True}, {"use_reentrant": False, "preserve_rng_state": True}):
        check_same(
            "reentrant",
            lambda run, o=options: (
                run if run is plainly else lambda f, a: torch.utils.checkpoint.checkpoint(f, a, **o)
            )(block, x).sum(),
            [x, *block.parameters()],
        )


def test_function_object_is_called_as_published() -> None:
    block, x, outputs = Block(dropout=0.0), an_input(), []
    results = ck.CheckpointFunction.apply(lambda a, n: (block(a) * n, n), outputs, x, 3)
    assert len(results) == 1 and outputs[1] == 3 and torch.equal(outputs[0], results[0])
    results[0].sum().backward()
    expected = torch.autograd.grad((block(x) * 3).sum(), [x])
    assert torch.equal(x.grad, expected[0])


def test_flattening_shares_no_container_and_keeps_no_leaf() -> None:
    inner: list[Any] = [torch.ones(1), 2]
    leaves, rebuild = flatten({"a": inner, "b": (torch.Size([3]), None)})
    assert leaves[1:] == [2, torch.Size([3]), None]
    again, once_more = rebuild(["t", 2, 3, 4]), rebuild(["t", 2, 3, 4])
    assert again == {"a": ["t", 2], "b": (3, 4)} and again["a"] is not once_more["a"] and again["a"] is not inner
