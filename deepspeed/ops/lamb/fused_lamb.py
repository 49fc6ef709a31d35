# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam's direction, with a step for each parameter that follows the norm of its weights.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020).
"""

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from deepspeed.ops import torch_updates
from deepspeed.ops.fused_kernels import StepNumbers, TensorUpdate, kernel_arguments
from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.optimizer_arguments import check_betas, check_numbers, refuse_arguments, run_closure
from deepspeed.ops.parameter_pieces import PartitionedTensors

CLIP_EPSILON = 1e-6


class FusedLamb(FusedOptimizer):
    """LAMB in two passes over all parameters: moments and norms, then the update.

    With ``u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w`` a step is
    ``w -= lr * ratio * u``, where ``ratio`` is ``|w| / |u|`` between ``min_coeff`` and ``max_coeff``, 1 where a norm is
    zero. Norms are those of whole parameters, also where ZeRO partitions them.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; a 0-dim tensor on the device for capturable steps whose rate changes.
        bias_correction: divide the moments by ``1 - beta^step``.
        betas: decay of the two moments.
        eps: added to the root of the second moment, or under it.
        eps_inside_sqrt: add ``eps`` under the root.
        weight_decay: its factor.
        max_grad_norm: largest norm of all gradients together; 0: any. Not under ZeRO, which clips by itself.
        max_coeff, min_coeff: bounds of the ratio.
        amsgrad: must be False.
        capturable: see ``FusedOptimizer``.

    Raises:
        ValueError: a number out of its range.
        RuntimeError: ``amsgrad``.
    """

    BUILDER = "FusedLambBuilder"
    takes_parts = False  # norms are of whole parameters
    _partitioned: PartitionedTensors | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant: set amsgrad to False")
        check_numbers("FusedLamb", lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        check_betas("FusedLamb", betas)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"FusedLamb: 0 <= min_coeff <= max_coeff does not hold for {min_coeff} and {max_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": bool(eps_inside_sqrt),
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "capturable": capturable,
        }
        super().__init__(params, defaults)
        # Of the last step, by the first tensor of those that were stepped together.
        self._ratios: dict[torch.Tensor, torch.Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_ratios", {})

    def use_partitioned(self, tensors: PartitionedTensors) -> None:
        """The parameters are flat tensors from now on, of which each rank has a part.

        Raises:
            ValueError: a group has ``max_grad_norm``.
        """
        if any(group["max_grad_norm"] for group in self.param_groups):
            raise ValueError("FusedLamb: max_grad_norm cannot be used under ZeRO; set gradient_clipping in the config")
        self._partitioned = tensors

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """One step with the gradients in ``.grad``, divided by ``scale``. Returns what ``closure`` returned.
        Collective where parameters are partitioned.

        Raises:
            RuntimeError: ``grads``, ``output_params`` or ``grad_norms``, or a sparse gradient.
        """
        refuse_arguments("FusedLamb", grads=grads, output_params=output_params, grad_norms=grad_norms)
        loss = run_closure(closure)
        self.step_each({}, 1.0 / scale)
        return loss

    @torch.no_grad()
    def step_each(
        self, low_precision: Mapping[torch.Tensor, torch.Tensor], grad_scale: float | torch.Tensor = 1.0
    ) -> None:
        """As ``FusedOptimizer.step_each``. Collective where parameters are partitioned."""
        factor = self._clip_factor(grad_scale)
        for group in self.param_groups:
            on_device: dict[torch.device, list[tuple[torch.Tensor, TensorUpdate]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state, low = self.state[parameter], low_precision.get(parameter)
                    update = self._prepare(parameter, [parameter.grad], state, group, low)
                    on_device.setdefault(parameter.device, []).append((parameter, update))
            for updates in on_device.values():
                self._step_group(updates, group, factor)

    @torch.no_grad()
    def step_flat(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        low_precision: torch.Tensor | None = None,
        grad_scale: float | torch.Tensor = 1.0,
    ) -> None:
        """As ``FusedOptimizer.step_flat``. Collective where parameters are partitioned; ``master`` is then one of the
        tensors that ``use_partitioned`` got."""
        update = self._prepare(master, [gradient], state, group, low_precision)
        self._step_group([(master, update)], group, grad_scale)

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of the last step, in the order of the parameters; waits for the device."""
        return [ratio for ratios in self._ratios.values() for ratio in ratios.tolist()]

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _clip_factor(self, factor: float | torch.Tensor) -> float | torch.Tensor:
        """By what gradients are multiplied so that their norm, after ``factor``, is at most ``max_grad_norm``."""
        limit = max((group["max_grad_norm"] for group in self.param_groups), default=0.0)
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not limit or not grads:
            return factor
        squares = [grad.double().square().sum().to(grads[0].device) for grad in grads]
        norm = torch.stack(squares).sum().sqrt() * factor
        return factor / ((norm + CLIP_EPSILON) / limit).clamp(min=1.0)

    # ------------------------------------------------------------------ one group

    def _step_group(
        self,
        updates: list[tuple[torch.Tensor, TensorUpdate]],
        group: dict[str, Any],
        grad_scale: float | torch.Tensor,
    ) -> None:
        """Updates of one device; each comes with the tensor that it is known by."""
        self._advance([update for _, update in updates])
        slots, count = self._slots(updates)
        device = updates[0][1].param.device
        numbers = self._numbers(group, grad_scale)
        squares = torch.zeros(count, 2, dtype=torch.float64, device=device)
        by_kind = self._by_kind(slots, group["capturable"])
        for alike, places in by_kind:
            self._moments(alike, places, numbers, group, squares)
        if self._partitioned is not None:
            squares = self._partitioned.sum_over_ranks(squares)
        ratios = trust_ratios(squares, group["min_coeff"], group["max_coeff"])
        self._ratios[updates[0][0]] = ratios
        for alike, places in by_kind:
            self._apply(alike, places, numbers, group, ratios)

    def _slots(self, updates: list[tuple[torch.Tensor, TensorUpdate]]) -> tuple[list[tuple[TensorUpdate, int]], int]:
        """The parts of parameters that are here, each with the number of its parameter; and how many parameters there
        are, here or on other ranks."""
        if self._partitioned is None:
            return [(update, slot) for slot, (_, update) in enumerate(updates)], len(updates)
        slots, count = [], 0
        for flat, update in updates:
            for parameter in self._partitioned.of(flat):
                piece = parameter.of_rank[self._partitioned.rank]
                if piece.numel:
                    slots.append((update.narrow(piece.offset, piece.numel), count))
                count += 1
        return slots, count

    def _by_kind(
        self, slots: list[tuple[TensorUpdate, int]], capturable: bool
    ) -> list[tuple[list[TensorUpdate], list[int]]]:
        kinds: dict[Any, tuple[list[TensorUpdate], list[int]]] = {}
        for update, slot in slots:
            step = None if capturable else float(update.step)
            key = (update.param.device, update.types, step, self._kernels_for(update) is None)
            alike, places = kinds.setdefault(key, ([], []))
            alike.append(update)
            places.append(slot)
        return list(kinds.values())

    def _moments(
        self,
        updates: list[TensorUpdate],
        places: list[int],
        numbers: StepNumbers,
        group: dict[str, Any],
        squares: torch.Tensor,
    ) -> None:
        kernels = self._kernels_for(updates[0])
        if kernels is None:
            for update, place in zip(updates, places):
                squares[place].copy_(torch_updates.lamb_moments(update, numbers, group["eps_inside_sqrt"]))
            return
        device = updates[0].param.device
        with torch.cuda.device(device):
            arguments = kernel_arguments(updates, numbers, group["capturable"])
            count = kernels.partials(arguments.tensors, *arguments.types)
            partials = torch.empty(count, dtype=torch.float64, device=device)
            kernels.moments(
                *arguments.positional(), group["eps_inside_sqrt"], places, partials.data_ptr(), squares.data_ptr()
            )

    def _apply(
        self,
        updates: list[TensorUpdate],
        places: list[int],
        numbers: StepNumbers,
        group: dict[str, Any],
        ratios: torch.Tensor,
    ) -> None:
        kernels: ModuleType | None = self._kernels_for(updates[0])
        if kernels is None:
            for update, place in zip(updates, places):
                torch_updates.lamb_apply(update, numbers, group["eps_inside_sqrt"], ratios[place])
            return
        with torch.cuda.device(updates[0].param.device):
            arguments = kernel_arguments(updates, numbers, group["capturable"])
            kernels.apply(*arguments.positional(), group["eps_inside_sqrt"], places, ratios.data_ptr())


def trust_ratios(squares: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """``|w| / |u|`` between ``least`` and ``most``, 1 where a norm is zero.

    Args:
        squares: two columns of float64, the squares of both norms.

    Returns:
        1-D float32.
    """
    norms = squares.sqrt()
    weight, update = norms[:, 0], norms[:, 1]
    usable = (weight > 0) & (update > 0)
    ratio = (weight / torch.where(usable, update, torch.ones_like(update))).clamp(least, most)
    return torch.where(usable, ratio, torch.ones_like(ratio)).float()
