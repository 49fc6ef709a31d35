# SPDX-License-Identifier: Apache-2.0
"""Config section ``aio``: asynchronous file I/O for NVMe offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import check_section_keys, read_section, read_value
from deepspeed.runtime.swap_tensor import constants as const

AIO_DEFAULT_DICT: dict[str, Any] = {
    const.AIO_BLOCK_SIZE: const.AIO_BLOCK_SIZE_DEFAULT,
    const.AIO_QUEUE_DEPTH: const.AIO_QUEUE_DEPTH_DEFAULT,
    const.AIO_INTRA_OP_PARALLELISM: const.AIO_INTRA_OP_PARALLELISM_DEFAULT,
    const.AIO_SINGLE_SUBMIT: const.AIO_SINGLE_SUBMIT_DEFAULT,
    const.AIO_OVERLAP_EVENTS: const.AIO_OVERLAP_EVENTS_DEFAULT,
    const.AIO_USE_GDS: const.AIO_USE_GDS_DEFAULT,
}


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the section ``aio`` into a dict with all keys; ``block_size`` is in bytes.

    Unknown keys, such as the old ``thread_count``, are ignored unless they look like a misspelling.

    Raises:
        DeepSpeedConfigError: a misspelt key or a wrong type.
        AssertionError: ``use_gds`` (GPUDirect storage) on an accelerator other than cuda.
        NotImplementedError: ``use_gds`` on cuda.
    """
    section = read_section(param_dict, const.AIO)
    check_section_keys(section, AIO_DEFAULT_DICT, const.AIO)
    config: dict[str, Any] = {}
    for key, default in AIO_DEFAULT_DICT.items():
        if isinstance(default, bool):
            config[key] = read_value(section, key, default, "bool", const.AIO)
        else:
            config[key] = read_value(section, key, default, "int", const.AIO, minimum=1)
    if config[const.AIO_USE_GDS]:
        _require_cuda()
        raise NotImplementedError(
            "'aio.use_gds': reads and writes straight to device memory (GPUDirect storage) are not built; set it to"
            " false"
        )
    return config


def _require_cuda() -> None:
    # Only needed for this key; choosing the accelerator while a config is parsed would be a side effect for all others.
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name()
    if device != "cuda":
        raise AssertionError(f"'aio.use_gds' needs the cuda accelerator, this process uses {device!r}: set it to false")
