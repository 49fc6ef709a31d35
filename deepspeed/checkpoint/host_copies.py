# SPDX-License-Identifier: Apache-2.0
"""Nested states with their tensors in host memory, to be written now or while training goes on."""

import copy
import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, type)
_Key = tuple[torch.dtype, torch.Size, bool]


def map_state(
    value: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_object: Callable[[Any], Any] = lambda item: item
) -> Any:
    """A copy of the containers of ``value``, with ``of_tensor`` of its tensors and ``of_object`` of what is neither.

    Names that share a tensor (tied weights) share the result, so that it is written once.
    """
    seen: dict[Any, torch.Tensor] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            key = _place(item)
            if key not in seen:
                seen[key] = of_tensor(item.detach())
            return seen[key]
        if isinstance(item, _IMMUTABLE):
            return item
        if isinstance(item, dict):
            # Made from pairs, a defaultdict would forget its factory and a Counter would count the pairs.
            copied = copy.copy(item)
            for key, entry in item.items():
                copied[key] = visit(entry)
            return copied
        if isinstance(item, tuple) and hasattr(item, "_fields"):  # a named tuple takes its entries one by one
            return type(item)(*map(visit, item))
        if isinstance(item, (list, tuple)):
            return type(item)(map(visit, item))
        return of_object(item)

    return visit(value)


def _place(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory in the same arrangement."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor), tensor  # the entry keeps the tensor, so that its id is not given to another one
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory whose storage holds nothing else: files hold storages, not views."""
    if tensor.layout != torch.strided:
        return tensor.cpu()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor.to("cpu", copy=True).contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.numel() < 2:  # a single element counts as contiguous whatever its stride is
        return tensor.clone()
    # The same memory under a storage of its own, which numpy makes and torch.save does not look behind.
    return torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


def writable_state(value: Any) -> Any:
    """``value`` as it can be written at once: what is on a device or not contiguous is copied, the rest is as it is."""
    return map_state(value, _writable)


class HostBuffers:
    """Copies of states that stay as they are while the originals change, in memory that is used again.

    The memory is pinned where a copy comes from a device, so that all copies are under way together. It stays until
    a snapshot has no use for it: taking one of the same state again allocates nothing.
    """

    def __init__(self) -> None:
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._taken: list[tuple[_Key, torch.Tensor]] = []
        self._devices: set[torch.device] = set()
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    @torch.no_grad()
    def snapshot(self, value: Any, rests: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
        """A copy of ``value`` that shares nothing mutable with it. Call ``wait`` and ``copy_later`` before reading it.

        Args:
            rests: whether a tensor in host memory stays as it is until ``copy_later`` has returned.
        """
        return map_state(value, functools.partial(self._copy, rests), copy.deepcopy)

    def _copy(self, rests: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        on_device = tensor.device.type != "cpu"
        key = (tensor.dtype, tensor.shape, on_device)
        kept = self._free.get(key)
        buffer = kept.pop() if kept else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        self._taken.append((key, buffer))
        if on_device:
            self._devices.add(tensor.device)
        elif rests(tensor):
            self._later.append((buffer, tensor, tensor._version))
            return buffer
        return buffer.copy_(tensor, non_blocking=on_device)

    @torch.no_grad()
    def copy_later(self) -> None:
        """Copy what was left out since it rests. By any thread.

        Raises:
            RuntimeError: it did not rest.
        """
        later, self._later = self._later, []
        for buffer, tensor, version in later:
            buffer.copy_(tensor)
            if tensor._version != version:
                raise RuntimeError(
                    "masters or optimizer state were changed while they were copied for a checkpoint, by something else"
                    " than a step or an accessor (deepspeed.utils.safe_set_...). Change them there, or save without"
                    " checkpoint.writer.decoupled"
                )

    def wait(self) -> None:
        """Until all copies are complete; what no snapshot since ``release`` has used is freed."""
        for device in self._devices:
            torch.accelerator.synchronize(device) if hasattr(torch, "accelerator") else torch.cuda.synchronize(device)
        self._devices.clear()
        self._free.clear()

    def release(self) -> None:
        """The snapshots were read, or are not wanted any more: their memory serves the next ones."""
        self._later.clear()
        for key, buffer in self._taken:
            self._free.setdefault(key, []).append(buffer)
        self._taken.clear()
