# SPDX-License-Identifier: Apache-2.0
"""Weights that were written past the optimizer: by ``module.load_state_dict``, or in place by the program.

An optimizer with masters of its own would round these over them in its next step, and nobody would notice.
"""

from collections.abc import Sequence

import torch

from deepspeed.runtime.gradients.autograd_internals import versions_of
from deepspeed.runtime.gradients.ledger import ParameterRecord


class WeightWatch:
    """Tells which parameters were written to in place, by the version that torch counts of each. A write through
    ``.data`` counts nothing and is not seen.

    Args:
        records: of the parameters to watch.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._records = list(records)
        self._parameters = [record.parameter for record in self._records]
        self._versions: list[int] = []
        self.settle()

    def settle(self) -> None:
        """The weights are what the masters say."""
        self._versions = versions_of(self._parameters)

    def written(self) -> list[ParameterRecord]:
        """Those that somebody has written to since; their values may be the same."""
        now = versions_of(self._parameters)
        if now == self._versions:
            return []
        return [record for record, old, new in zip(self._records, self._versions, now) if old != new]


@torch.no_grad()
def take_over(master: torch.Tensor, weight: torch.Tensor, former: torch.Tensor | None = None) -> None:
    """Give ``master`` the elements of ``weight`` that are new. Equal shapes, any dtypes and devices. A master keeps its
    digits where the weight is as it was, which is so after weights were exchanged for a while and put back.

    Args:
        former: what ``weight`` was; None: the master's own values, rounded.
    """
    weight = weight.to(master.device)
    kept = weight == (master.to(weight.dtype) if former is None else former.to(master.device))
    master.copy_(torch.where(kept, master, weight.to(master.dtype)))
