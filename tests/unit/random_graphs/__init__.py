# SPDX-License-Identifier: Apache-2.0
"""Random models, call sequences and configs, run by an engine and by plain autograd. See docs/testing.md.

A case is data (``cases``), drawn from choices (``choices``, ``drawing``), run in every rank of a group (``model``,
``running``), searched for and shrunk (``searching``, which alone needs hypothesis).
"""

from unit.random_graphs.cases import (
    DTYPES,
    LOSS_SCALE,
    Backward,
    Case,
    Edit,
    Forward,
    MicroStep,
    Program,
    Window,
    as_python,
    as_script,
    contains,
    render,
)
from unit.random_graphs.choices import SeededChoices
from unit.random_graphs.drawing import STAGES, WORLDS, draw_case, draw_world_size, drawn_case
from unit.random_graphs.model import Interrupted, MicroStepRun, RandomModel
from unit.random_graphs.running import full_config, make_engine, run_case

__all__ = [
    "DTYPES",
    "LOSS_SCALE",
    "STAGES",
    "WORLDS",
    "Backward",
    "Case",
    "Edit",
    "Forward",
    "Interrupted",
    "MicroStep",
    "MicroStepRun",
    "Program",
    "RandomModel",
    "SeededChoices",
    "Window",
    "as_python",
    "as_script",
    "contains",
    "draw_case",
    "draw_world_size",
    "drawn_case",
    "full_config",
    "make_engine",
    "render",
    "run_case",
]
