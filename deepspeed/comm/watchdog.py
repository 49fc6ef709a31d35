# SPDX-License-Identifier: Apache-2.0
"""Health of collectives: a rank that waits too long for others stops with an error that says who is where.

Users of collectives note what they issue and wait through :func:`wait`::

    lane = watchdog.lane(group, "gradients")
    ...
    lane.note("reduce", f"bucket {i}", key=i + 1)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    ...
    watchdog.wait(work, f"bucket {i}", lane)

One daemon thread per process answers other ranks' questions (``watchdog_peers``), in whatever C++ call the main thread
is. A rank whose wait has lasted longer than the timeout has the lowest rank that answers collect the states of all and
write the report; every rank that waits then raises with it.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist

from deepspeed.comm import watchdog_report
from deepspeed.comm.operation_log import Lane, OperationLog, Wait, What, describe
from deepspeed.comm.torch import is_alive, timeout_of
from deepspeed.comm.watchdog_peers import ANSWER_SECONDS, Answer, Peers
from deepspeed.utils.logging import logger

TIMEOUT_VARIABLE = "DS_COLLECTIVE_TIMEOUT"
EXIT_VARIABLE = "DS_COLLECTIVE_TIMEOUT_EXIT"
EXIT_CODE = 75
"""Exit status of a process that the watchdog ended because its device was stuck."""

_LONGEST_SLICE = 1.0  # seconds for which a wait is deaf to the alarm of another rank
_FAREWELL_SECONDS = 0.5
_JOIN_SECONDS = 60.0  # for which the store is asked for the addresses of ranks that have not started a watchdog
_REPORT_SECONDS = 30.0  # within which the leader answers: it asks every rank, some of which may not answer


class CollectiveError(RuntimeError):
    """A collective failed. The message has the report about all ranks."""


class CollectiveTimeoutError(CollectiveError):
    """A rank has waited for others for longer than the timeout. The message has the report about all ranks."""


def explained(error: RuntimeError, what: str, advice: str) -> RuntimeError:
    """An error of the same kind as a failed wait's, that says ``what`` failed and what to do, with the report at the
    end."""
    kind = type(error) if isinstance(error, CollectiveError) else RuntimeError
    first, newline, report = str(error).partition("\n")
    return kind(f"{what} ({first}). {advice}{newline}{report}")


class DeviceProbe:
    """Tells whether a device goes on: a mark is put at the end of its queue from time to time.

    Args:
        name: of the queue, for the report.
        mark: puts a mark with a ``query() -> bool`` into the queue; None when that cannot be done now.
    """

    def __init__(self, name: str, mark: Callable[[], Any]) -> None:
        self.name = name
        self._make_mark = mark
        self._mark: Any = None
        self._since = time.monotonic()
        self.stuck = 0.0

    def look(self, seconds: float) -> None:
        """Called from time to time. ``stuck`` is then the age in seconds of a mark that the device has not passed.

        A mark is asked about when it is half of ``seconds`` old: asking spoils a graph that another thread may just be
        capturing, so it must be rare.
        """
        age = time.monotonic() - self._since
        if self._mark is not None and age < seconds / 2:
            return
        if self._mark is None or self._mark.query():
            self._mark, self._since, self.stuck = self._make_mark(), time.monotonic(), 0.0
        else:
            self.stuck = age


class Watchdog:
    """The watchdog of one world process group in this process. See :func:`start`.

    Args:
        world: the world's process group, more than one rank.
        seconds: the timeout.
        place: prefix in the store at which the ranks of this world meet.
        operations: what this process does.

    Attributes:
        verdict: the report, once any rank has raised the alarm.
    """

    def __init__(self, world: Any, seconds: float, place: str, operations: OperationLog) -> None:
        self.rank = torch_dist.get_rank(world)
        self.size = torch_dist.get_world_size(world)
        self.seconds = seconds
        self.world = weakref.ref(world)
        self.verdict: str | None = None
        self.probes: list[DeviceProbe] = []
        self._operations = operations
        self._slice = min(_LONGEST_SLICE, seconds / 4)
        self.limit = timedelta(seconds=self._slice)  # of one slice of a wait; between slices an alarm is heard
        self._report_lock = threading.Lock()
        self._stopping = False
        self._farewells: dict[int, str] = {}
        store = torch_dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # a connection of its own, so that nobody waits for the other's request
            store = store.clone()
        self.peers = Peers(self.rank, self.size, torch_dist.PrefixStore(place, store), self._answer)
        self._thread = threading.Thread(target=self._run, name="deepspeed-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the sockets back."""
        self._stopping = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self.peers.wake()
            self._thread.join()

    # The waiting thread

    def go_on(self, work: Any, wait: Wait, began: float, error: RuntimeError) -> None:
        """Keep waiting for ``work`` after a slice, begun at ``began``, that ended with ``error``.

        A slice that is over and a failure raise alike. They differ in time: a work that has failed raises at once
        when it is asked again.
        """
        while True:
            if time.monotonic() - began < 0.9 * self._slice:
                self._fail(wait, error)
            if self.verdict is not None or time.monotonic() - wait.since > self.seconds:
                self._give_up(wait)
            began = time.monotonic()
            try:
                work.wait(self.limit)
                return
            except CollectiveError:  # from a handle that looks after the time itself
                raise
            except RuntimeError as again:
                error = again

    def _give_up(self, wait: Wait) -> NoReturn:
        waited = time.monotonic() - wait.since
        text = self.report(f"waited {waited:.1f} s for {_told(wait)}")
        keep_groups_for_ever()
        why = "and stops" if waited > self.seconds else "and stops because of the alarm of another rank"
        raise CollectiveTimeoutError(
            f"rank {self.rank} of {self.size} waited {waited:.1f} s for {_told(wait)}, {why} (timeout {self.seconds:g} "
            f"s; {TIMEOUT_VARIABLE}=<seconds> allows more, where a rank is only slow).\n{text}"
        ) from None

    def _fail(self, wait: Wait, error: RuntimeError) -> NoReturn:
        text = self.report(f"{_told(wait)} failed")
        keep_groups_for_ever()
        raise CollectiveError(f"rank {self.rank} of {self.size}: {_told(wait)} failed: {error}.\n{text}") from error

    # The report

    def report(self, reason: str) -> str:
        """Raise the alarm on all ranks and return the report; the one that exists, if there is one.

        Args:
            reason: what happened on this rank, e.g. ``waited 600 s for ...``.
        """
        for leader in self.peers.leaders():
            if self.verdict is not None:
                return self.verdict
            if leader == self.rank:
                return self._lead(self.rank, reason)
            if isinstance(self.peers.ask(leader, {"want": "state"}, ANSWER_SECONDS), str):
                continue
            request = {"want": "report", "from": self.rank, "reason": reason}
            answer = self.peers.ask(leader, request, _REPORT_SECONDS)
            if not isinstance(answer, str):
                return answer["report"]
        return self._lead(self.rank, reason)

    def _lead(self, origin: int, reason: str) -> str:
        """Collect all states, write the report, and tell it to every rank."""
        with self._report_lock:
            if self.verdict is None:
                states = self.states()
                text = f"Alarm of rank {origin}: {reason}.\n{watchdog_report.compose(states)}"
                self.verdict = text
                awake = [peer for peer, state in states.items() if not isinstance(state, str) and peer != self.rank]
                self.peers.ask_all(awake, {"want": "stop", "report": text}, ANSWER_SECONDS)
            return self.verdict

    def states(self) -> dict[int, Answer | str]:
        """What every rank does now; a sentence for a rank that does not answer. Raises no alarm."""
        states = self.peers.ask_all(self.peers.others(), {"want": "state"}, ANSWER_SECONDS)
        for peer, farewell in self._farewells.items():
            if isinstance(states[peer], str):
                states[peer] = farewell
        states[self.rank] = self._state()
        return dict(sorted(states.items()))

    def _state(self) -> Answer:
        state = self._operations.state(self.rank)
        state["device"] = [
            f"{probe.name} has not advanced for {probe.stuck:.0f} s"
            for probe in list(self.probes)
            if probe.stuck > self.seconds / 2
        ]
        return state

    def _answer(self, request: Answer) -> Answer:
        if request["want"] == "state":
            return self._state()
        if request["want"] == "report":
            return {"report": self._lead(request["from"], request["reason"])}
        if request["want"] == "farewell":
            self._farewells[request["from"]] = request["reason"]
        elif self.verdict is None:
            self.verdict = request["report"]
        return {}

    def say_farewell(self) -> None:
        """Tell the ranks that may write a report how this process ends."""
        error = getattr(sys, "last_value", None)  # set by the interpreter for an exception that nobody caught
        how = "without an error" if error is None else f"with {type(error).__name__}: {error}"
        reason = f"its process has ended {how[:2000]}"
        for leader in self.peers.leaders():
            if leader != self.rank:
                self.peers.ask(leader, {"want": "farewell", "from": self.rank, "reason": reason}, _FAREWELL_SECONDS)

    # The daemon thread

    def _run(self) -> None:
        known, latest = False, time.monotonic() + _JOIN_SECONDS
        tick = min(2.0, self.seconds / 4)
        while not self._stopping and self._world_lives():
            try:
                known = known or self.peers.learn_addresses() or time.monotonic() > latest
            except RuntimeError as error:  # the store has gone; peers that are known can still be asked
                logger.debug(f"watchdog of rank {self.rank}: the store does not answer: {error}")
                known = True
            self._check_waits()
            self._check_devices()
            self.peers.serve(tick if known else min(tick, 0.2))
        self.peers.close()

    def _world_lives(self) -> bool:
        world = self.world()
        return world is not None and is_alive(world)

    def _check_waits(self) -> None:
        wait = self._operations.oldest_unattended_wait()
        if wait is None or time.monotonic() - wait.since < self.seconds:
            return
        wait.reported = True
        threading.Thread(target=self._log_report, args=(wait,), name="deepspeed-watchdog-report", daemon=True).start()

    def _log_report(self, wait: Wait) -> None:
        """For a wait that nothing can interrupt: its library's own timeout, or a failing peer, ends it."""
        reason = f"waited {time.monotonic() - wait.since:.1f} s for {_told(wait)}"
        logger.error(f"rank {self.rank} of {self.size} {reason}.\n{self.report(reason)}")

    def _check_devices(self) -> None:
        for probe in list(self.probes):
            probe.look(self.seconds)
            if probe.stuck > self.seconds:
                self.probes.remove(probe)
                threading.Thread(
                    target=self._leave, args=(probe,), name="deepspeed-watchdog-report", daemon=True
                ).start()

    def _leave(self, probe: DeviceProbe) -> None:
        """The device is stuck, and with it whatever the host will do next: report, and end the process."""
        reason = f"{probe.name} has not advanced for {probe.stuck:.0f} s; likely not all ranks joined a collective"
        text = f"rank {self.rank} of {self.size}: {reason}.\n{self.report(reason)}"
        if os.environ.get(EXIT_VARIABLE, "1") == "0":
            logger.error(text)
            return
        logger.error(f"{text}\nThis process exits with status {EXIT_CODE} ({EXIT_VARIABLE}=0 prevents it).")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_CODE)


