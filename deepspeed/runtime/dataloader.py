# SPDX-License-Identifier: Apache-2.0
"""Data loading: each rank its own shard of the data set, freshly shuffled on each pass."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

# Worker processes per rank where the caller names no number.
DEFAULT_NUM_WORKERS = 2


class RepeatingLoader:
    """Endless iterator over a loader: starts it again each time it runs out. Has no length.

    Args:
        loader: anything that can be iterated more than once.

    Raises:
        ValueError: on ``next()``, where the loader yields nothing even when started afresh.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader: the loader yields no batch; is the data set empty, or too small for drop_last?"
            ) from None


class DeepSpeedDataLoader:
    """Batches of this rank's shard of a data set.

    Without ``data_sampler`` the data set is split over the data-parallel ranks by a shuffling ``DistributedSampler``,
    and each pass draws a new permutation. An ``IterableDataset`` cannot be split from outside: it is iterated as it is
    on every rank and has to shard itself.

    Args:
        dataset: map-style or iterable data set.
        batch_size: samples per batch on this rank (the micro-batch size).
        pin_memory: copy batches into page-locked memory; without a CUDA device it has no effect.
        local_rank: index of this rank on its machine; kept as an attribute, decides nothing.
        tput_timer: object with ``start()``, called before each batch is fetched so that loading time counts; or None.
        collate_fn: merges a list of samples into a batch; default is torch's.
        num_local_io_workers: worker processes; 0 loads in this process. Default 2, but 0 for an ``IterableDataset``,
            which several workers would each read from the start.
        data_sampler: sampler over ``dataset``; its ``set_epoch``, where it has one, is called on each pass.
        data_parallel_world_size, data_parallel_rank: how many shards there are and which is this rank's; default from
            the process group, one shard where there is none.
        dataloader_drop_last: drop the last batch where it is not full, and leave out the samples which do not divide by
            the number of ranks; otherwise some samples are repeated so that every rank has equally many.
        deepspeed_dataloader_config: settings of curriculum sampling, which is not built; must be empty.

    Raises:
        NotImplementedError: ``deepspeed_dataloader_config`` is not empty.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] = {},  # noqa: B006 - signature fixed by the interface, only read
    ) -> None:
        if deepspeed_dataloader_config:
            raise NotImplementedError("data efficiency: curriculum data sampling is not built")
        is_stream = isinstance(dataset, IterableDataset)
        if data_sampler is None and not is_stream:
            rank, world_size = _shard(data_parallel_rank, data_parallel_world_size)
            data_sampler = DistributedSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=True, drop_last=dataloader_drop_last
            )
        if num_local_io_workers is None:
            num_local_io_workers = 0 if is_stream else DEFAULT_NUM_WORKERS
        self.dataset = dataset
        self.batch_size = batch_size
        self.local_rank = local_rank
        self.tput_timer = tput_timer
        self.data_sampler = data_sampler
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            drop_last=dataloader_drop_last,
        )
        self.epoch = 0
        self.data: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches per pass on this rank."""
        return len(self.dataloader)

    def __iter__(self) -> "DeepSpeedDataLoader":
        """Start a new pass, with a new shuffle."""
        set_epoch = getattr(self.data_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        self.epoch += 1
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        """Next batch of the pass under way; the first call starts one."""
        if self.data is None:
            iter(self)
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self.data)


def _shard(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This rank's (index, number) of shards; what is not given comes from the process group."""
    in_group = dist.is_available() and dist.is_initialized()
    if world_size is None:
        world_size = dist.get_world_size() if in_group else 1
    if rank is None:
        rank = dist.get_rank() if in_group else 0
    return rank, world_size
