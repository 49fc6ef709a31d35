# SPDX-License-Identifier: Apache-2.0
"""Where this package departs from the published names, on purpose, and why. The conformance test accepts nothing else,
and refuses an entry that has become untrue. Patterns are those of ``fnmatch`` over dotted names. They let nothing go
unnoticed: docs/coverage.md lists each absent name, and a test compares the page."""

_ADMIN = "internal name of the published module"
_BUCKETS = "buckets, hooks and partitions: the reducer (docs/design.md) has its own"
_ONE_STEP = "pieces of the published step; here the step of all stages is one"
_OWN_STATES = "masters and optimizer state rest in homes (docs/design.md)"
_HANDLES = "handles of gathers: `sharded_parameter` has its own"
_MADE_BY_ENGINE = "made by `deepspeed.initialize` from other parts"
_ONE_SCALER = "one loss scale for every stage"
_DATASTATES = "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine"
_UNIVERSAL = "conversion needs no temporary files"

# Names that do not exist here; asking for one is Python's AttributeError or ImportError, which names it.
ABSENT = {
    "deepspeed.accelerator.*": _ADMIN,
    "deepspeed.checkpoint.constants.*": "entries of expert and tensor parallel checkpoints",
    "deepspeed.checkpoint.ds_to_universal.*": _UNIVERSAL,
    "deepspeed.comm.CCLBackend": "a backend beside torch's",
    "deepspeed.comm.comm.*_backend": "a backend beside torch's",
    "deepspeed.comm.torch.*": "switching collectives off, and staging them through the host, for measurements",
    "deepspeed.ops.*.multi_tensor_applier": "the launcher of fused kernels under this name",
    "deepspeed.ops.op_builder.*": _ADMIN,
    "deepspeed.profiling.flops_profiler.*": "operators are counted by torch's own counter, nothing is patched",
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.*": "`ZeROOptimizer.backward_state` (BackwardHookStateManager) and"
    " the accumulation schedule have it",
    "deepspeed.runtime.bf16_optimizer.*": _BUCKETS,
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine.*": "the writer is a thread, not a process",
    "deepspeed.runtime.compiler.compile": "the function of torch under another name",
    "deepspeed.runtime.compiler.compile_autoep_non_moe_regions": "mixture of experts",
    "deepspeed.runtime.compiler.compiled_autograd": "gradients are taken over in an ordinary backward",
    "deepspeed.runtime.engine.*": _ADMIN,
    "deepspeed.runtime.fp16.loss_scaler.*": _ONE_SCALER,
    "deepspeed.runtime.fp16.fused_optimizer.*": _ONE_STEP,
    "deepspeed.runtime.fp16.unfused_optimizer.*": _ONE_STEP,
    "deepspeed.runtime.keep_in_fp32.keep_buffers_in_fp32": "`data_types.buffer_dtype` says what buffers are",
    "deepspeed.runtime.tensor_parallel.config.*": "tensor parallelism",
    "deepspeed.runtime.utils.*": "mixture of experts, offload of Adam by hand, and steps of the published optimizers",
    "deepspeed.runtime.zero.offload_config.*": "`pipeline` follows from its two halves by itself",
    "deepspeed.runtime.zero.partition_parameters.*": _HANDLES,
    "deepspeed.runtime.zero.partitioned_param_coordinator.*": _HANDLES,
    "deepspeed.runtime.zero.stage3.*": _BUCKETS,
    "deepspeed.runtime.zero.stage_1_and_2.*": _BUCKETS,
    "deepspeed.runtime.zero.utils.*": _BUCKETS,
    "deepspeed.utils.*hp_params*": _OWN_STATES,
    "deepspeed.utils.get_hp_fragment_mapping": _OWN_STATES,
    "deepspeed.utils.map_to_flat_opt_states": _OWN_STATES,
    "deepspeed.utils.tensor_fragment.*": _OWN_STATES,
}

# Names that exist and raise NotImplementedError when called; besides those of `engine_config._UNBUILT`.
REFUSING = {
    "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.capture_to_graph": "graph capture",
    "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.replay_graph": "graph replay",
    "deepspeed.env_report.installed_cann_version": "Ascend",
    "deepspeed.launcher.runner.run_autotuning": "--autotuning",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam.rollback_subgroup": "rollback_subgroup",
    "deepspeed.ops.op_builder.builder.OpBuilder.get_rocm_gpu_arch": "ROCm",
    "deepspeed.ops.op_builder.builder.OpBuilder.get_rocm_wavefront_size": "ROCm",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer.load_state_dict": "load_state_dict",
    f"{_DATASTATES}.DataStatesCheckpointEngine.__init__": "DataStates",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer.load_state_dict": "load_state_dict",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.load_state_dict": "load_state_dict",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.load_state_dict": "load_state_dict",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.load_state_dict": "load_state_dict",
    "deepspeed.utils.groups._get_local_all_to_all_group": "all-to-all",
}

# Names that exist with another signature or value.
DIFFERING = {
    "deepspeed.comm.comm.*": "`debug` is the caller's name there, found once, when the module is loaded",
    "deepspeed.ops.op_builder.all_ops.op_builder_dir": "one folder of builders for every device",
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.__init__": _MADE_BY_ENGINE,
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.backward": "the keywords are named",
    "deepspeed.runtime.config_utils.DeepSpeedConfigModel.serialize_torch_dtype": "a method that pydantic calls",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer.__init__": _MADE_BY_ENGINE,
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer.backward": "as for every stage; there is no `create_graph`",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig.__init__": _ONE_SCALER,
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.__init__": _MADE_BY_ENGINE,
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.backward": "as for every stage; there is no"
    " `create_graph`",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.__init__": _MADE_BY_ENGINE,
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__init__": _MADE_BY_ENGINE,
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__init__": "None is the gradient's own dtype",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.__init__": "None is the gradient's own dtype",
    "deepspeed.utils.zero_to_fp32.OUTPUT_DTYPE_NAMES": "more spellings",
}