def _told(wait: Wait) -> str:
    return f"'{describe(wait.what)}' ({wait.lane.name})"


operations = OperationLog()
"""What this process does in collectives."""

_active: Watchdog | None = None
_worlds = 0
_configured_seconds: float | None = None
_guarded: "weakref.WeakSet[Any]" = weakref.WeakSet()


# For users of collectives


def lane(group: Any = None, name: str = "") -> Lane:
    """The sequence ``name`` of operations in a process group (None: the world). Keep it; looking it up takes longer."""
    return operations.lane(group, name)


def wait(work: Any, what: What, lane: Lane, on_host: bool = True) -> None:
    """Wait for an asynchronous operation, and stop with a report where other ranks do not come.

    Args:
        work: a handle of torch.distributed or of ``deepspeed.comm``; None is nothing to wait for.
        what: is waited for.
        lane: in which it was noted.
        on_host: False where ``work.wait()`` does not block this thread but a stream of a device.

    Raises:
        CollectiveTimeoutError: the wait has lasted longer than the timeout, here or on another rank.
        CollectiveError: the operation failed.
    """
    if work is None:
        return
    dog = _active
    if dog is None or not on_host:
        work.wait()
        return
    entry = operations.begin(lane, what, True)
    try:
        work.wait(dog.limit)
    except CollectiveError:
        raise
    except RuntimeError as error:
        dog.go_on(work, entry, entry.since, error)
    finally:
        operations.end(entry)


