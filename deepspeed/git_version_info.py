# SPDX-License-Identifier: Apache-2.0
"""Version of the package, written nowhere else, and what the package was built from."""

import importlib
import importlib.util
from typing import Any

version = "0.20.0"

# Written into wheels by setup.py; a source tree has none.
_BUILD_INFO = "deepspeed._build_info"

_LAZY = ("git_hash", "git_branch", "installed_ops", "accelerator_name", "torch_info")


def _torch_info() -> dict[str, Any]:
    """Versions of torch and of the libraries it was built with, "0.0" where it was built without.

    Answers without touching a device, so ``bf16_support`` says what the build can do, not what the card can.
    """
    import torch

    cuda = torch.version.cuda
    nccl = "0.0"
    if cuda is not None and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version()[:2])
    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": cuda is not None,
        "cuda_version": "0.0" if cuda is None else ".".join(cuda.split(".")[:2]),
        "nccl_version": nccl,
        "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
    }


def _accelerator_name() -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name()


def __getattr__(name: str) -> Any:
    """``git_hash``, ``git_branch``, ``installed_ops``, ``accelerator_name``, ``torch_info``: worked out when asked for.

    Lazy so that reading ``version`` needs neither torch nor an accelerator.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("git_hash", "git_branch"):
        built = importlib.util.find_spec(_BUILD_INFO) is not None
        value: Any = getattr(importlib.import_module(_BUILD_INFO), name) if built else "unknown"
    elif name == "installed_ops":
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        value = {name: builder.installed_library() is not None for name, builder in ALL_OPS.items()}
    elif name == "accelerator_name":
        value = _accelerator_name()
    else:
        value = _torch_info()
    globals()[name] = value
    return value
