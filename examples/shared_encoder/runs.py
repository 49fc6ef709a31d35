# SPDX-License-Identifier: Apache-2.0
"""One window of training, twice: with DeepSpeed, and in plain torch.

Both classes read alike. ``accumulate`` runs the micro-steps of a window and returns the loss terms, averaged over it;
``gradients`` looks at what they left; ``update`` makes the optimizer step.
"""

from collections.abc import Callable
from typing import Any

import torch
from reference import Gradients
from task import ACCUMULATION, Batch, loss_terms
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import deepspeed
from deepspeed.utils import safe_get_full_grad

PEAK_LR = 2e-3
CLIP = 1.0

Schedule = Callable[[int], float]  # optimizer steps taken -> share of PEAK_LR


class DeepSpeedRun:
    """ZeRO with a client optimizer and a client schedule."""

    def __init__(self, model: nn.Module, schedule: Schedule, config: dict[str, Any]) -> None:
        def make_scheduler(optimizer: Optimizer) -> LambdaLR:
            return LambdaLR(optimizer, schedule)

        optimizer = AdamW(model.parameters(), lr=PEAK_LR)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=make_scheduler, config=config
        )
        self.model = self.engine.module

    def accumulate(self, window: list[Batch], terms: tuple[str, ...], through_engine: bool = True) -> dict[str, float]:
        """``through_engine`` chooses between ``engine.backward(loss)`` and ``loss.backward()``."""
        seen = []
        for micro_step, batch in enumerate(window):
            if micro_step > 0:
                self.engine.step()  # ends the previous micro-step; the weights do not move yet
            losses = loss_terms(self.engine, self.engine.module.encoder, batch)
            loss = sum(losses[term] for term in terms)
            if through_engine:
                self.engine.backward(loss)
            else:
                loss.backward()
            seen.append(losses)
        return mean_terms(seen)

    def gradients(self) -> Gradients:
        return {name: safe_get_full_grad(weight) for name, weight in self.model.named_parameters()}

    def update(self) -> None:
        self.engine.step()  # the last micro-step of the window: clip, AdamW, all-gather, schedule


class DdpRun:
    """The same by hand: DDP reduces in the last micro-step, fp32 master weights stand behind the model's own."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.optimizer = AdamW(self.masters, lr=PEAK_LR)
        self.scheduler = LambdaLR(self.optimizer, schedule)

    def accumulate(self, window: list[Batch], terms: tuple[str, ...]) -> dict[str, float]:
        with self.ddp.no_sync():
            seen = [self._micro_step(batch, terms) for batch in window[:-1]]
        seen.append(self._micro_step(window[-1], terms))
        return mean_terms(seen)

    def _micro_step(self, batch: Batch, terms: tuple[str, ...]) -> dict[str, Tensor]:
        losses = loss_terms(self.ddp, self.ddp.module.encoder, batch)
        loss = sum(losses[term] for term in terms)
        (loss / ACCUMULATION).backward()
        return losses

    def gradients(self) -> Gradients:
        return {name: weight.grad.clone() for name, weight in self.model.named_parameters()}

    def update(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)


def mean_terms(seen: list[dict[str, Tensor]]) -> dict[str, float]:
    return {term: float(torch.stack([losses[term].detach() for losses in seen]).mean()) for term in seen[0]}
