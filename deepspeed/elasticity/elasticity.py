# SPDX-License-Identifier: Apache-2.0
"""One train batch size that divides evenly over many numbers of GPUs, so that a job can change its world size.

A number of GPUs fits a batch size if some micro batch size of the list times a whole number of accumulation steps
gives every data-parallel rank its share. The batch size chosen is the one, up to the allowed maximum, that the most
numbers of GPUs fit. It does not depend on how many GPUs there are now, so every restart finds the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.elasticity import constants as const
from deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.runtime.config_utils import read_section, warn_once_on_rank_0
from deepspeed.runtime.constants import (
    GRADIENT_ACCUMULATION_STEPS,
    TRAIN_BATCH_SIZE,
    TRAIN_MICRO_BATCH_SIZE_PER_GPU,
)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has a section ``elasticity`` that is switched on."""
    return bool(read_section(ds_config, const.ELASTICITY).get(const.ENABLED, const.ENABLED_DEFAULT))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The elastic train batch size and the numbers of GPUs that fit it.

    Args:
        ds_config: whole config, with a section ``elasticity``.
        target_deepspeed_version: version of the package that will run the job.
        world_size: number of GPUs of the job; 0 if not known yet.
        return_microbatch: return a micro batch size even where the world size is not known; the largest then.

    Returns:
        Train batch size (samples), ascending numbers of GPUs, and, with a world size or ``return_microbatch``, the
        micro batch size (samples per rank and micro-step).

    Raises:
        ElasticityConfigError: the section is missing or cannot be used as written.
        ElasticityError: the section is switched off, or the target version does not know it.
        ElasticityIncompatibleWorldSize: ``world_size`` does not fit.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"compute_elastic_config: ds_config must be a dict, got {type(ds_config).__name__}")
    if const.ELASTICITY not in ds_config:
        raise ElasticityConfigError("The config has no section 'elasticity'")
    if not elasticity_enabled(ds_config):
        raise ElasticityError("Config section 'elasticity' is switched off: set 'elasticity.enabled' to true")
    _check_target_version(target_deepspeed_version)
    config = ElasticityConfig(read_section(ds_config, const.ELASTICITY))
    batch_size, gpus = _best_batch_size(config)
    if world_size <= 0:
        return (batch_size, gpus, _micro_batch(config, batch_size, 1)) if return_microbatch else (batch_size, gpus)
    if world_size not in gpus:
        raise ElasticityIncompatibleWorldSize(
            f"The elastic train batch size {batch_size} does not fit {world_size} GPUs; it fits {gpus}"
        )
    return batch_size, gpus, _micro_batch(config, batch_size, world_size // _replica_size(config))


def elastic_batch_sizes(ds_config: Mapping[str, Any], data_parallel_size: int | None) -> tuple[int, int, int]:
    """Train batch size, micro batch size and accumulation steps of a job whose config is elastic.

    Args:
        ds_config: whole config.
        data_parallel_size: ranks that consume different samples; None before the process group exists: sizes then are
            those of one rank, and nothing is checked.

    Raises:
        ElasticityConfigError: batch keys stand beside the section, or it differs from what the scheduler reckons with.
        ElasticityError: as :func:`compute_elastic_config`.
    """
    from deepspeed.git_version_info import version

    section = read_section(ds_config, const.ELASTICITY)
    config = ElasticityConfig(section)
    _refuse_other_batch_keys(ds_config, config)
    ensure_immutable_elastic_config(section)
    world_size = 0 if data_parallel_size is None else data_parallel_size * _replica_size(config)
    train, _, micro = compute_elastic_config(ds_config, version, world_size, return_microbatch=True)
    return train, micro, train // micro // (data_parallel_size or 1)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Checks that the job trains with the batch sizes that its scheduler reckons with.

    A scheduler that changes the number of GPUs leaves the section, as it knows it, in the environment variable
    ``DEEPSPEED_ELASTICITY_CONFIG``. Without it there is nothing to compare with.

    Args:
        runtime_elastic_config_dict: the section that the job was started with.

    Raises:
        ElasticityConfigError: the two differ in what decides about batch sizes, or the variable holds no JSON object.
    """
    text = os.environ.get(const.DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        return
    try:
        scheduled = json.loads(text)
    except ValueError as error:
        raise ElasticityConfigError(f"{const.DEEPSPEED_ELASTICITY_CONFIG} is not JSON: {error}") from error
    if not isinstance(scheduled, dict):
        raise ElasticityConfigError(f"{const.DEEPSPEED_ELASTICITY_CONFIG} must hold a JSON object, got {text}")
    there, here = ElasticityConfig(scheduled), ElasticityConfig(runtime_elastic_config_dict)
    for name, key in (
        ("max_acceptable_batch_size", const.MAX_ACCEPTABLE_BATCH_SIZE),
        ("micro_batches", const.MICRO_BATCHES),
        ("version", const.VERSION),
    ):
        if getattr(there, name) != getattr(here, name):
            raise ElasticityConfigError(
                f"'elasticity.{key}' is {getattr(here, name)} in the config of this job and {getattr(there, name)} "
                f"for its scheduler ({const.DEEPSPEED_ELASTICITY_CONFIG}): it must not change while the job lives"
            )


def _check_target_version(text: str) -> None:
    numbers = re.match(r"\d+(\.\d+)*", text)
    if numbers is None:
        raise ElasticityError(f"Target version {text!r} is no version number")
    target, least = ([int(part) for part in v.split(".")] for v in (numbers.group(), const.MINIMUM_DEEPSPEED_VERSION))
    if target < least:
        raise ElasticityError(
            f"Version {text} does not know the section 'elasticity': {const.MINIMUM_DEEPSPEED_VERSION} is the first"
        )


def _refuse_other_batch_keys(ds_config: Mapping[str, Any], config: ElasticityConfig) -> None:
    keys = (TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU, GRADIENT_ACCUMULATION_STEPS)
    given = [key for key in keys if ds_config.get(key) is not None]
    if not given:
        return
    if not config.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"The section 'elasticity' decides about batch sizes, but {', '.join(given)} stand in the config too: take "
            f"them out, or set 'elasticity.{const.IGNORE_NON_ELASTIC_BATCH_INFO}' to true"
        )
    warn_once_on_rank_0(f"The section 'elasticity' decides about batch sizes; ignored: {', '.join(given)}")


def _replica_size(config: ElasticityConfig) -> int:
    """GPUs of one data-parallel rank."""
    return config.model_parallel_size if config.version >= 0.2 else 1


def _best_batch_size(config: ElasticityConfig) -> tuple[int, list[int]]:
    """Train batch size and the numbers of GPUs that fit it.

    Raises:
        ElasticityConfigError: no batch size fits any allowed number of GPUs.
    """
    # A job grows by whole units, of which each holds some data-parallel ranks: nodes from version 0.2 on, else GPUs.
    gpus_per_unit = config.num_gpus_per_node if config.version >= 0.2 else 1
    ranks_per_unit = gpus_per_unit // _replica_size(config)
    units = (math.ceil(config.min_gpus / gpus_per_unit), config.max_gpus // gpus_per_unit)
    largest = config.max_acceptable_batch_size // ranks_per_unit
    counts = fitting_counts(largest, config.micro_batches, *units)
    most = int(counts.max())
    if most == 0:
        raise ElasticityConfigError(
            f"No train batch size up to {config.max_acceptable_batch_size} fits {config.min_gpus} to {config.max_gpus} "
            f"GPUs ({gpus_per_unit} at a time) with micro batch sizes {config.micro_batches}: allow a larger batch, "
            "smaller micro batches or fewer GPUs"
        )
    best = torch.nonzero(counts == most).flatten()
    share = int(best[-1] if config.prefer_larger_batch_size else best[0])
    fitting = [n for n in range(units[0], min(units[1], share) + 1) if _fits(share, n, config.micro_batches)]
    return share * ranks_per_unit, [n * gpus_per_unit for n in fitting]


def _fits(batch: int, ranks: int, micro_batches: Sequence[int]) -> bool:
    return any(batch % (ranks * micro) == 0 for micro in micro_batches)


def fitting_counts(largest: int, micro_batches: Sequence[int], fewest: int, most: int) -> torch.Tensor:
    """How many numbers of ranks from ``fewest`` to ``most`` fit each batch size.

    Returns:
        int32, shape (largest + 1,): element b counts the n with b = n * q where some micro batch size divides q.
    """
    counts = torch.zeros(max(largest, 0) + 1, dtype=torch.int32, device="cpu")
    is_share = torch.zeros_like(counts)  # samples that one rank can take in one update
    for micro in micro_batches:
        is_share[micro::micro] = 1
    fewest = max(fewest, 1)
    # Pairs (n, q) with n * q <= largest have a factor up to the root: one vector operation for each such factor.
    root = math.isqrt(max(largest, 0))
    for small in range(1, root + 1):
        if fewest <= small <= most:  # n = small, every q >= n
            last = largest // small
            counts[small * small : small * last + 1 : small] += is_share[small : last + 1]
        if is_share[small]:  # q = small, every n > q
            first, last = max(fewest, small + 1), min(most, largest // small)
            if first <= last:
                counts[small * first : small * last + 1 : small] += 1
    return counts


def _micro_batch(config: ElasticityConfig, batch_size: int, data_parallel_size: int) -> int:
    """The largest micro batch size that fits: the fewest accumulation steps."""
    return max(micro for micro in config.micro_batches if batch_size % (micro * data_parallel_size) == 0)
