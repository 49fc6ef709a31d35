# SPDX-License-Identifier: Apache-2.0
"""Attributes of the stage 3 optimizer that outside code reads. All of them are views of state that lives elsewhere."""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.layout import FlatGroup
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.utils.tensor_fragment import (
    ParameterLink,
    get_full_hp_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    set_full_hp_param,
)


class Stage3Surface:
    """Read-only views named by the interface, and accessors by parameter; mixed into
    ``DeepSpeedZeroOptimizer_Stage3``."""

    optimizer_swapper = None
    partition_gradients = True

    reducer: Any
    weights: Any
    parameter_offload: Any
    dp_process_group: Any

    def state_dict(self) -> dict[str, Any]:
        """What this rank's file of a checkpoint holds of the optimizer, as live tensors. To resume from it,
        ``engine.save_checkpoint`` and ``load_checkpoint``."""
        from deepspeed.checkpoint.optimizer_transfer import partitioned_state  # which imports the optimizers

        return partitioned_state(self, 3)

    @property
    def offload_optimizer(self) -> bool:
        """Whether masters, optimizer state and reduced gradients, of some parameters at least, rest on the host."""
        return self.reducer.rests_on_host

    @property
    def offload_param(self) -> bool:
        """Whether this rank's shards of the weights rest on the host."""
        return any(shard.away for shard in self.parameter_offload.shards)

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
        self.reducer.await_host_shards()
        return {
            group.index: [
                self.reducer.shards[group.index].narrow(0, own.shard_begin, shard_of(record.parameter).slice_numel)
                for record, own in zip(group.records, group.own)
            ]
            for group in self._groups
            if self.reducer.shards[group.index].held
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

    def own_padded(self, link: ParameterLink, flat: torch.Tensor | GradientShard) -> torch.Tensor:
        """This rank's part of a parameter, padding included, out of a tensor laid out like the sub-group's shard."""
        return flat.narrow(0, link.shard_begin, shard_of(link.record.parameter).slice_numel)

    def get_fp32_grad_for_param(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """``safe_get_full_grad``. Collective."""
        return safe_get_full_grad(param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: torch.nn.Parameter) -> None:
        """``safe_set_full_grad``. Collective."""
        safe_set_full_grad(param, value)

    def update_fp32_grad_for_param_vectorized(
        self,
        update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
        param_list: list[torch.nn.Parameter],
    ) -> None:
        """``safe_update_full_grad_vectorized``. Collective."""
        safe_update_full_grad_vectorized(param_list, update_func)

    def get_full_hp_param(self, param: torch.nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The whole master, or an entry of the optimizer's state. Collective."""
        return get_full_hp_param(param, optim_state_key)

    def set_full_hp_param(
        self, value: torch.Tensor, param: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Replace the master, or an entry of the optimizer's state. Collective."""
        set_full_hp_param(param, value, optim_state_key)

    def get_local_fp32_grad_for_param(self, param: torch.nn.Parameter) -> torch.Tensor:
        """``safe_get_local_grad``. Collective."""
        return safe_get_local_grad(param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: torch.nn.Parameter) -> None:
        """``safe_set_local_grad``. Collective."""
        safe_set_local_grad(param, value)

    def get_local_fp32_param(self, param: torch.nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        """This rank's partition of the master, or of an entry of the optimizer's state."""
        if optim_state_key is None:
            return safe_get_local_fp32_param(param)
        return safe_get_local_optimizer_state(param, optim_state_key)

    def set_local_hp_param(
        self, value: torch.Tensor, param: torch.nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Replace this rank's partition of the master (collective), or of an entry of the optimizer's state."""
        if optim_state_key is None:
            safe_set_local_fp32_param(param, value)
        else:
            safe_set_local_optimizer_state(param, value, optim_state_key)

    def get_hp_param_device(self, param: torch.nn.Parameter, optim_state_key: str | None = None) -> torch.device:
        """Where the master, or an entry of the optimizer's state, is kept."""
        return self.get_local_fp32_param(param, optim_state_key).device
