# SPDX-License-Identifier: Apache-2.0
"""Sharding, shuffling and repetition of the data loaders."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler, TensorDataset

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader


def make_loader(
    samples: int, batch_size: int, rank: int = 0, world_size: int = 1, **kwargs: Any
) -> DeepSpeedDataLoader:
    dataset = kwargs.pop("dataset", TensorDataset(torch.arange(samples)))
    kwargs = {"num_local_io_workers": 0, "tput_timer": None, **kwargs}
    return DeepSpeedDataLoader(
        dataset,
        batch_size,
        pin_memory=True,
        local_rank=rank,
        data_parallel_rank=rank,
        data_parallel_world_size=world_size,
        **kwargs,
    )


def values(batches: Iterable[Any]) -> list[int]:
    return [int(value) for (batch,) in batches for value in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_out_the_data(world_size: int) -> None:
    shards = [values(make_loader(12, 2, rank, world_size)) for rank in range(world_size)]
    assert all(len(shard) == 12 // world_size for shard in shards)
    assert sorted(itertools.chain(*shards)) == list(range(12))


def test_each_pass_has_its_own_order() -> None:
    loader = make_loader(64, 8)
    passes = [values(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(64)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3


def test_passes_are_the_same_on_all_ranks_and_runs() -> None:
    """Ranks agree on each permutation, or shards would overlap."""
    loaders = [make_loader(16, 4, rank, 2) for rank in range(2)]
    for _ in range(2):
        assert sorted(values(loaders[0]) + values(loaders[1])) == list(range(16))


def test_last_batch() -> None:
    assert [len(batch) for (batch,) in make_loader(10, 4)] == [4, 4, 2]
    assert len(make_loader(10, 4)) == 3
    dropped = make_loader(10, 4, dataloader_drop_last=True)
    assert [len(batch) for (batch,) in dropped] == [4, 4] and len(dropped) == 2


def test_uneven_shards() -> None:
    kept = [values(make_loader(7, 2, rank, 2)) for rank in range(2)]
    assert [len(shard) for shard in kept] == [4, 4] and set(kept[0] + kept[1]) == set(range(7))
    dropped = [values(make_loader(7, 1, rank, 2, dataloader_drop_last=True)) for rank in range(2)]
    assert [len(shard) for shard in dropped] == [3, 3] and len(set(dropped[0] + dropped[1])) == 6


def test_own_sampler_and_collate() -> None:
    dataset = TensorDataset(torch.arange(5))
    loader = make_loader(5, 2, dataset=dataset, data_sampler=SequentialSampler(dataset), collate_fn=len)
    assert list(loader) == [2, 2, 1]


def test_workers_by_default() -> None:
    assert make_loader(4, 2, num_local_io_workers=None).dataloader.num_workers == 2


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_stream_is_read_once() -> None:
    loader = make_loader(0, 3, dataset=Stream(), num_local_io_workers=None)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_next_without_iter() -> None:
    loader = make_loader(4, 4)
    assert sorted(next(loader)[0].tolist()) == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        next(loader)


def test_timer_starts_with_each_fetch() -> None:
    class Timer:
        starts = 0

        def start(self) -> None:
            self.starts += 1

    timer = Timer()
    loader = iter(make_loader(6, 2, tput_timer=timer))
    for fetched in range(1, 4):
        next(loader)
        assert timer.starts == fetched


def test_curriculum_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="curriculum"):
        make_loader(4, 2, deepspeed_dataloader_config={"enabled": True})


def test_repeating_loader_goes_on_with_new_shuffles() -> None:
    loader = RepeatingLoader(make_loader(32, 8))
    taken = values(itertools.islice(loader, 8))
    assert sorted(taken[:32]) == sorted(taken[32:]) == list(range(32))
    assert taken[:32] != taken[32:]
    assert not hasattr(loader, "__len__")


def test_repeating_a_plain_list() -> None:
    assert list(itertools.islice(RepeatingLoader([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_repeating_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no batch"):
        next(RepeatingLoader([]))
