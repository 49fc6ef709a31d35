# SPDX-License-Identifier: Apache-2.0
"""Sharding, shuffling and repetition of the data loaders."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, TensorDataset

import deepspeed
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from unit.common import DistributedTest
from unit.runtime import engine_cases as cases


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


# Through the engine.


class Samples(Dataset):
    """Samples (x, y, uses) for the model of ``engine_cases``; remembers which were fetched."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, cases.WIDTH, generator=generator)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.fetched.append(index)
        return self.x[index], index % cases.WIDTH


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]), 1


def in_process(engine: Any, dataset: Dataset, **kwargs: Any) -> DeepSpeedDataLoader:
    return engine.deepspeed_io(dataset, num_local_io_workers=0, **kwargs)


class TestEngineLoader(DistributedTest):
    world_size = 2

    def test_batch_and_sampler_come_from_the_config(self) -> None:
        dataset = Samples(24)
        for micro in (2, 3):
            engine = cases.make_engine(cases.make_config(1, train_micro_batch_size_per_gpu=micro), collate_fn=collate)
            loader = in_process(engine, dataset)
            dataset.fetched.clear()
            sizes = [len(x) for x, _, _ in loader]
            assert sizes == [micro] * (24 // 2 // micro)
            everywhere: list[Any] = [None, None]
            dist.all_gather_object(everywhere, list(dataset.fetched))
            assert sorted(everywhere[0] + everywhere[1]) == list(range(24)), "ranks share out the data"
            assert everywhere[0] != sorted(everywhere[0]), "in a random order"
            assert [len(x) for x, _, _ in in_process(engine, dataset, batch_size=6)] == [6, 6]

    def test_drop_last_comes_from_the_config(self) -> None:
        for drop, sizes in ((False, [2, 2, 2, 1]), (True, [2, 2, 2])):
            engine = cases.make_engine(cases.make_config(1, dataloader_drop_last=drop), collate_fn=collate)
            assert [len(x) for x, _, _ in in_process(engine, Samples(13))] == sizes
            assert len(in_process(engine, Samples(13))) == len(sizes)

    def test_a_partial_window_goes_on_with_the_next_pass(self) -> None:
        """5 micro-steps a pass, 2 a window: the third window has the last batch of one pass, the first of the next."""
        for stage in (0, 1, 2):
            engine = cases.make_engine(cases.make_config(stage, gas=2), collate_fn=collate)
            batches = RepeatingLoader(in_process(engine, Samples(20)))
            boundaries = []
            for _ in range(10):
                engine.backward(engine(*next(batches)))
                engine.step()
                boundaries.append(engine.was_step_applied())
            assert boundaries == [False, True] * 5 and engine.global_steps == 5

    def test_a_partial_window_is_the_mean_of_its_micro_steps_or_dropped(self) -> None:
        for stage in (0, 1, 2):
            engine = cases.make_engine(cases.make_config(stage, gas=2))
            batches = cases.batches_of(dist.get_rank(), 3)
            cases.run_window(engine, batches[:2])
            engine.step()
            engine.backward(engine(*batches[2]))
            engine.step()
            assert not engine.was_step_applied()
            engine.zero_grad()
            engine.micro_steps = 0
            cases.check_window(engine, seed=1, note=f"stage {stage}, after a dropped window")

    def test_the_loader_of_initialize_trains(self) -> None:
        engine, _, loader, _ = deepspeed.initialize(
            model=cases.OddModel(),
            optimizer=torch.optim.SGD,
            training_data=Samples(8),
            collate_fn=collate,
            config=cases.make_config(2),
        )
        assert loader is engine.training_dataloader and isinstance(loader, DeepSpeedDataLoader)
        for batch in loader:
            engine.backward(engine(*batch))
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (2, 8)

    def test_loading_counts_for_throughput_in_training_only(self) -> None:
        engine = cases.make_engine(cases.make_config(1), collate_fn=collate)
        for route, timer in (("train", engine.tput_timer), ("eval", None), ("predict", None), ("encode", None)):
            assert in_process(engine, Samples(8), route=route).tput_timer is timer
        with pytest.raises(ValueError, match="route must be one of .*'test'"):
            in_process(engine, Samples(8), route="test")

    def test_what_is_no_data_set_is_refused(self) -> None:
        engine = cases.make_engine(cases.make_config(1))
        for wrong in (3, iter([1]), None):
            with pytest.raises(ValueError, match=type(wrong).__name__):
                engine.deepspeed_io(wrong)
        assert len(in_process(engine, [1, 2, 3, 4])) == 1