@contextmanager
def waiting(what: What, lane: Lane) -> Iterator[None]:
    """Around a call that waits for other ranks and that cannot be waited for by :func:`wait`: it is reported only."""
    entry = operations.begin(lane, what)
    try:
        yield
    finally:
        operations.end(entry)


def new_step() -> None:
    """A training step begins: reports count operations from here."""
    operations.new_step()


def watch_stream(stream: Any, name: str) -> None:
    """Watch a CUDA stream on which collectives run or are waited for.

    When what was enqueued on it is not done within the timeout, the report is logged and the process ends with
    :data:`EXIT_CODE`, unless the environment has ``DS_COLLECTIVE_TIMEOUT_EXIT=0``: nothing else frees the device.
    """

    def mark() -> Any:
        with torch.cuda.stream(stream):
            return None if torch.cuda.is_current_stream_capturing() else stream.record_event()

    watch_device(DeviceProbe(name, mark))


def watch_device(probe: DeviceProbe) -> None:
    """:func:`watch_stream` for any device."""
    if _active is not None:
        _active.probes.append(probe)


def guard(owner: Any) -> None:
    """Name an object outside torch's registry of groups (a gloo backend) for :func:`keep_groups_for_ever`."""
    _guarded.add(owner)


def keep_groups_for_ever() -> None:
    """Never destroy the groups that exist now.

    A collective that was given up is still running in a thread of its group, and destroying the group joins that
    thread: the process could not end before the group's own timeout. So the groups get one reference that nobody
    returns; they end with the process.
    """
    for owner in [*torch_dist.distributed_c10d._world.pg_map, *_guarded]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def report_now() -> str:
    """What every rank does now, without an alarm. Callable on any rank alone; empty where no watchdog runs."""
    return "" if _active is None else watchdog_report.compose(_active.states())


