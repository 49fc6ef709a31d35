# SPDX-License-Identifier: Apache-2.0
"""What custom functions find in ``ctx.saved_tensors`` under ZeRO-3: whole values, with the parameter's attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from unit.common import DistributedTest
from unit.graphs import Batch, assert_gradients, expected_gradients, make_batch, make_engine, my_batch, run_micro_step


class Affine(torch.autograd.Function):
    """x @ weight.T + bias, which notes what it finds in backward."""

    found: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias = ctx.saved_tensors
        Affine.found += [weight, bias]
        return grad @ weight, grad.t() @ x, grad.sum(0) + 0 * bias


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))
        self.weight.note, self.bias.note = "weight", "bias"

    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(x, self.weight, self.bias).tanh()


class Model(nn.Module):
    """A layer that runs twice, and whose weight operators use as well."""

    def __init__(self, frozen: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 5), Layer(), nn.Linear(5, 3)
        self.layer.requires_grad_(not frozen)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.last(self.layer(x) * (1 + self.layer.weight.square().mean()) + x @ self.layer.weight)


def through(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    yield (call(batch.x) - batch.target).square().mean()


def with_penalty(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """A loss over the gradient of the input: a backward of the function's backward."""
    x = batch.x.clone().requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    yield (out - batch.target).square().mean() + 0.01 * slope.square().mean()


def engine_of(*args: Any, persistent: int = 0, **options: Any) -> Any:
    torch.manual_seed(11)
    sizes = {"stage3_param_persistence_threshold": persistent, "stage3_max_reuse_distance": 0}
    return make_engine(Model(*args), 3, zero=sizes, **options)


def train(engine: Any, losses: Callable[..., Iterable[Tensor]] = through) -> None:
    for window in range(3):
        expected = expected_gradients(engine.module, losses, lambda rank, w=window: [make_batch(rank, w)], 1)
        Affine.found.clear()
        run_micro_step(engine, losses, "engine.backward", my_batch(engine, window))
        assert_gradients(engine, expected, torch.float32, f"window {window}")
        engine.step()


class TestCustomFunctions(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("persistent", [0, 10, 100])
    def test_saved_parameters_have_their_attributes(self, persistent: int, frozen: bool) -> None:
        engine = engine_of(frozen, persistent=persistent)
        train(engine)
        assert [each.note for each in Affine.found] == ["weight", "bias"] * 2
        for each in Affine.found:
            assert isinstance(each, nn.Parameter) and each.requires_grad is not frozen and each.is_leaf
            assert each.ds_status is ZeroParamStatus.AVAILABLE
            assert each.shape == each.ds_shape == ((5, 5) if each.note == "weight" else (5,))
        weight = engine.module.layer.weight
        if persistent < 25:  # the function's own goes on to be whole
            assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.numel() == 0
        engine.destroy()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_a_checkpoint(self, reentrant: bool) -> None:
        """The non-reentrant one sets hooks of its own: there torch gives tensors without attributes, whoever trains."""
        engine = engine_of(False, reentrant)
        train(engine)
        named = [getattr(each, "note", None) for each in Affine.found]
        assert named == ["weight", "bias"] * 2 if reentrant else ["weight", "bias", None, None]
        engine.destroy()

    def test_backward_of_backward(self) -> None:
        engine = engine_of()
        train(engine, with_penalty)
        assert {each.note for each in Affine.found} == {"weight", "bias"}
        engine.destroy()

    def test_a_step_in_between_is_noticed(self) -> None:
        for persistent in (0, 100):
            engine = engine_of(persistent=persistent)
            batch = my_batch(engine, 0)
            (kept,) = through(engine, engine.module, batch)
            run_micro_step(engine, through, "engine.backward", batch)
            engine.step()
            with pytest.raises(RuntimeError, match=r"modified"):
                engine.backward(kept)
            engine.destroy()

    def test_persistent_weights_let_go_of_in_between(self) -> None:
        """Modules of torch.nn leave it to what the graph saved to bring them back."""
        layers = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        engine = make_engine(layers, 3, zero={"stage3_param_persistence_threshold": 100})
        assert engine.module[1].weight.ds_persist
        expected = expected_gradients(engine.module, through, lambda rank: [make_batch(rank, 0)], 1)
        (loss,) = through(engine, engine.module, my_batch(engine, 0))
        engine.empty_partition_cache()
        assert engine.module[1].weight.numel() == 0
        engine.backward(loss)
        assert_gradients(engine, expected, torch.float32, "let go of")
        engine.destroy()

    def test_gathering_what_was_found(self) -> None:
        """As a function does that recomputes: only what is not there, by its ``ds_status``."""
        engine = engine_of()
        run_micro_step(engine, through, "engine.backward", my_batch(engine, 0))
        found = Affine.found[-2]
        before = found.detach().clone()
        with deepspeed.zero.GatheredParameters([found]):
            assert torch.equal(engine.module.layer.weight, before) and torch.equal(found, before)
        engine.destroy()

    def test_operators_find_plain_tensors(self) -> None:
        """They have no use for attributes, which cost time for each saved weight."""
        engine = engine_of()
        out = engine(my_batch(engine, 0).x)
        kinds: set[str] = set()
        waiting, seen = [out.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
            if type(node).__name__ == "MmBackward0":
                kinds.add(type(node._saved_mat2).__name__)
        assert kinds == {"Tensor"}
        engine.destroy()
