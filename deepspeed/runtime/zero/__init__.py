# SPDX-License-Identifier: Apache-2.0
"""ZeRO: partitioning optimizer state (1), gradients (2) and parameters (3) over the data-parallel ranks.

``deepspeed.zero`` is this package.
"""

import importlib
from typing import Any

_HOMES = {
    "ZeroParamType": "partition_parameters",
    "ZeroParamStatus": "partition_parameters",
    "Init": "partition_parameters",
    "GatheredParameters": "partition_parameters",
    "register_external_parameter": "partition_parameters",
    "unregister_external_parameter": "partition_parameters",
    "DeepSpeedTensorOverride": "partition_parameters",
    "DeepSpeedZeRoOffload": "parameter_offload",
    "TiledLinear": "tiling",
    "TiledLinearReturnBias": "tiling",
    "unwrap_model_for_generation": "stage3",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Names are imported when they are used: the configuration needs nothing but its own module."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
