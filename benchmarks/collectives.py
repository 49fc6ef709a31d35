# SPDX-License-Identifier: Apache-2.0
"""Count the collectives of a region and their bytes, whoever issues them.

A collective reaches the process group through a dispatcher op (``c10d::allreduce_`` and so on), also when C++
code such as DDP's reducer calls it. A dispatch mode sees those ops with their tensors; patching the functions
of ``torch.distributed`` would miss DDP, and the profiler does not record the shapes of tensor lists.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor

NAMESPACES = ("c10d", "_c10d_functional")
# Neither moves a tensor between ranks.
NOT_COUNTED = ("barrier", "monitored_barrier", "wait_tensor", "_wrap_tensor_autograd")
# Bytes that one rank of W sends with a ring, as a multiple of the full buffer's (W - 1) / W.
RING_FACTOR = {"all_reduce": 2.0}


def tensors_in(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)


def plain_name(op: str) -> str:
    """Return the field's name of a dispatcher op: ``_allgather_base_`` -> ``all_gather``."""
    squeezed = op.replace("_", "")
    # Longest first, since "reduce" is a part of two other names.
    for key, name in (
        ("reducescatter", "reduce_scatter"),
        ("allreduce", "all_reduce"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
        ("broadcast", "broadcast"),
        ("reduce", "reduce"),
    ):
        if key in squeezed:
            return name
    return op.strip("_")


class CollectiveCounter(TorchDispatchMode):
    """Count collectives while the context is entered.

    Attributes:
        calls: number of calls by name.
        bytes: bytes of the full buffer by name: the reduced buffer, the gathered output, the scattered input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Let DTensor run first: the collectives inside its ops then come here as ops of their own.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            op = func._schema.name.split("::")[1]
            if op not in NOT_COUNTED:
                name = plain_name(op)
                # The full buffer is the larger side, whichever side of the collective that is.
                sides = [*args, result] if func.namespace == "_c10d_functional" else args
                self.calls[name] += 1
                self.bytes[name] += max(sum(t.numel() * t.element_size() for t in tensors_in(side)) for side in sides)
        return result

    def ring_bytes(self) -> float:
        """Return the bytes that one rank would send if each collective ran as a ring."""
        ranks = torch.distributed.get_world_size()
        return sum(RING_FACTOR.get(name, 1.0) * count for name, count in self.bytes.items()) * (ranks - 1) / ranks
