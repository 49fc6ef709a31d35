# SPDX-License-Identifier: Apache-2.0
"""Hidden states that wait in host memory: which ones, how many, and that they come back as they were.

Without a device the "host copy" of a CPU tensor is one more CPU tensor, which shows everything but the streams.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import deepspeed
from deepspeed.runtime.activation_checkpointing import offload_activations
from deepspeed.runtime.activation_checkpointing.activation_storage import is_activation
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointActivationOffloadStats,
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)

ck = deepspeed.checkpointing
WIDTH, DEPTH = 16, 5


class FromAnywhere(CheckpointHiddenStatesOffload):
    """Copies CPU tensors too."""

    def _may_move(self, tensor: Tensor) -> bool:
        return is_activation(tensor, self._settings)


def torchs(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    if CheckpointHiddenStatesOffload._active:
        CheckpointHiddenStatesOffload._active[-1].mark(x)
    return torch_checkpoint(function, x, use_reentrant=False)


runs = pytest.mark.parametrize("run", [ck.checkpoint, ck.non_reentrant_checkpoint, torchs])


def a_tower() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))


def loss_of(layers: nn.ModuleList, run: Callable[..., Tensor], rows: int = 32) -> Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
    h = x * 1
    for layer in layers:
        h = run(layer, h)
    return h.square().mean()


def gradients(layers: nn.ModuleList, loss: Tensor) -> list[Tensor]:
    layers.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in layers.parameters()]


@runs
@pytest.mark.parametrize("keep_last_count", [0, 1, 3, 99])
def test_all_but_the_last_go_to_the_host_and_come_back(run: Callable[..., Tensor], keep_last_count: int) -> None:
    layers = a_tower()
    expected = gradients(layers, loss_of(layers, lambda f, x: f(x)))
    offload = FromAnywhere(keep_last_count=keep_last_count)
    for turn in (1, 2):
        with offload:
            loss = loss_of(layers, run)
        moved = max(0, DEPTH - keep_last_count)
        stats = offload.stats
        assert (stats.marked_tensors, stats.offloaded_tensors) == (turn * DEPTH, turn * moved)
        assert stats.offloaded_bytes == turn * moved * 32 * WIDTH * 4 and stats.saved_tensors_seen >= turn * DEPTH
        for a, b in zip(gradients(layers, loss), expected, strict=True):
            assert torch.equal(a, b)
        assert (stats.restored_tensors, stats.kept_last_tensors) == (turn * moved, turn * (DEPTH - moved))
        assert stats.restored_bytes == stats.offloaded_bytes
    offload.reset()
    assert offload.stats == CheckpointActivationOffloadStats()


@runs
def test_device_memory_is_let_go(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states that are on the host live nowhere else."""
    seen: list[Any] = []
    layers = a_tower()
    offload = FromAnywhere(keep_last_count=1)
    pack = offload_activations._ActivationOffloadEngine._offload

    def watched(self: Any, waiting: Any) -> None:
        storage = waiting.tensor.untyped_storage()
        seen.append(torch.multiprocessing.reductions.StorageWeakRef(storage))
        pack(self, waiting)

    monkeypatch.setattr(offload_activations._ActivationOffloadEngine, "_offload", watched)
    with offload:
        loss = loss_of(layers, run)
    assert len(seen) == DEPTH - 1 and all(reference.expired() for reference in seen)
    loss.backward()


def test_only_marked_tensors_move() -> None:
    x, y = (torch.randn(32, WIDTH, requires_grad=True) * 1 for _ in range(2))
    with FromAnywhere(keep_last_count=0) as offload:
        offload.mark(x)
        (x.exp() * y.sin() + x.square()).sum()
    assert offload.stats.offloaded_tensors == 1 and offload.stats.saved_tensors_seen == 5


def test_small_tensors_and_host_tensors_stay() -> None:
    for offload in (FromAnywhere(min_offload_bytes=4 * WIDTH + 1), CheckpointHiddenStatesOffload()):
        with offload:
            loss = loss_of(a_tower(), ck.checkpoint, rows=1)
        loss.backward()
        assert offload.stats.skipped_marked_tensors == DEPTH and not offload.stats.offloaded_tensors


def test_mark_dies_with_its_tensor() -> None:
    """The next tensor in the same memory is another one."""
    with FromAnywhere(keep_last_count=0) as offload:
        x = torch.randn(32, WIDTH, requires_grad=True) * 1
        offload.mark(x)
        del x
        assert not offload._marks


