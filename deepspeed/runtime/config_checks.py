# SPDX-License-Identifier: Apache-2.0
"""Checks of a whole config: unknown and removed keys, keys that exclude each other, features that do not exist yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.runtime.config_descriptions import NO_EFFECT, OPTION_OF, STAGE_3
from deepspeed.runtime.config_utils import (
    AUTO,
    DeepSpeedConfigError,
    closest_key,
    distributed_is_initialized,
    read_section,
    warn_once_on_rank_0,
)
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_SUM, MAX_GRAD_NORM
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.logging import log_dist_once

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

# Removed key and what to write instead, empty where there is nothing.
REMOVED_TOP_LEVEL_KEYS: dict[str, str] = {
    "nebula": "",
    "compression_training": "",
    "amp": "use 'bf16', 'fp16' or 'torch_autocast'",
    "quantize_training": "",
    "sparse_gradients": "",
    "eigenvalue": "",
    "sparse_attention": "",
    "graph_harvesting": "",
    "curriculum_learning": "truncate or pad the sequences in the collate function of the data loader",
    "progressive_layer_drop": "",
}


def check_top_level_keys(param_dict: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse removed and misspelt top-level keys; warn once about all other unknown ones.

    Client libraries keep settings of their own in the same dict, so an unknown key as such is not an error.

    Raises:
        DeepSpeedConfigError: a removed key, or an unknown key that is close to a known one.
    """
    removed = [key for key in REMOVED_TOP_LEVEL_KEYS if key in param_dict]
    if removed:
        advice = "; ".join(f"{key}: {REMOVED_TOP_LEVEL_KEYS[key]}" for key in removed if REMOVED_TOP_LEVEL_KEYS[key])
        raise DeepSpeedConfigError(
            f"Removed config keys: {removed}. These features do not exist any more, take them out"
            + (f" ({advice})" if advice else "")
        )
    known = list(known)
    # "$schema" and the like speak to editors.
    unknown = [str(key) for key in param_dict if key not in known and not str(key).startswith("$")]
    for key in unknown:
        suggestion = closest_key(key, known)
        if suggestion is not None:
            raise DeepSpeedConfigError(f"Unknown config key {key!r}: did you mean {suggestion!r}?")
    if unknown:
        warn_once_on_rank_0(f"Unknown top-level config keys are ignored: {sorted(unknown)}")


# --------------------------------------------------------------------------------------------------------------------
# Keys that exclude each other
# --------------------------------------------------------------------------------------------------------------------


def check_exclusions(config: DeepSpeedConfig) -> None:
    """Refuse combinations of keys that cannot work together.

    Raises:
        AssertionError, ValueError: the combination, with both keys and their values.
    """
    _check_precision(config)
    _check_reduction(config)
    _check_grad_norm(config)
    _check_offload(config)
    _check_accumulation(config)
    _check_optimizer(config)
    _check_data_parallel_size(config)


def deepcompile_enabled(config: DeepSpeedConfig) -> bool:
    """Whether ``compile.deepcompile`` is switched on."""
    return bool(config.compile_config.get("deepcompile", False))


def _check_precision(config: DeepSpeedConfig) -> None:
    fp16, bf16, stage = config.float16_config, config.bfloat16_config, config.zero_optimization_stage
    if fp16.enabled and bf16.enabled:
        raise AssertionError("'fp16.enabled' and 'bf16.enabled' are both true: parameters can have one dtype only")
    for key, value in (
        ("fp16.fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", bf16.bf16_master_weights_and_grads),
        ("bf16.bf16_optimizer_states", bf16.bf16_optimizer_states),
    ):
        if value and stage == 0:
            raise AssertionError(f"{key!r} needs ZeRO stage 1, 2 or 3, got 'zero_optimization.stage' 0")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise AssertionError("'bf16.bf16_optimizer_states' needs 'bf16.bf16_master_weights_and_grads': true")
    implied = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else torch.float32
    if config.param_dtype is not None and config.param_dtype != implied:
        raise AssertionError(
            f"'data_types.param_dtype' is {config.param_dtype} but 'fp16.enabled'={fp16.enabled} and "
            f"'bf16.enabled'={bf16.enabled} mean {implied}"
        )
    if config.torch_autocast_enabled and config.zero_config.zero_quantized_weights:
        raise AssertionError(
            "'torch_autocast.enabled' and 'zero_optimization.zero_quantized_weights' exclude each other"
        )