# Start and end


def set_timeout(seconds: float) -> None:
    """Change the timeout, and start or (0) stop the watchdog accordingly. The environment variable wins.

    Raises:
        ValueError: ``seconds`` is negative.
    """
    global _configured_seconds
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the timeout of collectives is {seconds!r}, must be a number of seconds, 0 for none")
    _configured_seconds = seconds
    if torch_dist.is_initialized():
        stop()
        start()


def start() -> None:
    """Start the watchdog of the world's process group, unless it runs. Every rank calls it, equally often.

    Nothing is started for one rank, for a timeout of 0, and under MPI, which has no store to meet at.
    """
    global _active, _worlds
    world = torch_dist.group.WORLD
    if _active is not None and _active.world() is world:
        return
    stop()
    seconds = timeout_seconds(world)
    _worlds += 1
    if seconds and torch_dist.get_world_size(world) > 1 and torch_dist.get_backend(world) != "mpi":
        _active = Watchdog(world, seconds, f"deepspeed/watchdog/{_worlds}", operations)


def timeout_seconds(world: Any) -> float:
    """The timeout in force: of the environment, of :func:`set_timeout`, else a little less than the world's own."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise ValueError(
                f"environment variable {TIMEOUT_VARIABLE}={text!r} must be a number of seconds, 0 to switch off"
            )
        return seconds
    if _configured_seconds is not None:
        return _configured_seconds
    own = timeout_of(world).total_seconds()
    return own - min(10.0, own / 10)


def world_number() -> int:
    """Counts the worlds that :func:`start` has seen in this process: the same on all ranks of a world."""
    return _worlds


def running() -> bool:
    """Whether a watchdog runs in this process."""
    return _active is not None


def stop() -> None:
    """Stop the watchdog, if one runs. Called before the world is destroyed, and at exit."""
    global _active
    dog, _active = _active, None
    if dog is not None:
        dog.stop()


def on_destroy(group: Any) -> None:
    """``group`` is about to be destroyed (None: all)."""
    if group is None:
        stop()


def _leave_in_child() -> None:
    """A forked child has no watchdog thread, and is no rank."""
    global _active
    dog, _active = _active, None
    if dog is not None:
        dog.peers.forget_in_child()
    operations.waits.clear()


def _at_exit() -> None:
    if _active is not None:
        _active.say_farewell()
    stop()


atexit.register(_at_exit)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_in_child)
