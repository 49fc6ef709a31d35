# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory of exactly the size that was asked for.

torch's allocator of pinned memory rounds sizes up to powers of two and keeps freed blocks; for buffers of many
gigabytes that costs up to half of the host's memory. This one locks whole pages around each tensor and frees them when
told to. It is used where ``DS_PIN_MEMORY_BACKEND=native``; the default, ``torch``, is torch's own allocator.
"""

import mmap
import os

import torch

from deepspeed.accelerator import get_accelerator


class NativePinnedMemory:
    """Keeps what it pinned alive until :meth:`unpin`."""

    def __init__(self) -> None:
        self._owned: dict[int, tuple[torch.Tensor, int, int]] = {}  # address -> memory, address and length registered

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Page-locked tensor like ``tensor``: with its values if ``make_copy``, 1-D unless ``match_shape``."""
        pinned = self.pin_empty(tensor, tensor.shape if match_shape else (tensor.numel(),))
        if make_copy:
            pinned.copy_(tensor.detach().view_as(pinned) if match_shape else tensor.detach().reshape(-1))
        return pinned

    def pin_empty(self, example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Uninitialised page-locked tensor with the dtype of ``example``."""
        num_bytes = torch.Size(shape).numel() * example.element_size()
        page = mmap.PAGESIZE
        length = max(1, -(-num_bytes // page)) * page
        memory = torch.empty(length + page, dtype=torch.uint8)
        offset = -memory.data_ptr() % page
        address = memory.data_ptr() + offset
        if get_accelerator().device_name() != "cpu":
            get_accelerator().register_host_memory(address, length)
        self._owned[address] = (memory, address, length)
        return memory[offset : offset + num_bytes].view(example.dtype).view(shape)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` begins where a tensor pinned here begins."""
        return tensor.data_ptr() in self._owned

    def unpin(self, tensor: torch.Tensor) -> None:
        """Unlock the pages; the tensor stays valid as pageable memory.

        Raises:
            ValueError: not pinned here.
        """
        if not self.is_pinned(tensor):
            raise ValueError("unpin needs a tensor that this object pinned and that is pinned still")
        _, address, _ = self._owned.pop(tensor.data_ptr())
        if get_accelerator().device_name() != "cpu":
            get_accelerator().unregister_host_memory(address)


_native: NativePinnedMemory | None = None


def get_native_pinned_memory() -> NativePinnedMemory:
    """The process's :class:`NativePinnedMemory`, made on first use."""
    global _native
    if _native is None:
        _native = NativePinnedMemory()
    return _native


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The process's :class:`NativePinnedMemory` if ``DS_PIN_MEMORY_BACKEND`` chooses it, else None.

    Raises:
        ValueError: unknown backend name.
    """
    name = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
    if name not in ("torch", "native"):
        raise ValueError(f"environment variable DS_PIN_MEMORY_BACKEND={name!r} must be torch or native")
    return get_native_pinned_memory() if name == "native" else None
