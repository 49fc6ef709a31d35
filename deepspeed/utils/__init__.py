# SPDX-License-Identifier: Apache-2.0
"""Public helpers: accessors to gradients, master weights and optimizer state; logging; process groups."""

import importlib
from typing import Any

from deepspeed import unbuilt
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.utils.comms_logging import get_caller_func
from deepspeed.utils.exceptions import DeprecatedException
from deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
from deepspeed.utils.nvtx import instrument_w_nvtx
from deepspeed.utils.tensor_fragment import (
    fragment_address,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    tensor_fragment,
)
from deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "DeprecatedException",
    "RepeatingLoader",
    "fragment_address",
    "get_caller_func",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "log_dist",
    "log_dist_once",
    "logger",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "tensor_fragment",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

# Shown here by name and loaded on first use: their modules use this one.
_LATER = {
    "OnDevice": "deepspeed.utils.init_on_device",
    "bwc_tensor_model_parallel_world_size": "deepspeed.utils.bwc",
    "bwc_pipeline_parallel_world_size": "deepspeed.utils.bwc",
    "get_accelerator": "deepspeed.accelerator",
    "get_numactl_cmd": "deepspeed.utils.numa",
    "get_full_hp_grad": "deepspeed.utils.tensor_fragment",
    "get_full_hp_param": "deepspeed.utils.tensor_fragment",
    "set_full_hp_grad": "deepspeed.utils.tensor_fragment",
    "set_full_hp_param": "deepspeed.utils.tensor_fragment",
} | dict.fromkeys(
    (
        "initialize",
        "get_tensor_model_parallel_group",
        "get_model_parallel_group",
        "get_data_parallel_group",
        "set_tensor_model_parallel_world_size",
        "get_tensor_model_parallel_world_size",
        "get_model_parallel_world_size",
        "set_tensor_model_parallel_rank",
        "get_tensor_model_parallel_rank",
        "get_model_parallel_rank",
        "get_tensor_model_parallel_src_rank",
        "get_data_parallel_world_size",
        "get_data_parallel_rank",
    ),
    "deepspeed.utils.groups",
)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        unbuilt.refuse(__name__, name)
    return getattr(importlib.import_module(_LATER[name]), name)
