# SPDX-License-Identifier: Apache-2.0
"""Choice of the accelerator of this process.

``DS_ACCELERATOR`` decides when it is set; otherwise cuda where a device is usable, else cpu. The choice is made on the
first :func:`get_accelerator` call, not at import, and does not initialise the CUDA runtime.
"""

import os

import torch

from .abstract_accelerator import DeepSpeedAccelerator

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"]

_BUILT_IN = ("cuda", "cpu")

# With this, torch asks the driver's management library whether a device exists; a later fork stays possible.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

ds_accelerator: DeepSpeedAccelerator | None = None


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one of :data:`SUPPORTED_ACCELERATOR_LIST`."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process, chosen on the first call.

    Raises:
        ValueError: ``DS_ACCELERATOR`` is not a known name.
        NotImplementedError: ``DS_ACCELERATOR`` names a device that this package has no implementation for.
    """
    global ds_accelerator
    if ds_accelerator is None:
        ds_accelerator = _create(_choose_name())
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> DeepSpeedAccelerator | None:
    """Use ``accel_obj`` from now on; None forgets the choice, so that the next call chooses again.

    Raises:
        TypeError: not a :class:`DeepSpeedAccelerator`.
    """
    global ds_accelerator
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator needs a DeepSpeedAccelerator, got {type(accel_obj).__name__}")
    ds_accelerator = accel_obj
    return accel_obj


def _choose_name() -> str:
    name = os.environ.get("DS_ACCELERATOR")
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in SUPPORTED_ACCELERATOR_LIST:
        raise ValueError(
            f"environment variable DS_ACCELERATOR={name!r} is not a known accelerator; "
            f"known names are {', '.join(SUPPORTED_ACCELERATOR_LIST)}, of which {' and '.join(_BUILT_IN)} are built in"
        )
    if name not in _BUILT_IN:
        raise NotImplementedError(
            f"accelerator {name!r} (from DS_ACCELERATOR) is not supported here: only {' and '.join(_BUILT_IN)} are "
            "built in. Pass an object of your own DeepSpeedAccelerator subclass to set_accelerator() to add one"
        )
    return name


def _create(name: str) -> DeepSpeedAccelerator:
    if name == "cuda":
        from .cuda_accelerator import CUDA_Accelerator

        return CUDA_Accelerator()
    from .cpu_accelerator import CPU_Accelerator

    return CPU_Accelerator()
