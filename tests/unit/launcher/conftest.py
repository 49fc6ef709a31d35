# SPDX-License-Identifier: Apache-2.0
"""The launcher's main functions set the level of the package's logger; other tests must not notice."""

import signal
from collections.abc import Iterator

import pytest

from deepspeed.utils.logging import logger


@pytest.fixture(autouse=True)
def logger_level_restored() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def signals_restored() -> Iterator[None]:
    """For tests that run a multi-node launcher in this process, which then handles signals."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
