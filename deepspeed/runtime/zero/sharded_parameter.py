# SPDX-License-Identifier: Apache-2.0
"""One parameter that is partitioned alone over the ranks (ZeRO-3): its shard, and its whole value while it is gathered.

A parameter of ``numel`` elements is padded to a multiple of the ranks; rank ``r`` holds elements
``[r * n, (r + 1) * n)``, ``n = ceil(numel / ranks)``, in ``parameter.ds_tensor``. While it is not gathered its
``.data`` is an empty tensor. Gathering gives ``.data`` whole values in memory that releasing lets go of; whoever
still holds a view of that memory keeps it, so a release never pulls values away from under a reader.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.comm import watchdog
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.gradients.layout import slice_numel
from deepspeed.runtime.gradients.streams import HostOrder, order_for
from deepspeed.utils import groups
from deepspeed.utils.nvtx import span_range

ATTRIBUTE = "_ds_shard"
LARGE = 1 << 18  # elements from which a parameter gets a collective of its own, without a copy out of a joint buffer
RECENT = 64
DIGEST_BITS = (1 << 62) - 1


class ZeroParamType(Enum):
    """How a parameter is stored."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether the whole value is there."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class PartitionedParamStatus(Enum):
    """Whether a shard is in memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT

# Whole values by address, of their memory and (where that is shared) of their first element: tells whether a tensor is
# (a view of) a gathered parameter. Weak: a model that is dropped while weights are whole must not stay.
GATHERED: "weakref.WeakValueDictionary[int, ShardedParameter]" = weakref.WeakValueDictionary()


class ShardRanks:
    """The ranks that parameters are cut over: their process group, and the record of what they gathered.

    Ranks must gather the same parameters in the same order. Backends do not check it: gathers of equal size that met by
    mistake would mix weights in silence. ``count`` and ``digest`` stand for the order so far and are compared by
    ``check_order``.

    Args:
        group: data-parallel process group. Gathers travel on a clone of it, since gradients may be reduced before a
            gather on one rank and after it on another.
    """

    def __init__(self, group: Any) -> None:
        self.data_parallel_group = group
        self.group = groups._get_gather_group(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._lane = watchdog.lane(self.group, "weights")
        self.by_all_reduce = False  # stage3_use_all_reduce_for_fetch_params
        self.one_by_one = False  # stage3_allgather_sequential
        self.count = 0
        self.digest = 0
        self.recent: deque[tuple[int, list[str]]] = deque(maxlen=RECENT)  # names alone: a group outlives its models
        self._orders: dict[torch.device, HostOrder] = {}
        self._channel: ControlChannel | None = None  # where each gather is compared at once

    def check_each_gather(self) -> None:
        """From now on compare each gather with the other ranks' before it begins, at the price of a message between
        hosts. Collective."""
        if self._channel is None:
            self._channel = ControlChannel(self.group)

    @property
    def checks_each_gather(self) -> bool:
        return self._channel is not None

    def order(self, device: torch.device) -> HostOrder:
        """The side stream of gathers on a device."""
        if device not in self._orders:
            self._orders[device] = order_for(device)
            self._orders[device].watch("gathers of weights")
        return self._orders[device]

    def note(self, shards: "list[ShardedParameter]") -> None:
        """Enter a gather into the record."""
        self.count += 1
        digest = self.digest
        for shard in shards:
            digest = (digest * 1000003 + shard.parameter.ds_id + 1) & DIGEST_BITS
        self._lane.note("gather weights", tuple(shard.name for shard in shards[:4]), key=digest & 0xFFFFFFFF)
        self.digest = digest
        self.recent.append((self.count, [shard.name for shard in shards]))
        if self._channel is not None:
            self.check_order(self._channel)

    def describe_recent(self) -> list[tuple[int, list[str]]]:
        """Number and parameter names of the last gathers, oldest first."""
        return list(self.recent)

    def check_order(self, channel: Any) -> None:
        """Compare the order of gathers with the other ranks'. Collective, on the host.

        Raises:
            RuntimeError: on every rank, when ranks gathered different parameters; names the first difference known.
        """
        if self.world_size == 1:
            return
        mine = [self.count, -self.count, self.digest, -self.digest]
        most, minus_least, high, minus_low = channel.all_reduce_max(mine, "whether ranks gathered the same weights")
        if most == -minus_least and high == -minus_low:
            return
        everyone = channel.gather(self.describe_recent(), "which weights each rank gathered")
        raise RuntimeError(
            "ZeRO-3: ranks ran different modules, so that weights of one were gathered where another gathered others; "
            f"what was computed since the last step is unusable. {first_difference(everyone)}. Every rank must run the"
            " same modules in the same order: give a rank without data for a module an input of zeros, or mark the"
            " module around the choice with deepspeed.utils.set_z3_leaf_modules"
        )


def first_difference(everyone: Sequence[list[tuple[int, list[str]]]]) -> str:
    """Where the gathers of ranks part, from the tails of their records."""
    numbers = sorted({number for record in everyone for number, _ in record})
    by_rank = [dict(record) for record in everyone]
    for number in numbers:
        names = [record.get(number) for record in by_rank]
        if any(name != names[0] for name in names):
            told = "; ".join(
                f"rank {rank}: {'nothing' if name is None else ', '.join(name[:4])}" for rank, name in enumerate(names)
            )
            return f"The first difference on record is gather number {number}: {told}"
    return "The difference lies before the last gathers on record"


_ranks: "weakref.WeakKeyDictionary[Any, ShardRanks]" = weakref.WeakKeyDictionary()


def ranks_of(group: Any) -> ShardRanks:
    """The ``ShardRanks`` of a process group. The first call for a group is a collective of its members."""
    if group not in _ranks:
        _ranks[group] = ShardRanks(group)
    return _ranks[group]


class ShardedParameter:
    """State of one partitioned parameter on this rank.

    Args:
        parameter: holds its whole value, the same on every rank of ``ranks``.
        ranks: whom it is cut over.
        shard_device: where the shard is kept, apart from whole values; None: with them, on the parameter's device.
    """

    __slots__ = (
        "parameter", "ranks", "shape", "numel", "slice_numel", "dtype", "device", "away", "name", "full", "aside",
        "gather", "held", "saved", "window", "version", "dropped", "persistent", "ahead", "secondary", "coordinator",
        "store", "__weakref__",
    )  # fmt: skip

    def __init__(
        self, parameter: torch.nn.Parameter, ranks: ShardRanks, shard_device: torch.device | None = None
    ) -> None:
        self.parameter = parameter
        self.ranks = ranks
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.slice_numel = slice_numel(self.numel, ranks.world_size)
        self.dtype = parameter.dtype
        self.device = parameter.device  # of whole values
        self.away = shard_device is not None  # whether the shard rests on the host, apart from whole values
        self.name = f"of shape {tuple(self.shape)}"
        self.full: torch.Tensor | None = None  # 1-D, padded; while gathered
        self.aside: torch.Tensor | None = None  # the same, while GatheredParameters shows a copy
        self.gather: Gather | None = None  # while under way
        self.held = 0  # GatheredParameters contexts that hold the whole value
        self.saved = 0  # uses in graphs whose backward has not come by yet
        self.dropped = 0  # grows when values were changed for a while and put back; may differ between ranks
        self.window = 0  # grows when ``saved`` starts anew
        self.version = 0  # of the values; grows with each write
        self.persistent = False
        self.ahead = False  # gathered before anybody asked
        self.secondary: SecondaryShard | None = None
        self.coordinator: Any = None  # of the engine that gathers it; None outside of one
        self.store: Any = None  # the ShardStore whose file the shard rests in; None: it is in memory
        shard = torch.zeros(self.slice_numel, dtype=self.dtype, device=shard_device or self.device)
        own = self.own_slice(parameter.data.reshape(-1))
        shard[: own.numel()].copy_(own)
        parameter.ds_tensor = describe_shard(shard, self.slice_numel)

    # ------------------------------------------------------------------ what belongs to this rank

    @property
    def shard(self) -> torch.Tensor:
        """The shard, 1-D; where it rests in a file, its values in memory of their own: ``put`` takes them back."""
        return self.parameter.ds_tensor if self.store is None else self.store.read(self)

    def put(self, values: torch.Tensor) -> None:
        """Give the shard the values of ``values``, which is what ``shard`` was or another 1-D tensor of that size in
        memory of the host; it must not be changed afterwards."""
        if self.store is not None:
            self.store.write(self, values)
        elif values is not self.parameter.ds_tensor:
            self.parameter.ds_tensor.copy_(values)

    @property
    def begin(self) -> int:
        """First own element."""
        return min(self.ranks.rank * self.slice_numel, self.numel)

    @property
    def end(self) -> int:
        return min(self.begin + self.slice_numel, self.numel)

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a 1-D tensor over all elements."""
        return flat[self.begin : self.end]

    @property
    def aliased(self) -> bool:
        """Whether the whole value is the shard itself: on one rank, unless the shard is away."""
        return self.ranks.world_size == 1 and not self.away

    @torch.no_grad()
    def move_shard(self, target: torch.Tensor, away: bool = False) -> None:
        """Keep the shard in ``target`` from now on, 1-D with ``slice_numel`` elements, in whatever dtype that has.

        Args:
            away: ``target`` is in memory of the host, and whole values stay on the device where they are.
        """
        target.copy_(self.shard)
        self.dtype = target.dtype
        self.away = away
        if not away:
            self.device = target.device
        self.parameter.ds_tensor = describe_shard(target, self.slice_numel)

    def replace_shard(self, target: torch.Tensor) -> None:
        """Keep the shard in ``target``, which has its values, for a while: nothing must be gathered from there."""
        self.parameter.ds_tensor = describe_shard(target, self.slice_numel)

    def await_copies(self) -> None:
        """Before the host writes to a shard that rests on it: no copy to the device reads it any more."""
        if self.away:
            self.ranks.order(self.device).await_all()

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        """Take new values, the same on every rank, in the parameter's shape. No communication.

        Raises:
            ValueError: another shape.
        """
        if whole.shape != self.shape:
            raise ValueError(
                f"parameter {self.name} has shape {tuple(self.shape)}, the value to write has {tuple(whole.shape)}"
            )
        flat = whole.detach().reshape(-1)
        own = self.own_slice(flat)
        self.await_copies()
        mine = self.shard
        mine[: own.numel()].copy_(own)
        self.put(mine)
        for full in (self.full, self.aside):
            if full is not None and not self.aliased:
                full[: self.numel].copy_(flat)
        self.written()

    def forget_saved(self) -> None:
        """Start counting saved uses anew."""
        self.saved = 0
        self.window += 1

    def written(self) -> None:
        """The values have changed: graphs that saved them must not be used any more, copies are stale."""
        all_written([self])

    # ------------------------------------------------------------------ whole values

    @property
    def free(self) -> bool:
        """Whether nobody needs the whole value at the moment."""
        return not (self.persistent or self.held or self.parameter.ds_active_sub_modules)

    def show(self, full: torch.Tensor) -> None:
        """Make ``full`` (1-D, at least ``numel`` elements) the parameter's data."""
        self._drop_address()
        self.full = full
        self.gather = None
        parameter = self.parameter
        parameter.data = full.narrow(0, 0, self.numel).view(self.shape)
        parameter.ds_status = AVAILABLE
        if self.numel:
            GATHERED[self._address(full)] = self

    def hide(self) -> None:
        """Let go of the whole value."""
        if self.gather is not None:
            self.gather.wait()
        self._drop_address()
        self.full = None
        self.parameter.data = empty_like_kind(self.dtype, self.device)
        self.parameter.ds_status = NOT_AVAILABLE
        self.ahead = False

    def _address(self, full: torch.Tensor) -> int:
        """A whole value that is the shard lies in memory with others; elsewhere they have their own."""
        return full.data_ptr() if self.aliased else full.untyped_storage().data_ptr()

    def _drop_address(self) -> None:
        if self.full is not None and self.numel:
            address = self._address(self.full)
            if GATHERED.get(address) is self:
                del GATHERED[address]

    def stand_in(self) -> None:
        """Give a hidden parameter its shape, without memory, for autograd to compare a gradient with."""
        self.parameter.data = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


