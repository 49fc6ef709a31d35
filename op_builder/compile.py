# SPDX-License-Identifier: Apache-2.0
"""Runs compilers and the linker over the sources of one op, and keeps the result in a cache that processes share.

A library in the cache is never half written: it is built in a folder of its own and renamed into place. A lock spares
other processes the same work. The system takes it from a process that dies, so nothing is left behind to wait for.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("DeepSpeed")

_HEADER_SUFFIXES = {".h", ".hpp", ".cuh", ".inc", ".inl"}
_CUDA_SUFFIXES = {".cu"}
_ERROR_LINES = 12

# POSIX locks are per process: threads of one process need one of their own.
_THREADS = threading.RLock()


def _forget_other_threads() -> None:
    """A forked child has none of them, and would wait for ever for one that held the lock."""
    global _THREADS
    _THREADS = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


class BuildError(RuntimeError):
    """An op could not be compiled. ``str`` says which command failed and the first lines of what it wrote."""


@dataclass(frozen=True)
class BuildPlan:
    """Everything that decides what comes out of a build.

    Attributes:
        name: name of the extension module, hence of the file and of its ``PyInit_`` function.
        sources: absolute paths; ``.cu`` goes to ``nvcc``, everything else to ``cxx``.
        include_paths: absolute folders with headers of this package; their headers count for the key.
        system_include_paths: absolute folders with headers of torch, Python and CUDA.
        cxx: command of the C++ compiler, which also links.
        nvcc: command of the CUDA compiler; empty if there are no CUDA sources.
        cxx_flags, nvcc_flags, link_flags: flags, without include paths.
        identity: whatever else makes a build another one (versions, processor), as text.
    """

    name: str
    sources: tuple[str, ...]
    include_paths: tuple[str, ...]
    system_include_paths: tuple[str, ...]
    cxx: tuple[str, ...]
    nvcc: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    identity: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """Name of the library file, with the suffix of this Python's extension modules."""
        return self.name + sysconfig.get_config_var("EXT_SUFFIX")

    def key(self) -> str:
        """Hexadecimal digest over sources, headers, flags and versions: equal keys, exchangeable builds."""
        facts = [self.name, self.cxx, self.nvcc, self.cxx_flags, self.nvcc_flags, self.link_flags, self.identity]
        facts += [sysconfig.get_config_var("EXT_SUFFIX"), platform.system(), platform.machine(), self.source_digest()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]

    def source_digest(self) -> str:
        """Hexadecimal digest over the sources and the headers of this package that they may include."""
        digest = hashlib.sha256()
        for path in sorted({*self.sources, *self._headers()}):
            content = Path(path).read_bytes()
            digest.update(f"{os.path.basename(path)} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:20]

    def _headers(self) -> list[str]:
        folders = {*self.include_paths, *(os.path.dirname(source) for source in self.sources)}
        found = [path for folder in folders for path in Path(folder).rglob("*") if path.suffix in _HEADER_SUFFIXES]
        return [str(path) for path in found]


def compile_into(plan: BuildPlan, folder: Path, verbose: bool = False) -> Path:
    """Compiles and links ``plan`` in ``folder`` and returns the library.

    Sources are compiled side by side, as many as ``MAX_JOBS`` says (default: the processors of this process).

    Raises:
        BuildError: a command is missing or fails.
    """
    objects = [str(folder / f"{index}_{Path(source).stem}.o") for index, source in enumerate(plan.sources)]
    commands = [_compile_command(plan, source, output) for source, output in zip(plan.sources, objects)]
    with ThreadPoolExecutor(min(_jobs(), len(commands))) as pool:
        list(pool.map(lambda command: _run(plan.name, command, verbose), commands))
    library = folder / plan.file_name
    _run(plan.name, [*plan.cxx, "-shared", *objects, "-o", str(library), *plan.link_flags], verbose)
    return library


def _jobs() -> int:
    named = os.environ.get("MAX_JOBS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile_command(plan: BuildPlan, source: str, output: str) -> list[str]:
    includes = [f"-I{path}" for path in plan.include_paths]
    for path in plan.system_include_paths:
        includes += ["-isystem", path]
    if Path(source).suffix in _CUDA_SUFFIXES:
        return [*plan.nvcc, *plan.nvcc_flags, *includes, "-c", source, "-o", output]
    return [*plan.cxx, *plan.cxx_flags, *includes, "-c", source, "-o", output]


def _run(name: str, command: Sequence[str], verbose: bool) -> None:
    if verbose:
        print(shlex.join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"op {name}: {command[0]} cannot be run: {error.strerror}") from error
    if verbose and done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        shown = "\n".join(lines[:_ERROR_LINES])
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise BuildError(f"op {name}: {shlex.join(command)} ended with {how}:\n{shown}")


def cache_folders() -> list[Path]:
    """Folders for built ops, in the order in which they are tried.

    ``TORCH_EXTENSIONS_DIR`` if it is set, else ``~/.cache/deepspeed_ops`` (``XDG_CACHE_HOME``). Where that cannot be
    written to, a folder below the system's folder for temporary files, which must belong to this user alone.
    """
    home = os.path.expanduser("~")  # stays "~" for a user without one, as containers have them
    named = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    if not named and home != "~":
        named = os.path.join(home, ".cache")
    fallback = Path(tempfile.gettempdir(), f"deepspeed_ops_{os.getuid()}")
    return [Path(named, "deepspeed_ops").absolute(), fallback] if named else [fallback]


def find_cached(plan: BuildPlan) -> Path | None:
    """The library of ``plan`` if the cache has it. Needs neither a compiler nor a folder that can be written to."""
    key = plan.key()
    folders = cache_folders()
    for folder in folders:
        library = folder / plan.name / key / plan.file_name
        if os.path.isfile(library) and _is_private(folder, folders):
            return library
    return None


def cached_build(plan: BuildPlan, verbose: bool = False, discard: bool = False) -> Path:
    """The library of ``plan`` from the cache, built now if it is not there.

    Args:
        discard: the cached library proved unusable; build it anew.

    Raises:
        BuildError: the build fails, here or in a process that this one waited for; or no folder can be written to.
    """
    key = plan.key()
    folders = cache_folders()
    problems = []
    for folder in folders:
        try:
            home = folder / plan.name
            if folder == folders[-1]:
                folder.mkdir(exist_ok=True, mode=0o700)
            home.mkdir(parents=True, exist_ok=True)
            if not _is_private(folder, folders):
                problems.append(f"{folder}: belongs to or can be written to by another user")
                continue
            failure = home / f"{key}.failed"
            seen = _stamp(failure)
            with _THREADS, _lock(home / f"{key}.lock") as locked:
                if _stamp(failure) != seen:
                    # It failed in another process while this one waited: every rank would fail in turn.
                    raise BuildError(failure.read_text(encoding="utf-8"))
                return _build_locked(plan, home, key, verbose, discard, locked)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise BuildError(
        f"op {plan.name}: no folder for the build ({'; '.join(problems)}). Set TORCH_EXTENSIONS_DIR to one that can be "
        "written to"
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None if there is none."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns


def _is_private(folder: Path, folders: Sequence[Path]) -> bool:
    """False for the fallback below a folder that everybody writes to, if somebody else could have put files there."""
    if folder != folders[-1]:
        return True
    info = folder.stat()
    return info.st_uid == os.getuid() and not info.st_mode & 0o022


def _build_locked(plan: BuildPlan, home: Path, key: str, verbose: bool, discard: bool, locked: bool) -> Path:
    final = home / key / plan.file_name
    if final.is_file() and not discard:
        return final
    if locked:
        for stale in home.glob(f".{key}.*"):  # of builds that died: nobody else builds this while the lock is held
            shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=home))
    try:
        library = compile_into(plan, staging, verbose)
        with open(library, "rb") as file:
            os.fsync(file.fileno())
        final.parent.mkdir(exist_ok=True)
        os.replace(library, final)
    except BuildError as error:
        _write_atomically(home / f"{key}.failed", str(error))
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _write_atomically(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds an exclusive POSIX lock on ``path``; gives whether it could be had.

    A forked child does not inherit it. Where the file system knows no locks, the work may be done twice; since the
    result is renamed into place, it is right all the same.
    """
    with open(path, "w", encoding="ascii") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            logger.debug(f"{path} cannot be locked: {error.strerror}")
            locked = False
        yield locked
