# SPDX-License-Identifier: Apache-2.0
"""The config section ``elasticity``, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.elasticity import constants as const
from deepspeed.runtime.config_utils import DeepSpeedConfigError

SUPPORTED_VERSIONS = (0.1, 0.2)


class ElasticityError(DeepSpeedConfigError):
    """Base of what goes wrong with elastic batch sizes."""


class ElasticityConfigError(ElasticityError):
    """The section, or what stands beside it, cannot be used as written."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The job runs on a number of GPUs that the elastic batch size does not divide over."""


class ElasticityConfig:
    """What the section says.

    Args:
        param_dict: the section itself, without the key ``elasticity`` around it.

    Attributes:
        enabled: whether the section acts.
        max_acceptable_batch_size: largest train batch size, samples.
        micro_batches: micro batch sizes to choose from, samples per rank and micro-step; ascending.
        min_gpus, max_gpus: limits on the number of GPUs, both inclusive.
        num_gpus_per_node: GPUs of one node; from version 0.2 on, a job grows and shrinks by whole nodes.
        model_parallel_size: GPUs that share one replica of the model (version 0.2).
        min_time: minutes for which a scheduler leaves the number of GPUs alone; only passed on.
        version: 0.1 or 0.2.
        prefer_larger_batch_size: of several batch sizes that allow equally many numbers of GPUs, the largest.
        ignore_non_elastic_batch_info: ignore batch keys beside the section instead of refusing them.

    Raises:
        ElasticityConfigError: values that contradict each other or cannot be.
        DeepSpeedConfigError: a value of a wrong type (also TypeError) or below its minimum (also ValueError).
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        # Imported here, since that module takes the defaults of the section from this package.
        from deepspeed.runtime.config_sections import read_whole_section

        section = read_whole_section({const.ELASTICITY: dict(param_dict)}, const.ELASTICITY)
        self.enabled: bool = section[const.ENABLED]
        self.max_acceptable_batch_size: int = section[const.MAX_ACCEPTABLE_BATCH_SIZE]
        self.micro_batches: list[int] = sorted(set(_micro_batches(section[const.MICRO_BATCHES])))
        self.min_gpus: int = section[const.MIN_GPUS]
        self.max_gpus: int = section[const.MAX_GPUS]
        self.num_gpus_per_node: int = section[const.NUM_GPUS_PER_NODE]
        self.model_parallel_size: int = section[const.MODEL_PARALLEL_SIZE]
        self.min_time: float = section[const.MIN_TIME]
        self.version: float = section[const.VERSION]
        self.prefer_larger_batch_size: bool = section[const.PREFER_LARGER_BATCH]
        self.ignore_non_elastic_batch_info: bool = section[const.IGNORE_NON_ELASTIC_BATCH_INFO]
        if self.enabled:
            self._check(param_dict)

    def _check(self, given: Mapping[str, Any]) -> None:
        missing = [key for key in (const.MAX_ACCEPTABLE_BATCH_SIZE, const.MICRO_BATCHES) if key not in given]
        if missing:
            raise ElasticityConfigError(f"Config section 'elasticity' is enabled and needs {' and '.join(missing)}")
        if self.version not in SUPPORTED_VERSIONS:
            raise ElasticityConfigError(
                f"'elasticity.version' is {self.version}, must be one of {', '.join(map(str, SUPPORTED_VERSIONS))}"
            )
        if self.min_gpus > self.max_gpus:
            raise ElasticityConfigError(f"'elasticity.min_gpus' {self.min_gpus} is above max_gpus {self.max_gpus}")
        if self.micro_batches[0] > self.max_acceptable_batch_size:
            raise ElasticityConfigError(
                f"'elasticity.micro_batch_sizes' {self.micro_batches} are all above max_train_batch_size "
                f"{self.max_acceptable_batch_size}"
            )
        if self.model_parallel_size > 1 and self.version < 0.2:
            raise ElasticityConfigError("'elasticity.model_parallel_size' above 1 needs 'elasticity.version' 0.2")
        if self.version >= 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            raise ElasticityConfigError(
                f"'elasticity.num_gpus_per_node' {self.num_gpus_per_node} is not divisible by model_parallel_size "
                f"{self.model_parallel_size}: a replica of the model stays on one node"
            )

    def __repr__(self) -> str:
        return f"ElasticityConfig({vars(self)})"


def _micro_batches(value: list[Any]) -> list[int]:
    if not value or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in value):
        raise ElasticityConfigError(f"'elasticity.micro_batch_sizes' must be a list of integers > 0, got {value!r}")
    return value
