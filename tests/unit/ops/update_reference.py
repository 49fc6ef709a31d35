# SPDX-License-Identifier: Apache-2.0
"""Adam, Lion and LAMB as their papers write them, one step after the other in float64."""

from __future__ import annotations

import torch


def adam(
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    amsgrad: bool = False,
) -> torch.Tensor:
    w, m, v, largest = weight.double(), 0.0, 0.0, torch.zeros_like(weight, dtype=torch.float64)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        if adam_w_mode:
            w = w - lr * weight_decay * w
        else:
            g = g + weight_decay * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        largest = torch.maximum(largest, v)
        second = largest if amsgrad else v
        first_correction = 1 - betas[0] ** t if bias_correction else 1.0
        second_correction = 1 - betas[1] ** t if bias_correction else 1.0
        w = w - lr * (m / first_correction) / ((second / second_correction) ** 0.5 + eps)
    return w


def lion(
    weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, and how close to zero the number came whose sign decides: rounding may flip it where it is small."""
    w, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    closest = torch.full_like(w, torch.inf)
    for gradient in gradients:
        g = gradient.double()
        direction = betas[0] * m + (1 - betas[0]) * g
        closest = torch.minimum(closest, torch.where(direction == 0, torch.inf, direction.abs()))
        w = w - lr * (torch.sign(direction) + weight_decay * w)
        m = betas[1] * m + (1 - betas[1]) * g
    return w, closest


def lamb(
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> torch.Tensor:
    w, m, v = weight.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        first = m / (1 - betas[0] ** t) if bias_correction else m
        second = v / (1 - betas[1] ** t) if bias_correction else v
        root = (second + eps) ** 0.5 if eps_inside_sqrt else second**0.5 + eps
        update = first / root + weight_decay * w
        weight_norm, update_norm = float(w.norm()), float(update.norm())
        ratio = min(max(weight_norm / update_norm, min_coeff), max_coeff) if weight_norm and update_norm else 1.0
        w = w - lr * ratio * update
    return w
