# SPDX-License-Identifier: Apache-2.0
"""Stage 0: every rank holds all weights, gradients and optimizer state."""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.control import ControlChannel
from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.runtime.base_optimizer import GradientNorm, ZeROOptimizer, make_records
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig, LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.arithmetic import scale_each
from deepspeed.runtime.gradients.autograd_internals import copy_each, versions_of
from deepspeed.runtime.gradients.gradient_shard import GradientShard, shard_values
from deepspeed.runtime.gradients.layout import (
    FlatGroup,
    Replicated,
    make_flat_groups,
    master_dtype,
)
from deepspeed.runtime.gradients.ledger import ParameterRecord
from deepspeed.runtime.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.runtime.parameter_handover import replace_parameters
from deepspeed.runtime.weight_watch import WeightWatch, take_over
from deepspeed.utils.tensor_fragment import ParameterLink, link_parameters, unlink_parameters


class ReplicatedOptimizer(ZeROOptimizer):
    """The inner optimizer steps on whole tensors: fp32 parameters themselves, fp32 masters of 16-bit ones.

    After a backward that reduced, ``.grad`` of each parameter is its mean over ranks, until the next backward or
    step. Edits made there count.

    Args:
        init_optimizer: torch optimizer over parameters of the model, without state.
        param_names: name of each model parameter, in the model's order.
        group: data-parallel process group.
        schedule: the engine's accumulation schedule.
        settings: how gradients are reduced; ``every_backward`` is False at stage 0.
        bucket_size: most elements in one bucket.
        loss_scaler, clip_grad, check_overflow, mpu: see ``ZeROOptimizer``.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: dict[torch.nn.Parameter, str],
        group: Any,
        schedule: AccumulationSchedule,
        settings: ReductionSettings,
        bucket_size: int,
        loss_scaler: LossScalerBase,
        clip_grad: float = 0.0,
        check_overflow: bool = True,
        mpu: Any = None,
    ) -> None:
        channel = ControlChannel(group)
        record_groups, frozen = make_records(init_optimizer.param_groups, param_names)
        flat_groups = make_flat_groups(record_groups)
        layout = Replicated(flat_groups, channel.rank, channel.world_size, bucket_size)
        reducer = GradientReducer(layout, layout.make_ledger(), group, channel, schedule, settings)
        super().__init__(
            init_optimizer, reducer, param_names, frozen, loss_scaler, clip_grad, check_overflow, True, mpu
        )
        self.masters = self._make_masters(flat_groups)
        replace_parameters(init_optimizer, [[self.masters[record] for record in group] for group in record_groups])
        beside = [record for record, master in self.masters.items() if master is not record.parameter]
        self._watch = WeightWatch(beside)
        self._published: list[torch.Tensor] = []  # what was shown in .grad, in the order of the views; empty if nothing
        self._versions: list[int] = []  # of what was shown, when it was
        self._views: list[tuple[ParameterRecord, torch.Tensor]] = []
        self._viewed: list[int] = []  # addresses of the shards that they are views of
        before = _only_if(self._published, self.backward_state.before_accumulation)
        self._handles = [record.parameter.register_hook(before) for record in reducer.ledger.records]
        self.backward_state.register_grad_acc_post_hook(self.publish_gradients)
        link_parameters(self)

    def _make_masters(self, groups: list[FlatGroup]) -> dict[ParameterRecord, torch.Tensor]:
        return {record: _master_of(record.parameter) for group in groups for record in group.records}

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The model's parameters, per parameter group."""
        parameter_of = {id(master): record.parameter for record, master in self.masters.items()}
        return [[parameter_of[id(master)] for master in group["params"]] for group in self.param_groups]

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """The loss scale and what it follows, as they are now."""
        return LossScaleConfig.of(self.loss_scaler, self.reducer.layout.groups[0].dtype)

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """fp32 masters, per parameter group."""
        return [list(group["params"]) for group in self.param_groups]

    # ------------------------------------------------------------------ published gradients

    def _gradient_views(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """Each parameter's part of the reduced gradient; kept, since they are asked for three times in a step. What is
        handed out is another tensor over the same memory: its ``.data`` may come to point elsewhere."""
        shards = self.reducer.shards
        addresses = [memory.data_ptr() for shard in shards for memory in shard.memory()]
        if addresses != self._viewed:
            self._viewed = addresses
            self._views = [
                (record, shards[group.index].narrow(0, offset, record.numel).view(record.shape))
                for group in self.reducer.layout.groups
                for record, offset in zip(group.records, group.offsets)
            ]
        return self._views

    @torch.no_grad()
    def publish_gradients(self) -> None:
        """Show the reduced gradient in ``.grad``: a view where the dtype allows, else a rounded copy."""
        ledger = self.reducer.ledger
        if not (ledger.reduced and self.reducer.usable and self.reducer.reduces_now()) or ledger.waiting():
            return
        self.reducer.order.join()
        self._published.clear()
        for record, view in self._gradient_views():
            parameter = record.parameter
            shown = view.detach() if view.dtype is parameter.dtype else view.to(parameter.dtype)
            parameter.grad = shown
            self._published.append(shown)
        self._versions = versions_of(self._published)

    @torch.no_grad()
    def refuse_strays(self) -> None:
        """What is published may be edited or replaced."""
        if not self._published:
            super().refuse_strays()

    def retract_gradients(self) -> None:
        """Take the published gradients back, with whatever was edited in them."""
        if not self._published:
            return
        # all of them now: views of fp32 gradients share one version, and taking an edit back changes it
        versions = versions_of(self._published)
        for (record, view), shown, before, now in zip(
            self._gradient_views(), self._published, self._versions, versions
        ):
            parameter = record.parameter
            gradient = parameter.grad
            if gradient is not shown or now != before:
                self._take_edit(parameter, gradient, view, gradient is shown)
            if gradient is not None:
                parameter.grad = None
        self._published.clear()

    def _take_edit(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, view: torch.Tensor, in_place: bool
    ) -> None:
        """Make ``view`` what the caller may have written: into what was shown, or in its place."""
        self.gradient_edited(parameter)  # which is not to be compared
        if gradient is None:
            view.zero_()
        elif not in_place or gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)

    def settle_gradients(self) -> None:
        super().settle_gradients()
        self.publish_gradients()

    def gradients_edited(self) -> None:
        self._published.clear()
        for record in self.reducer.ledger.records:
            record.parameter.grad = None
        self.publish_gradients()

    # ------------------------------------------------------------------ update

    def _take_over_written(self) -> None:
        for record in self._watch.written():
            take_over(self.masters[record], record.parameter)

    @torch.no_grad()
    def _update(self, shards: list[GradientShard], factor: float | torch.Tensor) -> None:
        in_one_pass = isinstance(self.optimizer, FusedOptimizer)
        if not in_one_pass:
            scale_each(shard_values(shards), factor)
        low: dict[torch.Tensor, torch.Tensor] = {}
        for record, view in self._gradient_views():
            master = self.masters[record]
            master.grad = view.detach() if view.dtype == master.dtype else view.to(master.dtype)
            if master is not record.parameter:
                low[master] = record.parameter
        if in_one_pass:
            self.optimizer.step_each(low, factor)
        else:
            self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        if in_one_pass:
            self.optimizer.step()  # finds no gradient and steps nothing: for its hooks, and whoever counts its steps
        else:
            copy_each(list(low.values()), list(low))
        self._watch.settle()

    def public_norm(self, norm: GradientNorm | None) -> Any:
        return None if norm is None else norm.read()

    @property
    def has_masters(self) -> bool:
        """Whether some weights have fp32 masters beside them."""
        return any(master is not record.parameter for record, master in self.masters.items())

    @torch.no_grad()
    def write_weights(self) -> None:
        """Masters to weights, rounded."""
        pairs = [(record.parameter, master) for record, master in self.masters.items()]
        low = [(parameter, master) for parameter, master in pairs if master is not parameter]
        copy_each([parameter for parameter, _ in low], [master for _, master in low])
        self._watch.settle()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Take the masters from the model's weights, after these were loaded."""
        for record, master in self.masters.items():
            if master is not record.parameter:
                master.copy_(record.parameter)
        self._watch.settle()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the optimizer, as live tensors. To resume from it, ``engine.save_checkpoint`` and
        ``load_checkpoint``."""
        from deepspeed.checkpoint.optimizer_transfer import replicated_state  # which imports the optimizers

        return replicated_state(self)

    # ------------------------------------------------------------------ for the accessors of deepspeed.utils

    def own_master(self, link: ParameterLink) -> torch.Tensor:
        return self.masters[link.record].data

    def own_state(self, link: ParameterLink, state: torch.Tensor) -> torch.Tensor:
        return state

    def state_owner(self, link: ParameterLink) -> torch.Tensor:
        return self.masters[link.record]

    def add_fragment(self, link: ParameterLink) -> None:
        """Whole parameters are nobody's fragment."""

    def destroy(self) -> None:
        self.retract_gradients()
        for handle in self._handles:
            handle.remove()
        self._views, self._viewed = [], []
        super().destroy()
        unlink_parameters(self)


class FP16_UnfusedOptimizer(ReplicatedOptimizer):
    """Stage 0 with fp16 or bf16 weights and one fp32 master per parameter."""


def _only_if(published: list[Any], hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """``hook``, where there is something in ``published``: it runs for every parameter in every backward, and nearly
    always there is nothing."""

    def call(gradient: torch.Tensor) -> None:
        if published:
            hook(gradient)

    return call


def _master_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    wide = master_dtype(parameter.dtype)
    return parameter if parameter.dtype == wide else parameter.detach().to(wide).requires_grad_()
