# SPDX-License-Identifier: Apache-2.0
"""From what the user gave (object, callable, config) to a torch optimizer, and from that to the optimizer of a
stage."""

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.ops.lamb import FusedLamb
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_checks import offloads
from deepspeed.runtime.config_utils import constructor_arguments
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer, ReplicatedOptimizer
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.reducer import ReductionSettings
from deepspeed.runtime.named_optimizers import named_optimizer
from deepspeed.runtime.torch_autocast import autocast_dtype_of
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.optimizer_pieces import partitioned_tensors
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_optimizer import PartitionedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZeRORuntimeException, is_zero_supported_optimizer
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

FUSED_ADAM = "FusedAdam"  # of this package or of apex
CPU_OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion")


def basic_optimizer(
    client: Any, model_parameters: Iterable[Any] | None, model: torch.nn.Module, config: DeepSpeedConfig
) -> torch.optim.Optimizer | None:
    """The torch optimizer: the client's object, else the client's callable, else the one of the config; None without
    any.

    Raises:
        TypeError: the client's optimizer is neither a torch optimizer nor a callable.
        AssertionError: the config names an optimizer that does not exist.
        NotImplementedError: the config names one that is not built.
        DeepSpeedConfigTypeError: the config gives it an argument that it does not take, or lacks one.
        ZeRORuntimeException: see ``_check_runs_offloaded``.
    """
    if isinstance(client, torch.optim.Optimizer):
        _check_runs_offloaded(client, config)
        return client
    if client is None and config.optimizer_name is None:
        return None
    parameters = _parameters(model_parameters, model)
    if client is None:
        return named_optimizer(config.optimizer_name, parameters, model, config)
    if not callable(client):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a callable that makes one, not {type(client).__name__}"
        )
    optimizer = client(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer callable returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    _check_runs_offloaded(optimizer, config)
    return optimizer


def _check_runs_offloaded(optimizer: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    """ZeRORuntimeException for a client's optimizer that is not made for the host, while ``offload_optimizer`` and
    ``zero_force_ds_cpu_optimizer`` are on."""
    if not (offloads(config.zero_config.offload_optimizer) and config.zero_force_ds_cpu_optimizer):
        return
    if not any(cls.__name__ in CPU_OPTIMIZERS for cls in type(optimizer).__mro__):
        raise ZeRORuntimeException(
            f"zero_optimization.offload_optimizer steps on the host, and {type(optimizer).__name__} is none of"
            f" {', '.join(CPU_OPTIMIZERS)}, which are made for it. Pass one of them, or name the optimizer in the"
            ' config; "zero_force_ds_cpu_optimizer": false lets any torch optimizer step on the host'
        )


def _parameters(model_parameters: Iterable[Any] | None, model: torch.nn.Module) -> list[Any]:
    if isinstance(model_parameters, torch.nn.Module):
        model_parameters = model_parameters.parameters()
    given = list(model.parameters() if model_parameters is None else model_parameters)
    return [item for item in given if isinstance(item, dict) or item.requires_grad]


def stage_optimizer(
    basic: torch.optim.Optimizer,
    module: torch.nn.Module,
    config: DeepSpeedConfig,
    schedule: AccumulationSchedule,
    group: Any,
    mpu: Any,
) -> ZeROOptimizer:
    """The optimizer of the configured stage around ``basic``.

    Raises:
        AssertionError: an optimizer that is not known to work on flat shards, without
            ``zero_allow_untested_optimizer``.
    """
    result = _stage_optimizer(basic, module, config, schedule, group, mpu)
    if isinstance(basic, (FusedLamb, MuonWithAuxAdam)) and isinstance(result, PartitionedOptimizer):
        reducer = result.reducer
        parts = partitioned_tensors(reducer.layout, result.weights.stepped, reducer.group, reducer.device)
        basic.use_partitioned(parts)
    return result


def _stage_optimizer(
    basic: torch.optim.Optimizer,
    module: torch.nn.Module,
    config: DeepSpeedConfig,
    schedule: AccumulationSchedule,
    group: Any,
    mpu: Any,
) -> ZeROOptimizer:
    param_names = {parameter: name for name, parameter in module.named_parameters()}
    if config.zero_optimization_stage == 0:
        return _replicated(basic, param_names, config, schedule, group, mpu)
    if not is_zero_supported_optimizer(basic) and not config.zero_allow_untested_optimizer:
        raise AssertionError(
            f"{type(basic).__name__} has not been tested with ZeRO, which steps on flat shards instead of whole"
            " parameters."
            ' If it works elementwise, set "zero_allow_untested_optimizer": true'
        )
    if config.zero_optimization_stage == 3:
        offload = parameter_offload(module, config, group)
        try:
            return DeepSpeedZeroOptimizer_Stage3(
                module,
                basic,
                param_names,
                parameter_offload=offload,
                offload_param_config=config.zero_config.offload_param,
                **_partitioned_settings(config, schedule, group, mpu),
            )
        except BaseException:
            offload.destroy()  # an engine that never came to be must not leave its hooks on the model
            raise
    zero = config.zero_config
    cls = BF16_Optimizer if _accumulates_bf16_in_fp32(config) else DeepSpeedZeroOptimizer
    return cls(
        basic,
        param_names,
        use_multi_rank_bucket_allreduce=zero.use_multi_rank_bucket_allreduce,
        allgather_bucket_size=zero.allgather_bucket_size,
        allgather_partitions=zero.allgather_partitions,
        gradient_average=config.gradient_allreduce_op == "mean",
        ignore_unused_parameters=zero.ignore_unused_parameters,
        partition_grads=config.zero_optimization_stage == 2,
        round_robin_gradients=zero.round_robin_gradients,
        parameter_alignment=zero.parameter_alignment,
        compute_grad_norm=zero.compute_grad_norm,
        **_partitioned_settings(config, schedule, group, mpu),
    )


def _partitioned_settings(
    config: DeepSpeedConfig, schedule: AccumulationSchedule, group: Any, mpu: Any
) -> dict[str, Any]:
    """Arguments that the optimizers of stages 1, 2 and 3 share."""
    zero, fp16 = config.zero_config, config.float16_config
    return {
        "loss_scaler": _loss_scaler(config),
        "contiguous_gradients": zero.contiguous_gradients,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "dp_process_group": group,
        "reduce_scatter": zero.reduce_scatter,
        "overlap_comm": bool(zero.overlap_comm),
        "mpu": mpu,
        "clip_grad": config.gradient_clipping,
        "check_grad_overflow": _checks_overflow(config),
        "gradient_accumulation_dtype": accumulation_dtype(config),
        "communication_data_type": config.communication_data_type,
        "postscale_gradients": not config.prescale_gradients,
        "gradient_predivide_factor": config.gradient_predivide_factor,
        "gradient_accumulation_steps": schedule.steps,
        "fp16_master_weights_and_gradients": fp16.fp16_master_weights_and_grads,
        "bf16_master_weights_and_gradients": config.bfloat16_config.bf16_master_weights_and_grads,
        "bf16_optimizer_states": config.bfloat16_config.bf16_optimizer_states,
        "offload_optimizer_config": zero.offload_optimizer,
        "aio_config": config.aio_config,
        "sub_group_size": zero.sub_group_size,
        "schedule": schedule,
    }


def _loss_scaler(config: DeepSpeedConfig) -> LossScalerBase:
    """The factor on the loss: as ``fp16`` says for fp16 models; for fp16 autocast dynamic, with the same settings."""
    fp16 = config.float16_config
    half = fp16.enabled or autocast_dtype_of(config) is torch.float16
    dtype = torch.float16 if half else torch.float32
    return CreateLossScaler(dtype, fp16.loss_scale, half and fp16.loss_scale == 0, fp16.dynamic_loss_scale_args())


def parameter_offload(module: torch.nn.Module, config: DeepSpeedConfig, group: Any) -> DeepSpeedZeRoOffload:
    """The hooks that gather a partitioned model's weights, set after its leaf modules are marked."""
    zero = config.zero_config
    apply_zero_leaf_module_config(module, zero.leaf_module)
    return DeepSpeedZeRoOffload(
        module,
        prefetch_bucket_size=zero.prefetch_bucket_size,
        max_reuse_distance=zero.max_reuse_distance,
        max_live_parameters=zero.max_live_parameters,
        param_persistence_threshold=zero.param_persistence_threshold,
        model_persistence_threshold=zero.model_persistence_threshold,
        dp_process_group=group,
        zero_hpz_partition_size=zero.zero_hpz_partition_size,
        zero_module_granularity_threshold=zero.module_granularity_threshold,
        use_all_reduce_for_fetch_params=zero.use_all_reduce_for_fetch_params,
        allgather_sequential=zero.allgather_sequential,
        offload_param_config=zero.offload_param,
        aio_config=config.aio_config,
    )


def _replicated(
    basic: torch.optim.Optimizer,
    param_names: dict[torch.nn.Parameter, str],
    config: DeepSpeedConfig,
    schedule: AccumulationSchedule,
    group: Any,
    mpu: Any,
) -> ReplicatedOptimizer:
    settings = ReductionSettings(
        every_backward=False,
        settles_in_backward=True,
        overlap=bool(config.zero_config.overlap_comm),
        persistent_buffers=config.zero_config.contiguous_gradients,
        comm_dtype=config.communication_data_type,
        accum_dtype=accumulation_dtype(config),
        mean=config.gradient_allreduce_op == "mean",
        predivide=config.gradient_predivide_factor,
        prescale=config.prescale_gradients,
    )
    low_precision = config.float16_config.enabled or config.bfloat16_config.enabled
    cls = _sixteen_bit_class(basic) if low_precision else ReplicatedOptimizer
    return cls(
        basic,
        param_names,
        group,
        schedule,
        settings,
        config.zero_config.reduce_bucket_size,
        _loss_scaler(config),
        clip_grad=config.gradient_clipping,
        check_overflow=_checks_overflow(config),
        mpu=mpu,
    )


def accumulation_dtype(config: DeepSpeedConfig) -> torch.dtype:
    """dtype in which gradients are accumulated: what the config says, else that of bf16 masters, else fp32."""
    narrow = config.bfloat16_config.bf16_master_weights_and_grads
    return config.grad_accum_dtype or (torch.bfloat16 if narrow else torch.float32)


def _accumulates_bf16_in_fp32(config: DeepSpeedConfig) -> bool:
    """Whether stage 1 goes by the name of ``BF16_Optimizer``, which is told apart by nothing but its attributes."""
    stage_1 = config.zero_optimization_stage == 1 and not offloads(config.zero_config.offload_optimizer)
    return stage_1 and config.bfloat16_config.enabled and config.grad_accum_dtype is torch.float32


def _sixteen_bit_class(basic: torch.optim.Optimizer) -> type[FP16_UnfusedOptimizer]:
    return FP16_Optimizer if type(basic).__name__ == FUSED_ADAM else FP16_UnfusedOptimizer


def _checks_overflow(config: DeepSpeedConfig) -> bool:
    return not config.bfloat16_config.enabled or config.bfloat16_config.check_grad_overflow


def lr_scheduler(client: Any, basic: torch.optim.Optimizer | None, wrapped: Any, config: DeepSpeedConfig) -> Any:
    """The scheduler: the client's object, the client's callable applied to the basic optimizer, or that of the config.

    Raises:
        AssertionError: a scheduler without an optimizer, or a type that does not exist.
        DeepSpeedConfigTypeError: the config gives the scheduler an argument that it does not take, or lacks one.
    """
    if client is not None:
        if basic is None:
            raise AssertionError("an lr_scheduler was given without an optimizer")
        is_factory = callable(client) and not isinstance(client, torch.optim.lr_scheduler.LRScheduler)
        return client(basic) if is_factory and not hasattr(client, "step") else client
    name = config.scheduler_name
    if name is None or basic is None:
        return None
    params, where = config.scheduler_params or {}, "scheduler.params"
    if name in lr_schedules.VALID_LR_SCHEDULES:
        cls = getattr(lr_schedules, name)
        return cls(wrapped, **constructor_arguments(cls, params, where))
    cls = getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(cls, type):
        raise AssertionError(
            f"scheduler.type {name!r} is neither one of {lr_schedules.VALID_LR_SCHEDULES} nor a class of"
            " torch.optim.lr_scheduler"
        )
    return cls(basic, **constructor_arguments(cls, params, where))
