# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for fp16 training.

The dynamic scale follows Micikevicius et al., "Mixed Precision Training" (2018), with hysteresis: it grows by a
factor after a window of clean steps and shrinks on overflow once the hysteresis is used up.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


def to_python_float(t: Any) -> float:
    """A Python number from a tensor of one element or a number."""
    return float(t.item()) if hasattr(t, "item") else float(t)


class LossScalerBase:
    """A loss scale and how it is applied.

    Args:
        cur_scale: factor for the loss, positive.
    """

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(cur_scale)
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale, differentiable. Computed in fp32, so that a large scale does not overflow a
        16-bit loss."""
        return loss.float() * self.cur_scale

    def is_exhausted(self) -> bool:
        """Whether the next overflow cannot be answered by a smaller scale and is an error."""
        return False

    def update_scale(self, overflow: bool, culprits: str = "") -> None:
        """Learn from one step whether its gradients were finite; ``culprits`` tells a message which were not."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A scale that never changes."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A scale that grows after ``scale_window`` clean steps and shrinks on overflow.

    Args:
        init_scale: first scale.
        scale_window: clean steps since the last overflow after which the scale doubles, and each as many again.
        min_scale: floor.
        delayed_shift: overflows, from a full hysteresis, until the scale halves; the first ones only use the
            hysteresis up.
        consecutive_hysteresis: refill the hysteresis on each clean step rather than after a full window.
        raise_error_at_min_scale: raise on an overflow at the floor, since no later step could succeed.
        dtype: kept for messages.
    """

    scale_factor = 2.0

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = delayed_shift

    def is_exhausted(self) -> bool:
        at_floor = self.cur_scale <= self.min_scale and not self._hysteresis_left()
        return at_floor and self.raise_error_at_min_scale

    def update_scale(self, overflow: bool, culprits: str = "") -> None:
        """Shrink, grow or keep the scale.

        Raises:
            Exception: overflow at the smallest scale with no hysteresis left.
        """
        if overflow:
            self._shrink(culprits)
        else:
            self._maybe_grow()
        self.cur_iter += 1

    def _hysteresis_left(self) -> bool:
        return self.delayed_shift > 1 and self.cur_hysteresis > 1

    def _shrink(self, culprits: str) -> None:
        if self._hysteresis_left():
            self.cur_hysteresis -= 1
        elif self.is_exhausted():
            raise Exception(
                f"the loss scale is at its minimum of {self.min_scale} and gradients still overflow, so no step can"
                f" succeed{culprits and ': '}{culprits}. The loss or the model produces non-finite values: lower the"
                " learning rate, check the data, or train in bf16"
            )
        else:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        self.last_overflow_iter = self.cur_iter

    def _maybe_grow(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor


DYNAMIC_DEFAULTS: dict[str, Any] = {
    INITIAL_LOSS_SCALE: 2.0**16,
    SCALE_WINDOW: 1000,
    MIN_LOSS_SCALE: 1.0,
    DELAYED_SHIFT: 2,
    CONSECUTIVE_HYSTERESIS: False,
}


@dataclass
class LossScaleConfig:
    """What the loss scale of a 16-bit optimizer is and follows; the fields are those of the scaler.

    Args:
        low_precision_dtype: of the weights; only float16 has a loss scale.
        dynamic_loss_scale: whether the scale adapts.
        static_loss_scale: the scale where it does not.
        dynamic_loss_args: arguments of ``DynamicLossScaler``; None: its defaults.
        initial_dynamic_scale: first scale where it adapts and ``dynamic_loss_args`` names none.
    """

    low_precision_dtype: torch.dtype
    dynamic_loss_scale: bool
    static_loss_scale: float
    dynamic_loss_args: dict[str, Any] | None
    initial_dynamic_scale: float | None = field(default=None, kw_only=True)
    use_grad_scaling: bool = field(init=False)
    cur_scale: float = field(init=False)
    cur_iter: int = field(default=0, init=False)
    last_overflow_iter: int | None = field(default=None, init=False)
    scale_factor: float | None = field(default=None, init=False)
    scale_window: int | None = field(default=None, init=False)
    min_loss_scale: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        arguments = DYNAMIC_DEFAULTS | (self.dynamic_loss_args or {})
        if self.initial_dynamic_scale is not None and INITIAL_LOSS_SCALE not in (self.dynamic_loss_args or {}):
            arguments[INITIAL_LOSS_SCALE] = self.initial_dynamic_scale
        self.use_grad_scaling = self.low_precision_dtype is torch.float16
        self._read(
            CreateLossScaler(self.low_precision_dtype, self.static_loss_scale, self.dynamic_loss_scale, arguments)
        )

    def _read(self, scaler: LossScalerBase) -> None:
        self.cur_scale = scaler.loss_scale
        if isinstance(scaler, DynamicLossScaler):
            self.cur_iter, self.last_overflow_iter = scaler.cur_iter, scaler.last_overflow_iter
            self.scale_factor, self.scale_window = scaler.scale_factor, scaler.scale_window
            self.min_loss_scale = scaler.min_scale

    @classmethod
    def of(cls, scaler: LossScalerBase, dtype: torch.dtype) -> "LossScaleConfig":
        """The present state of ``scaler``."""
        config = cls(dtype, scaler.dynamic, scaler.loss_scale, None)
        config.use_grad_scaling = scaler.dynamic or scaler.loss_scale != 1.0
        config._read(scaler)
        return config


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: dict[str, Any] | None,
) -> LossScalerBase:
    """The scaler for a dtype: dynamic or static for fp16, the constant 1 otherwise."""
    if dtype is not torch.float16:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    return DynamicLossScaler(dtype=dtype, **(DYNAMIC_DEFAULTS | (dynamic_loss_args or {})))
