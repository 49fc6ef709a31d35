# SPDX-License-Identifier: Apache-2.0
"""``ds_ssh``: one command on every host of a hostfile, through pdsh."""

import argparse
import os
import shutil
import sys
from typing import NoReturn

from .constants import PDSH_MAX_FAN_OUT
from .runner import DLTS_HOSTFILE, fetch_hostfile


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description="runs a command on every host of a hostfile")
    lines = "file with lines `HOST slots=N` (default: %(default)s)"
    parser.add_argument("-f", "--hostfile", type=str, default=DLTS_HOSTFILE, help=lines)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command, for a shell on each host")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    """Becomes pdsh. Without a hostfile it says so and returns.

    Raises:
        SystemExit: pdsh is not installed, or there is no command.
        ValueError: the hostfile is malformed.
    """
    parsed = parse_args(args)
    if shutil.which("pdsh") is None:
        sys.exit("ds_ssh: pdsh is not installed")
    if not parsed.command:
        sys.exit("ds_ssh: give the command to run, as in `ds_ssh -f HOSTFILE hostname`")
    pool = fetch_hostfile(parsed.hostfile)
    if pool is None:
        print(f"ds_ssh: no hostfile at {parsed.hostfile}")
        return
    _become_pdsh(["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(pool), *parsed.command])


def _become_pdsh(command: list[str]) -> NoReturn:
    environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh"}
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
