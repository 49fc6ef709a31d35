# SPDX-License-Identifier: Apache-2.0
"""How an activation waits between the forward that used it and the backward that needs it again.

As itself, or reduced to this rank's part of it, in host memory, or in a slot of one large buffer - in any combination.
Nothing here knows autograd: a :class:`StoredActivation` is a plain object that gives its memory back when it dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import warn_once_on_rank_0

PROBES = 16


@dataclass
class StorageSettings:
    """Where activations go.

    Args:
        partition: keep ``1 / mp_size`` of each on this rank.
        on_host: keep them in host memory.
        pinned: host memory that the device copies from is page-locked.
        contiguous: keep them in slots of large buffers.
        slots: activations per buffer, needed for ``contiguous``: how many checkpoints one forward makes.
        mp_rank, mp_size, mp_group: the ranks that hold the same activations.
    """

    partition: bool = False
    on_host: bool = False
    pinned: bool = True
    contiguous: bool = False
    slots: int | None = None
    mp_rank: int = 0
    mp_size: int = 1
    mp_group: Any = None

    def partition_size(self, tensor: Tensor) -> int:
        """Elements of ``tensor`` that each rank keeps; the last ranks' parts may be padded."""
        return -(-tensor.numel() // self.mp_size)

    def partitions(self) -> bool:
        """Whether there is more than one rank to divide activations among, and it is wanted."""
        return self.partition and self.mp_size > 1


def is_activation(value: Any, settings: StorageSettings) -> bool:
    """Whether ``value`` is a tensor that may be kept in another form than its own.

    Parameters stay in memory anyway; masks and positions are small, or shared by all layers; tensors whose elements
    share memory are smaller than they look.
    """
    return (
        type(value) is Tensor
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
        and value.numel() >= max(1, settings.mp_size)
        and _span(value) >= value.numel()
    )


def must_store(value: Any, settings: StorageSettings) -> bool:
    """Whether ``value`` is to be kept in another form. What has no gradient is input data, which the caller keeps."""
    if not (isinstance(value, Tensor) and value.requires_grad and is_activation(value, settings)):
        return False
    moves = settings.on_host and value.device.type != "cpu"
    return settings.partitions() or settings.contiguous or moves


def _span(tensor: Tensor) -> int:
    """Elements of memory from the tensor's first element to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


class _Arena:
    """One buffer of equally large slots."""

    def __init__(self, like: Tensor, numel: int, settings: StorageSettings) -> None:
        count = settings.slots or 0
        self.buffer = _empty(count * numel, like, settings)
        self.free = list(reversed(range(count)))
        self.count = count
        self.numel = numel


class _Slot:
    """A slot that is in use until this object dies."""

    def __init__(self, arena: _Arena) -> None:
        self._arena = arena
        self._index = arena.free.pop()
        self.tensor = arena.buffer.narrow(0, self._index * arena.numel, arena.numel)

    def __del__(self) -> None:
        self._arena.free.append(self._index)


class ContiguousBuffers:
    """One buffer per argument position, dtype, device and size of activation."""

    def __init__(self) -> None:
        self.arenas: dict[tuple[Any, ...], _Arena] = {}

    def take(self, position: int, numel: int, like: Tensor, settings: StorageSettings) -> _Slot | None:
        """A free slot of ``numel`` elements; None when all are in use.

        Raises:
            ValueError: the number of slots is not known.
        """
        if not settings.slots:
            raise ValueError(
                "contiguous checkpointing needs the number of checkpoints in one forward: set"
                " 'activation_checkpointing.number_checkpoints', configure(num_checkpoints=...) or set_num_layers()"
            )
        key = (position, numel, like.dtype, like.device, settings.on_host, settings.slots)
        arena = self.arenas.get(key)
        if arena is None:
            # Idle buffers are of a size that is not used any more, for example of another sequence length.
            self.arenas = {old: a for old, a in self.arenas.items() if len(a.free) < a.count}
            arena = self.arenas[key] = _Arena(like, numel, settings)
        if not arena.free:
            warn_once_on_rank_0(
                f"more activations wait for their backward than number_checkpoints={settings.slots} says; the others"
                " are kept outside of the contiguous buffers"
            )
            return None
        return _Slot(arena)

    def reset(self) -> None:
        """Let go of all buffers; those in use live until their activations are gone."""
        self.arenas = {}


def _empty(numel: int, like: Tensor, settings: StorageSettings) -> Tensor:
    if not (settings.on_host and settings.pinned) or like.device.type == "cpu":
        return torch.empty(numel, dtype=like.dtype, device="cpu" if settings.on_host else like.device)
    return get_accelerator().pin_empty(numel, dtype=like.dtype)


@dataclass(eq=False)
class StoredActivation:
    """An activation as it waits: ``kept`` is 1-D, this rank's part or the whole."""

    kept: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool
    slot: _Slot | None
    mp_size: int
    mp_group: Any
    probes: Tensor | None = field(default=None)

    @torch.no_grad()
    def restore(self) -> Tensor:
        """The activation: same values, shape, strides, device and ``requires_grad``, in memory of its own. Collective
        over the model-parallel group if it is partitioned.

        Raises:
            RuntimeError: ranks of the model-parallel group had different activations.
        """
        flat = self.kept
        if flat.device != self.device:
            # On the stream that copied to the host, hence after that copy.
            flat = flat.to(self.device, non_blocking=True)
        elif self.slot is not None and self.mp_size == 1:
            flat = flat.clone()  # the slot may be given away while the result is still read
        if self.mp_size > 1:
            flat = self._gather(flat)
        full = flat[: self.shape.numel()].view(self.shape)
        if full.stride() != self.stride:
            full = torch.empty_strided(self.shape, self.stride, dtype=full.dtype, device=full.device).copy_(full)
        return full.requires_grad_(self.requires_grad)

    def _gather(self, part: Tensor) -> Tensor:
        gathered = part.new_empty(part.numel() * self.mp_size)
        # As bytes: not every backend knows every dtype.
        dist.all_gather_into_tensor(gathered.view(torch.uint8), part.view(torch.uint8), group=self.mp_group)
        seen = gathered[_probe_positions(self.shape.numel(), gathered.device)]
        if not _same(seen, self.probes):
            raise RuntimeError(
                f"partition_activations: an activation of shape {tuple(self.shape)} differs between the ranks of the"
                " model-parallel group, so it cannot be put together from their parts. Ranks of that group must pass"
                " the same values into a checkpoint; check their data and their random states, or switch"
                " partition_activations off"
            )
        return gathered


def _probe_positions(numel: int, device: torch.device) -> Tensor:
    return torch.arange(PROBES, device=device) * (numel - 1) // (PROBES - 1)


def _same(seen: Tensor, expected: Tensor) -> bool:
    """Equal but for what kernels that add in another order may change."""
    wide = torch.complex128 if seen.is_complex() else torch.float64
    return torch.allclose(seen.to(wide), expected.to(wide), rtol=0.05, atol=1e-3, equal_nan=True)


@torch.no_grad()
def store(tensor: Tensor, position: int, settings: StorageSettings, buffers: ContiguousBuffers) -> StoredActivation:
    """Copy what this rank keeps of ``tensor``.

    Args:
        tensor: see :func:`is_activation`.
        position: of the argument among the arguments of its checkpoint.
        settings: where it goes.
        buffers: for contiguous storage.
    """
    flat = tensor.detach().reshape(-1)
    split = settings.partitions()
    size = settings.partition_size(tensor) if split else flat.numel()
    first = settings.mp_rank * size if split else 0
    part = flat[first : first + size]
    slot = buffers.take(position, size, tensor, settings) if settings.contiguous else None
    kept = _empty(size, tensor, settings) if slot is None else slot.tensor
    kept[: part.numel()].copy_(part, non_blocking=kept.is_pinned())
    kept[part.numel() :].zero_()
    return StoredActivation(
        kept=kept,
        shape=tensor.shape,
        stride=tensor.stride(),
        device=tensor.device,
        requires_grad=tensor.requires_grad,
        slot=slot,
        mp_size=settings.mp_size if split else 1,
        mp_group=settings.mp_group if split else None,
        probes=flat[_probe_positions(flat.numel(), flat.device)] if split else None,
    )
