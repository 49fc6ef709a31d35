# SPDX-License-Identifier: Apache-2.0
"""Storage benchmark (``ds_io``)."""

from .io_benchmark import ds_io_main as ds_io_main
from .tune import generate_main as generate_main
from .tune import sweep_main as sweep_main
