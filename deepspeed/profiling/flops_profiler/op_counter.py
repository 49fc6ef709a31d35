# SPDX-License-Identifier: Apache-2.0
"""Counting the floating-point operations of what runs in a block, on torch's own counter."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of scores and weighted sum; shapes (batch, heads, length, head size)."""
    batch, heads, queries, head = query
    keys, value_head = key[-2], value[-1]
    return 2 * batch * heads * queries * keys * (head + value_head)


def _attention_backward_on_cpu(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """The scores again, then the gradients of weights, value, query and key."""
    batch, heads, queries, head = query
    keys, value_head = key[-2], value[-1]
    return 2 * batch * heads * queries * keys * (3 * head + 2 * value_head)


def _formulas_torch_lacks() -> dict[Any, Callable[..., int]]:
    """Attention kernels that torch's table leaves out, by operator."""
    found = {}
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_on_cpu),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward_on_cpu),
    ):
        if hasattr(torch.ops.aten, name):
            found[getattr(torch.ops.aten, name)] = formula
    return found


class _WholeBlock:
    """In place of torch's module tracker: everything belongs to one block, and no hook is needed to tell."""

    parents = frozenset({"Global"})

    def __enter__(self) -> "_WholeBlock":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class OpCounter:
    """Counts what torch's ``FlopCounterMode`` counts: matrix products, convolutions, attention; other operators are 0.

    ``with counter: ...`` may be entered again and again; ``flops`` grows, also within the block.
    """

    def __init__(self) -> None:
        self._before = 0
        self._mode: FlopCounterMode | None = None

    @property
    def flops(self) -> int:
        """FLOPs so far; a multiply-accumulate is two."""
        return self._before + (0 if self._mode is None else self._mode.get_total_flops())

    @property
    def counting(self) -> bool:
        return self._mode is not None

    def __enter__(self) -> "OpCounter":
        mode = FlopCounterMode(display=False, custom_mapping=_formulas_torch_lacks())
        mode.mod_tracker = _WholeBlock()
        mode.__enter__()
        self._mode = mode
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode = self._mode
        self._before, self._mode = self.flops, None
        mode.__exit__(kind, error, trace)


# ---------------------------------------------------------------------------------- recurrent modules

# Fused recurrent kernels are single operators that no counter sees into, so these modules are counted by formula.


def _samples(features: torch.Tensor | PackedSequence) -> int:
    """Time steps times sequences."""
    data = features.data if isinstance(features, PackedSequence) else features
    return data.numel() // data.shape[-1]


def _recurrent_flops(gates: int) -> Callable[..., int]:
    def flops(module: nn.RNNBase, features: torch.Tensor | PackedSequence, *_: Any, **__: Any) -> int:
        hidden, directions = module.hidden_size, 2 if module.bidirectional else 1
        out = module.proj_size or hidden
        per_sample = 0
        for layer in range(module.num_layers):
            width = module.input_size if layer == 0 else out * directions
            projection = hidden * module.proj_size
            per_sample += directions * 2 * (gates * hidden * (width + out) + projection)
        return per_sample * _samples(features)

    return flops


def _cell_flops(gates: int) -> Callable[..., int]:
    def flops(module: nn.RNNCellBase, features: torch.Tensor, *_: Any, **__: Any) -> int:
        return 2 * gates * module.hidden_size * (module.input_size + module.hidden_size) * _samples(features)

    return flops


MODULE_HOOK_MAPPING: dict[type[nn.Module], Callable[..., int]] = {
    nn.RNN: _recurrent_flops(1),
    nn.GRU: _recurrent_flops(3),
    nn.LSTM: _recurrent_flops(4),
    nn.RNNCell: _cell_flops(1),
    nn.GRUCell: _cell_flops(3),
    nn.LSTMCell: _cell_flops(4),
}
"""FLOPs of a call, by module class: ``formula(module, *arguments of forward)``."""
