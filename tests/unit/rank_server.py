# SPDX-License-Identifier: Apache-2.0
"""The process that ranks are forked from, and what a rank does.

One server runs beside a pytest session. It has imported torch, deepspeed and pytest, has one thread and has never
touched a device, so a fork of it is a fresh rank within milliseconds. It forks on request, reaps on request, imports
test modules ahead of the ranks that need them and does nothing else; when the session's end of its socket closes, for
whatever reason, it kills every rank it started.

The session talks to each rank over a socket of its own. A rank reads a job, runs it, reports an outcome and then
*keeps its process group open* until told to go on: a rank that left early would turn its peers' collectives into
connection errors and hide which rank failed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1
# The first optimizer made in a process imports torch._dynamo, which takes more than a second.
PRELOAD = "torch._dynamo,torch.utils.data,deepspeed"
STACK_SIGNAL = signal.SIGUSR1
EXIT_BROKEN_RANK = 70


@dataclasses.dataclass(frozen=True)
class RankSpec:
    """What a rank process is, fixed for its lifetime. ``store`` is the path of a file that does not exist yet."""

    rank: int
    world_size: int
    backend: str | None
    init_distributed: bool
    set_dist_env: bool
    master_port: int
    store: str


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of ``class_name().method(**arguments)`` in every rank.

    ``payload`` is a pickle of ``(instance attributes, {argument: pickle})``; it is opened only after ``sys_path`` is in
    place. ``per_rank`` names the arguments that each rank makes for itself.
    """

    module: str
    module_file: str
    class_name: str
    method: str
    payload: bytes
    per_rank: tuple[str, ...]
    sys_path: list[str]
    directory: str
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank.

    ``kind`` is one of passed, skipped, xfailed, failed (said by the rank itself), died, hung, stopped (said by the
    session). ``when`` is CLOCK_MONOTONIC in seconds, which all processes of a machine share.
    """

    rank: int
    kind: str
    reason: str = ""
    details: str = ""
    when: float = 0.0


def send_message(connection: socket.socket, message: object, descriptors: list[int] | None = None) -> None:
    """Send one pickled message with its length in front, file descriptors attached to its first byte."""
    body = pickle.dumps(message)
    data = _HEADER.pack(len(body)) + body
    if descriptors:
        socket.send_fds(connection, [data[:1]], descriptors)
        data = data[1:]
    connection.sendall(data)


def receive_message(connection: socket.socket) -> Any:
    """Receive one message. Raises EOFError when the other end is gone."""
    (length,) = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    return pickle.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            chunk = connection.recv(min(length - len(data), 1 << 20))
        except ConnectionResetError as error:
            raise EOFError("the other end was killed") from error
        if not chunk:
            raise EOFError("the other end closed")
        data += chunk
    return bytes(data)


# ---------------------------------------------------------------------------------------------------------- server


def serve(descriptor: int) -> None:
    """Body of the server process: answer ``("fork", RankSpec)``, ``("load", Job)`` and ``("reap", pids)`` until the
    session goes away."""
    connection = socket.socket(fileno=descriptor)
    send_message(connection, {"import_error": _import_ahead(), "threads": _thread_count()})
    alive: set[int] = set()
    try:
        while True:
            # Four descriptors travel with each fork request: the rank's socket, stdout, stderr and stack file.
            first, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
            if not first:
                break
            (length,) = _HEADER.unpack(first + _receive_exactly(connection, _HEADER.size - 1))
            command, argument = pickle.loads(_receive_exactly(connection, length))
            if command == "fork":
                answer: object = _fork_rank(argument, descriptors, connection)
                alive.add(int(str(answer)))
            elif command == "load":
                answer = _load_ahead(argument)
            else:
                answer = {pid: _reap(pid) for pid in argument}
                alive -= set(argument)
            send_message(connection, answer)
    except (EOFError, BrokenPipeError):
        pass  # The session is gone: nobody is left to tell.
    finally:
        for pid in alive:
            _reap(pid)
        os._exit(0)


def _import_ahead() -> str | None:
    """Import what ranks need. Returns the traceback of what cannot be imported; the ranks then meet it where it counts.

    DS_TEST_PRELOAD names the modules, separated by commas. A rank that uses one that is missing here imports it by
    itself, every time.
    """
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    _install_assertion_rewriting()
    error = None
    for name in filter(None, os.environ.get("DS_TEST_PRELOAD", PRELOAD).split(",")):
        try:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
        except Exception:  # noqa: BLE001 - passed on as text
            error = traceback.format_exc()
    gc.collect()
    gc.freeze()  # Keeps the collector of the ranks from writing to, and so copying, every page of what is shared.
    return error


def _load_ahead(job: Job) -> bool:
    """Import the test module of a job, which each rank would otherwise do, assertion rewriting included.

    Returns whether ranks can still be forked from here: not if the import started threads or touched a device.
    """
    directory, path, environment = os.getcwd(), sys.path[:], dict(os.environ)
    try:
        os.environ.update(job.environment)
        os.chdir(job.directory)
        sys.path[:] = job.sys_path
        _seed(0)
        with contextlib.suppress(BaseException):  # The ranks import it again then, and report what was wrong.
            _load_module(job)
    finally:
        os.chdir(directory)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
    gc.collect()
    gc.freeze()
    return _thread_count() == 1 and not sys.modules["torch"].cuda.is_initialized()


def _thread_count() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def _install_assertion_rewriting() -> None:
    """Give the ranks pytest's explanations of failed assertions.

    pytest has no public call for this outside a session of its own. Preparing a configuration without plugins,
    conftest and ini file is what its own entry point does first, and it installs the import hook.
    """
    import pytest
    from _pytest.assertion import util
    from _pytest.config import _prepareconfig
    from _pytest.terminal import TerminalReporter

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    config = _prepareconfig(["--noconftest", "--capture=no", "-p", "no:cacheprovider", "-c", os.devnull])
    # Explanations ask it for colours, of which it has none here.
    config.pluginmanager.register(TerminalReporter(config, sys.stdout), "terminalreporter")
    pytest.register_assert_rewrite("unit.util", "unit.simple_model", "unit.reference")

    def explain(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            text = [line.replace("\n", "\\n") for line in lines or ()]
            if text:
                return "\n~".join(text).replace("%", "%%")
        return None

    util._reprcompare = explain
    util._config = config


def _fork_rank(spec: RankSpec, descriptors: list[int], server_connection: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            server_connection.close()
            os.setpgid(0, 0)
            _die_with_parent()
            os.dup2(descriptors[1], 1)
            os.dup2(descriptors[2], 2)
            # Held until the very end: the session takes its closing for the end of this process.
            connection = socket.socket(fileno=descriptors[0])
            _rank_main(spec, connection, descriptors[3])
            _flush()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may run further up, which is the server's code
            traceback.print_exc()
            _flush()
        finally:
            os._exit(EXIT_BROKEN_RANK)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        os.setpgid(pid, pid)
    except ProcessLookupError:
        pass  # It is dead already, which the session notices by its socket.
    return pid


def _die_with_parent() -> None:
    """Have the kernel kill this rank if the server is killed, which then cannot do it itself (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(pid: int) -> int:
    """Kill a rank with everything it started and return its exit code, negative for a signal."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # Already gone; the pid is still ours, because only the next line frees it.
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


# ------------------------------------------------------------------------------------------------------------ rank


def _rank_main(spec: RankSpec, connection: socket.socket, stack_file: int) -> None:
    """Body of a rank: run jobs until the session says None, then leave the process group."""
    import torch

    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    faulthandler.enable(file=stack_file)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    # A rank that a test makes crash shall leave no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    torch.set_num_threads(1)
    started = False
    while (job := receive_message(connection)) is not None:
        outcome = _run_job(spec, job, started)
        started = True
        _flush()
        send_message(connection, outcome)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # The session stopped reading, or the test closed the stream: there is nobody to flush to.


def _run_job(spec: RankSpec, job: Job, started: bool) -> Outcome:
    import pytest

    def outcome(kind: str, reason: str = "", details: str = "") -> Outcome:
        return Outcome(spec.rank, kind, reason, details, time.monotonic())

    monkeypatches: list[pytest.MonkeyPatch] = []
    try:
        _enter_environment(spec, job)
        if not started and spec.init_distributed:
            _join_process_group(spec)
        _seed(spec.rank)
        method, arguments = _load_call(spec, job, monkeypatches)
        method(**arguments)
        return outcome("passed")
    except pytest.skip.Exception as skip:
        return outcome("skipped", str(skip.msg))
    except pytest.xfail.Exception as xfail:
        return outcome("xfailed", str(xfail.msg))
    except BaseException as error:  # noqa: BLE001 - reported as the failure it is, SystemExit included
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        # The first entry of the traceback is this function.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        return outcome("failed", reason, "".join(traceback.format_exception(type(error), error, trace)))
    finally:
        for monkeypatch in monkeypatches:
            monkeypatch.undo()


def _enter_environment(spec: RankSpec, job: Job) -> None:
    environment = dict(job.environment)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # gloo otherwise resolves the host's name, which not every machine can.
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed = {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.master_port),
    }
    for name, value in distributed.items():
        environment.pop(name, None)
        if spec.set_dist_env:
            environment[name] = value
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job.directory)
    sys.path[:] = job.sys_path


def _seed(rank: int) -> None:
    """Give the rank the generators that a process of its own would have, but the same ones in each run.

    torch starts every process from one fixed seed; Python and numpy start each process differently.
    """
    import torch

    random.seed(rank)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)


def _join_process_group(spec: RankSpec) -> None:
    import pytest
    import torch
    import torch.distributed

    backend = spec.backend or _default_backend()
    if "nccl" in backend:
        if torch.cuda.device_count() < spec.world_size:
            pytest.skip(f"needs {spec.world_size} CUDA devices, found {torch.cuda.device_count()}")
        torch.cuda.set_device(spec.rank)
    arguments = {"init_method": f"file://{spec.store}", "rank": spec.rank, "world_size": spec.world_size}
    if _has_deepspeed_comm():
        init_distributed = importlib.import_module("deepspeed.comm").init_distributed
        init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, **arguments)
    else:
        torch.distributed.init_process_group(backend, **arguments)


def _default_backend() -> str:
    import torch

    if importlib.util.find_spec("deepspeed") is not None and _has_module("deepspeed.accelerator"):
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        return accelerator.communication_backend_name()
    return "nccl" if torch.cuda.is_available() else "gloo"


def _has_deepspeed_comm() -> bool:
    return importlib.util.find_spec("deepspeed") is not None and _has_module("deepspeed.comm")


def _has_module(name: str) -> bool:
    """Whether a module of that name has a source file; a bare folder is importable too and holds nothing."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _load_call(spec: RankSpec, job: Job, monkeypatches: list[Any]) -> tuple[Any, dict[str, Any]]:
    import pytest

    owner: Any = _load_module(job)
    for part in job.class_name.split("."):
        owner = getattr(owner, part)
    attributes, pickled = pickle.loads(job.payload)
    instance = owner()
    vars(instance).update(attributes)
    instance.world_size = spec.world_size
    arguments = {name: pickle.loads(value) for name, value in pickled.items()}
    for name in job.per_rank:
        monkeypatches.append(pytest.MonkeyPatch())
        arguments[name] = monkeypatches[-1]
    return getattr(instance, job.method), arguments


def _load_module(job: Job) -> ModuleType:
    import pytest

    if job.module in sys.modules:
        module = sys.modules[job.module]
        if _same_file(module, job.module_file):
            return module
    pytest.register_assert_rewrite(job.module)
    try:
        module = importlib.import_module(job.module)
        if _same_file(module, job.module_file):
            return module
    except ModuleNotFoundError as error:
        if error.name is None or not (job.module + ".").startswith(error.name + "."):
            raise
    # pytest's importlib mode gives modules names that no entry of sys.path can produce.
    spec = importlib.util.spec_from_file_location(job.module, job.module_file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the test module {job.module} from {job.module_file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[job.module]
        raise
    return module


def _same_file(module: ModuleType, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(path)
