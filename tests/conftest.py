# SPDX-License-Identifier: Apache-2.0
"""Makes the test tree importable as ``unit``, loads the multi-rank plugin, and lets whole folders of tests run in
several processes side by side; needs no pytest option to be set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Half of the tests use one processor only, so that one process of tests leaves the others idle.
MOST_LANES = 4
GPU = Path("/dev/nvidiactl")

if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
# Last, so that an installed package is tested in preference to the source tree.
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))


def _lanes(config: pytest.Config) -> int | None:
    """In how many processes the tests shall run; None leaves it to pytest's options and to pytest-xdist."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return None
    if option.numprocesses is not None or option.dist != "no" or option.tx:
        return None
    # One terminal, one debugger and one GPU are not shared.
    if option.collectonly or option.usepdb or option.capture == "no" or GPU.exists():
        return None
    if not any(Path(argument).is_dir() for argument in config.args):
        return None
    return min(MOST_LANES, _processors())


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    lanes = _lanes(config)
    if lanes is not None and lanes > 1:
        config.option.numprocesses = lanes
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("unit.rank_plugin")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slow files, where several processes share the tests: else one would end long after the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
