# SPDX-License-Identifier: Apache-2.0
"""Compiles a native op on first use. Importing this module compiles nothing and needs no compiler."""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .compile import BuildPlan, cached_build, compile_into, find_cached
from .cuda_arch import DEFAULT_ARCHITECTURES, gencode_flags, known_to, parse_architectures

YELLOW = "\033[93m"
END = "\033[0m"
WARNING = f"{YELLOW} [WARNING] {END}"

DEFAULT_TORCH_EXTENSION_PATH = "/tmp/torch_extensions"
DEFAULT_COMPUTE_CAPABILITIES = "6.0;6.1;7.0"

NATIVE_VARIABLE = "DS_NATIVE_OPS"

# As torch's own builds do: the other schemes of a distribution may point to a folder without headers.
_SCHEME = "posix_prefix"

# As torch compiles its own CUDA sources: its headers define these operators for its own half types.
_NVCC_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC",
]

# What load_or_none found, by import path of the op.
_ANSWERS: dict[str, ModuleType | None] = {}

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])

logger = logging.getLogger("DeepSpeed")


class MissingCUDAException(Exception):
    """No CUDA toolkit was found."""


class CUDAMismatchException(Exception):
    """The CUDA toolkit does not fit the CUDA version that torch was built with."""


def cuda_home() -> str | None:
    """Folder of the CUDA toolkit: ``CUDA_HOME`` or ``CUDA_PATH``, else where ``nvcc`` is, else ``/usr/local/cuda``."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return named
    nvcc = shutil.which("nvcc")
    candidates = [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for home in [*candidates, "/usr/local/cuda"]:
        # A script that only calls the real nvcc may stand elsewhere: the headers tell.
        if all(os.path.isfile(os.path.join(home, *part)) for part in (("bin", "nvcc"), ("include", "cuda_runtime.h"))):
            return home
    return None


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Major and minor version of the CUDA toolkit.

    Args:
        name: op for which this is asked, for the message.

    Raises:
        MissingCUDAException: no toolkit is found.
    """
    home = cuda_home()
    if home is None:
        needs = f"{name} needs the CUDA toolkit" if name else "there is no CUDA toolkit"
        raise MissingCUDAException(f"{needs}: CUDA_HOME is not set and nvcc is not found")
    nvcc = os.path.join(home, "bin", "nvcc")
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
    how = "without CUDA" if built_with is None else f"with CUDA {built_with}"
    message = f"{f'{name}: ' if name else ''}CUDA toolkit {major}.{minor} does not fit torch, which was built {how}"
    if os.getenv("DS_SKIP_CUDA_CHECK", "0") == "1":
        logger.warning(f"{message}; going on as DS_SKIP_CUDA_CHECK=1")
        return True
    raise CUDAMismatchException(f"{message}. Install a matching one or set DS_SKIP_CUDA_CHECK=1")


