# SPDX-License-Identifier: Apache-2.0
"""What the gradient should be: plain autograd in float64, in this one process, over the data of all ranks."""

import torch
from task import Autoencoder, Batch, loss_terms
from torch import Tensor, nn

Gradients = dict[str, Tensor]  # by parameter name, without any wrapper's prefix


def reference_gradients(model: nn.Module, windows: list[list[Batch]], terms: tuple[str, ...]) -> Gradients:
    """Mean over ranks and micro-steps of the gradient of the sum of ``terms``, at the (rounded) weights of ``model``.

    ``windows`` holds one list of micro-batches per rank.
    """
    exact = Autoencoder().to(windows[0][0].images.device, torch.float64)
    exact.load_state_dict(model.state_dict())
    micro_batches = [batch for window in windows for batch in window]
    for batch in micro_batches:
        losses = loss_terms(exact, exact.encoder, Batch(*(tensor.double() for tensor in batch)))
        loss = sum(losses[term] for term in terms)
        (loss / len(micro_batches)).backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in exact.named_parameters()
    }


def relative_error(actual: Gradients, expected: Gradients, part: str = "") -> float:
    """``|actual - expected| / |expected|`` over all parameters whose name starts with ``part``, taken as one vector.

    One vector, since a single bias can have a gradient near zero, with nothing but rounding left in it. Yet each
    parameter here makes up several percent of its part, so that losing one of them shows.

    Raises:
        ValueError: no parameter starts with ``part``, or one has a zero reference: nothing would be compared.
    """
    names = [name for name in expected if name.startswith(part)]
    if not names or any(expected[name].norm() == 0 for name in names):
        raise ValueError(f"nothing to compare in {part!r}: the reference has no such gradient, or a zero one")
    off = torch.cat([(actual[name].double() - expected[name]).flatten() for name in names])
    return float(off.norm() / torch.cat([expected[name].flatten() for name in names]).norm())
