# SPDX-License-Identifier: Apache-2.0
"""Device abstraction: what the package needs from a device, and which device this process uses."""

from .abstract_accelerator import DeepSpeedAccelerator
from .real_accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
