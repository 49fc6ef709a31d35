# SPDX-License-Identifier: Apache-2.0
"""Attributes of the stage 3 optimizer that outside code reads. All of them are views of state that lives elsewhere."""

from typing import Any

import torch

from deepspeed.runtime.gradients.layout import FlatGroup
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.utils.tensor_fragment import ParameterLink


class Stage3Surface:
    """Read-only views named by the interface, and accessors by parameter; mixed into
    ``DeepSpeedZeroOptimizer_Stage3``."""

    offload_optimizer = False
    offload_param = False
    optimizer_swapper = None
    partition_gradients = True

    reducer: Any
    weights: Any
    parameter_offload: Any
    dp_process_group: Any

    @property
    def _groups(self) -> list[FlatGroup]:
        return self.reducer.layout.groups

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Parameters of each sub-group."""
        return [[record.parameter for record in group.records] for group in self._groups]

    @property
    def fp16_partitioned_groups(self) -> list[list[torch.Tensor]]:
        """This rank's shards of each sub-group."""
        return [[record.parameter.ds_tensor for record in group.records] for group in self._groups]

    @property
    def fp16_partitioned_groups_flat(self) -> list[torch.Tensor]:
        return self.weights.flats

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        return self.weights.masters

    @property
    def sub_group_to_group_id(self) -> dict[int, int]:
        """Parameter group of each sub-group."""
        return {group.index: group.param_group for group in self._groups}

    @property
    def grad_position(self) -> dict[int, list[int]]:
        """``ds_id`` -> sub-group, offset in the flat shard, elements of the shard."""
        return {
            record.parameter.ds_id: [group.index, own.shard_begin, shard_of(record.parameter).slice_numel]
            for group in self._groups
            for record, own in zip(group.records, group.own)
        }

    @property
    def groups_padding(self) -> list[list[int]]:
        """Elements of padding of each parameter, by sub-group."""
        return [[record.parameter.padding_size() for record in group.records] for group in self._groups]

    @property
    def partition_count(self) -> int:
        return self.reducer.channel.world_size

    @property
    def persistent_parameters(self) -> list[torch.nn.Parameter]:
        return self.parameter_offload.persistent_parameters

    @property
    def real_dp_process_group(self) -> list[Any]:
        return [self.dp_process_group] * len(self._groups)

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """Own pieces of the reduced gradient, by sub-group, padding included; empty while nothing is reduced."""
        if not self.reducer.ledger.reduced:
            return {}
        return {
            group.index: [
                self.reducer.shards[group.index].narrow(0, own.shard_begin, shard_of(record.parameter).slice_numel)
                for record, own in zip(group.records, group.own)
            ]
            for group in self._groups
            if self.reducer.shards[group.index] is not None
        }

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Sub-group -> position -> own piece of the reduced gradient."""
        return {index: dict(enumerate(pieces)) for index, pieces in self.averaged_gradients.items()}

    def get_param_id(self, param: torch.nn.Parameter) -> int:
        return param.ds_id

    def empty_partition_cache(self) -> None:
        """Let go of every whole weight."""
        self.parameter_offload.empty_partition_cache()

    def invalidate_secondary_tensor(self) -> None:
        """Forget secondary shards. They are never used when older than the weights."""
        for shard in self.parameter_offload.shards:
            if shard.secondary is not None:
                shard.secondary.version = -1

    # ------------------------------------------------------------------ by parameter

    def own_padded(self, link: ParameterLink, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, padding included, out of a tensor laid out like the sub-group's shard."""
        return flat.narrow(0, link.shard_begin, shard_of(link.record.parameter).slice_numel)
