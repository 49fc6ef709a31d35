# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a device copies from and to without the host waiting, in the bytes asked for.

torch's own pinned allocator rounds every size up to a power of two and keeps what was freed. What is offloaded is
allocated once, in a few large pieces, so pages of its own are registered with CUDA instead.
"""

import mmap
import weakref
from dataclasses import dataclass

import torch

from deepspeed.utils.logging import warning_once


@dataclass(frozen=True)
class HostMemory:
    """How memory of the host is allocated.

    Args:
        pinned: page-locked where there is a CUDA device, so that copies are asynchronous; of no effect elsewhere.
    """

    pinned: bool = True

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor in host memory."""
        if not (self.pinned and numel and torch.cuda.is_available()):
            return torch.empty(numel, dtype=dtype, device="cpu")
        pinned = _registered(numel, dtype)
        if pinned is not None:
            return pinned
        try:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            warning_once(
                f"{numel * dtype.itemsize} bytes of host memory could not be pinned ({error}), so that the host waits"
                " for copies to and from the device. Raise the limit of locked memory (ulimit -l), or set pin_memory to"
                " false"
            )
            return torch.empty(numel, dtype=dtype, device="cpu")

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same, of zeros."""
        return self.empty(numel, dtype).zero_()

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a 1-D tensor, in its dtype."""
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor)


def _registered(numel: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor over pages that are registered with CUDA until they are freed; None where the system refuses it."""
    nbytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)  # whose storage owns the pages from here on
    address = tensor.data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)):
        _take_last_error()
        return None
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return tensor


def _take_last_error() -> None:
    """CUDA reports a refusal once more, at the next launch of a kernel, which it has nothing to do with."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")