def _check_reduction(config: DeepSpeedConfig) -> None:
    zero, stage = config.zero_config, config.zero_optimization_stage
    if config.gradient_allreduce_op == GRADIENT_ALLREDUCE_OP_SUM:
        for key, active in (
            ("zero_optimization.stage 3", stage == 3),
            ("zero_optimization.zenflow", zero.zenflow is not None),
            ("compile.deepcompile", deepcompile_enabled(config)),
        ):
            if active:
                raise ValueError(f"'gradient_allreduce_op': 'sum' cannot be used with {key}: use 'mean'")
    # Stage 1 and 0 do not reduce-scatter, the option says nothing about them.
    if stage >= 2 and zero.reduce_scatter:
        for key, value, neutral in (
            ("prescale_gradients", config.prescale_gradients, False),
            ("gradient_predivide_factor", config.gradient_predivide_factor, 1.0),
        ):
            if value != neutral:
                raise AssertionError(
                    f"{key!r}={value!r} cannot be used with 'zero_optimization.reduce_scatter' true at stage {stage}: "
                    f"set {key!r} to {neutral!r} or reduce_scatter to false"
                )
    if stage in (1, 2) and zero.allgather_bucket_size % 2:
        raise AssertionError(
            f"'zero_optimization.allgather_bucket_size' must be even at stage {stage}, got {zero.allgather_bucket_size}"
        )


def _check_grad_norm(config: DeepSpeedConfig) -> None:
    zero = config.zero_config
    if zero.compute_grad_norm:
        return
    bf16_optimizer = (
        config.zero_optimization_stage == 1
        and config.bfloat16_config.enabled
        and config.grad_accum_dtype == torch.float32
        and not offloads(zero.offload_optimizer)
    )
    for reason, active in (
        (f"'gradient_clipping' {config.gradient_clipping} (0 switches it off)", config.gradient_clipping > 0),
        ("'zero_optimization.offload_optimizer'", offloads(zero.offload_optimizer)),
        ("'zero_optimization.zenflow'", zero.zenflow is not None),
        ("stage 1 with bf16 and 'data_types.grad_accum_dtype': 'fp32'", bf16_optimizer),
    ):
        if active:
            raise ValueError(f"'zero_optimization.compute_grad_norm': false cannot be used with {reason}")


def _check_offload(config: DeepSpeedConfig) -> None:
    zero, stage = config.zero_config, config.zero_optimization_stage
    for key, section, least, what in (
        ("offload_optimizer", zero.offload_optimizer, 1, "which partitions no optimizer state: use stage 1, 2 or 3"),
        ("offload_param", zero.offload_param, 3, "which partitions no parameters: use stage 3"),
    ):
        if offloads(section) and stage < least:
            raise ValueError(
                f"'zero_optimization.{key}.device': '{section.device}' cannot be used with stage {int(stage)}, {what}"
            )


def _check_accumulation(config: DeepSpeedConfig) -> None:
    if config.managed_gradient_accumulation:
        return
    zero, stage = config.zero_config, config.zero_optimization_stage
    if stage in (0, 1) and zero.overlap_comm:
        raise AssertionError(
            f"'managed_gradient_accumulation': false cannot be used with 'zero_optimization.overlap_comm': true at "
            f"stage {stage}: gradients are reduced inside step(), there is no backward to overlap with"
        )
    if deepcompile_enabled(config):
        raise AssertionError("'managed_gradient_accumulation': false cannot be used with 'compile.deepcompile'")


def _check_optimizer(config: DeepSpeedConfig) -> None:
    params = config.optimizer_params or {}
    if MAX_GRAD_NORM in params:
        raise ValueError(
            f"'optimizer.params.{MAX_GRAD_NORM}' is not an optimizer argument: set the top-level 'gradient_clipping' "
            f"to {params[MAX_GRAD_NORM]!r} instead"
        )
    fp16 = config.float16_config
    if config.optimizer_name == "lamb" and fp16.enabled and fp16.loss_scale != 0:
        raise AssertionError(
            f"Optimizer 'lamb' needs dynamic loss scaling ('fp16.loss_scale': 0), got {fp16.loss_scale}"
        )
    if config.optimizer_name == "muon" and config.zero_optimization_stage == 3 and config.zero_config.reduce_scatter:
        raise ValueError("Optimizer 'muon' at stage 3 needs 'zero_optimization.reduce_scatter': false")


def _check_data_parallel_size(config: DeepSpeedConfig) -> None:
    size, world = config.data_parallel_size, config._batch_sizes.world
    # Before the process group exists nobody knows how many ranks there will be.
    if size is not None and distributed_is_initialized() and size != world.value:
        raise AssertionError(
            f"'data_parallel_size' is {size} but the data-parallel world size is {world.value} ({world.source})"
        )


# --------------------------------------------------------------------------------------------------------------------
# Features that do not exist yet
# --------------------------------------------------------------------------------------------------------------------


