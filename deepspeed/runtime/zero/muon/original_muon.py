# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose matrices are replaced by the nearest ones with orthonormal rows or columns.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The nearest semi-orthogonal matrix of
``U S V^T`` is ``U V^T``; a few steps of a Newton-Schulz iteration bring the singular values near 1 by matrix products
alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.ops.optimizer_arguments import check_betas, check_numbers, run_closure

NS_METHODS = {"gram", "standard"}
NS_STEPS = 5
# x -> a x + b x^3 + c x^5: steep at zero, so that small singular values grow fast; five steps end within [0.7, 1.2].
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST = torch.finfo(torch.float32).tiny  # in place of zero

MUON_DEFAULTS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def ns_compute_dtype(ns_method: str = "gram") -> torch.dtype:
    """dtype of the matrix products of a method.

    ``standard`` iterates on the matrix itself, which bf16 is enough for. ``gram`` iterates on the product of the matrix
    with its transpose, where the squares of small singular values would drown in the rounding of 16 bits.
    """
    check_method(ns_method)
    return torch.float32 if ns_method == "gram" else torch.bfloat16


def check_method(ns_method: str) -> None:
    """ValueError unless it is one of ``NS_METHODS``."""
    if ns_method not in NS_METHODS:
        raise ValueError(f"Muon: ns_method must be one of {sorted(NS_METHODS)}, got {ns_method!r}")


