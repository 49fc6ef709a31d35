# SPDX-License-Identifier: Apache-2.0
"""Attributes of the partitioned optimizer that outside code reads. All of them are views of state that lives
elsewhere."""

from typing import Any

import torch

from deepspeed.utils.tensor_fragment import LiveFragment, ParameterLink, fragment_address


class PartitionedOptimizerSurface:
    """Read-only views named by the interface; mixed into ``DeepSpeedZeroOptimizer``."""

    nccl_start_alignment_factor = 2

    # ---------------------------------------------------- for the accessors of deepspeed.utils

    def add_fragment(self, link: ParameterLink) -> None:
        """Set ``_hp_mapping``: what this rank owns of the parameter, None when that is nothing."""
        numel = link.end - link.begin
        mapping = None
        if numel:
            mapping = LiveFragment(
                lp_fragment=None,  # shown live, through the link
                lp_fragment_address=fragment_address(numel, link.begin),
                hp_fragment=None,
                hp_fragment_address=fragment_address(numel, link.shard_begin),
                gradient_dict={},
                offload_gradient_dict={},
                use_offload=link.group.on_host,
                param_group_index=link.group.param_group,
            )
            mapping.link = link
        link.record.parameter._hp_mapping = mapping

    @property
    def cpu_offload(self) -> bool:
        """Whether masters, optimizer state and reduced gradients rest on the host."""
        return self.reducer.rests_on_host

    def state_dict(self) -> dict[str, Any]:
        """What this rank's file of a checkpoint holds of the optimizer, as live tensors. To resume from it,
        ``engine.save_checkpoint`` and ``load_checkpoint``."""
        from deepspeed.checkpoint.optimizer_transfer import partitioned_state  # which imports the optimizers

        return partitioned_state(self, 2 if self.partition_gradients else 1)

    # ---------------------------------------------------- flat layout

    @property
    def bit16_groups(self) -> list[list[torch.nn.Parameter]]:
        return [[record.parameter for record in group.records] for group in self.reducer.layout.groups]

    round_robin_bit16_groups = bit16_groups

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        return self.weights.flats

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        return [list(flat.chunk(self.reducer.channel.world_size)) for flat in self.weights.flats]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        return self.weights.masters

    @property
    def groups_padding(self) -> list[int]:
        return [group.padding for group in self.reducer.layout.groups]

    @property
    def partition_size(self) -> list[int]:
        return [group.shard_numel for group in self.reducer.layout.groups]

    @property
    def partition_count(self) -> list[int]:
        return [self.reducer.channel.world_size] * len(self.reducer.layout.groups)

    @property
    def params_in_partition(self) -> list[list[torch.nn.Parameter]]:
        return [[local[1].parameter for local in group.local_ranges()] for group in self.reducer.layout.groups]

    @property
    def params_not_in_partition(self) -> list[list[torch.nn.Parameter]]:
        groups = []
        for group in self.reducer.layout.groups:
            local = {entry[1] for entry in group.local_ranges()}
            groups.append([record.parameter for record in group.records if record not in local])
        return groups

    @property
    def first_offset(self) -> list[int]:
        return [next((local[2] for local in group.local_ranges()), 0) for group in self.reducer.layout.groups]

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor] | None]:
        """Own pieces of the reduced gradient, by flat group; None while nothing is reduced."""
        self.reducer.await_host_shards()
        result: dict[int, list[torch.Tensor] | None] = {}
        for group in self.reducer.layout.groups:
            shard = self.reducer.shards[group.index]
            if not shard.held or not self.reducer.ledger.reduced:
                result[group.index] = None
                continue
            result[group.index] = [
                shard.narrow(0, start, stop - begin) for _, _, begin, stop, start in group.local_ranges()
            ]
        return result

    @property
    def real_dp_process_group(self) -> list[Any]:
        return [self.dp_process_group] * len(self.reducer.layout.groups)