@pytest.mark.parametrize("keep_last_count", [0, 1])
def test_change_in_place_is_never_used(keep_last_count: int) -> None:
    x = torch.ones(32, WIDTH, requires_grad=True)
    h = x * 1
    with FromAnywhere(keep_last_count=keep_last_count) as offload:
        offload.mark(h)
        loss = h.square().sum()
        h.detach().mul_(100)
        if keep_last_count:
            with pytest.raises(RuntimeError, match="modified in place"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_change_in_place_before_a_late_copy_is_never_used() -> None:
    h, other = (torch.ones(32, WIDTH, requires_grad=True) * 1 for _ in range(2))
    with FromAnywhere(keep_last_count=1) as offload:
        offload.mark(h)
        offload.mark(other)
        loss = h.square().sum()
        h.detach().mul_(100)
        loss = loss + other.square().sum()
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_contexts_nest_and_graphs_outlive_them() -> None:
    layers = a_tower()
    outer, inner = FromAnywhere(keep_last_count=0), FromAnywhere(keep_last_count=0)
    with outer:
        with inner:
            first = loss_of(layers, ck.checkpoint)
        second = loss_of(layers, ck.checkpoint)
    inner.reset()
    assert (outer.stats.offloaded_tensors, inner.stats.offloaded_tensors) == (DEPTH, 0)
    (first + second).backward()
    assert (outer.stats.restored_tensors, inner.stats.restored_tensors) == (DEPTH, DEPTH)
    assert not CheckpointHiddenStatesOffload._active


def test_pieces_by_hand() -> None:
    engine = FromAnywhere(keep_last_count=0)
    x = torch.randn(32, WIDTH, requires_grad=True) * 1
    kept = ck.get_offloaded_activations_for_backward([x, "text", torch.ones(300)], engine)
    assert kept[1] == "text" and engine.stats.offloaded_tensors == 1
    restored = ck.restore_offloaded_activations(kept, engine)
    assert torch.equal(restored[0], x) and restored[0] is not x and restored[1] == "text"


@pytest.mark.parametrize(
    "name", ["min_offload_bytes", "max_fwd_stash_count", "max_cpu_buffer_pool_count", "keep_last_count"]
)
def test_negative_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        get_checkpoint_hidden_states_offloading_ctx_manager(**{name: -1})


def test_layers_of_transformers_mark_their_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for the class that the library has."""

    class GradientCheckpointingLayer(nn.Module):
        gradient_checkpointing = True

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return torch_checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.inner(hidden_states)

    library = types.ModuleType("transformers.modeling_layers")
    library.GradientCheckpointingLayer = GradientCheckpointingLayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.modeling_layers", library)
    for _ in range(2):
        assert isinstance(get_checkpoint_hidden_states_offloading_ctx_manager(), CheckpointHiddenStatesOffload)
    layers = nn.ModuleList(GradientCheckpointingLayer(layer) for layer in a_tower())
    expected = gradients(layers, loss_of(layers, lambda f, x: f.inner(x)))
    with FromAnywhere(keep_last_count=1) as offload:
        loss = loss_of(layers, lambda f, x: f(x))
    assert (offload.stats.marked_tensors, offload.stats.offloaded_tensors) == (DEPTH, DEPTH - 1)
    for a, b in zip(gradients(layers, loss), expected, strict=True):
        assert torch.equal(a, b)
    layers.eval()
    with FromAnywhere() as offload:
        layers[0](torch.ones(2, WIDTH, requires_grad=True))
    assert not offload.stats.marked_tensors


@pytest.mark.cuda
@runs
@pytest.mark.parametrize("streams", [False, True])
def test_on_a_device(run: Callable[..., Tensor], streams: bool) -> None:
    layers, rows = a_tower().cuda(), 1 << 16

    def device_loss(run: Callable[..., Tensor]) -> Tensor:
        h = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)).cuda().requires_grad_() * 1
        for layer in layers:
            h = run(layer, h)
        return h.square().mean()

    expected = [grad.clone() for grad in gradients(layers, device_loss(lambda f, x: f(x)))]
    activation = rows * WIDTH * 4
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        with CheckpointHiddenStatesOffload(use_streams=streams) as offload:
            loss = device_loss(run)
        assert offload.stats.offloaded_tensors == DEPTH - 1
        # The input and its copy, the last hidden state and the result, which the loss needs.
        assert torch.cuda.memory_allocated() - before <= 4 * activation
        for a, b in zip(gradients(layers, loss), expected, strict=True):
            torch.testing.assert_close(a, b)
        del loss
