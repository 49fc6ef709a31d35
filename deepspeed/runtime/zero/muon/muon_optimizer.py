# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for everything else, over whole parameters or over what ZeRO partitioned."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.optimizer_arguments import run_closure
from deepspeed.ops.parameter_pieces import PartitionedTensors
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.original_muon import (
    apply_update,
    momentum_direction,
    momentum_of,
    orthogonalized,
    step_matrices,
    step_others,
)
from deepspeed.runtime.zero.muon.whole_matrices import WholeMatrices


class MuonWithAuxAdam(original_muon.MuonWithAuxAdam):
    """Muon for the groups with ``use_muon``, Adam for the others.

    Where ZeRO partitions parameters, the momentum is a part like any other state, and each matrix is brought together
    on one rank for its Newton-Schulz iteration: the update is that of whole matrices at every stage.

    Args:
        param_groups: see ``original_muon.SingleDeviceMuonWithAuxAdam``.
        adam_optimizer: class of the optimizer of the other groups; ``FusedAdam`` by default.
        adam_optimizer_kwargs: its arguments, beside what the groups say.
        adam_w_mode: decoupled weight decay, where the default class is used.
        fallback_to_inline: use ``original_muon.adam_update`` instead of a class.

    Raises:
        ValueError: a group that does not say ``use_muon``, or a number out of its range.
    """

    _matrices: WholeMatrices | None = None

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        adam_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        adam_optimizer_kwargs: dict[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        super().__init__(param_groups)
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._adam: torch.optim.Optimizer | None = None
        if others and not fallback_to_inline:
            arguments = dict(adam_optimizer_kwargs or {})
            if adam_optimizer is None:
                adam_optimizer, arguments = FusedAdam, {"adam_w_mode": adam_w_mode} | arguments
            self._adam = adam_optimizer(others, **arguments)

    def use_partitioned(self, tensors: PartitionedTensors) -> None:
        """The parameters are flat tensors from now on, of which each rank has a part.

        Raises:
            ValueError: a parameter of a group with ``use_muon`` is no matrix.
        """
        for group in self.param_groups:
            for flat in group["params"] if group["use_muon"] else ():
                for parameter in tensors.of(flat):
                    if len(parameter.shape) < 2:
                        raise ValueError(
                            f"parameter {parameter.name!r} of shape {tuple(parameter.shape)} is in a group with"
                            " use_muon and is no matrix: put it into a group without"
                        )
        self._matrices = WholeMatrices(tensors)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, step_id: int | None = None) -> Any:
        """One step. Returns what ``closure`` returned. Collective where parameters are partitioned.

        Args:
            step_id: of no effect; the count of steps is state of the parameters.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_others(group)
            elif self._matrices is None:
                step_matrices(self, group)
            else:
                self._step_partitioned(group, self._matrices)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.

        Raises:
            ValueError: the groups of the state were not those with ``use_muon`` here.
        """
        saved = [bool(group.get("use_muon")) for group in state_dict["param_groups"]]
        own = [bool(group["use_muon"]) for group in self.param_groups]
        if saved != own:
            raise ValueError(f"groups with use_muon differ: {saved} in the state, {own} in the optimizer")
        super().load_state_dict(state_dict)

    def _step_others(self, group: dict[str, Any]) -> None:
        if self._adam is None:
            step_others(self, group)
            return
        # The two optimizers have one state, and loading replaces it and the groups.
        self._adam.state = self.state
        self._adam.param_groups = [group]
        for key, value in self._adam.defaults.items():
            group.setdefault(key, value)
        self._adam.step()

    def _step_partitioned(self, group: dict[str, Any], matrices: WholeMatrices) -> None:
        for flat in group["params"]:
            if flat.grad is None:
                continue
            update = momentum_direction(flat.grad, momentum_of(self, flat), group["momentum"])
            matrices.apply(flat, update, lambda matrix: orthogonalized(matrix, ns_method=group["ns_method"]))
            apply_update(flat, update, group["lr"], group["weight_decay"])
