# SPDX-License-Identifier: Apache-2.0
"""What hypothesis does in the tests: draw, and make smaller what fails unless ``DS_TEST_SHRINK=0``."""

from __future__ import annotations

import os

from hypothesis import Phase

PHASES = (Phase.generate, *((Phase.shrink,) if os.environ.get("DS_TEST_SHRINK") != "0" else ()))
