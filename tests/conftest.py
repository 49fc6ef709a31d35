# SPDX-License-Identifier: Apache-2.0
"""Makes the test tree importable as ``unit`` and loads the multi-rank plugin; needs no pytest option to be set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
# Last, so that an installed package is tested in preference to the source tree.
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("unit.rank_plugin")
