# SPDX-License-Identifier: Apache-2.0
"""Config section ``zero_optimization``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from pydantic import Field, model_validator

from deepspeed.runtime.config_utils import (
    DeepSpeedConfigError,
    DeepSpeedConfigModel,
    DeepSpeedConfigValueError,
    DeprecatedKey,
    read_section,
    read_value,
    warn_once_on_rank_0,
)
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"
ALLGATHER_SIZE_DEPRECATED = "allgather_size"
ALLGATHER_SIZE_DEPRECATED_DEFAULT = int(5e8)

REMOVED_ZERO_KEYS = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")


class ZeroStageEnum(int, Enum):
    """ZeRO stage: what is partitioned over the data-parallel ranks."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _offload_to_cpu(enabled: bool) -> dict[str, str] | None:
    return {"device": OffloadDeviceEnum.cpu.value} if enabled else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """Everything ZeRO. Bucket sizes, thresholds and group sizes are numbers of elements, not bytes.

    ``overlap_comm`` left at null becomes true for stage 3 and false otherwise.
    """

    deprecated_keys: ClassVar[Mapping[str, DeprecatedKey]] = {
        "cpu_offload": DeprecatedKey("offload_optimizer", _offload_to_cpu),
        "cpu_offload_param": DeprecatedKey("offload_param", _offload_to_cpu),
        "cpu_offload_use_pin_memory": DeprecatedKey(
            None, advice="use 'pin_memory' inside 'offload_param' or 'offload_optimizer'"
        ),
        "stage3_gather_fp16_weights_on_model_save": DeprecatedKey("gather_16bit_weights_on_model_save"),
    }

    stage: ZeroStageEnum = ZeroStageEnum.disabled

    # Gradient reduction and parameter gathering, stages 1 and 2.
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(int(5e8), ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False

    # Checkpoints.
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    pipeline_loading_checkpoint: bool = False

    # Offload.
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(int(1e9), ge=0)
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None

    # Stage 3.
    prefetch_bucket_size: int = Field(int(5e7), ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(int(1e5), ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(sys.maxsize, ge=0, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = Field(int(1e9), ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(int(1e9), ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def overlap_comm_valid(self) -> DeepSpeedZeroConfig:
        """Fill in the default of ``overlap_comm``, which depends on the stage."""
        if self.overlap_comm is None:
            self.set_derived("overlap_comm", self.stage == ZeroStageEnum.weights)
        return self

    @model_validator(mode="after")
    def compute_grad_norm_valid(self) -> DeepSpeedZeroConfig:
        """Only stages 1 and 2 can step without the global gradient norm."""
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError(f"compute_grad_norm=false needs stage 1 or 2, got stage {self.stage}")
        return self

    @model_validator(mode="after")
    def offload_ratio_check(self) -> DeepSpeedZeroConfig:
        """Partial optimizer offload exists in stage 3 only."""
        offload = self.offload_optimizer
        if offload is not None and offload.ratio < 1.0 and self.stage != ZeroStageEnum.weights:
            raise ValueError(f"offload_optimizer.ratio={offload.ratio} (< 1) needs stage 3, got stage {self.stage}")
        return self

    @model_validator(mode="after")
    def elastic_checkpoint_deprecated(self) -> DeepSpeedZeroConfig:
        """Point users of ``elastic_checkpoint`` to universal checkpoints."""
        if self.elastic_checkpoint:
            warn_once_on_rank_0(
                "Config key 'zero_optimization.elastic_checkpoint' is deprecated; to change the number of ranks "
                "convert to a universal checkpoint and load it with 'checkpoint': {'load_universal': true}"
            )
        return self


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section behind the deprecated ``zero_optimization: true`` with the top-level ``allgather_size``."""
    section: dict[str, Any] = {"stage": 1 if param_dict[ZERO_OPTIMIZATION] else 0}
    if section["stage"] > 0:
        section["allgather_bucket_size"] = read_value(
            param_dict, ALLGATHER_SIZE_DEPRECATED, ALLGATHER_SIZE_DEPRECATED_DEFAULT, "int", minimum=0
        )
    warn_once_on_rank_0(
        "A boolean 'zero_optimization' is deprecated, write 'zero_optimization': {'stage': 0, 1, 2 or 3} instead"
    )
    return section


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Parse the section ``zero_optimization`` (absent: stage 0).

    Raises:
        DeepSpeedConfigError: a removed key, or a section that is neither a dict nor a bool.
        pydantic.ValidationError: an unknown key or a value that is not allowed.
        AssertionError: a deprecated key together with its successor.
    """
    if isinstance(param_dict.get(ZERO_OPTIMIZATION), bool):
        return DeepSpeedZeroConfig(**read_zero_config_deprecated(param_dict))
    if ALLGATHER_SIZE_DEPRECATED in param_dict:
        warn_once_on_rank_0(
            f"Config key {ALLGATHER_SIZE_DEPRECATED!r} is deprecated and ignored, use "
            "'zero_optimization': {'allgather_bucket_size': ...}"
        )
    section = read_section(param_dict, ZERO_OPTIMIZATION)
    removed = [key for key in REMOVED_ZERO_KEYS if key in section]
    if removed:
        raise DeepSpeedConfigError(
            f"Removed config keys in {ZERO_OPTIMIZATION!r}: {removed}. Take them out of the config"
        )
    config = DeepSpeedZeroConfig(**section)
    if config.legacy_stage1:
        raise DeepSpeedConfigValueError("'zero_optimization.legacy_stage1' is not supported any more: use stage 1")
    return config