def get_default_compute_capabilities() -> str:
    """Compute capabilities, separated by ``;``, that are built for when no device is there to ask.

    Those of :data:`DEFAULT_ARCHITECTURES` that the CUDA toolkit of this host can compile for;
    ``DEFAULT_COMPUTE_CAPABILITIES`` without a toolkit.
    """
    home = cuda_home()
    if home is None:
        return DEFAULT_COMPUTE_CAPABILITIES
    return ";".join(known_to(os.path.join(home, "bin", "nvcc"), DEFAULT_ARCHITECTURES))


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

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
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
        return ["-O3", "-Wno-reorder"]

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

    def why_not(self) -> str | None:
        """Why the op cannot be compiled here, in one sentence; None if it can."""
        compiler = shlex.split(cxx_command())[0]
        if not self.command_exists(compiler):
            return f"there is no C++ compiler ({compiler}): install g++, or name one in CXX"
        headers = sysconfig.get_path("include", scheme=_SCHEME)
        if not os.path.isfile(os.path.join(headers, "Python.h")):
            return f"{headers} has no Python.h: install Python's headers (Debian, Ubuntu: python3-dev)"
        return None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here; with ``verbose`` says why not."""
        reason = self.why_not()
        if reason is not None and verbose:
            self.warning(reason)
        return reason is None

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

    def uses_torch(self) -> bool:
        """Whether the sources include headers of torch. A build of one that does not fits every torch."""
        return True

    def plan(self) -> BuildPlan:
        """What is compiled, and how. Runs no compiler.

        Raises:
            FileNotFoundError: a source is missing.
        """
        sources = [self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.sources())]
        missing = [path for path in sources if not os.path.isfile(path)]
        if missing:
            raise FileNotFoundError(f"op {self.name}: sources are missing: {', '.join(missing)}")
        includes = [self.deepspeed_src_path(path) for path in self.strip_empty_entries(self.include_paths())]
        name = self.absolute_name().rpartition(".")[2]
        common = self._common_flags(name)
        cxx_flags = [*common, "-fPIC", *self.strip_empty_entries(self.cxx_args()), *shlex.split(_env("CFLAGS"))]
        return BuildPlan(
            name=name,
            sources=tuple(sources),
            include_paths=tuple(includes),
            system_include_paths=tuple(self._system_include_paths()),
            cxx=tuple(shlex.split(cxx_command())),
            nvcc=(),
            cxx_flags=tuple(cxx_flags),
            nvcc_flags=(),
            link_flags=tuple([*self._link_flags(), *shlex.split(_env("LDFLAGS"))]),
            identity=tuple(self._identity(cxx_flags)),
        )

    def _common_flags(self, name: str) -> list[str]:
        flags = [f"-DTORCH_EXTENSION_NAME={name}"]
        if self.uses_torch():
            flags += [
                "-DTORCH_API_INCLUDE_EXTENSION_H",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            ]
        if not any(arg.startswith("-std=") for arg in self.cxx_args()):
            flags.append(f"-std={_cxx_standard()}")
        return flags

    def _system_include_paths(self) -> list[str]:
        from torch.utils import cpp_extension

        torch_paths = cpp_extension.include_paths() if self.uses_torch() else []
        return [*torch_paths, sysconfig.get_path("include", scheme=_SCHEME)]

    def _link_flags(self) -> list[str]:
        flags = self.strip_empty_entries(self.extra_ldflags())
        if self.uses_torch():
            from torch.utils import cpp_extension

            flags += [f"-L{path}" for path in cpp_extension.library_paths()]
            flags += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        return flags

    def _identity(self, flags: Sequence[str]) -> list[str]:
        facts = [f"torch {torch.__version__} {torch.version.cuda} {torch.version.hip}"] if self.uses_torch() else []
        if any(flag in ("-march=native", "-mcpu=native", "-mtune=native") for flag in flags):
            facts.append(_processor())
        return facts

    def builder(self) -> Any:
        """A ``setuptools.Extension`` under which the op is compiled when the package is installed.

        It names the module and its sources; ``setup.py`` compiles it with :meth:`compile_ahead`.
        """
        from setuptools import Extension

        return Extension(self.absolute_name(), self.strip_empty_entries(self.sources()))

    def compile_ahead(self, folder: Path) -> Path:
        """Compiles the op into ``folder``, with a file beside it that says what it was compiled for.

        Raises:
            BuildError: the compiler fails.
            RuntimeError: it cannot be compiled here.
        """
        self._check_compatible(verbose=True)
        plan = self.plan()
        with tempfile.TemporaryDirectory() as staging:
            library = compile_into(plan, Path(staging))
            folder.mkdir(parents=True, exist_ok=True)
            final = folder / plan.file_name
            shutil.copyfile(library, final)
        final.with_name(f"{plan.name}.json").write_text(json.dumps({"built_for": _built_for(plan)}), encoding="utf-8")
        return final

    def installed_library(self) -> Path | None:
        """The library compiled ahead of time, if there is one and it fits the torch that runs; else None."""
        package, _, name = self.absolute_name().rpartition(".")
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            return None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            library = Path(folder, name + sysconfig.get_config_var("EXT_SUFFIX"))
            facts = library.with_name(f"{name}.json")
            if not library.is_file() or not facts.is_file():
                continue
            built_for = json.loads(facts.read_text(encoding="utf-8"))["built_for"]
            wanted = _built_for(self.plan())
            if built_for == wanted:
                return library
            self._warn_first_rank(f"{library} was compiled from or for {built_for}, not {wanted}: it is not used")
        return None

    def _warn_first_rank(self, message: str) -> None:
        if os.getenv("RANK", "0") == "0":
            self.warning(message)

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module: the one compiled ahead of time if there is one that fits, else compiled now.

        Raises:
            RuntimeError: it cannot be compiled here, or the compiler fails.
        """
        if self._loaded is None:
            self._loaded = self._load_installed() or self.jit_load(verbose)
        return self._loaded

    def _load_installed(self) -> ModuleType | None:
        installed = self.installed_library()
        if installed is None:
            return None
        try:
            return _import_library(installed)
        except ImportError as error:
            self._warn_first_rank(f"{installed} cannot be loaded ({error}): it is not used")
            return None

    def compiled(self) -> str:
        """Where there is a library of the op that fits: "installed", "cached", or "" for nowhere. Compiles nothing."""
        if not self.sources():
            return ""
        if self.installed_library() is not None:
            return "installed"
        return "cached" if find_cached(self.plan()) is not None else ""

    def load_or_none(self) -> ModuleType | None:
        """As :meth:`load`, with None where the op cannot be had; one line on the first rank says why.

        The answer is kept, so that every optimizer of this process gets the same one.
        """
        key = self.absolute_name()
        if key not in _ANSWERS:
            _ANSWERS[key] = self._answer()
        return _ANSWERS[key]

    def _answer(self) -> ModuleType | None:
        if os.getenv(NATIVE_VARIABLE, "1") == "0":
            return None
        try:
            return self.load()
        except (RuntimeError, ImportError, OSError) as error:
            reason = " ".join(str(error).split())
            self._warn_first_rank(f"the native kernel cannot be used, torch does the work, more slowly: {reason}")
            return None

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compiles the op with the compilers of this host, or takes it from the cache, and loads it.

        Raises:
            RuntimeError: the op cannot be compiled here, or the compiler fails (then BuildError).
        """
        plan = self.plan()
        library = find_cached(plan)
        if library is None:
            self._check_compatible(verbose)
            library = cached_build(plan, verbose)
        try:
            return _import_library(library)
        except ImportError as error:
            self.warning(f"{library} cannot be loaded ({error}): it is built anew")
        self._check_compatible(verbose)
        return _import_library(cached_build(plan, verbose, discard=True))

    def _check_compatible(self, verbose: bool) -> None:
        reason = self.why_not()
        if reason is not None:
            raise RuntimeError(f"op {self.name} cannot be compiled here: {reason}")


def _built_for(plan: BuildPlan) -> list[str]:
    return [*plan.identity, f"sources {plan.source_digest()}"]


def _env(name: str) -> str:
    return os.environ.get(name, "")


def cxx_command() -> str:
    """The C++ compiler: ``CXX`` if it is set, else ``g++`` or ``c++``, whichever is there."""
    return _env("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")


def _cxx_standard() -> str:
    """The C++ standard that torch's headers were written for, as its own build says."""
    found = re.search(r"C\+\+ Version: (\d+)", torch.__config__.show())
    return "c++20" if found and int(found.group(1)) >= 202002 else "c++17"


