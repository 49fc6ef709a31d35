# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a device copies from and to without the host waiting, in the bytes asked for and a page.

torch's own pinned allocator rounds every size up to a power of two and keeps what was freed. State of the optimizer is
allocated once, in a few large pieces, so ordinary memory is registered with CUDA here instead.
"""

import weakref
from dataclasses import dataclass

import torch

from deepspeed.utils.logging import warning_once

PAGE = 4096


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
        pinned = _registered(numel * dtype.itemsize)
        if pinned is not None:
            return pinned.view(dtype)
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


def _registered(nbytes: int) -> torch.Tensor | None:
    """Bytes that are registered with CUDA until they are freed; None where the system refuses it."""
    pages = -(-nbytes // PAGE)
    memory = torch.empty((pages + 1) * PAGE, dtype=torch.uint8)  # whole pages, that are not in other tensors too
    begin = -memory.data_ptr() % PAGE
    runtime = torch.cuda.cudart()
    address = memory.data_ptr() + begin
    if int(runtime.cudaHostRegister(address, pages * PAGE, 0)):
        return None
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return memory[begin : begin + nbytes]
