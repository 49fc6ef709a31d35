# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: parameters partitioned over the data-parallel ranks, as well as gradients and optimizer state.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.base_optimizer import GradientNorm, forget_autocast_copies, make_records
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.layout import PerParameter, make_flat_groups
from deepspeed.runtime.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.runtime.weight_watch import take_over
from deepspeed.runtime.zero.flat_weights import ShardWeights, WeightStaging
from deepspeed.runtime.zero.memory_estimators import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.memory_estimators import model_to_params_zero3 as model_to_params
from deepspeed.runtime.zero.offload_states import Movable
from deepspeed.runtime.zero.optimizer_offload import bucket_size, host_memory, place_groups, shard_memory, state_homes
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.runtime.zero.partitioned_optimizer import (
    PartitionedOptimizer,
    master_dtypes,
    refuse_unbuilt,
    takes_parts,
)
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of
from deepspeed.runtime.zero.stage3_surface import Stage3Surface
from deepspeed.utils.tensor_fragment import ParameterLink

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
    "unwrap_model_for_generation",
]


class DeepSpeedZeroOptimizer_Stage3(Stage3Surface, PartitionedOptimizer):
    """Steps on this rank's shards of all parameters.

    The inner optimizer sees one flat fp32 tensor per sub-group: this rank's shards of the sub-group's parameters, end
    to end.

    Args:
        module: all of whose parameters are partitioned (``convert_to_zero_parameters``) over ``dp_process_group``.
        init_optimizer: torch optimizer over parameters of ``module``, without state.
        param_names: name of each model parameter, in the model's order.
        sub_group_size: a sub-group ends where its shards on one rank reach so many elements.
        schedule: the engine's accumulation schedule; made here from ``gradient_accumulation_steps`` when absent.
        loss_scaler: made here from the arguments with that name in them when absent.
        parameter_offload: the hooks on ``module``, where they exist already.

    The other arguments are named as in the configuration. Those of features that are not built raise
    NotImplementedError.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: torch.optim.Optimizer,
        param_names: dict[torch.nn.Parameter, str],
        timers: Any = None,
        ds_config: Any = None,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500000000,
        prefetch_bucket_size: int = 50000000,
        max_reuse_distance: int = 1000000000,
        max_live_parameters: int = 1000000000,
        param_persistence_threshold: int = 100000,
        model_persistence_threshold: int = 2**63 - 1,
        dp_process_group: Any = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        offload_optimizer_config: Any = None,
        offload_param_config: Any = None,
        zenflow_config: Any = None,
        sub_group_size: int = 1000000000000,
        offload_ratio: float = 0.0,
        mpu: Any = None,
        clip_grad: float = 0.0,
        gradient_accumulation_dtype: torch.dtype = torch.float32,
        communication_data_type: torch.dtype | None = None,
        fp16_master_weights_and_gradients: bool = False,
        bf16_master_weights_and_gradients: bool = False,
        bf16_optimizer_states: bool = False,
        postscale_gradients: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_accumulation_steps: int = 1,
        elastic_checkpoint: bool = False,
        aio_config: Any = None,
        all2all_process_group: Any = None,
        zero_hpz_partition_size: int = 1,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        zero_module_granularity_threshold: int = 0,
        log_trace_cache_warnings: bool = False,
        enable_sanity_checks: bool = False,
        cpuadam_cores_perc: float = 0.8,
        save_muon_momentum_buffer_in_memory: bool = False,
        check_grad_overflow: bool = True,
        schedule: AccumulationSchedule | None = None,
        loss_scaler: LossScalerBase | None = None,
        parameter_offload: DeepSpeedZeRoOffload | None = None,
    ) -> None:
        refuse_unbuilt(
            "stage 3",
            zenflow=zenflow_config is not None,
            fp16_master_weights_and_grads=fp16_master_weights_and_gradients,
            elastic_checkpoint=elastic_checkpoint,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
        )
        group = dp_process_group if dp_process_group is not None else dist.get_world_group()
        self.parameter_offload = parameter_offload or DeepSpeedZeRoOffload(
            module,
            prefetch_bucket_size=prefetch_bucket_size,
            max_reuse_distance=max_reuse_distance,
            max_live_parameters=max_live_parameters,
            param_persistence_threshold=param_persistence_threshold,
            model_persistence_threshold=model_persistence_threshold,
            dp_process_group=group,
            zero_hpz_partition_size=zero_hpz_partition_size,
            zero_module_granularity_threshold=zero_module_granularity_threshold,
            offload_param_config=offload_param_config,
            aio_config=aio_config,
        )
        channel = ControlChannel(group)
        record_groups, frozen = make_records(init_optimizer.param_groups, param_names)
        flat_groups = place_groups(
            make_flat_groups(record_groups), offload_optimizer_config, channel.world_size, max(1, sub_group_size)
        )
        numel = bucket_size(offload_optimizer_config, reduce_bucket_size)
        layout = PerParameter(flat_groups, channel.rank, channel.world_size, numel, reduce_scatter)
        reducer = GradientReducer(
            layout,
            layout.make_ledger(),
            group,
            channel,
            schedule or AccumulationSchedule(gradient_accumulation_steps),
            ReductionSettings(
                every_backward=True,
                gathers_in_backward=True,
                overlap=overlap_comm,
                persistent_buffers=contiguous_gradients,
                comm_dtype=communication_data_type,
                accum_dtype=gradient_accumulation_dtype,
                predivide=gradient_predivide_factor,
                prescale=not postscale_gradients,
                host_memory=host_memory(offload_optimizer_config),
                shard_in_parts=takes_parts(init_optimizer),
            ),
        )
        scaler = loss_scaler or CreateLossScaler(
            layout.first_dtype, static_loss_scale, dynamic_loss_scale, dynamic_loss_args
        )
        super().__init__(init_optimizer, reducer, param_names, frozen, scaler, clip_grad, check_grad_overflow, mpu=mpu)
        whole = self.parameter_offload.parameters_of_whole_units()
        reducer.hold_back(record for record in reducer.ledger.records if record.parameter in whole)
        self.module = module
        self.sub_group_size = sub_group_size
        self.reduce_scatter = reduce_scatter
        self._take_over(
            ShardWeights(
                layout,
                *master_dtypes(bf16_master_weights_and_gradients, bf16_optimizer_states),
                homes=state_homes(flat_groups, offload_optimizer_config, aio_config),
                staging=WeightStaging(reducer.settings.host_memory, reducer.order),
                host=shard_memory(offload_param_config),
                in_files=self.parameter_offload.store is not None,
            )
        )

    # ------------------------------------------------------------------ the step

    def settle_gradients(self) -> None:
        super().settle_gradients()
        self._check_window()

    def _window_ended(self) -> None:
        self.parameter_offload.end_window()

    def _check_window(self) -> None:
        """Ranks that gathered different weights under one another's name must not step. It is asked when no rank
        reduces any more, since a backward on some ranks alone asks the others through the same channel."""
        for ranks in self.parameter_offload.gathering_ranks():
            ranks.check_order(self.reducer.channel)

    @contextmanager
    def _writing_weights(self) -> Iterator[None]:
        for device in {shard.device: None for shard in self.weights.shards() if shard.away}:
            for ranks in self.parameter_offload.gathering_ranks():
                ranks.order(device).await_all()  # what was gathered ahead and not used may still be read
        if self.parameter_offload.store is not None:
            self.parameter_offload.store.retry()
        with super()._writing_weights():
            yield

    def _weights_written(self) -> None:
        """Weights that stay whole are gathered again."""
        self.parameter_offload.weights_written(self.weights.shards())

    @torch.no_grad()
    def take_changed_weights(self, link: ParameterLink, former: torch.Tensor) -> None:
        """Let the master of a parameter follow its shard where that differs from ``former``. Elsewhere the master
        keeps what it has beyond the precision of the shard."""
        shard = shard_of(link.record.parameter)
        numel = link.end - link.begin
        with self.resident(link):
            take_over(self.own_master(link), shard.shard[:numel], former[:numel])

    def let_go_of_whole_weights(self) -> None:
        self.parameter_offload.partition_all_parameters()

    def _movable_weights(self) -> list[Movable]:
        trained = set(self.weights.shards())
        frozen = [shard for shard in self.parameter_offload.shards if shard not in trained and not shard.away]
        own = [] if self.offload_param else super()._movable_weights()
        return own + [Movable(functools.partial(_shard_tensor, shard), shard.replace_shard) for shard in frozen]

    def write_weight(self, link: ParameterLink, value: torch.Tensor) -> None:
        shard_of(link.record.parameter).write(value)
        forget_autocast_copies()

    @torch.no_grad()
    def write_local_weight(self, link: ParameterLink, value: torch.Tensor) -> None:
        """Give this rank's shard of a parameter the values that its master was given. Collective."""
        shard = shard_of(link.record.parameter)
        shard.await_copies()
        mine = shard.shard
        shard.put(mine.copy_(value))
        self.parameter_offload.weights_written([shard])
        forget_autocast_copies()

    def public_norm(self, norm: GradientNorm | None) -> Any:
        """0-dim float64; with an offloaded optimizer 0-dim float32 on the host."""
        if norm is None or not self.reducer.rests_on_host:
            return None if norm is None else norm.tensor
        return torch.tensor(norm.read(), dtype=torch.float32)

    def destroy(self) -> None:
        """Remove hooks and free buffers and masters; the model's parameters stay partitioned."""
        super().destroy()
        self.parameter_offload.destroy()


def _shard_tensor(shard: ShardedParameter) -> torch.Tensor:
    return shard.shard


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The bare module of an engine with all weights whole and without gathering around modules, for generation."""
    offload = getattr(model.optimizer, "parameter_offload", model.optimizer)
    if not isinstance(offload, DeepSpeedZeRoOffload):
        yield model.module
        return
    with GatheredParameters(model.module.parameters()):
        offload.remove_hooks()
        try:
            yield model.module
        finally:
            offload.setup_zero_stage3_hooks()
