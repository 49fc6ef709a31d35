# SPDX-License-Identifier: Apache-2.0
"""The engine's read-only view of its configuration, and its public methods whose features are not built.

One table instead of a hundred one-line methods: each entry is a public name of the engine and where its value stands.
"""

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_checks import offloads
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum

Read = Callable[[DeepSpeedConfig], Any]


def _offload_optimizer(config: DeepSpeedConfig) -> DeepSpeedZeroOffloadOptimizerConfig:
    return config.zero_config.offload_optimizer or DeepSpeedZeroOffloadOptimizerConfig()


_ACCESSORS: dict[str, Read] = {
    "train_batch_size": lambda c: c.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda c: c.train_micro_batch_size_per_gpu,
    "gradient_accumulation_steps": lambda c: c.gradient_accumulation_steps,
    "managed_gradient_accumulation": lambda c: c.managed_gradient_accumulation,
    "steps_per_print": lambda c: c.steps_per_print,
    "dump_state": lambda c: c.dump_state,
    "gradient_clipping": lambda c: c.gradient_clipping,
    "gradient_predivide_factor": lambda c: c.gradient_predivide_factor,
    "postscale_gradients": lambda c: not c.prescale_gradients,
    "dataloader_drop_last": lambda c: c.dataloader_drop_last,
    "log_level": lambda c: c.log_level,
    "wall_clock_breakdown": lambda c: c.wall_clock_breakdown,
    "memory_breakdown": lambda c: c.memory_breakdown,
    "use_node_local_storage": lambda c: c.use_node_local_storage,
    "load_universal_checkpoint": lambda c: c.load_universal_checkpoint,
    "checkpoint_tag_validation_enabled": lambda c: c.checkpoint_tag_validation_enabled,
    "checkpoint_tag_validation_fail": lambda c: c.checkpoint_tag_validation_fail,
    "optimizer_name": lambda c: c.optimizer_name,
    "optimizer_params": lambda c: c.optimizer_params,
    "optimizer_legacy_fusion": lambda c: c.optimizer_legacy_fusion,
    "scheduler_name": lambda c: c.scheduler_name,
    "scheduler_params": lambda c: c.scheduler_params,
    "fp16_enabled": lambda c: c.float16_config.enabled,
    "bfloat16_enabled": lambda c: c.bfloat16_config.enabled,
    "fp16_auto_cast": lambda c: c.float16_config.auto_cast,
    "fp16_master_weights_and_gradients": lambda c: c.float16_config.fp16_master_weights_and_grads,
    "bf16_master_weights_and_gradients": lambda c: c.bfloat16_config.bf16_master_weights_and_grads,
    "bf16_optimizer_states": lambda c: c.bfloat16_config.bf16_optimizer_states,
    "loss_scale": lambda c: c.float16_config.loss_scale,
    "dynamic_loss_scale": lambda c: c.float16_config.loss_scale == 0,
    "initial_dynamic_scale": lambda c: c.float16_config.initial_dynamic_scale(),
    "dynamic_loss_scale_args": lambda c: c.float16_config.dynamic_loss_scale_args(),
    "torch_autocast_enabled": lambda c: c.torch_autocast_enabled,
    "torch_autocast_dtype": lambda c: c.torch_autocast_dtype,
    "torch_autocast_lower_precision_safe_modules": lambda c: c.torch_autocast_lower_precision_safe_modules,
    "zero_allow_untested_optimizer": lambda c: c.zero_allow_untested_optimizer,
    "zero_force_ds_cpu_optimizer": lambda c: c.zero_force_ds_cpu_optimizer,
    "zero_optimization": lambda c: c.zero_enabled,
    "zero_optimization_stage": lambda c: c.zero_optimization_stage,
    "zero_optimization_partition_gradients": lambda c: c.zero_optimization_stage >= 2,
    "zero_optimization_partition_weights": lambda c: c.zero_optimization_stage >= 3,
    "zero_offload_optimizer": lambda c: c.zero_config.offload_optimizer,
    "zero_offload_param": lambda c: c.zero_config.offload_param,
    "zero_cpu_offload": lambda c: offloads(c.zero_config.offload_optimizer),
    "zero_use_cpu_optimizer": lambda c: offloads(c.zero_config.offload_optimizer),
    "zero_partial_offload": lambda c: _offload_optimizer(c).ratio,
    "zero_nvme_offload_optimizer": lambda c: _offload_optimizer(c).device == OffloadDeviceEnum.nvme,
    "super_offload": lambda c: _offload_optimizer(c).super_offload,
    "cpuadam_cores_perc": lambda c: _offload_optimizer(c).cpuadam_cores_perc,
    "zero_multi_rank_bucket_allreduce": lambda c: c.zero_config.use_multi_rank_bucket_allreduce,
    "zero_gather_16bit_weights_on_model_save": lambda c: c.zero_config.gather_16bit_weights_on_model_save,
    "is_sanity_checks_enabled": lambda c: c.zero_config.enable_sanity_checks,
    "aio_config": lambda c: c.aio_config,
    "data_efficiency_config": lambda c: c.data_efficiency_config,
    "data_efficiency_enabled": lambda c: bool(c.data_efficiency_config.get("enabled", False)),
    "tensor_parallel_config": lambda c: c.tensor_parallel_config,
    "autotp_size": lambda c: c.tensor_parallel_config.autotp_size,
    "checkpoint_serialization_enabled": lambda c: c.checkpoint_config["checkpoint_serialization"],
    "checkpoint_writer_enabled": lambda c: c.checkpoint_config["writer"] is not None,
    "flops_profiler_enabled": lambda c: c.flops_profiler_config.enabled,
    "flops_profiler_recompute_fwd_factor": lambda c: c.flops_profiler_config.recompute_fwd_factor,
    "flops_profiler_profile_step": lambda c: c.flops_profiler_config.profile_step,
    "flops_profiler_module_depth": lambda c: c.flops_profiler_config.module_depth,
    "flops_profiler_top_modules": lambda c: c.flops_profiler_config.top_modules,
    "flops_profiler_detailed": lambda c: c.flops_profiler_config.detailed,
    "flops_profiler_output_file": lambda c: c.flops_profiler_config.output_file,
}

