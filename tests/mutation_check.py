# SPDX-License-Identifier: Apache-2.0
"""Breaks the package in each of the ways of ``unit/mutations.py`` and demands that the quick tests notice.

    python tests/mutation_check.py                  # all, some minutes
    python tests/mutation_check.py --only owner     # those with "owner" in their name
    python tests/mutation_check.py --table          # and print the table of docs/testing.md

Each fault is put into a copy of the package, on which the quick subset of the tests runs until the first failure, in a
process forked from this one. Exit status 1 if a fault passes, or if the subset is red without any.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from unit.mutations import MUTATIONS, PACKAGE, QUICK, ROOT, Mutation, copy_package

TIMEOUT = 900.0  # seconds for one fault
# Few random cases: what they find here is broken through and through.
ENVIRONMENT = {
    "DS_RANDOM_GRAPH_CASES": "60",
    "DS_TEST_SHRINK": "0",
    "DS_COLLECTIVE_TIMEOUT": "15",
    "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file may be equally old and equally long
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the mutations with this in their name")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="the package to break")
    parser.add_argument("--skip-unbroken", action="store_true", help="take it for granted that the tests are green")
    parser.add_argument("--table", action="store_true", help="print the results as a table in Markdown")
    return parser.parse_args(arguments)


def run_tests(copy: Path, tests: list[str], log: Path) -> int:
    """pytest's exit status of ``tests`` on a copy of the package; -1 when it took too long."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= ENVIRONMENT
        os.environ["PYTHONPATH"] = str(copy.parent)
        sys.path[:0] = [str(copy.parent)]
        os.chdir(copy.parent)
        status = 70
        try:
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
            status = int(pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    limit = time.monotonic() + TIMEOUT
    while time.monotonic() < limit:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def found_by(log: Path) -> str:
    """The first test that failed, and the first line of why."""
    text = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w/]+\.py\S*)", text, re.MULTILINE)
    return failed.group(1).rpartition("/")[2] if failed else "?"


def check(mutation: Mutation | None, package: Path, folder: Path) -> tuple[int, str, float]:
    """Exit status of the tests, the test that failed and the seconds it took; None breaks nothing."""
    begin = time.monotonic()
    log = folder / "log.txt"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copy = copy_package(Path(place), package)
        if mutation is not None:
            mutation.apply(copy)
        first = [] if mutation is None else list(mutation.first)
        status = run_tests(copy, first + [test for test in QUICK if test not in first], log)
    by = "no end within the time limit" if status == -1 else found_by(log) if status else ""
    return status, by, time.monotonic() - begin


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    import hypothesis.stateful  # noqa: F401 - what every forked process needs, but for the package itself
    import torch._dynamo  # noqa: F401

    package = options.package.resolve()
    rows: list[tuple[Mutation, str]] = []
    passed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.skip_unbroken:
            status, by, seconds = check(None, package, folder)
            print(f"unbroken: {'green' if not status else f'RED by {by}'} ({seconds:.0f} s)", flush=True)
            if status:
                print((folder / "log.txt").read_text(errors="replace")[-4000:])
                return 1
        for mutation in MUTATIONS:
            if options.only not in mutation.name:
                continue
            status, by, seconds = check(mutation, package, folder)
            red = status in (1, -1)
            if not red:
                passed.append(mutation.name)
                print((folder / "log.txt").read_text(errors="replace")[-2000:])
            rows.append((mutation, by if red else f"**not found** (status {status})"))
            print(f"{mutation.name}: {rows[-1][1]} ({seconds:.0f} s)", flush=True)
    if options.table:
        print("\n| what is broken | in | found first by |\n|---|---|---|")
        for mutation, by in rows:
            print(f"| {mutation.name} | `{mutation.file}` | `{by}` |")
    print(f"{len(rows)} mutations, {len(passed)} not found{': ' if passed else ''}{', '.join(passed)}")
    return len(passed) > 0


if __name__ == "__main__":
    sys.exit(main())
