# SPDX-License-Identifier: Apache-2.0
"""Compiles a native op on first use. Importing this module compiles nothing and needs no compiler."""

import importlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

YELLOW = "\033[93m"
END = "\033[0m"
WARNING = f"{YELLOW} [WARNING] {END}"

DEFAULT_TORCH_EXTENSION_PATH = "/tmp/torch_extensions"
DEFAULT_COMPUTE_CAPABILITIES = "6.0;6.1;7.0"

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])

logger = logging.getLogger("DeepSpeed")


class MissingCUDAException(Exception):
    """No CUDA toolkit was found."""


class CUDAMismatchException(Exception):
    """The CUDA toolkit does not fit the CUDA version that torch was built with."""


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Major and minor version of the CUDA toolkit.

    Args:
        name: op for which this is asked, for the message.

    Raises:
        MissingCUDAException: no toolkit is found.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise MissingCUDAException(
            f"{name or 'the op'} needs the CUDA toolkit: CUDA_HOME is not set and nvcc is not found"
        )
    nvcc = os.path.join(CUDA_HOME, "bin", "nvcc")
    done = subprocess.run([nvcc, "-V"], capture_output=True, text=True, check=True)
    release = done.stdout.partition("release ")[2].partition(",")[0]
    major, _, minor = release.partition(".")
    return int(major), int(minor)


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """Checks that the CUDA toolkit has the major version that torch was built with; True if so.

    ``DS_SKIP_CUDA_CHECK=1`` turns the error into a warning.

    Raises:
        MissingCUDAException: no toolkit is found.
        CUDAMismatchException: the major versions differ, or torch was built without CUDA.
    """
    major, minor = installed_cuda_version(name)
    built_with = torch.version.cuda
    if built_with is not None and int(built_with.split(".")[0]) == major:
        return True
    message = f"{name or 'the op'}: CUDA toolkit {major}.{minor} does not fit torch, which was built with {built_with}"
    if os.getenv("DS_SKIP_CUDA_CHECK", "0") == "1":
        logger.warning(f"{message}; going on as DS_SKIP_CUDA_CHECK=1")
        return True
    raise CUDAMismatchException(f"{message}. Install a matching one or set DS_SKIP_CUDA_CHECK=1")


def get_default_compute_capabilities() -> str:
    """Compute capabilities, separated by ``;``, that are built for when no device is there to ask."""
    return DEFAULT_COMPUTE_CAPABILITIES


def probe_is_compatible(builder: "OpBuilder", verbose: bool = False) -> bool:
    """``builder.is_compatible``, with False for a toolkit that is missing or does not fit."""
    try:
        return builder.is_compatible(verbose=verbose)
    except (MissingCUDAException, CUDAMismatchException) as error:
        if verbose:
            builder.warning(str(error))
        return False


