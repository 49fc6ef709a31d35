# SPDX-License-Identifier: Apache-2.0
"""Settings are of the process: what one test configures must not meet the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unit.runtime.activation_checkpointing.settings import unconfigured


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """For tests that run in the session's process."""
    with unconfigured():
        yield
