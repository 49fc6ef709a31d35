# SPDX-License-Identifier: Apache-2.0
"""Construction of a model on a chosen device in a chosen dtype."""

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

_CONSTRUCTORS = ("empty", "zeros", "ones", "full", "rand", "randn", "arange", "eye", "linspace", "tensor")

# torch's own code that makes a model's tensors. The rest of torch needs what it asks for: torch.load makes an empty
# tensor of the stored dtype and points it at the bytes of the file, optimizers count steps in fp32.
_MODEL_CODE_IN_TORCH = ("torch.nn.", "torch.ao.nn.")
_NO_MODEL_CODE = ("torch.nn.init", "deepspeed.comm")


def makes_model_tensors(module_name: str) -> bool:
    """Whether code in the module of this name makes tensors of a model, of which the dtype and device may be chosen."""
    if module_name.startswith(_NO_MODEL_CODE):
        return False
    in_torch = module_name == "torch" or module_name.startswith("torch.")
    return not in_torch or module_name.startswith(_MODEL_CODE_IN_TORCH)


class OnDevice:
    """Context in which torch's constructors default to ``device`` and make floating-point tensors of ``dtype``.

    A ``device=`` argument of a call wins over the context's, and so does what torch makes for itself, as when it loads
    a file. Not for several threads at once: torch's functions are replaced while the context is open.

    Args:
        dtype: of new floating-point tensors, also where the call asks for another one.
        device: ``meta`` makes a model without memory.
        enabled: False does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._originals: dict[str, Callable[..., torch.Tensor]] = {}
        self._original_new: Any = None

    def fp_tensor_constructor(self, fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype) -> Callable:
        """``fn`` with the context's device as default and floating-point results in ``target_fp_dtype``."""

        @functools.wraps(fn)
        def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not makes_model_tensors(sys._getframe(1).f_globals.get("__name__", "")):
                return fn(*args, **kwargs)
            if kwargs.get("device") is None:
                kwargs["device"] = self.device
            made = fn(*args, **kwargs)
            if not made.is_floating_point() or made.dtype == target_fp_dtype:
                return made
            return made.detach().to(target_fp_dtype).requires_grad_(made.requires_grad)

        return construct

    def get_new_tensor_fn_for_dtype(self, dtype: torch.dtype) -> Callable:
        """Replacement of ``torch.Tensor.__new__``, for the older style ``torch.Tensor(2, 3)``."""
        original = self._originals.get("empty", torch.empty)
        original_new = torch.Tensor.__new__

        def new(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
            if cls is not torch.Tensor:
                return original_new(cls, *args, **kwargs)
            if args and all(isinstance(arg, int) for arg in args):
                return original(args, device=self.device, dtype=dtype)
            if len(args) == 1 and isinstance(args[0], torch.Size):
                return original(args[0], device=self.device, dtype=dtype)
            return original_new(cls, *args, **kwargs).to(device=self.device, dtype=dtype)

        return new

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._original_new = vars(torch.Tensor).get("__new__")  # None: inherited
            self._originals = {name: getattr(torch, name) for name in _CONSTRUCTORS}
            torch.Tensor.__new__ = self.get_new_tensor_fn_for_dtype(self.dtype)
            for name, original in self._originals.items():
                setattr(torch, name, self.fp_tensor_constructor(original, self.dtype))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.enabled:
            if self._original_new is None:
                del torch.Tensor.__new__
            else:
                torch.Tensor.__new__ = self._original_new
            for name, original in self._originals.items():
                setattr(torch, name, original)
            self._originals = {}
