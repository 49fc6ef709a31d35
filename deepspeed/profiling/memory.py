# SPDX-License-Identifier: Apache-2.0
"""What an engine's memory is used for: bytes by kind on each rank.

Memory is counted by storage, once, whole, and for the first kind that uses it: weights that are views of one flat
tensor count as that tensor, a ``.grad`` that shows a slice of the reduced gradient does not count again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import tensors_in
from deepspeed.utils.comms_logging import convert_size, print_rank_0
from deepspeed.utils.timer import SynchronizedWallClockTimer

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

KINDS = (
    "weights",
    "gathered_parameters",
    "module_buffers",
    "gradients",
    "optimizer_state",
    "communication_buffers",
)
ROWS_SHOWN = 16


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes that one rank holds between steps.

    Attributes:
        rank: global rank.
        weights: model weights; at stage 3 this rank's slices of them.
        gathered_parameters: whole values of partitioned weights (stage 3) that are there now.
        module_buffers: buffers of the modules (running statistics, tables).
        gradients: ``.grad``, this rank's shard of the reduced gradient, and what waits on this rank to be reduced.
        optimizer_state: states of the optimizer, and its master weights where they are not the model's own.
        communication_buffers: gradients on their way.
        on_host: the part of all these that is in host memory though the engine's device is another.
        device_allocated: bytes that torch's allocator has given out on the device; None where there is no such
            allocator (CPU). What is in no kind above is activations and what the program holds besides.
    """

    rank: int
    weights: int = 0
    gathered_parameters: int = 0
    module_buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    communication_buffers: int = 0
    on_host: int = 0
    device_allocated: int | None = None

    @property
    def total(self) -> int:
        """Sum of the kinds."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def other(self) -> int | None:
        """Allocated on the device and in no kind; None where the allocation is not known."""
        return None if self.device_allocated is None else self.device_allocated - (self.total - self.on_host)


class _Storages:
    """Adds up storages, each once."""

    def __init__(self, device: torch.device) -> None:
        self.on_host = 0
        self._device = device
        self._seen: set[tuple[torch.device, int]] = set()

    def take(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Bytes of the storages that are met for the first time."""
        total = 0
        for tensor in tensors:
            if tensor is None or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if storage.nbytes() == 0 or key in self._seen:
                continue
            self._seen.add(key)
            total += storage.nbytes()
            if tensor.device.type == "cpu" and self._device.type != "cpu":
                self.on_host += storage.nbytes()
        return total


def memory_breakdown(engine: "DeepSpeedEngine") -> MemoryBreakdown:
    """What this rank's memory is used for now. Communicates nothing."""
    storages = _Storages(engine.device)
    parameters = list(engine.module.parameters())
    own, whole = _weights(parameters)
    sizes = {
        "weights": storages.take(own),
        "gathered_parameters": storages.take(whole),
        "module_buffers": storages.take(engine.module.buffers()),
        "gradients": storages.take(_gradients(engine, parameters)),
        "optimizer_state": storages.take(_optimizer_tensors(engine)),
    }
    reducer = None if engine._stepper is None else engine._stepper.reducer
    allocated = None if engine.device.type == "cpu" else get_accelerator().memory_allocated()
    return MemoryBreakdown(
        rank=engine.global_rank,
        communication_buffers=0 if reducer is None else reducer.transport.pool.nbytes,
        on_host=storages.on_host,
        device_allocated=allocated,
        **sizes,
    )


def _weights(parameters: list[torch.nn.Parameter]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank keeps of the weights, and whole values of partitioned ones."""
    own, whole = [], []
    for parameter in parameters:
        shard = getattr(parameter, "ds_tensor", None)  # a partitioned parameter's slice
        if shard is None:
            own.append(parameter.data)
        else:
            own += [shard, getattr(parameter, "ds_secondary_tensor", None)]
            whole.append(parameter.data)
    return own, whole


def _gradients(engine: "DeepSpeedEngine", parameters: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = [parameter.grad for parameter in parameters]
    if engine._stepper is not None:
        reducer = engine._stepper.reducer
        found += [tensor for shard in reducer.shards for tensor in shard.memory()]
        found += [bucket.local for bucket in reducer.buckets]
    return found


def _optimizer_tensors(engine: "DeepSpeedEngine") -> list[torch.Tensor]:
    if engine._stepper is None:
        return []
    optimizer = engine._stepper.optimizer
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    return masters + [tensor for state in optimizer.state.values() for tensor in tensors_in(state)]


# ---------------------------------------------------------------------------------- table


def memory_table(breakdowns: list[MemoryBreakdown]) -> str:
    """A row per rank, the kinds that anybody uses as columns. Of many ranks, those that hold most."""
    kinds = [kind for kind in KINDS if any(getattr(one, kind) for one in breakdowns)]
    extra = ["on_host"] if any(one.on_host for one in breakdowns) else []
    extra += ["device_allocated", "other"] if any(one.device_allocated is not None for one in breakdowns) else []
    columns = [*kinds, "total", *extra]
    rows = [["rank", *(column.replace("_", " ") for column in columns)]]
    shown = sorted(breakdowns, key=lambda one: -one.total)[:ROWS_SHOWN]
    for one in sorted(shown, key=lambda one: one.rank):
        values = [getattr(one, column) for column in columns]
        rows.append([str(one.rank), *("-" if value is None else _size(value) for value in values)])
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    lines = ["".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if len(shown) < len(breakdowns):
        lines.append(f"the {len(shown)} of {len(breakdowns)} ranks that hold most")
    return "\n".join(lines)


def _size(size: int) -> str:
    return convert_size(size) if size >= 0 else f"-{convert_size(-size)}"


def print_memory_breakdown(engine: "DeepSpeedEngine") -> None:
    """Print every rank's breakdown on rank 0. Collective of the world."""
    everyone: list[Any] = [None] * engine.world_size
    dist.all_gather_object(everyone, memory_breakdown(engine))
    usage = SynchronizedWallClockTimer.memory_usage()
    print_rank_0(f"memory after step {engine.global_steps}{usage}\n{memory_table(everyone)}")
