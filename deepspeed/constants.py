# SPDX-License-Identifier: Apache-2.0
"""Names and defaults that several parts of the package share."""

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

_DEFAULT_TIMEOUT_MINUTES = "10"


def _timeout_from_environment() -> timedelta:
    """Process-group timeout: ``DEEPSPEED_TIMEOUT`` in minutes, 10 when unset."""
    text = os.environ.get("DEEPSPEED_TIMEOUT", _DEFAULT_TIMEOUT_MINUTES)
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < float("inf"):
        raise ValueError(f"environment variable DEEPSPEED_TIMEOUT={text!r} must be a positive number of minutes")
    return timedelta(minutes=minutes)


default_pg_timeout = _timeout_from_environment()

INFERENCE_GENERIC_MODE = "generic"
INFERENCE_SPECIALIZED_MODE = "specialized"

CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"
