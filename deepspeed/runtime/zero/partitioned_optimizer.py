# SPDX-License-Identifier: Apache-2.0
"""What ZeRO stages 1, 2 and 3 share: the inner optimizer steps on this rank's flat fp32 masters."""

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.gradients.arithmetic import scale_each
from deepspeed.runtime.gradients.gradient_shard import GradientShard, shard_values
from deepspeed.runtime.parameter_handover import replace_parameters
from deepspeed.runtime.zero.flat_weights import MasterWeights
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import (
    HostCopies,
    Kind,
    Movable,
    check_target,
    kinds_of,
    movable_data,
    refuse_while_away,
)
from deepspeed.runtime.zero.optimizer_offload import flat_step
from deepspeed.utils.tensor_fragment import ParameterLink, link_parameters, unlink_parameters


class PartitionedOptimizer(ZeROOptimizer):
    """One flat master per flat group in place of the model's parameters."""

    weights: MasterWeights

    def _take_over(self, weights: MasterWeights) -> None:
        """Step on ``weights`` from now on."""
        self.weights = weights
        self._on_host = HostCopies()
        self._flat_steps: dict[torch.device, Callable[..., None]] = {}
        link_parameters(self)
        groups = self.reducer.layout.groups
        for group in groups:
            weights.allocate_copy(group.index)
        replace_parameters(
            self.optimizer,
            [
                [weights.stepped[group.index] for group in groups if group.param_group == index]
                for index in range(len(self.optimizer.param_groups))
            ],
        )
        for group in groups:
            weights.free_copy(group.index)
        if getattr(self.optimizer, "step_flat", None) is not None:
            for group in groups:
                self._flat_step(group.index)  # raises here, and not in the first step, where there is none
        inner = self.optimizer
        weights.state_of = lambda stepped: inner.state.get(stepped, {})

    @property
    def dp_process_group(self) -> Any:
        return self.reducer.group

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights of the first flat group."""
        return self.reducer.layout.first_dtype

    @property
    def overlap_comm(self) -> bool:
        return self.reducer.settings.overlap

    @property
    def contiguous_gradients(self) -> bool:
        return self.reducer.settings.persistent_buffers

    @property
    def communication_data_type(self) -> torch.dtype:
        return self.reducer.settings.comm_dtype or self.dtype

    @property
    def gradient_accumulation_dtype(self) -> torch.dtype:
        return self.reducer.settings.accum_dtype

    @property
    def master_weights_and_grads_dtype(self) -> torch.dtype:
        """dtype of the masters of the first flat group."""
        return next((master.dtype for master in self.weights.masters), torch.float32)

    def create_gradient_handling_hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        """The post-accumulate-grad hooks through which every contribution is seen, one per trainable parameter.

        They are registered when the optimizer is made; each takes note of a firing and decides nothing else.
        """
        return [record.handle for record in self.reducer.ledger.records]

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def _update(self, shards: list[GradientShard], factor: float | torch.Tensor) -> None:
        flat = getattr(self.optimizer, "step_flat", None) is not None
        step = self._step_group_by_group if flat else self._step_together
        with self._writing_weights():
            for batch in self.weights.visit():
                step(batch, shards, factor)
        if flat:
            self.optimizer.step()  # finds no gradient and steps nothing: for its hooks, and whoever counts its steps

    def _step_together(self, batch: Sequence[int], shards: list[GradientShard], factor: float | torch.Tensor) -> None:
        """The way of any torch optimizer: it steps on the tensors that have a gradient."""
        stepped = [self.weights.stepped[index] for index in batch]
        scale_each(shard_values([shards[index] for index in batch]), factor)
        with self.weights.stepping(batch):
            for index, tensor in zip(batch, stepped):
                tensor.grad = shards[index].flat().to(tensor.dtype)
            try:
                self.optimizer.step()
            finally:
                for tensor in stepped:
                    tensor.grad = None
        for index in batch:
            with self.weights.writing(index):
                self._gather_weights(index)

    def _step_group_by_group(
        self, batch: Sequence[int], shards: list[GradientShard], factor: float | torch.Tensor
    ) -> None:
        """The way of optimizers that take one tensor with its gradient and state: one pass over each group, while the
        weights of the one before are on their way."""
        weights, in_parts = self.weights, takes_parts(self.optimizer)
        for index in batch:
            step_flat = self._flat_step(index)
            target = weights.target(index)
            with weights.stepping([index]):
                stepped = weights.stepped[index]
                in_one_pass = target.dtype != stepped.dtype and target.device == stepped.device
                step_flat(
                    stepped,
                    shards[index].memory() if in_parts else shards[index].flat(),
                    self.optimizer.state[stepped],
                    self.optimizer.param_groups[self.reducer.layout.groups[index].param_group],
                    low_precision=target if in_one_pass else None,
                    grad_scale=factor,
                )
            if not in_one_pass:
                target.copy_(weights.masters[index])
            with weights.sending(index, target):
                self._gather_weights(index)

    def _flat_step(self, index: int) -> Callable[..., None]:
        """What steps the group where it is."""
        device = self.weights.homes[index].device
        if not self.reducer.rests_on_host:
            return self.optimizer.step_flat
        if device not in self._flat_steps:
            self._flat_steps[device] = flat_step(self.optimizer, device)
        return self._flat_steps[device]

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Round this rank's master weights into the model's weights, and bring everyone's up to date. Collective."""
        self.require_states("update_lp_params", "step")
        with self._writing_weights():
            for batch in self.weights.visit(write=False):
                for index in batch:
                    with self.weights.writing(index):
                        self._gather_weights(index)

    @contextmanager
    def _writing_weights(self) -> Iterator[None]:
        """Around the writing of all groups' weights. Copies to the device come after what reads the former weights
        there, and before what reads the new ones."""
        order = self.reducer.order
        if self.reducer.rests_on_host:
            order.fork()
        yield
        if self.reducer.rests_on_host:
            order.join()
        self._weights_written()

    def _gather_weights(self, index: int) -> None:
        """This rank's part of the weights of a group is new: bring everyone's up to date. Collective."""

    def _weights_written(self) -> None:
        """All weights are new. Collective."""
        raise NotImplementedError

    def refresh_fp32_params(self) -> None:
        """Take the master weights from the model's weights, after these were loaded."""
        self.weights.read_own_slices()

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Reduce everything pending now. Collective."""
        if pipeline_parallel:
            raise NotImplementedError("pipeline parallelism is not built")
        self.reducer.settle()

    def destroy(self) -> None:
        """Remove hooks and free buffers, masters and links from parameters; the model keeps its weights."""
        super().destroy()
        unlink_parameters(self)
        self.weights.release()

    # ------------------------------------------------------------------ on the host for a while

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """As ``engine.offload_states``."""
        check_target(device)
        kinds = kinds_of(include)
        self.backward_state.close_unannounced()
        self.reducer.order.join()
        if Kind.lp_params in kinds:
            self.let_go_of_whole_weights()
        for kind in kinds:
            if kind is Kind.contiguous_grad_buffer:
                self.reducer.transport.free_buffers()  # nothing rests in them
            else:
                self._on_host.offload(kind, self.movable_states(kind), pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """As ``engine.reload_states``."""
        for kind in list(self._on_host.away):
            self._on_host.reload(kind, non_blocking)

    def settle_gradients(self) -> None:
        self.require_states("gradients", "backward")
        super().settle_gradients()

    def require_states(self, what: str, needed: str) -> None:
        """RuntimeError where ``needed`` (forward, backward, step) cannot do without something that is on the host."""
        if self._on_host.away:
            refuse_while_away(self._on_host.away, what, needed)

    def movable_states(self, kind: OffloadStateTypeEnum) -> list[Movable]:
        """The tensors of a kind that rest on the device, or did before they were moved."""
        weights, reducer = self.weights, self.reducer
        indices = [group.index for group in reducer.layout.groups if not group.on_host]
        if kind is Kind.optim_states:
            steps = [weights.stepped[index] for index in indices]
            values = [value for stepped in steps for value in weights.state_of(stepped).values()]
            return [movable_data(value) for value in values if isinstance(value, torch.Tensor) and value.dim()]
        if kind is Kind.hp_params:
            return [movable_data(weights.masters[index]) for index in indices]
        if kind is Kind.lp_grads:
            local = [bucket.local for bucket in reducer.buckets if bucket.local is not None]
            reduced = [tensor for index in indices for tensor in reducer.shards[index].memory()]
            return [movable_data(tensor) for tensor in (*reduced, *local)]
        if kind is Kind.lp_params:
            return self._movable_weights()
        return [movable_data(buffer.data) for buffer in reducer.transport.pool.buffers()]

    def _movable_weights(self) -> list[Movable]:
        weights = self.weights
        return [
            Movable(functools.partial(weights.flats.__getitem__, index), functools.partial(weights.replace_flat, index))
            for index in range(len(weights.flats))
        ]

    def let_go_of_whole_weights(self) -> None:
        """Before weights are moved: what was gathered of them."""

    # ------------------------------------------------------------------ for the accessors of deepspeed.utils

    def resident(self, link: ParameterLink, write: bool = True) -> AbstractContextManager[None]:
        self.require_states(f"parameter {link.record.name!r}", "forward")
        return self.weights.resident(link.group.index, write)

    def own_master(self, link: ParameterLink) -> torch.Tensor:
        return link.own_part(self.master_of(link))

    def master_of(self, link: ParameterLink) -> torch.Tensor:
        """Masters of the parameter's group."""
        return self.weights.masters[link.group.index].data

    def own_state(self, link: ParameterLink, state: torch.Tensor) -> torch.Tensor:
        return link.own_part(state)

    def state_owner(self, link: ParameterLink) -> torch.Tensor:
        """The tensor whose optimizer state holds this parameter's."""
        return self.weights.stepped[link.group.index]

    def add_fragment(self, link: ParameterLink) -> None:
        """Set what outside code reads of a parameter's part."""


def takes_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradient of ``step_flat`` may lie in several tensors, where the optimizer has that."""
    return getattr(optimizer, "takes_parts", False)


def refuse_unbuilt(stages: str, **requested: Any) -> None:
    """NotImplementedError for the first feature that is asked for."""
    for feature, wanted in requested.items():
        if wanted:
            raise NotImplementedError(f"{feature} is not built for ZeRO {stages}")


def master_dtypes(bf16_masters: bool, bf16_states: bool) -> tuple[torch.dtype | None, torch.dtype | None]:
    """dtype of the masters and of the step; None is the default of ``MasterWeights``. Without ``bf16_states`` the step
    is computed in fp32, with state in fp32, though its result is kept in bf16."""
    if not bf16_masters:
        return None, None
    return torch.bfloat16, torch.bfloat16 if bf16_states else torch.float32