def _normalised(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide rather than tall, with singular values of at most 1, in ``dtype``."""
    matrices = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    matrices = matrices.float()
    matrices = matrices / matrices.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(
        SMALLEST
    )  # squares of it are normal
    return (matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST)).to(dtype)


def zeropower_via_newtonschulz5(G: torch.Tensor, steps: int) -> torch.Tensor:
    """``U V^T`` of each matrix ``U S V^T``, approximately, by iterating on the matrix.

    Args:
        G: matrices in the last two dimensions.
        steps: of the iteration; 5 are usual.

    Returns:
        of the same shape, in ``ns_compute_dtype("standard")``.
    """
    a, b, c = NS_COEFFICIENTS
    x = _normalised(G, ns_compute_dtype("standard"))
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if G.size(-2) > G.size(-1) else x


def zeropower_via_gram_newtonschulz(G: torch.Tensor, steps: int) -> torch.Tensor:
    """As ``zeropower_via_newtonschulz5``, by iterating on the small square matrix ``R = X X^T``.

    A step multiplies ``X`` from the left by ``P = a + b R + c R^2``. All ``P`` are polynomials of the first ``R``, so
    they commute: their product is collected and meets ``X`` once, and the next ``R`` is ``P R P = R P P``.

    Returns:
        of the same shape, in ``ns_compute_dtype("gram")``.
    """
    a, b, c = NS_COEFFICIENTS
    x = _normalised(G, ns_compute_dtype("gram"))
    gram = x @ x.mT
    identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    product = None
    for step in range(steps):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor if product is None else factor @ product
        if step + 1 < steps:
            gram = (gram @ factor) @ factor
            gram = (gram + gram.mT) / 2  # what rounding made of its symmetry
    x = x if product is None else product @ x
    return x.mT if G.size(-2) > G.size(-1) else x


_ZEROPOWER: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "gram": zeropower_via_gram_newtonschulz,
    "standard": zeropower_via_newtonschulz5,
}


def momentum_direction(
    grad: torch.Tensor, momentum: torch.Tensor, beta: float = 0.95, nesterov: bool = True
) -> torch.Tensor:
    """Move ``momentum`` towards ``grad`` in place; what is to be orthogonalised, elementwise."""
    momentum.lerp_(grad, 1 - beta)
    return grad.lerp(momentum, beta) if nesterov else momentum.clone()


def orthogonalized(
    update: torch.Tensor,
    ns_steps: int = NS_STEPS,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> torch.Tensor:
    """The update that a matrix makes: orthogonal, larger where it is tall so that outputs change as much.

    Args:
        update: two dimensions or more; a convolution's filters are its rows.
        is_expert_group: the first of three dimensions counts matrices that have nothing to do with each other.
        num_heads: the rows belong to so many heads, each of which is a matrix of its own.

    Raises:
        ValueError: less than two dimensions, an unknown method, or rows that the heads do not divide.
    """
    check_method(ns_method)
    if update.dim() < 2:
        raise ValueError(f"Muon updates matrices, not a tensor of shape {tuple(update.shape)}: give it to AdamW")
    matrices = update if is_expert_group else update.reshape(update.size(0), -1)
    if num_heads is not None:
        if matrices.size(-2) % num_heads:
            raise ValueError(f"Muon: {matrices.size(-2)} rows cannot be cut into {num_heads} heads")
        matrices = matrices.unflatten(-2, (num_heads, matrices.size(-2) // num_heads))
    tall = max(1.0, matrices.size(-2) / matrices.size(-1)) ** 0.5
    return (_ZEROPOWER[ns_method](matrices, ns_steps) * tall).reshape(update.shape)


def muon_update(
    grad: torch.Tensor,
    momentum: torch.Tensor,
    beta: float = 0.95,
    ns_steps: int = NS_STEPS,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> torch.Tensor:
    """What ``lr`` times is subtracted from a matrix; ``momentum`` is updated in place. See ``orthogonalized``."""
    update = momentum_direction(grad, momentum, beta, nesterov)
    return orthogonalized(update, ns_steps, ns_method, is_expert_group, num_heads)


def adam_update(
    grad: torch.Tensor,
    buf1: torch.Tensor,
    buf2: torch.Tensor,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> torch.Tensor:
    """What ``lr`` times is subtracted by Adam in its ``step``-th step; both moments are updated in place."""
    buf1.lerp_(grad, 1 - betas[0])
    buf2.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    return buf1 / (1 - betas[0] ** step) / ((buf2 / (1 - betas[1] ** step)).sqrt() + eps)


def apply_update(parameter: torch.Tensor, update: torch.Tensor, lr: float, weight_decay: float) -> None:
    """Decoupled weight decay, then the update."""
    parameter.mul_(1 - lr * weight_decay)
    parameter.add_(update.to(parameter.dtype), alpha=-lr)


class SingleDeviceMuon(torch.optim.Optimizer):
    """Muon for matrices alone. Every rank that has the gradients makes the whole step.

    Args:
        params: matrices, or filters of convolutions.
        lr: what a step changes the weights by, in units of the spectral norm.
        weight_decay: what the weights shrink by, times ``lr``.
        momentum: decay of the momentum.
        ns_method: one of ``NS_METHODS``.

    Raises:
        ValueError: a number out of its range, or an unknown method.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        check_muon_group(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns what ``closure`` returned."""
        loss = run_closure(closure)
        for group in self.param_groups:
            step_matrices(self, group)
        return loss


class Muon(SingleDeviceMuon):
    """The same under its other name."""


class SingleDeviceMuonWithAuxAdam(torch.optim.Optimizer):
    """Muon for the groups with ``use_muon``, AdamW for the others.

    Args:
        param_groups: each with ``params`` and ``use_muon``. With it: ``lr``, ``momentum``, ``weight_decay``,
            ``ns_method``; without: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        ValueError: a group that does not say ``use_muon``, or a number out of its range.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        groups = [dict(group) for group in param_groups]
        for group in groups:
            if "use_muon" not in group:
                raise ValueError(f"{type(self).__name__}: each parameter group must say use_muon, True or False")
            for key, value in (MUON_DEFAULTS if group["use_muon"] else ADAM_DEFAULTS).items():
                group.setdefault(key, value)
            check_muon_group(group) if group["use_muon"] else check_adam_group(group)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns what ``closure`` returned."""
        loss = run_closure(closure)
        for group in self.param_groups:
            step_matrices(self, group) if group["use_muon"] else step_others(self, group)
        return loss


class MuonWithAuxAdam(SingleDeviceMuonWithAuxAdam):
    """The same under its other name; that of ``muon_optimizer`` is the one that ZeRO can partition."""


def check_muon_group(group: dict[str, Any]) -> None:
    """ValueError for numbers that Muon cannot use."""
    check_numbers("Muon", lr=group["lr"], weight_decay=group["weight_decay"])
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"Muon: momentum must be in [0, 1), got {group['momentum']}")
    check_method(group["ns_method"])


def check_adam_group(group: dict[str, Any]) -> None:
    """ValueError for numbers that AdamW cannot use."""
    check_numbers("Muon's AdamW", lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"])
    check_betas("Muon's AdamW", group["betas"])


def momentum_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """The momentum of a parameter, made in the first step."""
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return state["momentum_buffer"]


def step_matrices(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Muon's step of whole matrices."""
    for parameter in group["params"]:
        if parameter.grad is not None:
            momentum = momentum_of(optimizer, parameter)
            update = muon_update(parameter.grad, momentum, group["momentum"], ns_method=group["ns_method"])
            apply_update(parameter, update, group["lr"], group["weight_decay"])


def step_others(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """AdamW's step."""
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state["step"] += 1
        step = int(state["step"])
        update = adam_update(parameter.grad, state["exp_avg"], state["exp_avg_sq"], step, group["betas"], group["eps"])
        apply_update(parameter, update, group["lr"], group["weight_decay"])
