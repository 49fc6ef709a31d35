# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors that live, also of those that only autograd holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class HeldBytes(TorchDispatchMode):
    """Counts storages that operations inside the context made. Largest sum so far: ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in _tensors(args)}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes that live now."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []
