# SPDX-License-Identifier: Apache-2.0
"""This rank's fp32 master weights, and the model's weights that follow them: views of flat tensors, or shards."""

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import FlatGroup, ShardLayout, master_dtype
from deepspeed.runtime.gradients.ledger import ParameterRecord
from deepspeed.runtime.gradients.streams import HostOrder
from deepspeed.runtime.weight_watch import take_over
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of
from deepspeed.runtime.zero.state_home import StateHome, homes_in_memory

MASTER = "master"


class WeightStaging:
    """Two buffers in host memory through which new weights go to the device: one is filled while the other is copied.

    Args:
        memory: how they are allocated.
        order: on whose side stream copies run.
    """

    SLOTS = 2

    def __init__(self, memory: HostMemory, order: HostOrder) -> None:
        self.order = order
        self._memory = memory
        self._buffers: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._marks: dict[tuple[torch.dtype, int], object] = {}
        self._turn = 0
        self._key: tuple[torch.dtype, int] | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer, once the copy out of it is over; ``sent`` follows, before the next one is taken."""
        self._turn = (self._turn + 1) % self.SLOTS
        self._key = (dtype, self._turn)
        self.order.await_mark(self._marks.pop(self._key, None))
        buffer = self._buffers.get(self._key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[self._key] = self._memory.empty(numel, dtype)
        return buffer[:numel]

    def sent(self) -> None:
        """The copy out of the buffer that was taken last has begun."""
        self._marks[self._key] = self.order.mark()

    def clear(self) -> None:
        """Free the buffers."""
        self.order.await_all()
        self._buffers.clear()
        self._marks.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class MasterWeights:
    """One master per flat group, laid out like this rank's shard of the group's gradient.

    The inner optimizer steps on ``stepped``: the masters themselves, or, where masters are kept in less than it
    computes in, tensors that hold them in that dtype for the time of a step. Masters and the optimizer's state rest in
    ``homes``: whoever uses them asks for them there (``visit``, ``resident``).

    Args:
        layout: where each parameter lies.
        kept_in: dtype of the masters of weights that are no wider; None: fp32, or the weights' own if that is wider.
        stepped_in: dtype of the step and hence of the optimizer's state; None: that of the masters.
        homes: of each flat group; None: the device of its weights.
        staging: how new weights come to the device from masters on the host.
    """

    def __init__(
        self,
        layout: ShardLayout,
        kept_in: torch.dtype | None = None,
        stepped_in: torch.dtype | None = None,
        homes: Sequence[StateHome] | None = None,
        staging: WeightStaging | None = None,
    ) -> None:
        self.layout = layout
        self.homes = homes_in_memory(layout.groups) if homes is None else list(homes)
        self.staging = staging or WeightStaging(HostMemory(pinned=False), HostOrder())
        # The state of the inner optimizer for one of ``stepped``; nothing until there is such an optimizer.
        self.state_of: Callable[[torch.Tensor], Mapping[str, Any]] = lambda stepped: {}
        self.flats: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self.stepped: list[torch.Tensor] = []
        self._readers: list[Callable[[], None]] = []
        with torch.no_grad():
            for group, home in zip(layout.groups, self.homes):
                self.flats.append(self._flatten(group))
                low = kept_in is not None and group.dtype.itemsize <= kept_in.itemsize
                dtype = kept_in if low else master_dtype(group.dtype)
                master = home.empty(group.shard_numel, dtype).copy_(self.own_slice(group.index))
                narrow = low and stepped_in not in (None, dtype)
                stepped = torch.empty(0, dtype=stepped_in, device=home.device) if narrow else master
                self.masters.append(master)
                self.stepped.append(stepped.requires_grad_())
                home.admit(group.index, functools.partial(self.tensors, group.index))

    # ------------------------------------------------------------------ where they are

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """What rests in the home of a group: its master and the entries of the optimizer's state of that size."""
        numel = self.layout.groups[index].shard_numel
        entries = self.state_of(self.stepped[index])
        return {MASTER: self.masters[index]} | {
            key: value
            for key, value in entries.items()
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel
        }

    def visit(self, write: bool = True) -> Iterator[list[int]]:
        """All groups, in batches that are resident together; see ``StateHome.visit``. First those that are in memory,
        those on the device in front, so that it works while the host does."""
        if write:
            self._await_readers()
        in_memory = [group.index for group in self.layout.groups if self.homes[group.index].always_resident]
        if in_memory:
            yield sorted(in_memory, key=lambda index: self.layout.groups[index].on_host)
        away: dict[StateHome, list[int]] = {}
        for index, home in enumerate(self.homes):
            if not home.always_resident:
                away.setdefault(home, []).append(index)
        for home, indices in away.items():
            yield from home.visit(indices, write)

    def resident(self, index: int, write: bool = True) -> AbstractContextManager[None]:
        """The master and the state of one group are in memory inside. Not within a ``visit``."""
        if write:
            self._await_readers()
        home = self.homes[index]
        return nullcontext() if home.always_resident else home.resident(index, write)

    def read_beside(self, wait: Callable[[], None]) -> None:
        """Masters and state that are in memory are being read by a thread. They are written to after ``wait``."""
        self._readers.append(wait)

    def _await_readers(self) -> None:
        while self._readers:
            self._readers.pop()()

    def values(self, index: int) -> dict[str, torch.Tensor]:
        """As ``tensors``, with their values also where they are not in memory: to be read, outside of a ``visit`` and
        until the next."""
        home = self.homes[index]
        return self.tensors(index) if home.always_resident else home.values(index)

    # ------------------------------------------------------------------ stepping

    @contextmanager
    def stepping(self, batch: Sequence[int]) -> Iterator[None]:
        """The time of a step: ``stepped`` of these groups hold the masters; afterwards the masters are updated."""
        narrow = [index for index in batch if self.stepped[index] is not self.masters[index]]
        for index in narrow:
            self.stepped[index].data = self.masters[index].to(self.stepped[index].dtype)
        try:
            yield
        finally:
            for index in narrow:
                self.masters[index].copy_(self.stepped[index])
                self.free_copy(index)

    def allocate_copy(self, index: int) -> None:
        """Give ``stepped`` the size of the master, without values."""
        if self.stepped[index] is not self.masters[index]:
            self.stepped[index].data = torch.empty_like(self.masters[index], dtype=self.stepped[index].dtype)

    def free_copy(self, index: int) -> None:
        """Between steps only the master holds values."""
        if self.stepped[index] is not self.masters[index]:
            self.stepped[index].data = self.stepped[index].data.new_empty(0)

    # ------------------------------------------------------------------ the model's weights

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        """Bring the group's weights into one tensor in the group's dtype."""
        raise NotImplementedError

    def own_slice(self, index: int) -> torch.Tensor:
        """This rank's part of the weights of a group."""
        raise NotImplementedError

    def _goes_through_staging(self, index: int) -> bool:
        """Whether the group is stepped on the host and its weights are on the device."""
        return self.layout.groups[index].on_host

    def target(self, index: int) -> torch.Tensor:
        """Memory, where the group is stepped, that takes its new weights; ``send`` follows."""
        own = self.own_slice(index)
        return self.staging.take(own.numel(), own.dtype) if self._goes_through_staging(index) else own

    @contextmanager
    def sending(self, index: int, target: torch.Tensor) -> Iterator[None]:
        """Bring ``target`` into the model's weights. What is done inside comes after that, on the device."""
        if not self._goes_through_staging(index):
            yield
            return
        with self.staging.order.side():
            self.own_slice(index).copy_(target, non_blocking=True)
            self.staging.sent()
            yield

    @contextmanager
    def writing(self, index: int) -> Iterator[None]:
        """Master to weights, rounded; what is done inside comes after that, on the device. The group is resident."""
        target = self.target(index)
        target.copy_(self.masters[index])
        with self.sending(index, target):
            yield

    def replace_flat(self, index: int, flat: torch.Tensor) -> None:
        """Let the weights of a group be views of ``flat``, of the same values."""
        raise NotImplementedError

    @torch.no_grad()
    def read_own_slices(self) -> None:
        """Weights to masters."""
        for batch in self.visit():
            for index in batch:
                self.masters[index].copy_(self.own_slice(index))

    def release(self) -> None:
        """Free the masters; the parameters keep their weights."""
        for home in dict.fromkeys(self.homes):
            home.close()
        self.staging.clear()
        self.masters, self.stepped = [], []


class FlatWeights(MasterWeights):
    """Stages 1 and 2: every rank has all weights; the parameters become views of one flat tensor per flat group."""

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        flat = torch.zeros(group.padded_numel, dtype=group.dtype, device=group.device)
        for record, offset in zip(group.records, group.offsets):
            view = flat.narrow(0, offset, record.numel).view(record.shape)
            view.copy_(record.parameter.data)
            record.parameter.data = view
        return flat

    def replace_flat(self, index: int, flat: torch.Tensor) -> None:
        group = self.layout.groups[index]
        self.flats[index] = flat
        for record, offset in zip(group.records, group.offsets):
            record.parameter.data = flat.narrow(0, offset, record.numel).view(record.shape)

    def own_slice(self, index: int) -> torch.Tensor:
        group = self.layout.groups[index]
        return self.flats[index].narrow(0, group.shard_start, group.shard_numel)

    def take_over(self, written: Container[ParameterRecord]) -> None:
        """Masters of parameters that were written to take their values."""
        for batch in self.visit():
            for index in batch:
                group, own = self.layout.groups[index], self.own_slice(index)
                for record, offset in zip(group.records, group.offsets):
                    begin = max(offset - group.shard_start, 0)
                    end = min(offset + record.numel - group.shard_start, group.shard_numel)
                    if record in written and begin < end:
                        take_over(self.masters[index][begin:end], own[begin:end])


