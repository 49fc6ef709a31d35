# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its monitors about each accumulation window.

Nothing here synchronises a device in forward or backward: losses are summed where they are. The sum is read at the
boundary, by every rank, since ranks average it. Without an enabled monitor each method returns at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.monitor.monitor import Monitor
from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.utils import tensors_in
from deepspeed.utils.logging import log_dist_once

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

PREFIX = "Train/Samples/"
TOKEN_DTYPES = (torch.int32, torch.int64)
TOKEN_KEY = "input_ids"


class StepEvents:
    """Collects during a window and writes events at its boundary.

    Args:
        monitor: where events go; its ``enabled`` is the same on every rank.
        device: where the message between ranks lies.
        group: ranks over which losses are averaged and tokens summed.
    """

    def __init__(self, monitor: Monitor, device: torch.device, group: object) -> None:
        self.monitor = monitor
        self._device = device
        self._group = group
        self._collectives = 0
        self._bytes = 0
        self._since: float | None = None  # when the present window began, in seconds of perf_counter
        self.start_window()

    def start_window(self) -> None:
        """Forget what was collected of the present window."""
        self._loss: torch.Tensor | None = None
        self._losses_seen = 0
        self._tokens = 0

    def saw_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The arguments of a forward in training mode."""
        if not self.monitor.enabled:
            return
        if self._since is None:
            self._since = time.perf_counter()
        if torch.is_grad_enabled():
            self._tokens += count_tokens(args, kwargs)

    def saw_loss(self, loss: torch.Tensor, share: float = 1.0) -> None:
        """The loss of a backward: one element of any dtype, without graph. ``share`` divides it by the accumulation
        count where the gradient is; here, so that nothing is rounded to the dtype of the loss."""
        if not self.monitor.enabled:
            return
        if self._loss is None:
            self._loss = torch.zeros((), dtype=torch.float64, device=loss.device)
        self._loss.add_(loss.reshape(()), alpha=share)
        self._losses_seen += 1

    def write(self, engine: DeepSpeedEngine, samples: int, backwards: int) -> None:
        """Write the events of the window that has just ended, and start the next. Collective when a monitor is
        enabled.

        Args:
            engine: after the step, with its counters updated.
            samples: of all ranks in the window.
            backwards: finished on this rank in the window.
        """
        if not self.monitor.enabled:
            return
        loss, tokens = self._over_ranks(backwards)
        now = time.perf_counter()  # after the collective, for which the host has waited
        values = {**_values_of(engine), "train_loss": loss}
        if self._since is not None:
            values["samples_per_second"] = samples / (now - self._since)
            values["tokens_per_second"] = tokens / (now - self._since) if tokens else None
        sent = engine._stepper.reducer.transport
        values["gradient_collectives"] = sent.collectives_issued - self._collectives
        values["gradient_bytes"] = sent.bytes_communicated - self._bytes
        self.monitor.write_events(
            [(PREFIX + name, value, engine.global_samples) for name, value in values.items() if value is not None]
        )
        self._collectives, self._bytes, self._since = sent.collectives_issued, sent.bytes_communicated, now
        self.start_window()

    def _over_ranks(self, backwards: int) -> tuple[float | None, int]:
        """Mean loss over the ranks that had one, and tokens of all ranks.

        The loss is None when some rank ran a backward whose loss it does not know: the mean would be of something
        else.
        """
        known = self._losses_seen == backwards
        loss = 0.0 if self._loss is None else self._loss.item()
        mine = [loss, float(self._losses_seen > 0), float(not known), float(self._tokens)]
        message = torch.tensor(mine, dtype=torch.float64, device=self._device)
        total, ranks, unknown, tokens = collectives.sum_over_ranks(message, self._group).tolist()
        if unknown:
            log_dist_once(
                "monitors: train_loss is left out of windows with loss.backward(), where the engine does not see the"
                " loss; call engine.backward(loss) to have it",
                ranks=[0],
                level=logging.WARNING,
            )
        return (total / ranks if ranks and not unknown else None), int(tokens)


def _values_of(engine: DeepSpeedEngine) -> dict[str, float | None]:
    """What the engine knows without talking to other ranks; None for what there is not."""
    stepper = engine._stepper
    clipped = stepper._clipped_grad_norm
    return {
        "lr": _number(next(iter(engine.get_lr()), None)),
        "loss_scale": stepper.loss_scale if engine.fp16_enabled() or stepper.needs_scaler() else None,
        "grad_norm": _number(engine.get_global_grad_norm()),
        "grad_norm_clipped": None if clipped is None or not engine.was_step_applied() else clipped.read(),
        "skipped_steps": engine.skipped_steps,
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def count_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens in the arguments of a forward, 0 where that cannot be told.

    They are the elements of what is named ``input_ids``, else of the first tensor if that holds integers and has a
    batch dimension and another one (labels of a classification have only the first).
    """
    named = kwargs.get(TOKEN_KEY)
    if named is None:
        named = next((arg[TOKEN_KEY] for arg in args if isinstance(arg, Mapping) and TOKEN_KEY in arg), None)
    if isinstance(named, torch.Tensor):
        return named.numel()
    first = next(tensors_in((*args, *kwargs.values())), None)
    is_sequence = first is not None and first.dtype in TOKEN_DTYPES and first.dim() >= 2
    return first.numel() if is_sequence else 0
