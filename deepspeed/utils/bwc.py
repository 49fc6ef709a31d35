# SPDX-License-Identifier: Apache-2.0
"""Model- and pipeline-parallel figures from a model-parallel unit (mpu), whichever generation of names it has."""

from typing import Any


def _ask(mpu: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    """Result of the first of the methods that ``mpu`` has."""
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return otherwise


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Tensor-parallel rank; 0 without an mpu."""
    names = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
    return _ask(mpu, names, 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Tensor-parallel size; 1 without an mpu."""
    names = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size")
    return _ask(mpu, names, 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Tensor-parallel process group; None without an mpu."""
    names = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")
    return _ask(mpu, names, None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Pipeline-parallel size; 1 without an mpu or without pipelines."""
    return _ask(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Pipeline-parallel process group; None without an mpu or without pipelines."""
    return _ask(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)