class ShardWeights(MasterWeights):
    """Stage 3: a rank has its shards alone; those of a flat group become views of one flat tensor.

    Args:
        host: how memory of the host is allocated, where shards rest on the host (``offload_param``); None: they do not.
        in_files: shards rest in files, but for some; there are no flat tensors then.
        settings: further arguments of ``MasterWeights``.
    """

    def __init__(self, *args: Any, host: HostMemory | None = None, in_files: bool = False, **settings: Any) -> None:
        self._host = host
        self._in_files = in_files
        super().__init__(*args, **settings)

    def _flatten(self, group: FlatGroup) -> torch.Tensor:
        if self._in_files:
            return torch.empty(0, dtype=group.dtype)
        if self._host is not None:
            flat = self._host.zeros(group.shard_numel, group.dtype)
        else:
            flat = torch.zeros(group.shard_numel, dtype=group.dtype, device=group.device)
        for record, own in zip(group.records, group.own):
            shard = shard_of(record.parameter)
            shard.move_shard(flat.narrow(0, own.shard_begin, shard.slice_numel), away=self._host is not None)
        return flat

    def replace_flat(self, index: int, flat: torch.Tensor) -> None:
        group = self.layout.groups[index]
        self.flats[index] = flat
        for record, own in zip(group.records, group.own):
            shard = shard_of(record.parameter)
            shard.replace_shard(flat.narrow(0, own.shard_begin, shard.slice_numel))

    def _goes_through_staging(self, index: int) -> bool:
        return self._host is None and super()._goes_through_staging(index)

    def own_slice(self, index: int) -> torch.Tensor:
        if not self._in_files:
            return self.flats[index]
        group = self.layout.groups[index]
        flat = torch.zeros(group.shard_numel, dtype=group.dtype)
        for shard, begin in self._places(group):
            flat.narrow(0, begin, shard.slice_numel).copy_(shard.shard)
        return flat

    def target(self, index: int) -> torch.Tensor:
        if not self._in_files:
            return super().target(index)
        group = self.layout.groups[index]
        return torch.empty(group.shard_numel, dtype=group.dtype)

    @contextmanager
    def sending(self, index: int, target: torch.Tensor) -> Iterator[None]:
        if not self._in_files:
            with super().sending(index, target):
                yield
            return
        for shard, begin in self._places(self.layout.groups[index]):
            shard.put(target.narrow(0, begin, shard.slice_numel))
        yield

    @staticmethod
    def _places(group: FlatGroup) -> list[tuple[ShardedParameter, int]]:
        """The shards of a group, and where each begins in this rank's part of the group."""
        return [(shard_of(record.parameter), own.shard_begin) for record, own in zip(group.records, group.own)]

    def shards(self) -> list[ShardedParameter]:
        """All parameters that have masters."""
        return [shard_of(record.parameter) for group in self.layout.groups for record in group.records]
