# SPDX-License-Identifier: Apache-2.0
from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
