# SPDX-License-Identifier: Apache-2.0
"""Small agreements among the ranks of a process group, on the host.

They run on a gloo connection of their own, so they never synchronise a device and never mix with the collectives of
the group. There is one connection per process group, shared by every :class:`ControlChannel` over it; it goes away with
the group.
"""

import atexit
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import watchdog
from deepspeed.comm.torch import is_alive, timeout_of


class _Link:
    """The transport under channels: either a gloo backend of our own or, without gloo, the group itself."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.gloo = _connect_gloo(group, rank, size) if _gloo_can_serve() else None
        self._group = None if self.gloo is not None else weakref.ref(group)
        self.closed = False
        self._buffers: dict[int, torch.Tensor] = {}
        self._lane = watchdog.lane(group, "agreements")
        if self.gloo is not None:
            watchdog.guard(self.gloo)
        self._max = torch_dist.AllreduceOptions()
        self._max.reduceOp = torch_dist.ReduceOp.MAX

    def close(self) -> None:
        self.closed = True
        self.gloo = None
        self._group = None

    def _buffer(self, length: int) -> torch.Tensor:
        buffer = self._buffers.get(length)
        if buffer is None:
            device = "cpu" if self.gloo is not None else get_accelerator().current_device_name()
            buffer = self._buffers[length] = torch.zeros(length, dtype=torch.int64, device=device)
        return buffer

    def all_reduce_max(self, values: Sequence[int], what: str = "a value") -> list[int]:
        buffer = self._buffer(len(values))
        buffer.copy_(torch.tensor(values, dtype=torch.int64))
        if self.gloo is not None:
            # Compared by length: one agreement may be about different things on different ranks.
            self._lane.note("agree on", what, key=len(values) + 1)
            watchdog.wait(self.gloo.allreduce([buffer], self._max), what, self._lane)
        else:
            torch_dist.all_reduce(buffer, torch_dist.ReduceOp.MAX, self._group())
        return buffer.tolist()

    def gather(self, obj: Any, what: str = "a report") -> list[Any]:
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        longest = self.all_reduce_max([payload.numel()], what)[0]
        device = "cpu" if self.gloo is not None else get_accelerator().current_device_name()
        own = torch.zeros(longest, dtype=torch.uint8, device=device)
        own[: payload.numel()] = payload  # pickle ends with its own stop mark, so the padding needs no length
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        if self.gloo is not None:
            self._lane.note("gather", what, key=1)
            watchdog.wait(self.gloo.allgather([everyone], [own]), what, self._lane)
        else:
            torch_dist.all_gather(everyone, own, self._group())
        return [pickle.loads(one.cpu().numpy().tobytes()) for one in everyone]


def _gloo_can_serve() -> bool:
    return torch_dist.is_gloo_available() and torch_dist.get_backend() != "mpi"  # MPI has no store to meet at


def _connect_gloo(group: Any, rank: int, size: int) -> Any:
    """A gloo backend over the members of ``group``, outside torch's registry, so that only members need to call.

    The members meet in the world's store under the group's name. The count of arrivals tells how often the group of
    this name was connected before: connecting returns when all members have arrived, so nobody is ahead by a round.
    A second connection then never reads the addresses that the first one left behind.
    """
    store = torch_dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()  # a client of its own: keeping it does not keep the server of a destroyed world alive
    place = f"deepspeed/control/{group.group_name}"
    arrivals = store.add(f"{place}/arrivals", 1)
    meeting = torch_dist.PrefixStore(f"{place}/{(arrivals - 1) // size}", store)
    return torch_dist.ProcessGroupGloo(meeting, rank, size, timeout=timeout_of(group))


_links: "weakref.WeakKeyDictionary[Any, _Link]" = weakref.WeakKeyDictionary()


def _link_of(group: Any, rank: int, size: int) -> _Link:
    _drop_dead_links()
    link = _links.get(group)
    if link is None:
        link = _links[group] = _Link(group, rank, size)
    return link


def _drop_dead_links() -> None:
    """Close links whose process group was destroyed through torch while somebody still holds the group object."""
    for group in [group for group in _links if not is_alive(group)]:
        _links.pop(group).close()


def close_channels(group: Any = None) -> None:
    """Close the connection that belongs to ``group``; None: all. Called before process groups are destroyed."""
    for known in [known for known in _links if group is None or known is group]:
        _links.pop(known).close()


# A script that ends without destroying its process groups must end well: gloo's threads may not outlive Python.
atexit.register(close_channels)


class ControlChannel:
    """Host-side agreement among the ranks of a process group.

    Creating the first channel of a group is a collective of that group's members. All members must make the same calls
    in the same order. At world size 1 nothing is created and every call is the identity.

    Args:
        group: the process group; None: the world (or this process alone, where there is none).

    Attributes:
        rank: this process's rank in the group.
        world_size: number of ranks of the group.

    Raises:
        RuntimeError: this process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self._link: _Link | None = None
        if not torch_dist.is_initialized():
            self.rank, self.world_size = 0, 1
            return
        group = torch_dist.group.WORLD if group is None else group
        self.rank = torch_dist.get_rank(group)
        if self.rank < 0:
            raise RuntimeError(
                f"global rank {torch_dist.get_rank()} is not in the process group, so it cannot take part in its "
                "agreements: create the engine on members of its group only"
            )
        self.world_size = torch_dist.get_world_size(group)
        if self.world_size > 1:
            self._link = _link_of(group, self.rank, self.world_size)

    def all_reduce_max(self, values: Sequence[int], what: str = "a value") -> list[int]:
        """Element-wise maximum over the ranks.

        Args:
            values: int64 numbers, as many on every rank.
            what: what is being agreed, for the error message.

        Raises:
            RuntimeError: a rank did not answer in time or is gone, or the process group was destroyed.
        """
        if self._link is None:
            return list(values)
        try:
            return self._open_link(what).all_reduce_max(values, what)
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def gather(self, obj: Any, what: str = "a report") -> list[Any]:
        """The picklable ``obj`` of every rank, in rank order. Objects are unpickled: use it among trusted ranks only.

        Raises:
            RuntimeError: as for :meth:`all_reduce_max`.
        """
        if self._link is None:
            return [obj]
        try:
            return self._open_link(what).gather(obj, what)
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _open_link(self, what: str) -> _Link:
        if self._link.closed:
            raise RuntimeError("the process group was destroyed")
        return self._link

    def _failure(self, what: str, error: RuntimeError) -> RuntimeError:
        return watchdog.explained(
            error,
            f"rank {self.rank} of {self.world_size}: the ranks could not agree on {what}",
            "Either a rank has failed (look at the other ranks' logs for the first error) or the ranks did not make the"
            " same calls in the same order. If a rank is only slow, raise DEEPSPEED_TIMEOUT or"
            " init_distributed(timeout=).",
        )
