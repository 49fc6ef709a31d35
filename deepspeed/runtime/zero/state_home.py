# SPDX-License-Identifier: Apache-2.0
"""Where masters and optimizer state of flat groups rest between uses: device memory, host memory, files.

The step of the partitioned optimizers asks a home for groups, batch by batch, and steps those that are there. It does
not know what a home does to bring them. So does everybody else who reads or writes masters or state: accessors,
checkpoints, ``offload_states``.

A home of another kind (files) keeps the *identity* of the tensors: the inner optimizer's ``state`` is keyed by the
tensor it steps on. It sets ``.data`` of the tensors that ``admit``'s callback lists: to memory with their values while
the group is resident, else to a stand-in of the same shape, dtype and device without memory (``expand``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from deepspeed.runtime.gradients.layout import FlatGroup

# The live tensors of a group by name, all 1-D of ``shard_numel`` elements: "master", and the entries of the inner
# optimizer's state that have its size ("exp_avg", ...), none before the first step. Entries without dimensions (the
# count of steps) and tensors of other sizes stay in memory. Asked anew each time: an optimizer may make an entry in any
# step, and loading a checkpoint replaces entries.
GroupTensors = Callable[[], dict[str, torch.Tensor]]


class StateHome(ABC):
    """Masters and optimizer state of some flat groups.

    Args:
        device: where a group is while it is resident, and hence where it is stepped.
    """

    # Whether every group is resident all the time, so that views of its tensors stay valid.
    always_resident = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a master that is about to be made, 1-D."""

    @abstractmethod
    def admit(self, group: int, tensors: GroupTensors) -> None:
        """Take charge of a group, which is resident; it may go to rest at once."""

    @abstractmethod
    def visit(self, groups: Sequence[int], write: bool = True) -> Iterator[list[int]]:
        """Batches of ``groups``, in this order. The groups of a batch are resident until the next batch is asked for,
        or the iteration ends in whatever way.

        A home fetches what comes next while a batch is used, and writes back behind. An error of writing behind is
        raised in a later call, of ``settle`` at the latest, and names the group; what was at rest before stays usable.

        Args:
            write: whether the visitor changes what it visits, so that it must be written back.
        """

    @contextmanager
    def resident(self, group: int, write: bool = True) -> Iterator[None]:
        """One group is resident inside. Not within a visit of the same home."""
        with closing(self.visit([group], write)) as visit:
            next(visit)
            yield
            for _ in visit:
                raise AssertionError("a visit of one group has one batch")

    def values(self, group: int) -> dict[str, torch.Tensor]:
        """The tensors of a group with their values, by name, outside of a visit: to be read, until the next visit.

        Only for homes whose groups are not always resident: elsewhere the tensors themselves have the values.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until all that was written back is at rest."""

    def close(self) -> None:
        """Let go of all groups: what is not in memory is lost."""


class MemoryHome(StateHome):
    """Device memory, or host memory: everything is resident all the time and visited at once.

    Memory of the host is not pinned: masters and state do not travel.
    """

    always_resident = True

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def admit(self, group: int, tensors: GroupTensors) -> None:
        """Nothing to do."""

    def visit(self, groups: Sequence[int], write: bool = True) -> Iterator[list[int]]:
        yield list(groups)


def homes_in_memory(groups: Sequence[FlatGroup]) -> list[StateHome]:
    """A home for each group: host memory for those that rest on the host, else the device of their weights."""
    on_host = MemoryHome(torch.device("cpu"))
    devices = {group.device: MemoryHome(group.device) for group in groups}
    return [on_host if group.on_host else devices[group.device] for group in groups]
