# SPDX-License-Identifier: Apache-2.0
"""A multi-node launcher while it runs: told to end, or with ranks failing on one host, all hosts end."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

from .launch import GRACE_PERIOD_S, exit_status

_POLL_S = 0.05
_KILL_TIMEOUT_S = 30
# Beyond the grace period of the ranks: their launch step has to end and ssh to notice.
_MARGIN_S = 5.0
_HOST_FAILED = re.compile(rb": (\S+): ssh exited with exit code (\d+)")

logger = logging.getLogger("DeepSpeed")


class RemoteJob:
    """One run of a multi-node launcher.

    Args:
        command: the launcher's command.
        environment: of the launcher.
        kill_command: what ends the ranks on the hosts; empty if the launcher does that itself when it gets a signal.
        end_on_failure: end all hosts as soon as the launcher says on stderr that one of them failed. For launchers
            that would wait for the others, which wait for the failed one.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        kill_command: Sequence[str] = (),
        end_on_failure: bool = False,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._kill_command = list(kill_command)
        self._end_on_failure = end_on_failure
        self._signals: list[int] = []
        self._failure: tuple[str, int] | None = None

    def run(self) -> int:
        """Runs the launcher to its end.

        Returns:
            0 if all is well, 1 if a signal came, the status of the host that failed first where that is known, else the
            status of the launcher.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        stderr = subprocess.PIPE if self._end_on_failure else None
        process = subprocess.Popen(self._command, env=self._environment, start_new_session=True, stderr=stderr)
        if process.stderr is None:
            return self._wait(process)
        reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            return self._wait(process, ended=reader.join)
        finally:
            process.stderr.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)

    def _read(self, stream: IO[bytes]) -> None:
        """Hands the launcher's stderr on as it comes, and looks for a host that failed."""
        last_line = b""
        while chunk := os.read(stream.fileno(), 1 << 16):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
            last_line += chunk
            found = _HOST_FAILED.search(last_line)
            if found and self._failure is None:
                self._failure = (found.group(1).decode(errors="replace"), int(found.group(2)))
            last_line = last_line.rpartition(b"\n")[2][-1024:]

    def _wait(self, process: subprocess.Popen[bytes], ended: Callable[[float], None] | None = None) -> int:
        while process.poll() is None:
            if self._signals:
                logger.info(f"received {signal.Signals(self._signals[0]).name}: ending the ranks")
                self._end(process, self._signals[0])
                return 1
            if self._failure is not None:
                host, status = self._failure
                logger.error(f"the ranks on host {host} ended with status {status}: ending those on the other hosts")
                self._end(process, signal.SIGTERM)
                return status
            time.sleep(_POLL_S)
        if ended is not None:
            ended(_MARGIN_S)
        return exit_status(process.returncode) if self._failure is None else self._failure[1]

    def _end(self, process: subprocess.Popen[bytes], signum: int) -> None:
        """Ends the ranks, then the launcher. A further signal does not wait for the grace period."""
        patience = len(self._signals)
        self._tell(process, signum)
        # Told twice: a host that was about to start its ranks may have missed the first time.
        steps: tuple[tuple[float, Callable[[], None]], ...] = (
            (GRACE_PERIOD_S + _MARGIN_S, lambda: self._tell(process, signum)),
            (_MARGIN_S, lambda: _signal_group(process, signal.SIGTERM)),
            (_MARGIN_S, lambda: _signal_group(process, signal.SIGKILL)),
        )
        for seconds, then in steps:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline and len(self._signals) == patience:
                time.sleep(_POLL_S)
            if process.poll() is None:
                then()
        process.wait()

    def _tell(self, process: subprocess.Popen[bytes], signum: int) -> None:
        """Tells the ranks to end."""
        if not self._kill_command:
            _signal_group(process, signum)
            return
        try:
            subprocess.run(
                self._kill_command,
                env=self._environment,
                timeout=_KILL_TIMEOUT_S,
                check=False,
                start_new_session=True,
                stderr=subprocess.DEVNULL,  # pkill finds nothing on hosts that have ended already
            )
        except subprocess.TimeoutExpired:
            logger.error(f"not all hosts could be told to end within {_KILL_TIMEOUT_S} s: look for ranks there")


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
