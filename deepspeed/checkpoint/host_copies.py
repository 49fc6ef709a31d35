# SPDX-License-Identifier: Apache-2.0
"""Nested states with their tensors in host memory, to be written now or while training goes on."""

import copy
import functools
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from deepspeed.checkpoint.block_stream import new_pages
from deepspeed.checkpoint.native_sums import NativeCopies, native_sums

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, type)
WORTH_A_SUM = 1 << 20  # bytes from which a copy gets whole pages, and its checksum while it is made
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


_Pair = tuple[torch.Tensor, torch.Tensor]  # a copy, and what it is of


class HostBuffers:
    """Copies of states that stay as they are while the originals change, in memory that is used again.

    The memory is pinned where a copy comes from a device, so that all copies are under way together. It stays until
    a snapshot has no use for it: taking one of the same state again allocates nothing.
    """

    def __init__(self) -> None:
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._taken: list[tuple[_Key, torch.Tensor]] = []
        self._devices: set[torch.device] = set()
        self._now: list[_Pair] = []
        self._later: list[_Pair] = []
        self._versions: list[int] = []
        self._beside: NativeCopies | None = None
        self._sums: dict[int, int] = {}
        self._settling = threading.Lock()
        self._disturbed = False

    @torch.no_grad()
    def snapshot(self, value: Any, rests: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
        """A copy of ``value`` that shares nothing mutable with it. Call ``wait`` and ``settle`` before reading it.

        Args:
            rests: whether a tensor in host memory stays as it is until ``settle`` has returned.
        """
        return map_state(value, functools.partial(self._copy, rests), copy.deepcopy)

    def _copy(self, rests: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        on_device = tensor.device.type != "cpu"
        key = (tensor.dtype, tensor.shape, on_device)
        kept = self._free.get(key)
        buffer = kept.pop() if kept else _new_memory(tensor.dtype, tensor.shape, on_device)
        self._taken.append((key, buffer))
        if on_device:
            self._devices.add(tensor.device)
        elif rests(tensor):
            self._later.append((buffer, tensor))
            self._versions.append(tensor._version)
            return buffer
        elif tensor.nbytes >= WORTH_A_SUM and _is_plain(tensor):
            self._now.append((buffer, tensor))
            return buffer
        return buffer.copy_(tensor, non_blocking=on_device)

    @torch.no_grad()
    def wait(self) -> None:
        """Until all copies are complete except those of what rests, which begin beside other work; what no snapshot
        since ``release`` has used is freed."""
        if self._now:
            self._copy_summing(self._now)
            self._now.clear()
        for device in self._devices:
            torch.accelerator.synchronize(device) if hasattr(torch, "accelerator") else torch.cuda.synchronize(device)
        self._devices.clear()
        self._free.clear()
        plain = [pair for pair in self._later if _is_plain(pair[1])]
        native = native_sums(sum(buffer.nbytes for buffer, _ in plain))
        self._beside = native.copies(plain, beside=True) if native is not None and plain else None

    def _copy_summing(self, pairs: list[_Pair]) -> None:
        """Copy plain tensors, with all threads."""
        native = native_sums(sum(buffer.nbytes for buffer, _ in pairs))
        if native is None:
            for buffer, tensor in pairs:
                buffer.copy_(tensor)
        else:
            sums = native.copies(pairs, beside=False).finish(torch.get_num_threads())
            self._sums.update(zip((buffer.data_ptr() for buffer, _ in pairs), sums))

    @property
    def copies_beside(self) -> bool:
        """Whether what rests is being copied without anybody calling ``settle``."""
        return self._beside is not None

    def settle(self, threads: int = 0) -> None:
        """Until what rests is copied. By any thread, and by several.

        Args:
            threads: of the caller's priority that take part, where there is more than waiting to be done.
        """
        if (beside := self._beside) is not None:
            beside.finish(threads)
        with self._settling, torch.no_grad():
            if not self._later:
                return
            plain = [pair for pair in self._later if beside is not None and _is_plain(pair[1])]
            if beside is not None:
                self._sums.update(zip((buffer.data_ptr() for buffer, _ in plain), beside.finish(0)))
            done = {id(buffer) for buffer, _ in plain}
            for buffer, tensor in self._later:
                if id(buffer) not in done:
                    buffer.copy_(tensor)
            self._disturbed = any(tensor._version != seen for (_, tensor), seen in zip(self._later, self._versions))
            self._later.clear()
            self._versions.clear()

    def check_rest(self) -> None:
        """After ``settle``.

        Raises:
            RuntimeError: something did not rest until it was copied.
        """
        if self._disturbed:
            raise RuntimeError(
                "masters or optimizer state were changed while they were copied for a checkpoint, by something else"
                " than a step or an accessor (deepspeed.utils.safe_set_...). Change them there, or save without"
                " checkpoint.writer.decoupled"
            )

    def steady(self) -> dict[int, tuple[int, int | None]]:
        """The memory of large copies, which stays until ``release``: by address bytes and, where they were computed,
        their CRC-32. After ``wait`` and ``settle``."""
        large = (buffer for _, buffer in self._taken if buffer.nbytes >= WORTH_A_SUM)
        return {buffer.data_ptr(): (buffer.nbytes, self._sums.get(buffer.data_ptr())) for buffer in large}

    def release(self) -> None:
        """The snapshots were read, or are not wanted any more: their memory serves the next ones."""
        if self._beside is not None:
            self._beside.finish(torch.get_num_threads())  # nobody may be copying to it
        for copies in (self._now, self._later, self._versions):
            copies.clear()
        self._beside, self._disturbed = None, False
        self._sums.clear()
        for key, buffer in self._taken:
            self._free.setdefault(key, []).append(buffer)
        self._taken.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in host memory in their order: a copy of them is a copy of the tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _new_memory(dtype: torch.dtype, shape: torch.Size, pinned: bool) -> torch.Tensor:
    """Without values; such that large ones can go to the disk from where they are."""
    nbytes = shape.numel() * dtype.itemsize
    if pinned or nbytes < WORTH_A_SUM:
        return torch.empty(shape, dtype=dtype, pin_memory=pinned)
    return torch.frombuffer(new_pages(nbytes), dtype=torch.uint8, count=nbytes).view(dtype).view(shape)
