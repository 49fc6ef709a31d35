# SPDX-License-Identifier: Apache-2.0
"""The launcher's main functions set the level of the package's logger; other tests must not notice."""

from collections.abc import Iterator

import pytest

from deepspeed.utils.logging import logger


@pytest.fixture(autouse=True)
def logger_level_restored() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)
