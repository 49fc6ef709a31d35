# SPDX-License-Identifier: Apache-2.0
"""Adding what a collective brought to a gradient that rests on the host, without the host taking part.

The sum is made on the device, through a small buffer: what the host holds comes to the device, the result is added, the
sum goes back. All of it is ordered on the stream of collectives, so that it overlaps with the backward, and it is the
same arithmetic, in the same order, as where the gradient rests on the device.
"""

from collections.abc import Sequence

import torch

from deepspeed.runtime.gradients.arithmetic import deliver

STAGE = 1 << 23  # elements that pass through the device at a time, at most: 32 MiB of fp32


class HostLanding:
    """The way from results of collectives on one device to shards on the host.

    Args:
        device: of the results.
        numel: elements that pass through the device at a time, at least 1. More is less work for the processor.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._numel = max(1, min(numel, STAGE))
        self._stages: dict[torch.dtype, torch.Tensor] = {}

    def _stage(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        stage = self._stages.get(dtype)
        if stage is None or stage.numel() < numel:
            stage = self._stages[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return stage[:numel]

    def deliver(self, target: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, add: bool) -> None:
        """As ``arithmetic.deliver``, for a ``target`` on the host. On CUDA it is done when the current stream is."""
        for begin in range(0, target.numel(), self._numel):
            into = target[begin : begin + self._numel]
            stage = self._stage(into.numel(), target.dtype)
            if add:
                stage.copy_(into, non_blocking=True)
            deliver(stage, [part[begin : begin + self._numel] for part in parts], scale, add)
            into.copy_(stage, non_blocking=True)

    def clear(self) -> None:
        """Free the buffers."""
        self._stages.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held on the device now."""
        return sum(stage.nbytes for stage in self._stages.values())