class OpBuilder(ABC):
    """How one native op is compiled and loaded.

    Subclasses set ``NAME`` and name their sources; paths are relative to the folder that holds ``csrc``.
    """

    BUILD_VAR = ""
    NAME = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: ModuleType | None = None

    @abstractmethod
    def absolute_name(self) -> str:
        """Import path under which an op compiled ahead of time lies, such as ``deepspeed.ops.adam.cpu_adam_op``."""

    @abstractmethod
    def sources(self) -> list[str]:
        """Source files."""

    def include_paths(self) -> list[str]:
        """Folders with headers."""
        return []

    def nvcc_args(self) -> list[str]:
        """Flags for the CUDA compiler."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags for the C++ compiler."""
        return ["-O3", "-std=c++17", "-Wno-reorder"]

    def extra_ldflags(self) -> list[str]:
        """Flags for the linker."""
        return []

    def hipify_extension(self) -> None:
        """Hook for translating sources on ROCm; nothing by default."""

    def sycl_extension(self) -> None:
        """Hook for SYCL sources; nothing by default."""

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch was built for ROCm."""
        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Whether torch was built for SYCL devices."""
        return getattr(torch.version, "xpu", None) is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Major and minor version of ROCm that torch was built for, (0, 0) if for none."""
        if torch.version.hip is None:
            return 0, 0
        major, minor = torch.version.hip.split(".")[:2]
        return int(major), int(minor)

    @staticmethod
    def get_rocm_gpu_arch() -> str:
        """Not built.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("native ops on ROCm are not built")

    @staticmethod
    def get_rocm_wavefront_size() -> str:
        """Not built.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("native ops on ROCm are not built")

    @staticmethod
    def validate_torch_version(torch_info: dict[str, Any]) -> None:
        """Checks that an op compiled ahead of time was compiled against the torch that runs.

        Args:
            torch_info: ``deepspeed.git_version_info.torch_info`` of the build.

        Raises:
            RuntimeError: the versions differ.
        """
        running = f"{TORCH_MAJOR}.{TORCH_MINOR}"
        if torch_info["version"] != running:
            raise RuntimeError(
                f"the op was compiled against torch {torch_info['version']}, but torch {running} runs: compile it again"
            )

    @staticmethod
    def validate_torch_op_version(torch_info: dict[str, Any]) -> None:
        """As ``validate_torch_version``, for the CUDA version that torch was built with.

        Raises:
            RuntimeError: the versions differ.
        """
        running = ".".join((torch.version.cuda or "0.0").split(".")[:2])
        if torch_info["cuda_version"] != running:
            raise RuntimeError(
                f"the op was compiled for CUDA {torch_info['cuda_version']}, but torch runs with CUDA {running}: "
                "compile it again"
            )

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here; with ``verbose`` says why not."""
        compiler = os.environ.get("CXX", "c++")
        if not self.command_exists(compiler):
            if verbose:
                self.warning(f"{self.name} needs a C++ compiler, and {compiler!r} is not installed")
            return False
        return True

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Whether a C program that calls ``funcname`` compiles and links with ``libraries``."""
        compiler = os.environ.get("CC", "cc")
        if not self.command_exists(compiler):
            return False
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(f"char {funcname}(void);\nint main(void) {{ return {funcname}(); }}\n", encoding="ascii")
            command = [compiler, str(source), "-o", str(Path(folder, "probe"))]
            command += [f"-L{path}" for path in library_dirs or ()] + [f"-l{library}" for library in libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if verbose and done.returncode != 0:
            self.warning(done.stderr)
        return done.returncode == 0

    def strip_empty_entries(self, args: Sequence[str]) -> list[str]:
        """``args`` without empty strings."""
        return [arg for arg in args if arg]

    def cpu_arch(self) -> str:
        """Compiler flag for the instruction set of this host."""
        return "-mcpu=native" if platform.machine() in ("ppc64le", "aarch64") else "-march=native"

    def simd_width(self) -> str:
        """Macro that says which vector instructions this host has; empty if none that kernels are written for."""
        try:
            flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return ""
        if "avx512f" in flags:
            return "-D__AVX512__"
        return "-D__AVX256__" if "avx2" in flags else ""

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a command, or any of several, is installed."""
        return any(shutil.which(name) is not None for name in ([cmd] if isinstance(cmd, str) else cmd))

    def warning(self, msg: str) -> None:
        """Logs a warning that names the op."""
        logger.warning(f"op {self.name}: {msg}")

    def deepspeed_src_path(self, code_path: str) -> str:
        """Absolute path of a source: unchanged if absolute, else below the folder that holds ``csrc``."""
        # Not resolved: in a checkout this folder is a link, and csrc is beside the link as it is beside this folder.
        return str(Path(os.path.abspath(__file__)).parent.parent / code_path)

    def builder(self) -> Any:
        """Not built: ops are compiled on first use only.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"op {self.name}: compiling ops when the package is installed is not built")

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module: the one compiled ahead of time if there is one, else compiled now.

        Raises:
            RuntimeError: it cannot be compiled here, or the compiler fails.
        """
        if self._loaded is None:
            path = self.absolute_name()
            try:
                compiled_before = importlib.util.find_spec(path) is not None
            except ModuleNotFoundError:  # the package it would be in does not exist either
                compiled_before = False
            self._loaded = importlib.import_module(path) if compiled_before else self.jit_load(verbose)
        return self._loaded

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compiles the op with the compilers of this host, or takes it from torch's cache, and loads it.

        Raises:
            RuntimeError: the op cannot be compiled here, or the compiler fails.
        """
        if not probe_is_compatible(self, verbose=verbose):
            raise RuntimeError(f"op {self.name} cannot be compiled on this host: `ds_report` says what is missing")
        from torch.utils import cpp_extension

        sources = [self.deepspeed_src_path(path) for path in self.sources()]
        return cpp_extension.load(
            name=self.name,
            sources=self.strip_empty_entries(sources),
            extra_include_paths=[
                self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.include_paths())
            ],
            extra_cflags=self.strip_empty_entries(self.cxx_args()),
            extra_cuda_cflags=self.strip_empty_entries(self.nvcc_args()),
            extra_ldflags=self.strip_empty_entries(self.extra_ldflags()),
            verbose=verbose,
        )


class CUDAOpBuilder(OpBuilder):
    """An op with CUDA sources. torch chooses the architectures (TORCH_CUDA_ARCH_LIST or the devices of this host)."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a C++ compiler and a CUDA toolkit that fits torch are here.

        Raises:
            MissingCUDAException: no toolkit is found.
            CUDAMismatchException: it does not fit torch.
        """
        return super().is_compatible(verbose) and assert_no_cuda_mismatch(self.name)

    def nvcc_args(self) -> list[str]:
        return ["-O3", "-std=c++17", f"--threads={os.getenv('DS_NVCC_THREADS', '8')}"]

    def libraries_args(self) -> list[str]:
        """Libraries to link with."""
        return []


class NotImplementedBuilder(OpBuilder):
    """An op that is in the interface but has no native kernel: says so instead of pretending."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(self.NAME if name is None else name)

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        if verbose:
            self.warning("no native kernel is built")
        return False

    def load(self, verbose: bool = False) -> ModuleType:
        """Raises NotImplementedError, always."""
        raise NotImplementedError(f"op {self.name}: no native kernel is built")

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Raises NotImplementedError, always."""
        raise NotImplementedError(f"op {self.name}: no native kernel is built")
