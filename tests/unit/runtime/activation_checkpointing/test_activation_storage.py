# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps: bytes are counted between forward and backward, and after it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.activation_checkpointing.activation_storage import (
    ContiguousBuffers,
    StorageSettings,
    is_activation,
    must_store,
    store,
)
from unit.runtime.activation_checkpointing.held_bytes import HeldBytes

ck = deepspeed.checkpointing

WIDTH, ROWS, DEPTH = 32, 64, 5
ACTIVATION = WIDTH * ROWS * 4  # bytes
SLACK = 64  # a token and a loss


class Layer(nn.Module):
    """Makes six activations of which a checkpoint keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.linear(x))
        return x


def tower_loss(layers: list[nn.Module], run: Callable[..., Tensor], rows: int = ROWS) -> Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return tower_of(layers, run, x * 1).square().mean()


def tower_of(layers: list[nn.Module], run: Callable[..., Tensor], h: Tensor) -> Tensor:
    for layer in layers:
        h = run(layer, h)
    return h


def a_tower() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(DEPTH)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return layers


both = pytest.mark.parametrize("run", [ck.checkpoint, ck.non_reentrant_checkpoint])


@both
@pytest.mark.parametrize("contiguous", [False, True])
def test_only_arguments_are_kept_and_backward_releases_them(run: Callable[..., Tensor], contiguous: bool) -> None:
    layers = a_tower()
    ck.configure(None, contiguous_checkpointing=contiguous, num_checkpoints=DEPTH)
    plain = HeldBytes()
    with plain:
        tower_loss(layers, lambda layer, x: layer(x))
    with HeldBytes() as held:
        loss = tower_loss(layers, run)
        # Arguments, the last result, which the loss keeps, and the input.
        assert DEPTH * ACTIVATION < held.now() <= (DEPTH + 2) * ACTIVATION + SLACK, held.now() / ACTIVATION
        loss.backward()
        buffers = DEPTH * ACTIVATION if contiguous else 0
        # The graph is alive, and with it the input and its gradient. Activations must not be.
        assert held.now() <= buffers + 2 * ACTIVATION + SLACK, held.now() / ACTIVATION
        ck.reset()
        assert held.now() <= 2 * ACTIVATION + SLACK
    assert plain.peak > 6 * DEPTH * ACTIVATION
    assert held.peak < (2 * DEPTH + 12) * ACTIVATION


@both
def test_kept_graph_keeps_activations_until_it_is_released(run: Callable[..., Tensor]) -> None:
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=DEPTH)
    loss = tower_loss(a_tower(), run)
    assert ck.data_offsets == [DEPTH]
    loss.backward(retain_graph=True)
    assert ck.data_offsets == [DEPTH]
    loss.backward()
    assert ck.data_offsets == [0], "released while the graph object is alive"


@both
def test_slots_are_used_again_and_not_mixed_up(run: Callable[..., Tensor]) -> None:
    """Two forwards before two backwards, in either order; more checkpoints than slots; other sizes; 4 rounds."""
    layers = a_tower()
    plain = [tower_loss(layers, lambda layer, x: layer(x), rows) for rows in (7, 9)]
    expected = [torch.autograd.grad(loss, [p for layer in layers for p in layer.parameters()]) for loss in plain]
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
    for turn in range(4):
        losses = [tower_loss(layers, run, rows) for rows in (7, 9)]
        for which in ((0, 1), (1, 0))[turn % 2]:
            for layer in layers:
                layer.zero_grad()
            losses[which].backward()
            actual = [p.grad for layer in layers for p in layer.parameters()]
            for a, b in zip(actual, expected[which], strict=True):
                torch.testing.assert_close(a, b)
        assert len(ck.contiguous_data_buffers) == 2 and ck.data_offsets == [0, 0]


@pytest.mark.parametrize("inner", [ck.checkpoint, ck.non_reentrant_checkpoint])
@both
@pytest.mark.parametrize("contiguous", [False, True])
def test_nested_checkpoints_keep_what_the_outer_one_keeps(
    run: Callable[..., Tensor], inner: Callable[..., Tensor], contiguous: bool
) -> None:
    layers = a_tower()
    ck.configure(None, contiguous_checkpointing=contiguous, num_checkpoints=2)
    with HeldBytes() as held:
        x = torch.randn(ROWS, WIDTH).requires_grad_()
        h = x * 1
        for _ in range(2):
            h = run(lambda a: tower_of(layers, inner, a), h)
        loss = h.square().mean()
        del h
        assert held.now() <= 4 * ACTIVATION + SLACK, held.now() / ACTIVATION
        loss.backward()
        assert held.now() <= (2 + 2 * contiguous) * ACTIVATION + SLACK
    assert not contiguous or ck.data_offsets[0] == 0


def test_buffers_of_sizes_that_are_not_used_any_more_are_freed() -> None:
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=DEPTH)
    layers = a_tower()
    for rows in (3, 4, 5):
        tower_loss(layers, ck.checkpoint, rows).backward()
        assert [buffer.numel() for buffer in ck.contiguous_data_buffers] == [DEPTH * rows * WIDTH]


def test_graph_that_is_dropped_without_backward_gives_its_slots_back() -> None:
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=DEPTH)
    for run in (ck.checkpoint, ck.non_reentrant_checkpoint):
        loss = tower_loss(a_tower(), run)
        assert ck.data_offsets == [DEPTH]
        del loss
        gc.collect()
        assert ck.data_offsets == [0]


def test_restored_value_outlives_its_slot() -> None:
    buffers = ContiguousBuffers()
    settings = StorageSettings(contiguous=True, slots=1)
    first, second = (torch.full((3, 2), value, requires_grad=True) * 1 for value in (1.0, 2.0))
    stored = store(first, 0, settings, buffers)
    restored = stored.restore()
    del stored
    store(second, 0, settings, buffers)
    assert torch.equal(restored, first)


def test_arguments_of_one_size_have_buffers_of_their_own() -> None:
    """The number counts checkpoints, however many arguments each has."""
    ck.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    x, y = (torch.randn(3, WIDTH, requires_grad=True) * 1 for _ in range(2))
    for _ in range(2):
        x, y = ck.checkpoint(lambda a, b: (a * b, a + b), x, y)
    assert ck.data_offsets == [2, 2]
    (x + y).sum().backward()
    assert ck.data_offsets == [0, 0]


def test_number_of_checkpoints_is_needed() -> None:
    ck.configure(None, contiguous_checkpointing=True)
    with pytest.raises(ValueError, match="number_checkpoints"):
        ck.checkpoint(Layer(), torch.ones(2, WIDTH, requires_grad=True))
    ck.set_num_layers(2)
    ck.checkpoint(Layer(), torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels last": lambda t: t[:, None].contiguous(memory_format=torch.channels_last),
    "every second": lambda t: t[:, ::2],
    "inner slice": lambda t: t[1:, 1:, 1:],
    "one element": lambda t: t[0, 0, 0],
    "complex": lambda t: torch.complex(t, -t).conj(),
    "bf16": lambda t: t.bfloat16(),
    "fp64": lambda t: t.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_and_dtype_survive(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(3, 4, 5, requires_grad=True))
    settings = StorageSettings(contiguous=True, slots=2)
    assert must_store(tensor, settings)
    restored = store(tensor, 0, settings, ContiguousBuffers()).restore()
    assert torch.equal(restored, tensor) and restored.dtype is tensor.dtype and restored.requires_grad
    assert restored.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("value", "activation", "kept_otherwise"),
    [
        (torch.ones(3, requires_grad=True) * 1, True, True),
        (torch.ones(3), True, False),  # input data
        (nn.Parameter(torch.ones(3)), False, False),  # in memory anyway
        (torch.ones(3, dtype=torch.long), False, False),
        (torch.ones(1, requires_grad=True).expand(8), False, False),  # one element of memory
        (torch.ones(6, requires_grad=True).as_strided((4, 3), (1, 1)), False, False),
        (torch.ones(0, requires_grad=True) * 1, False, False),
        (torch.eye(3, requires_grad=True).to_sparse(), False, False),
        ("text", False, False),
    ],
)
def test_what_counts_as_an_activation(value: Any, activation: bool, kept_otherwise: bool) -> None:
    settings = StorageSettings(contiguous=True, slots=1)
    assert (is_activation(value, settings), must_store(value, settings)) == (activation, kept_otherwise)
    assert ck.is_activation_to_checkpoint(value) is activation
    assert not must_store(value, StorageSettings()), "no setting, no copy"


def test_host_memory_for_what_is_in_it_already() -> None:
    """Activations of a CPU model are kept as they are: autograd notices when they change."""
    ck.configure(None, checkpoint_in_cpu=True)
    layers = a_tower()
    with HeldBytes() as held:
        loss = tower_loss(layers, ck.checkpoint)
        assert held.now() <= (DEPTH + 2) * ACTIVATION + SLACK
        loss.backward()


@pytest.mark.cuda
@both
@pytest.mark.parametrize("contiguous", [False, True])
def test_on_a_device_activations_wait_in_pinned_host_memory(run: Callable[..., Tensor], contiguous: bool) -> None:
    layers = [layer.cuda() for layer in a_tower()]
    parameters = [p for layer in layers for p in layer.parameters()]

    def device_loss(run: Callable[..., Tensor]) -> Tensor:
        x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
        h = x * 1
        for layer in layers:
            h = run(lambda a, layer=layer: nn.functional.dropout(layer(a), 0.3), h)
        return h.square().mean()

    grads, held = [], []
    for on_host in (False, True):
        ck.configure(None, checkpoint_in_cpu=on_host, contiguous_checkpointing=contiguous, num_checkpoints=DEPTH)
        torch.manual_seed(1)
        before = torch.cuda.memory_allocated()
        loss = device_loss(run)
        held.append(torch.cuda.memory_allocated() - before)
        if contiguous:
            assert ck.contiguous_data_buffers[-1].is_pinned() is on_host
        grads.append(torch.autograd.grad(loss, parameters) if run is ck.non_reentrant_checkpoint else None)
        if grads[-1] is None:
            for parameter in parameters:
                parameter.grad = None
            loss.backward()
            grads[-1] = [p.grad.clone() for p in parameters]
        del loss
        ck.reset()
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    one = 4096 * WIDTH * 4
    assert held[0] >= DEPTH * one and held[1] <= 3 * one
