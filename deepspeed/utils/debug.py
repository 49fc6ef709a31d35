# SPDX-License-Identifier: Apache-2.0
"""Names of modules and parameters, and prints that several ranks can do without mixing their lines."""

import os
import tempfile
import weakref
from typing import Any, TextIO

import torch

from deepspeed import comm as dist

try:  # absent on Windows
    import fcntl
except ImportError:
    fcntl = None


class WeakIdNameMap:
    """Names of objects, by identity. An entry goes away with its object and never passes to another one."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, str]] = {}

    def __setitem__(self, obj: Any, name: str) -> None:
        key = id(obj)
        self._entries[key] = (weakref.ref(obj, lambda _: self._entries.pop(key, None)), name)

    def __getitem__(self, obj: Any) -> str:
        if obj not in self:
            raise KeyError(f"no name was recorded for this {type(obj).__name__}")
        return self._entries[id(obj)][1]

    def __contains__(self, obj: Any) -> bool:
        entry = self._entries.get(id(obj))
        return entry is not None and entry[0]() is obj

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all names."""
        self._entries.clear()


module_names = WeakIdNameMap()
param_names = WeakIdNameMap()
fh: TextIO | None = None


def debug_clear_module_and_param_names() -> None:
    """Forget the recorded names."""
    module_names.clear()
    param_names.clear()


def debug_extract_module_and_param_names(model: torch.nn.Module) -> None:
    """Record the names of all modules and parameters of ``model``, for the other functions here."""
    debug_clear_module_and_param_names()
    for name, module in model.named_modules():
        module_names[module] = name
    for name, param in model.named_parameters():
        param_names[param] = name


def debug_module2name(module: torch.nn.Module) -> str:
    """Recorded name, or ``unknown``."""
    return module_names[module] if module in module_names else "unknown"


def debug_module2name_id(module: torch.nn.Module) -> str:
    """Recorded name and ZeRO-3 id."""
    return f"name={debug_module2name(module)} id={getattr(module, 'ds_id', None)}"


def debug_module2name_class(module: torch.nn.Module) -> str:
    """Recorded name and class."""
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: torch.Tensor) -> str:
    """Recorded name, or ``unknown``."""
    return param_names[param] if param in param_names else "unknown"


def ds_id(param: torch.Tensor) -> int | None:
    """ZeRO-3 id, None where the parameter is not partitioned."""
    return getattr(param, "ds_id", None)


def ds_shape(param: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter, also while it is partitioned."""
    return getattr(param, "ds_shape", param.shape)


def debug_param2name_id(param: torch.Tensor) -> str:
    """Recorded name and ZeRO-3 id."""
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_shape(param: torch.Tensor) -> str:
    """Recorded name, ZeRO-3 id and shape."""
    return f"{debug_param2name_id(param)} shape={tuple(ds_shape(param))}"


def debug_param2name_id_shape_device(param: torch.Tensor) -> str:
    """Recorded name, ZeRO-3 id, shape and device."""
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: torch.Tensor) -> str:
    """Recorded name, ZeRO-3 id and number of elements."""
    return f"{debug_param2name_id(param)} numel={ds_shape(param).numel()}"


def debug_param2name_id_shape_status(param: torch.Tensor) -> str:
    """Recorded name, ZeRO-3 id, shape and ZeRO-3 status."""
    return f"{debug_param2name_id_shape(param)} status={getattr(param, 'ds_status', None)}"


def printflock(*msgs: Any) -> None:
    """``print`` under a lock shared by this user's processes on the node, so that lines of ranks do not mix."""
    if fcntl is None:
        print(*msgs, flush=True)
        return
    path = os.path.join(tempfile.gettempdir(), f"deepspeed_printflock_{os.getuid()}")
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(*msgs, flush=True)


def log_rank_file(rank: int, *msgs: Any) -> None:
    """Append a line to ``log_rank_<rank>.txt`` in the current directory (opened once per process)."""
    global fh
    if fh is None:
        fh = open(f"log_rank_{rank}.txt", "w")  # stays open for the life of the process
    print(*msgs, file=fh, flush=True)


def print_backward_tensors(tensor: torch.Tensor) -> None:
    """Print the autograd nodes above ``tensor`` and the shapes of the leaves they accumulate into."""

    def visit(node: Any, depth: int) -> None:
        variable = getattr(node, "variable", None)
        leaf = "" if variable is None else f" {debug_param2name_id_shape(variable)}"
        print("  " * depth + type(node).__name__ + leaf, flush=True)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                visit(parent, depth + 1)

    seen: set[Any] = set()
    if tensor.grad_fn is not None:
        visit(tensor.grad_fn, 0)


def print_rank(*msg: Any, force: bool = False) -> None:
    """Print on every rank with the rank in front, if ``force``."""
    if force:
        printflock(f"[{dist.get_rank() if dist.is_initialized() else 0}]", *msg)


def print_rank0(*msg: Any, force: bool = False) -> None:
    """Print on rank 0, if ``force``."""
    if force and (not dist.is_initialized() or dist.get_rank() == 0):
        print(*msg, flush=True)
