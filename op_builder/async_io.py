# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reads and writes of files."""

import sys
from types import ModuleType

from .builder import OpBuilder


class AsyncIOBuilder(OpBuilder):
    """Asynchronous file reads and writes for NVMe offload. The sources need neither torch nor a library beyond libc."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"

    def absolute_name(self) -> str:
        return "deepspeed.ops.aio.async_io_op"

    def sources(self) -> list[str]:
        names = ("backend", "bindings", "engine", "io_uring_backend", "kernel_aio_backend")
        return [f"csrc/aio/{name}.cpp" for name in names]

    def include_paths(self) -> list[str]:
        return ["csrc/aio"]

    def uses_torch(self) -> bool:
        return False

    def why_not(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "its system calls are those of Linux"
        return super().why_not()

    def _system_include_paths(self) -> list[str]:
        """pybind11 is among torch's headers."""
        from torch.utils import cpp_extension

        return [*cpp_extension.include_paths(), *super()._system_include_paths()]

    def load(self, verbose: bool = False) -> ModuleType:
        """``deepspeed.ops.aio.handle``, with ``aio_handle``. The engines are compiled when the first handle is made;
        where that is not possible, Python threads take their place."""
        from deepspeed.ops.aio import handle

        return handle

    def load_native(self, verbose: bool = False) -> ModuleType:
        """The compiled engines alone, compiled now if they are not.

        Raises:
            RuntimeError: they cannot be compiled here, or the compiler fails.
        """
        return super().load(verbose)
