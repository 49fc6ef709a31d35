# SPDX-License-Identifier: Apache-2.0
"""Runs one command on several hosts at once over plain ssh (``--launcher ssh``). Standard library only.

What a host prints comes out as it is. ``%n`` in the command is the index of the host and ``%%`` a percent sign, as in
pdsh. A host whose command fails is reported on stderr in pdsh's words; the others go on, and the exit status is the
largest of all, as with ``pdsh -S``.
"""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import NoReturn

_POLL_S = 0.05
# A host that went away without a word counts as failed after this long, three times in a row.
_ALIVE_INTERVAL_S = 30
# What ssh itself returns for a connection that cannot be made or breaks.
_SSH_FAILED = 255


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(description="runs a command on several hosts over ssh; called by `deepspeed`")
    parser.add_argument("--hosts", type=str, required=True, help="comma-separated host names")
    parser.add_argument("--ssh_port", type=int, default=None, help="port for ssh")
    parser.add_argument("--ssh_args", type=str, action="append", default=[], help="one further argument for ssh")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="words of the command, joined for the remote shell")
    return parser.parse_args(args)


def ssh_command(args: argparse.Namespace, index: int, host: str) -> list[str]:
    """What is executed for one host."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    text = re.sub("%[%n]", lambda match: "%" if match.group() == "%%" else str(index), " ".join(words))
    port = [] if args.ssh_port is None else ["-p", str(args.ssh_port)]
    # Nobody is there to type a password, and a connection that is dead must be noticed.
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ServerAliveInterval={_ALIVE_INTERVAL_S}"]
    return ["ssh", *options, *port, *args.ssh_args, host, text]


class Hosts:
    """The ssh clients, one per host."""

    def __init__(self) -> None:
        self._clients: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, args: argparse.Namespace) -> None:
        """Starts all of them.

        Raises:
            SystemExit: ssh cannot be executed.
        """
        for index, host in enumerate(args.hosts.split(",")):
            try:
                self._clients[host] = subprocess.Popen(ssh_command(args, index, host), stdin=subprocess.DEVNULL)
            except OSError as error:
                self.on_signal(signal.SIGTERM, None)
                raise SystemExit(f"deepspeed launcher: cannot execute ssh: {error.strerror}") from error

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Passes a request to end on to the clients. ssh hands no signal to the remote side: the caller does that."""
        for client in self._clients.values():
            with contextlib.suppress(ProcessLookupError):
                client.send_signal(signum)

    def wait(self) -> int:
        """Waits until all hosts have ended; the largest status."""
        largest, running = 0, dict(self._clients)
        while running:
            for host, client in list(running.items()):
                code = client.poll()
                if code is None:
                    continue
                del running[host]
                status = _SSH_FAILED if code < 0 else code
                if status:
                    print(f"ssh_hosts: {host}: ssh exited with exit code {status}", file=sys.stderr, flush=True)
                largest = max(largest, status)
            time.sleep(_POLL_S)
        return largest


def main() -> NoReturn:
    """Runs the command everywhere and exits with the largest status.

    Raises:
        SystemExit: always.
    """
    args = parse_args()
    hosts = Hosts()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, hosts.on_signal)
    hosts.start(args)
    sys.exit(hosts.wait())


if __name__ == "__main__":
    main()
