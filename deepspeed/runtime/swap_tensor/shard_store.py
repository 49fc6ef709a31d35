# SPDX-License-Identifier: Apache-2.0
"""Shards of weights that rest in a file (``offload_param.device: nvme``)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.ops.aio.errors import AsyncIOError
from deepspeed.ops.aio.handle import FileTransfer, handle_of
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.streams import HostOrder
from deepspeed.runtime.swap_tensor.buffer_pool import PAGE, BufferPool, aligned_buffer
from deepspeed.runtime.swap_tensor.errors import SwapError
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.sharded_parameter import PartitionedParamStatus, ShardedParameter, describe_shard
from deepspeed.utils.logging import logger

SECTION = "zero_optimization.offload_param"


@dataclass
class _Write:
    """Values on the way to the file; ``values`` keeps them until they are there."""

    transfer: FileTransfer
    values: torch.Tensor


class ShardStore:
    """One file, with a place for each shard at the beginning of a page.

    A shard is read into one of ``buffer_count`` buffers of host memory, ahead of its use where the order of modules is
    known, and goes to the device from there. New values are written behind; reading waits for that. What could not be
    written stays in memory and is read from there; ``retry`` tries again.

    Args:
        config: section ``offload_param``.
        aio: section ``aio``.
        rank: of this process in the world.

    Raises:
        OSError: see ``SwapFolder``.
    """

    def __init__(self, config: DeepSpeedZeroOffloadParamConfig, aio: Mapping[str, Any], rank: int) -> None:
        self.rank = rank
        self._config = config
        self._memory = HostMemory(pinned=config.pin_memory)
        self.pool = BufferPool(max(1, config.buffer_count), 0, lambda nbytes: aligned_buffer(self._memory, nbytes))
        self.folder = SwapFolder(config.nvme_path, rank, f"{SECTION}.nvme_path")
        self.handle = handle_of(aio)
        self._file = self.handle.open(self.folder.path / "weights")
        self.offsets: dict[ShardedParameter, int] = {}
        self._end = 0
        self._reads: dict[ShardedParameter, tuple[torch.Tensor, FileTransfer]] = {}  # begun, not used yet
        self._writes: dict[ShardedParameter, _Write] = {}  # in the order in which they began
        self._held: dict[ShardedParameter, torch.Tensor] = {}  # could not be written
        self._in_use: list[tuple[torch.Tensor, HostOrder, object]] = []  # buffers that a device still copies from

    # ------------------------------------------------------------------ taking charge

    def rest(self, shards: Iterable[ShardedParameter]) -> None:
        """Let shards rest in the file, but for the smallest, ``max_in_cpu`` elements together, which stay in memory.

        Raises:
            ValueError: a shard does not fit into a buffer.
            SwapError: one cannot be written.
        """
        in_memory = 0
        for shard in sorted(shards, key=lambda shard: shard.slice_numel):
            in_memory += shard.slice_numel
            if in_memory > self._config.max_in_cpu and shard.slice_numel:
                self._admit(shard)

    def _admit(self, shard: ShardedParameter) -> None:
        if shard.slice_numel > self._config.buffer_size:
            raise ValueError(
                f"rank {self.rank}: the shard of parameter {shard.name} has {shard.slice_numel} elements and does not"
                f" fit into a buffer: {SECTION}.buffer_size {self._config.buffer_size} must be at least that"
            )
        values = shard.shard
        self.pool.largest = max(self.pool.largest, values.nbytes)
        self.offsets[shard] = self._end
        self._end += -(-values.nbytes // PAGE) * PAGE
        shard.store = self
        self.write(shard, values)
        self._settle_write(shard)
        if shard in self._held:
            self.retry()
        stand_in = torch.empty((), dtype=shard.dtype).expand(shard.slice_numel)
        shard.parameter.ds_tensor = describe_shard(stand_in, shard.slice_numel)
        shard.parameter.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
        shard.parameter.ds_tensor.final_location = "nvme"

    # ------------------------------------------------------------------ reading

    def read_ahead(self, shard: ShardedParameter) -> bool:
        """Begin to read a shard that will be needed; False if there is no buffer for it now."""
        return self._start(shard, insist=False)

    def read(self, shard: ShardedParameter) -> torch.Tensor:
        """The values of a shard, in memory of their own.

        Raises:
            SwapError: they cannot be read.
        """
        into = torch.empty(shard.slice_numel, dtype=shard.dtype)
        self.bring([shard], [into], HostOrder())
        return into

    def bring(self, shards: Sequence[ShardedParameter], intos: Sequence[torch.Tensor], order: HostOrder) -> None:
        """Copy the values of shards to where a gather wants them, on the current stream.

        Args:
            order: whose marks tell when the copies are over.

        Raises:
            SwapError: they cannot be read.
        """
        for shard in shards:
            if not self._start(shard, insist=False):
                break
        for shard, into in zip(shards, intos):
            if shard in self._held:
                into.copy_(self._held[shard])
                continue
            self._start(shard, insist=True)
            if shard in self._held:  # its writing was waited for, and failed
                into.copy_(self._held[shard])
                continue
            buffer, transfer = self._reads.pop(shard)
            error = transfer.settle()
            if error is not None:
                self.pool.give(buffer)
                raise SwapError(
                    f"rank {self.rank}: the shard of parameter {shard.name} cannot be read back from"
                    f" {self._file.path}. Load a checkpoint before training goes on"
                ) from error
            into.copy_(_first(buffer, shard), non_blocking=True)
            mark = order.mark()
            if mark is None:
                self.pool.give(buffer)
            else:
                self._in_use.append((buffer, order, mark))

    def _start(self, shard: ShardedParameter, insist: bool) -> bool:
        if shard in self._reads or shard in self._held:
            return True
        self._settle_write(shard)
        if shard in self._held:
            return True
        buffer = self.pool.take(shard.slice_numel * shard.dtype.itemsize)
        while buffer is None and insist:
            if self._in_use:
                done, order, mark = self._in_use.pop(0)
                order.await_mark(mark)
                self.pool.give(done)
            elif self._reads:
                self._drop_read(next(reversed(self._reads)))  # what was read last is needed last
            buffer = self.pool.take(shard.slice_numel * shard.dtype.itemsize)
        if buffer is None:
            return False
        self._reads[shard] = buffer, self.handle.start_read(_first(buffer, shard), self._file, self.offsets[shard])
        return True

    def _drop_read(self, shard: ShardedParameter) -> None:
        buffer, transfer = self._reads.pop(shard)
        transfer.settle()
        self.pool.give(buffer)

    # ------------------------------------------------------------------ writing

    def write(self, shard: ShardedParameter, values: torch.Tensor) -> None:
        """New values of a shard: 1-D in memory of the host, which must not be changed any more. They are written
        behind, and read from here on."""
        if shard in self._reads:
            self._drop_read(shard)
        self._settle_write(shard)
        self._held.pop(shard, None)
        bound = self.pool.count * max(self.pool.largest, 1)
        while sum(write.values.nbytes for write in self._writes.values()) > bound:
            self._settle_write(next(iter(self._writes)))
        try:
            transfer = self.handle.start_write(values, self._file, self.offsets[shard])
        except AsyncIOError as error:
            self._hold(shard, values, error)
            return
        self._writes[shard] = _Write(transfer, values)

    def _settle_write(self, shard: ShardedParameter) -> None:
        write = self._writes.pop(shard, None)
        if write is None:
            return
        error = write.transfer.settle()
        if error is not None:
            self._hold(shard, write.values, error)

    def _hold(self, shard: ShardedParameter, values: torch.Tensor, error: AsyncIOError) -> None:
        self._held[shard] = values
        logger.error(
            f"rank {self.rank}: new values of parameter {shard.name} could not be written and stay in memory; the next"
            f" step tries again, and raises if that fails: {error}"
        )

    def retry(self) -> None:
        """Wait for what is being written, and write what could not be written before.

        Raises:
            SwapError: it cannot be written now either; it stays in memory.
        """
        for shard in list(self._writes):
            self._settle_write(shard)
        failure: AsyncIOError | None = None
        for shard, values in list(self._held.items()):
            try:
                self.handle.sync_pwrite(values, self._file, self.offsets[shard])
            except AsyncIOError as error:
                failure = failure or error
            else:
                del self._held[shard]
        if failure is not None:
            names = ", ".join(shard.name for shard in list(self._held)[:4])
            raise SwapError(
                f"rank {self.rank}: weights of {len(self._held)} parameters ({names}, ...) cannot be written to"
                f" {self.folder.path}, and stay in memory. Nothing is lost: free space and call the step again, or save"
                " a checkpoint"
            ) from failure

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Bring all shards back to memory of the host, and remove the file. May be called again."""
        for shard in list(self.offsets):
            values = self.read(shard)
            del self.offsets[shard]
            shard.store = None
            shard.parameter.ds_tensor = describe_shard(self._memory.copy_of(values), shard.slice_numel)
        for shard in list(self._reads):
            self._drop_read(shard)
        for shard in list(self._writes):
            self._settle_write(shard)
        self._held.clear()
        self._in_use.clear()
        self.pool.clear()
        self.handle.close()
        self._file.close()
        self.folder.remove()


def _first(buffer: torch.Tensor, shard: ShardedParameter) -> torch.Tensor:
    """The part of a buffer that a shard takes, in its dtype."""
    return buffer[: shard.slice_numel * shard.dtype.itemsize].view(shard.dtype)
