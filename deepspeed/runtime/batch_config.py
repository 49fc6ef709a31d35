# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: train_batch_size == micro batch * gradient accumulation steps * data-parallel world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.config_utils import distributed_is_initialized, world_size
from deepspeed.runtime.constants import (
    GRADIENT_ACCUMULATION_STEPS,
    TRAIN_BATCH_SIZE,
    TRAIN_MICRO_BATCH_SIZE_PER_GPU,
)

GIVEN = "given in the config"


@dataclass(frozen=True)
class Sourced:
    """A number and where it comes from, for messages and for the printed config."""

    value: int
    source: str


@dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes, consistent with ``world``. Sizes are samples, ``gas`` is micro-steps per window."""

    train: Sourced
    micro: Sourced
    gas: Sourced
    world: Sourced

    def equation(self) -> str:
        """The equation with all its numbers and their sources."""
        train, micro, gas, world = self.train, self.micro, self.gas, self.world
        relation = "==" if self.balanced else "!="
        return (
            f"{TRAIN_BATCH_SIZE} {train.value} {relation} {TRAIN_MICRO_BATCH_SIZE_PER_GPU} {micro.value} * "
            f"{GRADIENT_ACCUMULATION_STEPS} {gas.value} * data-parallel world size {world.value} "
            f"(= {micro.value * gas.value * world.value}); "
            f"{TRAIN_BATCH_SIZE}: {train.source}; {TRAIN_MICRO_BATCH_SIZE_PER_GPU}: {micro.source}; "
            f"{GRADIENT_ACCUMULATION_STEPS}: {gas.source}; world size: {world.source}"
        )

    @property
    def balanced(self) -> bool:
        """Whether both sides of the equation agree."""
        return self.train.value == self.micro.value * self.gas.value * self.world.value


def data_parallel_world_size(
    sequence_parallel_size: int | None = None, mpu: Any = None, mesh_device: Any = None
) -> Sourced:
    """Number of ranks that consume different samples.

    The model-parallel unit knows best, then the device mesh, then ``sequence_parallel_size``; without any of them all
    ranks do. 1 before the process group exists.

    Raises:
        AssertionError: the sequence-parallel size does not divide the world size.
    """
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return Sourced(int(mpu.get_data_parallel_world_size()), "mpu.get_data_parallel_world_size()")
    if not distributed_is_initialized():
        return Sourced(1, "the process group is not initialized")
    world = world_size()
    if mpu is not None and hasattr(mpu, "get_sequence_parallel_world_size"):
        return _divided(world, int(mpu.get_sequence_parallel_world_size()), "mpu.get_sequence_parallel_world_size()")
    if mesh_device is not None:
        names = mesh_device.mesh_dim_names or ()
        if "data_parallel" not in names:
            raise AssertionError(f"mesh_device needs a dimension named 'data_parallel', it has {tuple(names)}")
        return Sourced(mesh_device.size(names.index("data_parallel")), "dimension data_parallel of mesh_device")
    if sequence_parallel_size is not None:
        return _divided(world, sequence_parallel_size, "sequence_parallel_size")
    return Sourced(world, "world size of the process group")


def _divided(world: int, parts: int, name: str) -> Sourced:
    if parts < 1 or world % parts:
        raise AssertionError(f"The world size {world} is not divisible by {name} = {parts}")
    return Sourced(world // parts, f"world size {world} of the process group / {name} {parts}")


def resolve_batch_sizes(
    train: int | None, micro: int | None, gas: int | None, world: Sourced, source: str = GIVEN
) -> BatchSizes:
    """Complete the batch sizes that are given (not None) and check that they agree. ``source``: who gave them.

    Raises:
        AssertionError: a size is not positive, too few are given, or the equation does not hold.
    """
    given = {TRAIN_BATCH_SIZE: train, TRAIN_MICRO_BATCH_SIZE_PER_GPU: micro, GRADIENT_ACCUMULATION_STEPS: gas}
    for key, value in given.items():
        if value is not None and value <= 0:
            raise AssertionError(f"Config key {key!r} must be an integer > 0, got {value} ({source})")
    if train is None and micro is None:
        raise AssertionError(
            f"The config needs {TRAIN_BATCH_SIZE!r} or {TRAIN_MICRO_BATCH_SIZE_PER_GPU!r} (or both, or one of them "
            f"with {GRADIENT_ACCUMULATION_STEPS!r}); given: {GRADIENT_ACCUMULATION_STEPS}={gas}, "
            f"data-parallel world size {world.value} ({world.source})"
        )
    sizes = _complete(train, micro, gas, world, source)
    if not sizes.balanced or min(sizes.train.value, sizes.micro.value, sizes.gas.value) <= 0:
        raise AssertionError(
            f"The batch sizes do not agree: {sizes.equation()}. Change one of the given numbers, or leave one out and "
            "it is computed"
        )
    return sizes


def _complete(train: int | None, micro: int | None, gas: int | None, world: Sourced, source: str) -> BatchSizes:
    ranks = world.value
    product = f"{TRAIN_MICRO_BATCH_SIZE_PER_GPU} * {GRADIENT_ACCUMULATION_STEPS} * world size"
    new_gas, gas_source = gas, source
    if new_gas is None:
        new_gas, gas_source = 1, "default"
        if train is not None and micro is not None:
            new_gas = train // micro // ranks
            gas_source = f"computed as {TRAIN_BATCH_SIZE} // {TRAIN_MICRO_BATCH_SIZE_PER_GPU} // world size"
    new_micro, micro_source = micro, source
    if new_micro is None:
        new_micro = train // ranks // new_gas
        micro_source = f"computed as {TRAIN_BATCH_SIZE} // world size // {GRADIENT_ACCUMULATION_STEPS}"
    new_train, train_source = train, source
    if new_train is None:
        new_train, train_source = new_micro * new_gas * ranks, f"computed as {product}"
    return BatchSizes(
        Sourced(new_train, train_source), Sourced(new_micro, micro_source), Sourced(new_gas, gas_source), world
    )
