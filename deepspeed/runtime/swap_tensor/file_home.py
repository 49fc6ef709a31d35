# SPDX-License-Identifier: Apache-2.0
"""Masters and optimizer state that rest in files (``offload_optimizer.device: nvme``)."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from deepspeed.ops.aio.errors import AsyncIOError
from deepspeed.ops.aio.handle import FileTransfer, handle_of
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import FlatGroup, master_dtype
from deepspeed.runtime.swap_tensor.buffer_pool import BufferPool, aligned_buffer
from deepspeed.runtime.swap_tensor.errors import SwapError
from deepspeed.runtime.swap_tensor.group_file import GroupFile
from deepspeed.runtime.swap_tensor.swap_folder import SwapFolder
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.state_home import GroupTensors, StateHome
from deepspeed.utils.logging import logger, warning_once

KEY = "zero_optimization.offload_optimizer.nvme_path"


class Phase(Enum):
    """Where the values of a group are."""

    RESTING = "in the file"
    READING = "on the way from the file into buffers"
    RESIDENT = "in buffers, which the tensors show"
    WRITING = "in buffers, and on the way to the file"
    HELD = "in buffers: writing them failed"


MOVES = {
    Phase.RESTING: (Phase.READING,),
    Phase.READING: (Phase.RESIDENT, Phase.RESTING),
    Phase.RESIDENT: (Phase.WRITING, Phase.RESTING, Phase.HELD),
    Phase.WRITING: (Phase.RESTING, Phase.RESIDENT, Phase.HELD),
    Phase.HELD: (Phase.WRITING, Phase.RESIDENT),
}


class RestingGroup:
    """One flat group. Its tensors keep their identity: away from memory they show a stand-in."""

    def __init__(self, index: int, tensors: GroupTensors, file: GroupFile, label: str) -> None:
        self.index = index
        self.tensors = tensors
        self.file = file
        self.label = label
        self.phase = Phase.RESIDENT
        self.buffers: dict[str, torch.Tensor] = {}
        self.transfers: list[FileTransfer] = []
        self.parked: dict[str, torch.Tensor] = {}  # by name, the tensors that show a stand-in
        self.unwritten = False  # the buffers are newer than the file

    def enter(self, phase: Phase) -> None:
        """Move to another phase.

        Raises:
            AssertionError: not from this one.
        """
        if phase not in MOVES[self.phase]:
            raise AssertionError(f"{self.label}: from '{self.phase.value}' to '{phase.value}'")
        self.phase = phase

    def show(self) -> None:
        """Let the tensors have the values that are in the buffers."""
        live = self.tensors()
        for name, tensor in self.parked.items():
            if live.get(name) is tensor:  # else it was replaced meanwhile, and what replaced it has the values
                slot = self.file.slots[name]
                tensor.data = self.buffers[name][: slot.nbytes].view(slot.dtype)
        self.parked = {}

    def park(self) -> None:
        """Let the tensors show stand-ins, so that the buffers can go."""
        self.parked = self.tensors()
        for tensor in self.parked.values():
            tensor.data = _stand_in(tensor)

    def strays(self) -> dict[str, torch.Tensor]:
        """Tensors that are not in this group's buffers: state that was made in this step, or loaded."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name not in self.buffers or tensor.data_ptr() != self.buffers[name].data_ptr()
        }


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and device of ``tensor`` without memory. NaN where the dtype has it, so that no use goes unseen."""
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class FileHome(StateHome):
    """One file per flat group, in a folder of this rank. Groups are resident one by one, in buffers of host memory.

    With ``pipeline_read`` the next group is read while one is used, with ``pipeline_write`` the last one is written
    meanwhile, and after the visit; each needs buffers for one more group (a group has one tensor for the master and one
    for each state).

    A group whose writing failed stays in its buffers, whatever their number, and the present step goes on; the next
    visit that writes tries again, and raises before anything was visited if that fails too.

    Args:
        groups: all flat groups of the optimizer.
        config: section ``offload_optimizer``.
        aio: section ``aio``.
        rank: of this process in the world.

    Raises:
        FileNotFoundError, NotADirectoryError, OSError: see ``SwapFolder``.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        config: DeepSpeedZeroOffloadOptimizerConfig,
        aio: Mapping[str, Any],
        rank: int,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.rank = rank
        self._flat_groups = {group.index: group for group in groups}
        self._pipeline_read, self._pipeline_write = config.pipeline_read, config.pipeline_write
        memory = HostMemory(pinned=config.pin_memory)
        largest = max((g.shard_numel * master_dtype(g.dtype).itemsize for g in groups), default=0)
        self.pool = BufferPool(config.buffer_count, largest, lambda nbytes: aligned_buffer(memory, nbytes))
        self.folder = SwapFolder(config.nvme_path, rank, KEY)
        self.handle = handle_of(aio)
        self._groups: dict[int, RestingGroup] = {}
        self._handed: dict[int, torch.Tensor] = {}  # by address: buffers of masters that are being made
        self._visits = 0
        self._in_turn: list[RestingGroup] = []  # READING or WRITING, in the order in which that began

    # ------------------------------------------------------------------ taking charge

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        (buffer,) = self._take([nbytes], insist=True)
        self._handed[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype)

    def admit(self, group: int, tensors: GroupTensors) -> None:
        """Raises SwapError where the group cannot be written."""
        names = [record.name for record in self._flat_groups[group].records]
        label = f"rank {self.rank}: optimizer state of flat group {group} ({names[0]} to {names[-1]})"
        file = GroupFile(self.handle, str(self.folder.path / f"group{group}.state"))
        resting = self._groups[group] = RestingGroup(group, tensors, file, label)
        for name, tensor in tensors().items():
            buffer = self._handed.pop(tensor.data_ptr(), None)
            if buffer is not None:
                resting.buffers[name] = buffer
        self._put_back(resting, write=True)
        self._finish(resting)
        if resting.phase is Phase.HELD:
            self._retry_held()

    # ------------------------------------------------------------------ visiting

    def visit(self, groups: Sequence[int], write: bool = True) -> Iterator[list[int]]:
        """As ``StateHome.visit``.

        Raises:
            SwapError: what an earlier visit wrote could not be written, now and then, and nothing was visited; or a
                group cannot be read, and the groups before it were visited.
        """
        self._end_visit()
        self._visits += 1
        number = self._visits
        if write:
            self._retry_held()
        order = [self._groups[index] for index in groups]
        try:
            for position, group in enumerate(order):
                self._bring(group)
                if self._pipeline_read and position + 1 < len(order):
                    self._start_reading(order[position + 1], insist=False)
                yield [group.index]
                self._put_back(group, write)
                if not self._pipeline_write:
                    self._finish(group)
        finally:
            if number == self._visits:  # else it was abandoned, and ended when the next began
                self._end_visit(write)

    def _end_visit(self, write: bool = True) -> None:
        """Nothing is resident or expected after a visit, also one that was left in the middle."""
        for group in self._groups.values():
            if group.phase is Phase.RESIDENT:
                self._put_back(group, write)
            elif group.phase is Phase.READING:
                self._give_up_reading(group)

    def settle(self) -> None:
        """As ``StateHome.settle``.

        Raises:
            SwapError: something cannot be written; it stays in memory.
        """
        for group in list(self._in_turn):
            self._finish(group)
        self._retry_held()

    def values(self, group: int) -> dict[str, torch.Tensor]:
        """As ``StateHome.values``.

        Raises:
            SwapError: the file cannot be read.
        """
        resting = self._groups[group]
        self._end_visit()
        self._finish(resting)
        live = resting.tensors()
        found = {}
        for name, tensor in live.items():
            if resting.parked.get(name) is not tensor:
                found[name] = tensor.detach()  # replaced since the last visit
            elif resting.phase is Phase.HELD:
                slot = resting.file.slots[name]
                found[name] = resting.buffers[name][: slot.nbytes].view(slot.dtype)
            else:
                found[name] = self._mapped(resting, name)
        return found

    def _mapped(self, group: RestingGroup, name: str) -> torch.Tensor:
        try:
            return group.file.mapped(name)
        except OSError as error:
            raise self._lost(group) from error

    def close(self) -> None:
        for group in self._groups.values():
            for transfer in group.transfers:
                transfer.settle()
        self.handle.close()
        for group in self._groups.values():
            group.file.close()
        self._groups.clear()
        self._in_turn.clear()
        self._handed.clear()
        self.pool.clear()
        self.folder.remove()

    # ------------------------------------------------------------------ from files

    def _bring(self, group: RestingGroup) -> None:
        """Make a group resident."""
        if group.phase is Phase.WRITING:
            self._finish(group, keep_buffers=True)
        if group.phase is Phase.RESTING:
            self._start_reading(group, insist=True)
        if group.phase is Phase.READING:
            self._in_turn.remove(group)
            try:
                self._await(group)
            except AsyncIOError as error:
                self._free(group)
                group.enter(Phase.RESTING)
                raise self._lost(group) from error
        if group.phase is not Phase.RESIDENT:
            group.enter(Phase.RESIDENT)
        group.show()

    def _start_reading(self, group: RestingGroup, insist: bool) -> None:
        """Begin to read a group that rests; without ``insist``, only if there are buffers for it."""
        self._reap()
        if group.phase is not Phase.RESTING:
            return
        live = group.tensors()
        names = [name for name, tensor in group.parked.items() if live.get(name) is tensor]
        buffers = self._take([group.file.slots[name].room for name in names], insist)
        if buffers is None:
            return
        group.buffers = dict(zip(names, buffers))
        group.enter(Phase.READING)
        self._in_turn.append(group)
        try:
            for name in names:
                group.transfers.append(group.file.start_read(name, group.buffers[name]))
        except AsyncIOError as error:
            self._give_up_reading(group)
            raise self._lost(group) from error

    def _give_up_reading(self, group: RestingGroup) -> None:
        self._in_turn.remove(group)
        for transfer in group.transfers:
            transfer.settle()
        group.transfers = []
        self._free(group)
        group.enter(Phase.RESTING)

    def _lost(self, group: RestingGroup) -> SwapError:
        return SwapError(
            f"{group.label} cannot be read back from {group.file.path}. This group was not stepped; groups before it"
            " may have been. Load a checkpoint before training goes on"
        )

    # ------------------------------------------------------------------ to files

    def _put_back(self, group: RestingGroup, write: bool) -> None:
        """Let a resident group go to rest: begin to write it if it may have changed."""
        strays = group.strays()
        live = group.tensors()
        for name in [name for name in group.buffers if name not in live]:
            self.pool.give(group.buffers.pop(name))
            group.file.forget(name)
        for name, tensor in strays.items():
            if name in group.buffers:
                self.pool.give(group.buffers.pop(name))
            (buffer,) = self._take([tensor.nbytes], insist=True)
            buffer[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach())
            group.buffers[name] = buffer
        for name, tensor in live.items():
            group.file.slot_for(name, tensor)
        group.park()
        if write or strays or group.unwritten:
            self._start_writing(group)
        else:
            self._free(group)
            group.enter(Phase.RESTING)

    def _start_writing(self, group: RestingGroup) -> None:
        group.unwritten = True
        try:
            for name, buffer in group.buffers.items():
                group.transfers.append(group.file.start_write(name, buffer))
        except AsyncIOError as error:
            self._hold(group, error)
            return
        group.enter(Phase.WRITING)
        self._in_turn.append(group)

    def _finish(self, group: RestingGroup, keep_buffers: bool = False) -> None:
        """Wait until a group is not being written any more; then it rests, or it is held in memory."""
        if group.phase is not Phase.WRITING:
            return
        self._in_turn.remove(group)
        try:
            self._await(group)
        except AsyncIOError as error:
            self._hold(group, error)
            return
        group.unwritten = False
        if not keep_buffers:
            self._free(group)
            group.enter(Phase.RESTING)

    def _hold(self, group: RestingGroup, error: AsyncIOError) -> None:
        """A group could not be written: its buffers are all that there is of it."""
        for transfer in group.transfers:
            transfer.settle()
        group.transfers = []
        group.enter(Phase.HELD)
        logger.error(
            f"{group.label} could not be written and stays in memory; the next step tries again, and raises if that"
            f" fails: {error}"
        )

    def _retry_held(self) -> None:
        """Write what could not be written before.

        Raises:
            SwapError: it cannot be written now either.
        """
        held = [group for group in self._groups.values() if group.phase is Phase.HELD]
        failures: list[AsyncIOError] = []
        for group in held:
            try:
                for name, buffer in group.buffers.items():
                    group.transfers.append(group.file.start_write(name, buffer))
                self._await(group)
            except AsyncIOError as error:
                for transfer in group.transfers:
                    transfer.settle()
                group.transfers = []
                failures.append(error)
                continue
            group.enter(Phase.WRITING)
            group.unwritten = False
            self._free(group)
            group.enter(Phase.RESTING)
        if failures:
            labels = "; ".join(group.label for group in held if group.phase is Phase.HELD)
            raise SwapError(
                f"cannot be written to {self.folder.path}, and stays in memory: {labels}. Nothing is lost: free space"
                " and call the step again, or save a checkpoint"
            ) from failures[0]

    # ------------------------------------------------------------------ buffers

    def _await(self, group: RestingGroup) -> None:
        """Wait for all transfers of a group; the first error is raised when all are over."""
        transfers, group.transfers = group.transfers, []
        failures = [error for transfer in transfers if (error := transfer.settle()) is not None]
        if failures:
            raise failures[0]

    def _free(self, group: RestingGroup) -> None:
        for buffer in group.buffers.values():
            self.pool.give(buffer)
        group.buffers = {}

    def _reap(self) -> None:
        """Free the buffers of groups that are written by now."""
        for group in list(self._in_turn):
            if group.phase is Phase.WRITING and all(transfer.finished for transfer in group.transfers):
                self._finish(group)

    def _take(self, sizes: Sequence[int], insist: bool) -> list[torch.Tensor] | None:
        """Buffers of at least these sizes; None if there are not enough and not ``insist``, else what is written is
        waited for, what was read ahead is given up, and at last the bound is passed."""
        taken: list[torch.Tensor] = []
        for size in sizes:
            buffer = self.pool.take(size)
            while buffer is None and insist and self._in_turn:
                oldest = self._in_turn[0]
                self._finish(oldest) if oldest.phase is Phase.WRITING else self._give_up_reading(oldest)
                buffer = self.pool.take(size)
            if buffer is None and not insist:
                for other in taken:
                    self.pool.give(other)
                return None
            if buffer is None:
                self._warn_of_bound()
                buffer = self.pool.take(size, insist=True)
            taken.append(buffer)
        return taken

    def _warn_of_bound(self) -> None:
        if any(group.phase is Phase.HELD for group in self._groups.values()):
            return  # that error is in the log
        warning_once(
            f"zero_optimization.offload_optimizer.buffer_count {self.pool.count} is less than the tensors of one flat"
            " group (its master and each state of the optimizer), which are in memory together: more buffers are made"
        )