def _processor() -> str:
    """What ``-march=native`` depends on, as text."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:
        return platform.processor()
    lines = [line for line in text.splitlines() if re.match(r"(model name|flags|Features|CPU part)\s*:", line)]
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:16]


def _import_library(path: Path) -> ModuleType:
    """Imports an extension module from its file.

    Raises:
        ImportError: the file is no library for this process.
    """
    name = path.name.removesuffix(sysconfig.get_config_var("EXT_SUFFIX"))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class CUDAOpBuilder(OpBuilder):
    """An op with CUDA sources.

    It is compiled for the architectures of ``TORCH_CUDA_ARCH_LIST``, else for the devices of this host, else (on a host
    without a device) for those of :func:`get_default_compute_capabilities` that the toolkit knows.
    """

    def why_not(self) -> str | None:
        reason = super().why_not()
        if reason is not None:
            return reason
        try:
            assert_no_cuda_mismatch()
        except (MissingCUDAException, CUDAMismatchException) as error:
            return str(error)
        return None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a C++ compiler and a CUDA toolkit that fits torch are here.

        Raises:
            MissingCUDAException: no toolkit is found.
            CUDAMismatchException: it does not fit torch.
        """
        assert_no_cuda_mismatch(self.name)
        return super().is_compatible(verbose)

    def nvcc_args(self) -> list[str]:
        """Flags for ``nvcc``, without architectures. ``DS_DEBUG_CUDA_BUILD`` adds line numbers and register counts."""
        args = ["-O3", f"--threads={os.getenv('DS_NVCC_THREADS', '8')}"]
        if os.getenv("DS_DEBUG_CUDA_BUILD") is not None:
            args += ["-g", "-lineinfo", "--ptxas-options=-v"]
        return args

    def libraries_args(self) -> list[str]:
        """Names of libraries to link with, without ``-l``."""
        return []

    def version_dependent_macros(self) -> list[str]:
        """Macros that say which torch the sources meet."""
        return [f"-DTORCH_VERSION_MAJOR_DS={TORCH_MAJOR}", f"-DTORCH_VERSION_MINOR_DS={TORCH_MINOR}"]

    def cuda_capability_major(self) -> int:
        """Major compute capability of the first device.

        Raises:
            RuntimeError: there is no device.
        """
        if not torch.cuda.is_available():
            raise RuntimeError(f"op {self.name}: there is no CUDA device to ask for its compute capability")
        return torch.cuda.get_device_capability(0)[0]

    def filter_ccs(self, ccs: list[str]) -> list[str]:
        """Those of the architectures ``ccs`` that the op is compiled for; an op that needs newer ones overrides it."""
        return list(ccs)

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """``-gencode`` flags for the architectures that the op is compiled for.

        Args:
            cross_compile_archs: used instead of the default where neither ``TORCH_CUDA_ARCH_LIST`` nor a device says.

        Raises:
            ValueError: an entry of the list is no architecture.
            RuntimeError: the op can be compiled for none of them.
        """
        entries = parse_architectures(_env("TORCH_CUDA_ARCH_LIST")) or _architectures_of_devices()
        if not entries:
            entries = parse_architectures(cross_compile_archs or get_default_compute_capabilities())
        kept = self.filter_ccs(entries)
        if not kept:
            raise RuntimeError(f"op {self.name} cannot be compiled for any of {', '.join(entries)}")
        return gencode_flags(kept)

    def plan(self) -> BuildPlan:
        plan = super().plan()
        name = self.absolute_name().rpartition(".")[2]
        flags = [*self._common_flags(name), *_NVCC_FLAGS, *self.strip_empty_entries(self.nvcc_args())]
        if _env("CXX"):
            flags += ["-ccbin", shlex.split(_env("CXX"))[0]]
        return replace(
            plan,
            nvcc=(os.path.join(cuda_home() or "", "bin", "nvcc"),),
            nvcc_flags=tuple([*flags, *self.compute_capability_args()]),
        )

    def _system_include_paths(self) -> list[str]:
        home = cuda_home()
        return super()._system_include_paths() + ([os.path.join(home, "include")] if home else [])

    def _link_flags(self) -> list[str]:
        flags = super()._link_flags()
        if torch.version.cuda is not None and self.uses_torch():
            flags += ["-lc10_cuda", "-ltorch_cuda"]
        home = cuda_home()
        flags += [f"-L{os.path.join(home, folder)}" for folder in ("lib64", "lib") if home]
        return [*flags, "-lcudart", *(f"-l{name}" for name in self.libraries_args())]


def _architectures_of_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(capabilities)]


class NotImplementedBuilder(OpBuilder):
    """An op that is in the interface but has no native kernel: says so instead of pretending."""

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}_op"

    def sources(self) -> list[str]:
        return []

    def why_not(self) -> str | None:
        return "it has no native kernel"

    def load(self, verbose: bool = False) -> ModuleType:
        """Raises NotImplementedError, always."""
        raise NotImplementedError(f"op {self.name}: no native kernel is built")

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Raises NotImplementedError, always."""
        raise NotImplementedError(f"op {self.name}: no native kernel is built")
