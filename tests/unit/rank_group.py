# SPDX-License-Identifier: Apache-2.0
"""The session's side of the multi-rank tests: asks the server for ranks, gives them jobs, collects what they say."""

from __future__ import annotations

import atexit
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import IO, Any

from unit import rank_server
from unit.rank_server import STACK_SIGNAL, Job, Outcome, RankSpec, receive_message, send_message

# Seconds that ranks get to report after another rank failed, before they are stopped. Ranks that fail for the same
# reason do so within milliseconds; longer than that, a rank most likely waits for the failed one.
FAILURE_GRACE = 1.0
# After a skip: longer, because stopping a rank here could hide a failure that is still to come.
SKIP_GRACE = 5.0
# Seconds for leaving the process group and exiting.
EXIT_GRACE = 30.0
START_LIMIT = 300.0
STACK_LIMIT = 2.0


class RankServer:
    """Client of one server process (see ``rank_server``), which is started on construction."""

    def __init__(self) -> None:
        self._connection, remote = socket.socketpair()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        environment = dict(os.environ)
        # One thread in the server: a fork copies only the calling one, and locks held by others stay locked for ever.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = "1"
        # Lets code ask whether CUDA is there without initialising it, after which a forked rank could not use it.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from unit.rank_server import serve; serve({remote.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches the session only; it then ends the ranks itself.
        )
        remote.close()
        self._connection.settimeout(START_LIMIT)
        greeting = self._receive()
        if greeting["threads"] != 1:
            warnings.warn(
                f"importing ahead for the ranks left {greeting['threads']} threads running: forked ranks may deadlock",
                stacklevel=2,
            )
        if greeting["import_error"]:
            warnings.warn(f"importing ahead for the ranks failed:\n{greeting['import_error']}", stacklevel=2)

    def _receive(self) -> Any:
        try:
            return receive_message(self._connection)
        except (EOFError, TimeoutError) as error:
            raise self._gone() from error

    def _ask(self, question: tuple[str, Any], descriptors: list[int] | None = None) -> Any:
        try:
            send_message(self._connection, question, descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error
        return self._receive()

    def _gone(self) -> RuntimeError:
        self.close()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return RuntimeError(f"the process that ranks are forked from is gone or stuck; its stderr:\n{text}")

    def fork(self, spec: RankSpec, descriptors: list[int]) -> int:
        """Start one rank on the given socket, stdout, stderr and stack file. Returns its process id."""
        return self._ask(("fork", spec), descriptors)

    def load_ahead(self, job: Job) -> bool:
        """Import the job's test module once for all ranks. Returns False if no rank should be forked after that."""
        return self._ask(("load", job))

    def reap(self, pids: list[int]) -> dict[int, int]:
        """Kill what is left of these ranks. Returns exit codes, negative ones are signals."""
        return self._ask(("reap", pids))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and with it every rank. May be called again."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Rank:
    """The session's end of one rank: its socket, what it writes, and its outcome once there is one."""

    def __init__(self, server: RankServer, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.outcome: Outcome | None = None
        self.gone = False
        self.connection, remote = socket.socketpair()
        self._stack_file: IO[bytes] = tempfile.TemporaryFile()
        self.outputs: dict[int, _Output] = {}
        theirs = []
        for stream in ("stdout", "stderr"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self.outputs[read] = _Output(spec.rank, stream)
            theirs.append(write)
        try:
            self.pid = server.fork(spec, [remote.fileno(), *theirs, self._stack_file.fileno()])
        finally:
            remote.close()
            for descriptor in theirs:
                os.close(descriptor)

    def request_stacks(self) -> None:
        os.kill(self.pid, STACK_SIGNAL)

    def stacks(self) -> str:
        """What faulthandler has written so far. Does not move the offset, which the rank shares."""
        size = os.fstat(self._stack_file.fileno()).st_size
        text = os.pread(self._stack_file.fileno(), size, 0).decode(errors="replace")
        # The frames below the test's body are the same in every stack; so is the list of extension modules.
        unwanted = (f'"{rank_server.__file__}"', 'File "<string>", line 1 in <module>', "Extension modules: ")
        return "".join(line for line in text.splitlines(True) if not any(part in line for part in unwanted))

    def drain(self, descriptor: int) -> bool:
        """Pass on what the rank has written to one of its outputs. Returns whether more can come."""
        output = self.outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            output.feed(data)

    def close(self) -> None:
        self.connection.close()
        self._stack_file.close()
        for descriptor, output in self.outputs.items():
            self.drain(descriptor)
            output.finish()
            os.close(descriptor)
        self.outputs.clear()


class _Output:
    """Writes a rank's lines, with its number in front, to the same stream of the session, where pytest captures."""

    def __init__(self, rank: int, stream: str) -> None:
        self._prefix = f"[rank {rank}] "
        self._stream = stream
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._write(line)

    def finish(self) -> None:
        if self._rest:
            self._write(self._rest)
        self._rest = b""

    def _write(self, line: bytes) -> None:
        getattr(sys, self._stream).write(f"{self._prefix}{line.decode(errors='replace')}\n")


class _IdleWatch:
    """Tells when process groups have used next to no processor time for a while. Never does where there is no /proc.

    A rank that issues one collective more than its peers waits for ever without working; noticing that saves most of
    the timeout. gloo's threads wake up while they wait, which takes far less than the share allowed here.
    """

    SHARE = 0.05

    def __init__(self, limit: float) -> None:
        self.interval = min(1.0, limit / 10)
        self._limit = limit
        self._groups: set[int] = set()
        self._since = self._used = self._checked = 0.0

    def idle(self, groups: set[int]) -> bool:
        """Whether the groups have idled for the limit, as far back as they were asked about."""
        now = time.monotonic()
        if groups == self._groups and now - self._checked < self.interval:
            return False
        self._checked = now
        used = processor_seconds(groups)
        if groups != self._groups or used is None or used - self._used > self.SHARE * self._limit:
            self._groups, self._since, self._used = groups, now, used or 0.0
            return False
        return now - self._since >= self._limit


def processor_seconds(groups: set[int]) -> float | None:
    """Processor time of all live processes of these process groups; None where the system does not tell."""
    ticks = found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; the fields after it are state, parent, group, ...
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        if int(fields[2]) in groups:
            found += 1
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


class RankGroup:
    """The processes of one world size. They run one job after the other, as long as all of them stay healthy."""

    def __init__(
        self,
        server: RankServer,
        world_size: int,
        backend: str | None = None,
        init_distributed: bool = True,
        set_dist_env: bool = True,
    ) -> None:
        self._server = server
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._store_directory = tempfile.mkdtemp(prefix="ranks-")
        # Bound but not listening for as long as the ranks live: no other process is given this port, while rank 0 may
        # listen on it because both sockets allow the reuse of the address.
        self._port = socket.socket()
        self._port.bind(("127.0.0.1", 0))
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store = os.path.join(self._store_directory, "store")
        port = self._port.getsockname()[1]
        try:
            for rank in range(world_size):
                spec = RankSpec(rank, world_size, backend, init_distributed, set_dist_env, port, store)
                self._ranks.append(_Rank(server, spec))
        except BaseException:
            self.kill()
            raise
        for member in self._ranks:
            self._selector.register(member.connection, selectors.EVENT_READ, member)
            for descriptor in member.outputs:
                self._selector.register(descriptor, selectors.EVENT_READ, member)

    @property
    def usable(self) -> bool:
        """Whether another job can be given to these ranks."""
        return bool(self._ranks) and self._server.running

    def run(self, job: Job, timeout: float, idle_timeout: float) -> list[Outcome]:
        """Run the job on all ranks for at most ``timeout`` seconds.

        Ranks that idle for ``idle_timeout`` seconds while others have passed already are taken for hanging.
        Returns one outcome per rank, by rank. Unless every rank passed or every rank skipped, all are dead afterwards.
        """
        try:
            for member in self._ranks:
                member.outcome = Outcome(member.rank, "died", when=time.monotonic()) if member.gone else None
                try:
                    send_message(member.connection, job)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # It died just now; its socket tells below.
            outcomes = self._conclude(self._collect(timeout, idle_timeout))
        except BaseException:  # Also Ctrl-C: no rank outlives the call.
            self.kill()
            raise
        if len({outcome.kind for outcome in outcomes}) > 1 or outcomes[0].kind not in ("passed", "skipped"):
            self.kill()
        return outcomes

    def _collect(self, timeout: float, idle_timeout: float) -> str:
        """Wait for outcomes. If the ranks that are left hang, returns in words how that was noticed."""
        deadline = time.monotonic() + timeout
        watch = _IdleWatch(idle_timeout)
        while unfinished := [member for member in self._ranks if member.outcome is None]:
            limit = deadline
            for member in self._ranks:
                if member.outcome is not None and member.outcome.kind != "passed":
                    grace = SKIP_GRACE if member.outcome.kind == "skipped" else FAILURE_GRACE
                    limit = min(limit, member.outcome.when + grace)
            remaining = limit - time.monotonic()
            if remaining <= 0:
                return f"did not finish within {timeout:g} s" if limit == deadline else ""
            if len(unfinished) < len(self._ranks):
                if watch.idle({member.pid for member in unfinished}):
                    return f"idled for {idle_timeout:g} s after other ranks had finished"
                remaining = min(remaining, watch.interval)
            self._serve_events(remaining)
        return ""

    def _serve_events(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            member: _Rank = key.data
            if key.fileobj is not member.connection:
                if not member.drain(key.fd):
                    self._selector.unregister(key.fileobj)
                continue
            try:
                member.outcome = receive_message(member.connection)
            except EOFError:
                self._selector.unregister(member.connection)
                member.gone = True
                if member.outcome is None:
                    member.outcome = Outcome(member.rank, "died", when=time.monotonic())

    def _conclude(self, hang: str) -> list[Outcome]:
        members = list(self._ranks)
        unfinished = [member for member in members if member.outcome is None]
        for member in unfinished:
            member.request_stacks()
        limit = time.monotonic() + STACK_LIMIT
        while time.monotonic() < limit and not all(member.stacks() for member in unfinished):
            time.sleep(0.01)
        if unfinished:
            time.sleep(0.05)  # The file is not empty, but the handler may still be writing.
        for member in unfinished:
            details = member.stacks() or "(no stack: the process did not react to the signal)\n"
            member.outcome = Outcome(member.rank, "hung" if hang else "stopped", hang, details, time.monotonic())
        dead = [member for member in members if member.outcome is not None and member.outcome.kind == "died"]
        if dead:
            stacks = {member.rank: member.stacks() for member in dead}
            codes = self.kill()
            for member in dead:
                reason, when = describe_exit_code(codes[member.pid]), member.outcome.when if member.outcome else 0.0
                member.outcome = Outcome(member.rank, "died", reason, stacks[member.rank], when)
        return [member.outcome for member in members if member.outcome is not None]

    def close(self) -> list[str]:
        """Let the ranks leave their process group and exit. Returns what went wrong, one text per rank."""
        for member in self._ranks:
            try:
                send_message(member.connection, None)
            except (BrokenPipeError, ConnectionResetError):
                pass  # It died before; its exit code tells below.
        limit = time.monotonic() + EXIT_GRACE
        while time.monotonic() < limit and not all(member.gone for member in self._ranks):
            self._serve_events(limit - time.monotonic())
        stuck = {member.pid for member in self._ranks if not member.gone}
        ranks = {member.pid: member.rank for member in self._ranks}
        codes = self.kill()
        faults = []
        for pid, code in codes.items():
            if pid in stuck:
                faults.append(f"rank {ranks[pid]} was still in destroy_process_group or exit after {EXIT_GRACE:g} s")
            elif code != 0:
                faults.append(f"rank {ranks[pid]} {describe_exit_code(code)} while leaving the process group")
        return faults

    def kill(self) -> dict[int, int]:
        """Kill the ranks and what they started, pass on what they have written. Returns exit codes by process id."""
        members, self._ranks = self._ranks, []
        codes: dict[int, int] = {}
        try:
            if members:
                codes = self._server.reap([member.pid for member in members])
        finally:
            self._selector.close()
            for member in members:
                member.close()
            self._port.close()
            shutil.rmtree(self._store_directory, ignore_errors=True)
        return codes


def describe_exit_code(code: int) -> str:
    """Say in words how a process ended; ``code`` is negative for a signal."""
    if code < 0:
        return f"died: {signal.Signals(-code).name}"
    return f"left with exit code {code}"


_server: RankServer | None = None
# Files of test modules that the server has imported, and of those that it must not import.
_loaded: set[str] = set()
_not_ahead: set[str] = set()


def get_server(job: Job) -> RankServer:
    """The server of this session, started on first use and again if it is gone; with the job's module imported."""
    global _server
    if _server is None or not _server.running:
        close_server()
        _server = RankServer()
        atexit.register(close_server)
    if job.module_file not in _loaded | _not_ahead:
        _loaded.add(job.module_file)
        if not _server.load_ahead(job):
            _not_ahead.add(job.module_file)
            close_server()
            return get_server(job)
    return _server


def close_server() -> None:
    """End the server of this session, if there is one."""
    global _server
    server, _server = _server, None
    _loaded.clear()
    if server is not None:
        server.close()
