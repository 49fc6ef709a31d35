# SPDX-License-Identifier: Apache-2.0
"""Small helpers of the ZeRO stages."""

import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam


class ZeRORuntimeException(Exception):
    """A ZeRO configuration or checkpoint that cannot be used as asked."""


ZERO_SUPPORTED_OPTIMIZERS: list[type[torch.optim.Optimizer]] = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    FusedLion,
    FusedLamb,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    MuonWithAuxAdam,
]


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is known to work on flat shards: it updates elementwise, or is told of the parameters in
    them. Exact types: a subclass may look at shapes."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def is_zero_param(parameter: object) -> bool:
    """Whether ``parameter`` is partitioned by ZeRO-3."""
    return isinstance(parameter, torch.Tensor) and getattr(parameter, "ds_id", None) is not None


def get_norm_dtype() -> torch.dtype:
    """dtype in which the squares of norms are summed."""
    return torch.float64