class SecondaryShard:
    """``1/k`` of a parameter, kept so that ``k`` ranks of one node can gather it among themselves (ZeRO++ hpZ).

    Valid only while ``version`` is that of the parameter, so it can never be older than the weights.
    """

    __slots__ = ("ranks", "data", "version")

    def __init__(self, ranks: ShardRanks) -> None:
        self.ranks = ranks
        self.data: torch.Tensor | None = None
        self.version = -1

    def keep(self, shard: ShardedParameter) -> None:
        """Take this rank's part of the whole value that is there now."""
        numel = slice_numel(shard.numel, self.ranks.world_size)
        begin = min(self.ranks.rank * numel, shard.numel)
        end = min(begin + numel, shard.numel)
        if self.data is None:
            self.data = torch.zeros(numel, dtype=shard.dtype, device=shard.device)
        self.data[: end - begin].copy_(shard.full[begin:end])
        self.version = shard.version
        shard.parameter.ds_secondary_tensor = self.data


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def empty_like_kind(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of a parameter that is not gathered: 1-D without elements."""
    key = (dtype, device)
    if key not in _empty:
        with torch.inference_mode(False):
            _empty[key] = torch.empty(0, dtype=dtype, device=device)
    return _empty[key]


def describe_shard(shard: torch.Tensor, numel: int) -> torch.Tensor:
    """Set what outside code reads of a shard."""
    shard.ds_numel = numel
    shard.status = PartitionedParamStatus.AVAILABLE
    shard.final_location = None
    return shard


def all_written(shards: "Sequence[ShardedParameter]") -> None:
    """The values of all of ``shards`` have changed, see ``ShardedParameter.written``."""
    for shard in shards:
        shard.version += 1
    autograd.increment_versions([shard.parameter for shard in shards])


def rest_shards(shards: Iterable[ShardedParameter], host: HostMemory | None) -> None:
    """Let hidden shards rest in memory of the host; None: leave them where they are."""
    for shard in shards:
        if host is not None and not shard.away:
            shard.move_shard(host.empty(shard.slice_numel, shard.dtype), away=True)
            shard.hide()


def shard_of(parameter: Any) -> ShardedParameter | None:
    """The state of a partitioned parameter; None for any other object."""
    return getattr(parameter, ATTRIBUTE, None)


def shards_of(parameters: Iterable[Any]) -> list[ShardedParameter]:
    """The states of those parameters that are partitioned, each once, in the order of creation."""
    found = {shard for shard in map(shard_of, parameters) if shard is not None}
    return sorted(found, key=lambda shard: shard.parameter.ds_id)


# ---------------------------------------------------------------------------------------------------- gathering


class Gather:
    """A collective under way that brings whole values of some parameters of one dtype and device.

    Args:
        shards: none of them gathered; the same on every rank, in the same order.
        secondary: gather from the secondary shards, which must be valid.
    """

    def __init__(self, shards: list[ShardedParameter], secondary: bool = False) -> None:
        self.shards = shards
        self._secondary = secondary
        ranks = shards[0].secondary.ranks if secondary else shards[0].ranks
        self._ranks = ranks
        self._order = ranks.order(shards[0].device)
        self._rows: torch.Tensor | None = None
        self._works: list[Any] = []
        self._fulls: list[torch.Tensor] = []
        self._mark: object | None = None
        ranks.note(shards)
        for shard in shards:
            shard.gather = self
            shard.parameter.ds_status = INFLIGHT
        with plain_tensors(), span_range("deepspeed.gather", shards):
            self._start()

    def _sizes(self) -> list[int]:
        """Elements of each parameter that one rank contributes."""
        if self._secondary:
            return [shard.secondary.data.numel() for shard in self.shards]
        return [shard.slice_numel for shard in self.shards]

    def _sources(self) -> list[torch.Tensor]:
        if self._secondary:
            return [shard.secondary.data for shard in self.shards]
        return [shard.shard for shard in self.shards]

    def _copy_to_device(self, own: torch.Tensor) -> None:
        """Shards that rest on the host, or in a file, to this rank's part of what is gathered."""
        into, store = own.split(self._sizes()), self.shards[0].store
        if store is not None:
            store.bring(self.shards, into, self._order)
            return
        for part, source in zip(into, self._sources()):
            part.copy_(source, non_blocking=True)

    def _start(self) -> None:
        ranks, sizes = self._ranks, self._sizes()
        if self.shards[0].aliased and not self._secondary:
            self._fulls = self._sources()
            return
        width = sum(sizes)
        first = self.shards[0]
        rows = torch.empty(ranks.world_size * width, dtype=first.dtype, device=first.device)
        own = rows.narrow(0, ranks.rank * width, width)
        away = first.away and not self._secondary
        if not away:
            sources = self._sources()
            torch.cat(sources, out=own) if len(sources) > 1 else own.copy_(sources[0])
        self._rows = rows
        # All memory comes from the current stream's pool: what the side stream does with it is over before ``wait``
        # returns, and only after that can it be let go of.
        single = len(sizes) == 1
        self._fulls = [rows] if single else [rows.new_empty(ranks.world_size * size) for size in sizes]
        if width == 0:
            self._take_out()
            return
        self._order.fork()
        with self._order.side():
            if away:
                self._copy_to_device(own)
            self._works = collectives.gather_rows(rows, ranks.rank, ranks.group, ranks.by_all_reduce)
            if self._order.asynchronous or not self._works:
                self._await()

    def _await(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                names = [shard.name for shard in self.shards]
                raise watchdog.explained(
                    error,
                    f"rank {self._ranks.rank}: weights of {names[0]} to {names[-1]} (gather number {self._ranks.count}"
                    " of this rank) did not arrive",
                    "Either another rank failed, whose log has the first error, or ranks ran different modules",
                ) from error
        self._works = []
        self._take_out()
        self._mark = self._order.mark()

    def _take_out(self) -> None:
        """From one row per rank to one contiguous tensor per parameter."""
        if len(self.shards) > 1:
            world_size = self._ranks.world_size
            columns = self._rows.view(world_size, -1).split(self._sizes(), dim=1)
            autograd.copy_each([full.view(world_size, -1) for full in self._fulls], list(columns))

    def wait(self) -> None:
        """Make the whole values the parameters' data. On CUDA the current stream waits, the host does not."""
        with plain_tensors():
            if self._works:
                self._await()
            self._order.wait_mark(self._mark)
            self._rows = None
            for shard, full in zip(self.shards, self._fulls):
                shard.show(full)


def plain_tensors() -> AbstractContextManager:
    """Gathered weights must be usable in training, even if they were first asked for in inference mode."""
    if not (torch.is_inference_mode_enabled() or autograd.transform_is_running()):
        return torch.no_grad()  # a stack of contexts costs several microseconds, twice for each gather
    stack = ExitStack()
    stack.enter_context(autograd.outside_of_transforms())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def start_gathers(shards: Iterable[ShardedParameter], prefer_secondary: bool = False) -> list[Gather]:
    """Begin to gather those of ``shards`` that are hidden: small ones together, one collective per kind.

    Every rank calls it with the same parameters in the same order.
    """
    batches: dict[Any, list[ShardedParameter]] = {}
    started: list[Gather] = []
    for shard in shards:
        if shard.parameter.ds_status is not NOT_AVAILABLE:
            continue
        second = shard.secondary
        secondary = prefer_secondary and second is not None and second.version == shard.version
        if shard.ranks.one_by_one:
            started.append(Gather([shard], secondary))
            started[-1].wait()
        elif shard.numel >= LARGE or shard.aliased:
            started.append(Gather([shard], secondary))
        else:
            kind = (shard.ranks, shard.dtype, shard.device, secondary, shard.away, id(shard.store))
            batches.setdefault(kind, []).append(shard)
    started += [Gather(batch, key[3]) for key, batch in batches.items()]
    return started


def gather_now(shards: Iterable[ShardedParameter]) -> None:
    """Gather those of ``shards`` that are hidden, and wait for all."""
    shards = list(shards)
    start_gathers(shards)
    for shard in shards:
        if shard.gather is not None:
            shard.gather.wait()
