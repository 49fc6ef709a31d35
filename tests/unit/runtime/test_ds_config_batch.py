# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: what is computed from what, and that a contradiction shows the whole equation."""

from types import SimpleNamespace

import pytest

from deepspeed.runtime import batch_config
from deepspeed.runtime.batch_config import Sourced, data_parallel_world_size, resolve_batch_sizes
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.fixture
def ranks(monkeypatch):
    """Pretend that a process group of this many ranks exists."""

    def pretend(count):
        monkeypatch.setattr(batch_config, "distributed_is_initialized", lambda: True)
        monkeypatch.setattr(batch_config, "world_size", lambda: count)

    return pretend


@pytest.mark.parametrize(
    "world, given, expected",
    [
        (4, {TRAIN: 24, MICRO: 3, GAS: 2}, (24, 3, 2)),
        (4, {TRAIN: 24, MICRO: 3}, (24, 3, 2)),
        (4, {TRAIN: 24, GAS: 2}, (24, 3, 2)),
        (4, {MICRO: 3, GAS: 2}, (24, 3, 2)),
        (4, {TRAIN: 24}, (24, 6, 1)),
        (4, {MICRO: 3}, (12, 3, 1)),
        (1, {TRAIN: 24}, (24, 24, 1)),
        (3, {TRAIN: 9e0, MICRO: 1.0}, (9, 1, 3)),
    ],
)
def test_missing_sizes_are_computed(ranks, world, given, expected):
    ranks(world)
    config = DeepSpeedConfig(given)
    got = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert got == expected
    assert all(type(number) is int for number in got)
    assert config.world_size == world


@pytest.mark.parametrize(
    "world, given",
    [
        (4, {TRAIN: 24, MICRO: 3, GAS: 3}),
        (4, {TRAIN: 25, MICRO: 3}),
        (4, {TRAIN: 25, GAS: 2}),
        (4, {TRAIN: 25}),
        (4, {TRAIN: 3}),
        (4, {TRAIN: 4, MICRO: 2}),
        (4, {TRAIN: 4, GAS: 2}),
    ],
)
def test_contradictions_are_refused(ranks, world, given):
    ranks(world)
    with pytest.raises(AssertionError, match="do not agree"):
        DeepSpeedConfig(given)


def test_the_error_shows_every_number_and_where_it_comes_from():
    with pytest.raises(AssertionError) as caught:
        resolve_batch_sizes(16, 3, None, Sourced(2, "world size 4 of the process group / sequence_parallel_size 2"))
    text = str(caught.value)
    assert (
        "train_batch_size 16 != train_micro_batch_size_per_gpu 3 * gradient_accumulation_steps 2 * data-parallel world "
        "size 2 (= 12)" in text
    )
    assert "train_batch_size: given in the config" in text
    assert "gradient_accumulation_steps: computed as train_batch_size // train_micro_batch_size_per_gpu" in text
    assert "world size: world size 4 of the process group / sequence_parallel_size 2" in text


@pytest.mark.parametrize("given", [{}, {GAS: 2}])
def test_too_few_sizes_are_refused(given):
    with pytest.raises(AssertionError, match="needs 'train_batch_size' or 'train_micro_batch_size_per_gpu'"):
        DeepSpeedConfig(given)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("key", [TRAIN, MICRO, GAS])
def test_sizes_must_be_positive(key, value):
    with pytest.raises(AssertionError, match=f"'{key}' must be an integer > 0, got {value}"):
        DeepSpeedConfig({TRAIN: 4, key: value})


@pytest.mark.parametrize("value", ["auto", "4", 1.5, True, [4], float("inf")])
@pytest.mark.parametrize("key", [TRAIN, MICRO, GAS])
def test_sizes_must_be_integers(key, value):
    with pytest.raises(TypeError, match=f"'{key}' must be an integer") as caught:
        DeepSpeedConfig({TRAIN: 4, key: value})
    assert isinstance(caught.value, DeepSpeedConfigError)
    assert repr(value) in str(caught.value)


class Mesh:
    """A stand-in for a 2-D device mesh."""

    def __init__(self, *names):
        self.mesh_dim_names = names

    def size(self, dim):
        return {"data_parallel": 5, "sequence_parallel": 7}[self.mesh_dim_names[dim]]


@pytest.mark.parametrize(
    "sequence_parallel_size, mpu, mesh, expected",
    [
        (None, None, None, 12),
        (3, None, None, 4),
        (3, None, Mesh("data_parallel", "sequence_parallel"), 5),
        (3, None, Mesh("sequence_parallel", "data_parallel"), 5),
        (3, SimpleNamespace(get_sequence_parallel_world_size=lambda: 2), Mesh("data_parallel"), 6),
        (
            3,
            SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_data_parallel_world_size=lambda: 11),
            Mesh("data_parallel"),
            11,
        ),
    ],
)
def test_who_decides_the_data_parallel_world_size(ranks, sequence_parallel_size, mpu, mesh, expected):
    ranks(12)
    assert data_parallel_world_size(sequence_parallel_size, mpu, mesh).value == expected
    config = {MICRO: 1, "sequence_parallel_size": sequence_parallel_size}
    assert DeepSpeedConfig(config, mpu=mpu, mesh_device=mesh).train_batch_size == expected


def test_the_world_is_one_rank_before_the_process_group_exists():
    assert data_parallel_world_size(2).value == 1
    assert data_parallel_world_size(None, SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)).value == 1


@pytest.mark.parametrize("mpu", [None, SimpleNamespace(get_sequence_parallel_world_size=lambda: 5)])
def test_sequence_parallel_size_must_divide_the_world(ranks, mpu):
    ranks(12)
    with pytest.raises(AssertionError, match="world size 12 is not divisible by .* = 5"):
        data_parallel_world_size(5, mpu)


def test_a_mesh_without_data_parallel_dimension_is_refused(ranks):
    ranks(12)
    with pytest.raises(AssertionError, match="data_parallel"):
        data_parallel_world_size(None, None, Mesh("sequence_parallel"))
