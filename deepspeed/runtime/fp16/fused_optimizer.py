# SPDX-License-Identifier: Apache-2.0
"""Stage 0 with 16-bit weights and masters in one flat tensor per group, for optimizers that step on all at once."""

import torch

from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.gradients.layout import FlatGroup, master_dtype
from deepspeed.runtime.gradients.ledger import ParameterRecord


class FP16_Optimizer(FP16_UnfusedOptimizer):
    """As ``FP16_UnfusedOptimizer``; the masters are views of ``fp32_groups_flat``, one 1-D tensor per flat group
    (parameters of one dtype of one parameter group). Chosen for FusedAdam."""

    fp32_groups_flat: list[torch.Tensor]

    def _make_masters(self, groups: list[FlatGroup]) -> dict[ParameterRecord, torch.Tensor]:
        masters: dict[ParameterRecord, torch.Tensor] = {}
        self.fp32_groups_flat = []
        for group in groups:
            wide = master_dtype(group.dtype)
            if wide == group.dtype:  # the parameters are their own masters
                masters.update((record, record.parameter) for record in group.records)
                continue
            flat = torch.empty(group.padded_numel, dtype=wide, device=group.device)
            for record, offset in zip(group.records, group.offsets):
                view = flat.narrow(0, offset, record.numel).view(record.shape)
                masters[record] = view.copy_(record.parameter.detach()).requires_grad_()
            self.fp32_groups_flat.append(flat)
        return masters
