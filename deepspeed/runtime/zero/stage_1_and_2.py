# SPDX-License-Identifier: Apache-2.0
"""ZeRO stages 1 and 2: optimizer state (1) and gradients (2) partitioned over the data-parallel ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.base_optimizer import make_records
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase
from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.autograd_internals import increment_versions
from deepspeed.runtime.gradients.layout import FlatPartition, make_flat_groups, round_robin
from deepspeed.runtime.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.runtime.weight_watch import WeightWatch
from deepspeed.runtime.zero.flat_weights import FlatWeights, WeightStaging
from deepspeed.runtime.zero.memory_estimators import (  # noqa: F401 - looked for here by users
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.memory_estimators import model_to_params_zero2 as model_to_params  # noqa: F401
from deepspeed.runtime.zero.offload_states import (  # noqa: F401 - some are looked for here by users
    Movable,
    movable_data,
    offload_adam_states,
    reload_adam_states,
)
from deepspeed.runtime.zero.optimizer_offload import active, bucket_size, host_memory, place_groups, state_homes
from deepspeed.runtime.zero.partitioned_optimizer import (
    PartitionedOptimizer,
    master_dtypes,
    refuse_unbuilt,
    takes_parts,
)
from deepspeed.runtime.zero.stage_1_and_2_surface import PartitionedOptimizerSurface

PADDING_PER_RANK = 2  # a slice is a multiple of so many elements
ALIGNED_BYTES = 16  # with parameter_alignment


class DeepSpeedZeroOptimizer(PartitionedOptimizerSurface, PartitionedOptimizer):
    """Partitions optimizer state, and with ``partition_grads`` gradients, in contiguous slices of each parameter group.

    The model's weights become views of one flat tensor per group and dtype. The inner optimizer sees one flat fp32
    tensor per parameter group (one per dtype when a group mixes dtypes): this rank's slice of the master weights.

    Args:
        init_optimizer: torch optimizer over parameters of the model, without state.
        param_names: name of each model parameter, in the model's order.
        partition_grads: reduce and free gradients in each backward (stage 2); otherwise only at the boundary (stage 1).
        schedule: the engine's accumulation schedule; made here from ``gradient_accumulation_steps`` when absent.
        sub_group_size: with an offloaded optimizer, a flat group ends where a rank's part reaches so many elements.
        loss_scaler: made here from the arguments with that name in them when absent.

    The other arguments are named as in the configuration. Those of features that are not built raise
    NotImplementedError.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: dict[torch.nn.Parameter, str],
        timers: Any = None,
        optimizer_params: dict[str, Any] | None = None,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500000000,
        use_multi_rank_bucket_allreduce: bool = True,
        allgather_bucket_size: int = 5000000000,
        dp_process_group: Any = None,
        expert_parallel_group: Any = None,
        expert_data_parallel_group: Any = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        offload_optimizer_config: Any = None,
        zenflow_config: Any = None,
        mpu: Any = None,
        clip_grad: float = 0.0,
        gradient_accumulation_dtype: torch.dtype = torch.float32,
        communication_data_type: torch.dtype | None = None,
        postscale_gradients: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average: bool = True,
        gradient_accumulation_steps: int = 1,
        ignore_unused_parameters: bool = True,
        partition_grads: bool = True,
        round_robin_gradients: bool = False,
        parameter_alignment: bool = False,
        has_moe_layers: bool = False,
        fp16_master_weights_and_gradients: bool = False,
        bf16_master_weights_and_gradients: bool = False,
        bf16_optimizer_states: bool = False,
        elastic_checkpoint: bool = False,
        check_grad_overflow: bool = True,
        compute_grad_norm: bool = True,
        schedule: AccumulationSchedule | None = None,
        loss_scaler: LossScalerBase | None = None,
        allgather_partitions: bool = True,
        aio_config: Any = None,
        sub_group_size: int = 1000000000,
    ) -> None:
        refuse_unbuilt(
            "stages 1 and 2",
            zenflow=zenflow_config is not None,
            moe_layers=has_moe_layers,
            fp16_master_weights_and_grads=fp16_master_weights_and_gradients,
            elastic_checkpoint=elastic_checkpoint,
        )
        group = dp_process_group if dp_process_group is not None else dist.get_world_group()
        channel = ControlChannel(group)
        record_groups, frozen = make_records(init_optimizer.param_groups, param_names)
        if round_robin_gradients:
            record_groups = [round_robin(records, channel.world_size) for records in record_groups]
        flat_groups = make_flat_groups(record_groups)
        offload = active(offload_optimizer_config)
        if offload:
            limit = max(1, sub_group_size)
            flat_groups = place_groups(flat_groups, offload_optimizer_config, channel.world_size, limit)
        layout = FlatPartition(
            flat_groups,
            channel.rank,
            channel.world_size,
            bucket_size(offload_optimizer_config, reduce_bucket_size),
            reduce_scatter,
            aligned_bytes=ALIGNED_BYTES if parameter_alignment else 0,
            padding_multiple=PADDING_PER_RANK,
        )
        reducer = GradientReducer(
            layout,
            layout.make_ledger(),
            group,
            channel,
            schedule or AccumulationSchedule(gradient_accumulation_steps),
            ReductionSettings(
                every_backward=partition_grads or offload,  # else they would wait on the device
                overlap=overlap_comm,
                persistent_buffers=contiguous_gradients,
                comm_dtype=communication_data_type,
                accum_dtype=gradient_accumulation_dtype,
                mean=gradient_average,
                predivide=gradient_predivide_factor,
                prescale=not postscale_gradients,
                host_memory=host_memory(offload_optimizer_config),
                shard_in_parts=takes_parts(init_optimizer),
            ),
        )
        scaler = loss_scaler or CreateLossScaler(
            layout.first_dtype, static_loss_scale, dynamic_loss_scale, dynamic_loss_args
        )
        super().__init__(
            init_optimizer, reducer, param_names, frozen, scaler, clip_grad, check_grad_overflow, compute_grad_norm, mpu
        )
        self.partition_gradients = partition_grads
        self.reduce_scatter = reduce_scatter
        self.allgather_partitions = allgather_partitions
        self.allgather_bucket_size = allgather_bucket_size
        self._take_over(
            FlatWeights(
                layout,
                *master_dtypes(bf16_master_weights_and_gradients, bf16_optimizer_states),
                homes=state_homes(flat_groups, offload_optimizer_config, aio_config),
                staging=WeightStaging(reducer.settings.host_memory, reducer.order),
            )
        )
        self._watch = WeightWatch(reducer.ledger.records)

    def _gather_weights(self, index: int) -> None:
        flat = self.weights.flats[index]
        if self.allgather_partitions:
            collectives.all_gather_slices(
                flat, self.reducer.channel.rank, self.dp_process_group, self.allgather_bucket_size
            )
        else:
            collectives.broadcast_slices(flat, self.dp_process_group)

    def _movable_weights(self) -> list[Movable]:
        trained = {record.parameter for record in self.reducer.ledger.records}
        frozen = [parameter for parameter in self.param_names if parameter not in trained]
        return super()._movable_weights() + [movable_data(parameter) for parameter in frozen]

    def _weights_written(self) -> None:
        # graphs that saved the old values are stale
        increment_versions([record.parameter for record in self.reducer.ledger.records])
        self._watch.settle()

    def _take_over_written(self) -> None:
        written = self._watch.written()
        if written:
            self.weights.take_over(set(written))

    def refresh_fp32_params(self) -> None:
        super().refresh_fp32_params()
        self._watch.settle()