def offloads(section: Any) -> bool:
    """Whether an offload section moves anything away from the device."""
    return section is not None and section.device != OffloadDeviceEnum.none


def _section_enabled(name: str) -> Callable[[DeepSpeedConfig], bool]:
    return lambda config: read_section(config._param_dict, name).get("enabled", False) not in (False, None, AUTO)


def _section_not_empty(name: str) -> Callable[[DeepSpeedConfig], bool]:
    def active(config: DeepSpeedConfig) -> bool:
        section = config._param_dict.get(name)
        return bool(section.get("enabled", True) if isinstance(section, dict) and section else section)

    return active


# Config key, what it would need, when it is switched on. Remove a line when the feature exists.
_UNSUPPORTED: list[tuple[str, str, Callable[[DeepSpeedConfig], bool]]] = [
    (
        "zero_optimization.offload_optimizer.super_offload",
        "SuperOffload",
        lambda c: offloads(c.zero_config.offload_optimizer) and c.zero_config.offload_optimizer.super_offload,
    ),
    ("zero_optimization.zenflow", "ZenFlow", lambda c: c.zero_config.zenflow is not None),
    (
        "zero_optimization.zero_quantized_weights",
        "quantized parameter all-gather",
        lambda c: c.zero_config.zero_quantized_weights,
    ),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        "quantized parameter all-gather",
        lambda c: c.zero_config.zero_quantized_nontrainable_weights,
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        "quantized gradient reduction",
        lambda c: c.zero_config.zero_quantized_gradients,
    ),
    ("sequence_parallel_size", "sequence parallelism", lambda c: (c.sequence_parallel_size or 1) > 1),
    ("pipeline", "pipeline parallelism", _section_not_empty("pipeline")),
    ("hybrid_engine.enabled", "hybrid engine", _section_enabled("hybrid_engine")),
    ("compile.deepcompile", "DeepCompile", deepcompile_enabled),
    ("data_efficiency.enabled", "data efficiency library", _section_enabled("data_efficiency")),
    ("weight_quantization", "weight quantization", _section_not_empty("weight_quantization")),
    ("autotuning.enabled", "autotuning", _section_enabled("autotuning")),
    ("expert_parallel", "automatic expert parallelism", _section_not_empty("expert_parallel")),
    (
        "tensor_parallel.autotp_size",
        "automatic tensor parallelism",
        lambda c: c.tensor_parallel_config.autotp_size > 0,
    ),
    ("tensor_parallel.tp", "tensor parallelism", lambda c: c.tensor_parallel_config.tensor_parallel.tp_size > 1),
    (
        "use_data_before_expert_parallelism",
        "expert parallelism",
        lambda c: c.use_data_before_expert_parallel_,
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        "fp16 master weights",
        lambda c: c.float16_config.fp16_master_weights_and_grads,
    ),
    ("datastates_ckpt", "DataStates checkpoint engine", _section_not_empty("datastates_ckpt")),
    (
        "checkpoint.writer.data_parallel",
        "one file written by several ranks",
        lambda c: (c.checkpoint_config["writer"] or {}).get("data_parallel") is not None,
    ),
]


def unsupported_features(config: DeepSpeedConfig) -> list[str]:
    """Features that the config switches on and that this package does not have, as ``"key: what is missing"``."""
    return [f"{key}: {what} is not implemented" for key, what, active in _UNSUPPORTED if active(config)]


# --------------------------------------------------------------------------------------------------------------------
# Keys that change nothing
# --------------------------------------------------------------------------------------------------------------------


def keys_without_effect(config: DeepSpeedConfig) -> list[str]:
    """Keys that the config gives and that change nothing in this run, as ``"key (reason)"``."""
    reasons = dict(NO_EFFECT)
    if config.zero_optimization_stage != 3:
        reasons |= {path: "stage 3 only" for path, feature in OPTION_OF.items() if feature == STAGE_3}
    return [f"{path} ({reason})" for path, reason in reasons.items() if _is_given(config._param_dict, path)]


def _is_given(param_dict: Mapping[str, Any], path: str) -> bool:
    node: Any = param_dict
    for name in path.split("."):
        if not isinstance(node, Mapping) or (name not in node and name.removeprefix("stage3_") not in node):
            return False
        node = node[name] if name in node else node[name.removeprefix("stage3_")]
    return not (isinstance(node, str) and node == AUTO)


def log_keys_without_effect(config: DeepSpeedConfig) -> None:
    """One debug line on rank 0 that names them."""
    idle = keys_without_effect(config)
    if idle:
        log_dist_once(f"Config keys without effect: {', '.join(idle)}", ranks=[0], level=logging.DEBUG)