_ZERO_FIELDS = (
    "reduce_scatter",
    "overlap_comm",
    "sub_group_size",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "compute_grad_norm",
    "contiguous_gradients",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "max_live_parameters",
    "max_reuse_distance",
    "prefetch_bucket_size",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "legacy_stage1",
    "ignore_unused_parameters",
    "save_muon_momentum_buffer_in_memory",
    "allgather_partitions",
    "round_robin_gradients",
    "parameter_alignment",
    "log_trace_cache_warnings",
    "allgather_sequential",
)

_SAME_NAME_IN_ZERO = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)

# Public methods of the interface and the feature each belongs to.
_UNBUILT: dict[str, str] = {
    "load_moe_state_dict": "mixture-of-experts checkpoints",
    "swap_tensor_config": "a section of its own for swapping (zero_optimization.offload_*.nvme_path and aio say it)",
    "zenflow_config": "ZenFlow",
    "is_first_weights_partition_group": "a test for groups of secondary partitions",
    "register_compile_pass": "DeepCompile",
    "get_compile_time": "DeepCompile",
    "get_deepcompile_backend": "DeepCompile",
    "get_deepspeed_compile_backend": "DeepCompile",
    "get_autosp_backend": "automatic sequence parallelism",
    "get_autotp_backend": "automatic tensor parallelism",
    "compile_zero_optimization_stage": "DeepCompile",
    "compile_autosp": "automatic sequence parallelism",
    "compile_autotp": "automatic tensor parallelism",
    "uses_parallelization_pass_only": "DeepCompile",
    "print_forward_breakdown": "mixture of experts",
    "set_data_post_process_func": "data efficiency",
    "set_custom_curriculum_learning_schedule": "curriculum learning",
    "data_sampling_enabled": "data efficiency",
    "data_sampling_config": "data efficiency",
    "curriculum_learning_enabled": "curriculum learning",
    "curriculum_learning_config": "curriculum learning",
    "random_ltd_enabled": "random layer-token dropping",
    "random_ltd_config": "random layer-token dropping",
    "random_ltd_initialize": "random layer-token dropping",
    "autotuning_enabled": "autotuning",
    "autotuning_start_profile_step": "autotuning",
    "autotuning_end_profile_step": "autotuning",
    "autotuning_metric_path": "autotuning",
    "autotuning_model_info_path": "autotuning",
    "autotuning_metric": "autotuning",
    "autotuning_profile_model_info": "autotuning",
    "sparse_allreduce": "sparse gradients",
    "sparse_allreduce_bucket": "sparse gradients",
    "sparse_allreduce_no_retain": "sparse gradients",
    "sparse_all_gather": "sparse gradients",
    "all_gather_scalar": "sparse gradients",
    "allreduce_bucket": "reduction by hand (the reducer owns the buckets)",
    "allreduce_and_copy": "reduction by hand (the reducer owns the buckets)",
    "allreduce_no_retain": "reduction by hand (the reducer owns the buckets)",
    "buffered_allreduce_fallback": "reduction by hand (the reducer owns the buckets)",
    "clip_fp32_gradients": "clipping by hand (the optimizer clips)",
    "get_optimizer_configuration": "optimizers over native kernels",
}


class EngineConfigAccessors:
    """Public read-only methods of the engine; each takes no argument and reads ``self._config``."""

    _config: DeepSpeedConfig


def _accessor(name: str, read: Read) -> Callable[[EngineConfigAccessors], Any]:
    def get(self: EngineConfigAccessors) -> Any:
        return read(self._config)

    get.__name__ = name
    get.__doc__ = f"The effective value of the configuration that ``{name}`` names."
    return get


def _unbuilt(name: str, feature: str) -> Callable[..., Any]:
    def refuse(self: EngineConfigAccessors, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"engine.{name}: {feature} is not built yet")

    refuse.__name__ = name
    refuse.__doc__ = f"Not built yet: {feature}."
    return refuse


def _zero_field(field: str) -> Read:
    return lambda config: getattr(config.zero_config, field)


for _name, _read in _ACCESSORS.items():
    setattr(EngineConfigAccessors, _name, _accessor(_name, _read))
for _field in _ZERO_FIELDS:
    setattr(EngineConfigAccessors, f"zero_{_field}", _accessor(f"zero_{_field}", _zero_field(_field)))
for _field in _SAME_NAME_IN_ZERO:
    setattr(EngineConfigAccessors, _field, _accessor(_field, _zero_field(_field)))
for _name, _feature in _UNBUILT.items():
    setattr(EngineConfigAccessors, _name, _unbuilt(_name, _feature))
