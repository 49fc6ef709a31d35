# SPDX-License-Identifier: Apache-2.0
"""Property: whatever the graph, the calls and the config, the gradient of a window is what plain autograd computes.

``DS_RANDOM_GRAPH_CASES=N`` runs N cases instead of the suite's, ``DS_RANDOM_GRAPH_SEED=S`` draws others. A case that
fails is shrunk, printed, and written as a program that runs alone. By the thousand: ``tests/campaign.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.checkpoint

from unit.common import DistributedTest
from unit.random_graphs import (
    WORLDS,
    Backward,
    Case,
    Forward,
    MicroStep,
    Program,
    SeededChoices,
    Window,
    drawn_case,
    model,
    run_case,
)
from unit.random_graphs.searching import Ranks, search, write_script

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("DS_RANDOM_GRAPH_CASES", "200"))
SEED = int(os.environ.get("DS_RANDOM_GRAPH_SEED", "0"))
SHARES = {1: 5, 2: 6, 3: 2, 4: 1}  # of world sizes among the cases: large ones take longer


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as groups:
        yield groups


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", SHARES)
def test_gradient_is_that_of_plain_autograd(ranks: Ranks, world_size: int, stage: int, tmp_path: Path) -> None:
    weight = SHARES[world_size] * (2 if stage == 3 else 1)
    count = max(1, round(CASES * weight / (5 * sum(SHARES.values()))))
    seed = 1000 * SEED + 10 * world_size + stage
    finding = search(seed, count, ranks, [world_size], [stage])
    if finding is not None:
        path = write_script(finding, tmp_path, "Found by test_zero_random_graphs.py.")
        pytest.fail(f"{finding.told}\n{path}:\n{path.read_text()}", pytrace=False)


def programs_of(case: Case) -> Iterator[Program]:
    for window in case.windows:
        for step in window.micro_steps:
            for forward in (*step.forwards, *step.failing):
                yield forward.program


def kinds_in(program: Program) -> Iterator[str]:
    yield program[0]
    for part in program[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            yield from kinds_in(part)


def features_of(case: Case) -> set[str]:
    """What a case exercises, in words."""
    steps = [step for window in case.windows for step in window.micro_steps]
    backwards = [backward for step in steps for backward in step.backwards]
    found = {f"stage {case.stage}", f"world {case.world_size}", case.dtype}
    found |= {kind for program in programs_of(case) for kind in kinds_in(program)}
    found |= {kind for kind, _ in case.blocks}
    found |= {f"{forward.route} forward" for step in steps for forward in step.forwards}
    found |= {f"{backward.kind} backward" for backward in backwards}
    found |= {step.deferred_by for step in steps if step.deferred_by}
    found |= {edit.how for window in case.windows for edit in window.edits}
    facts = {
        "frozen": case.frozen_blocks or any(window.frozen_blocks for window in case.windows),
        "unmanaged": not case.managed,
        "boundary by hand": case.boundary_by_hand,
        "delayed": case.delayed,
        "jitter": case.jitter,
        "clipped": "gradient_clipping" in case.config,
        "offload_optimizer": "offload_optimizer" in case.zero,
        "offload_param": "offload_param" in case.zero,
        "some ranks": any(backward.ranks is not None for backward in backwards),
        "penalty": any(backward.penalty for backward in backwards),
        "scale_wrt_gas": any(not backward.scale_wrt_gas for backward in backwards),
        "aborted": any(b.aborted for w in case.windows if not w.may_refuse for s in w.micro_steps for b in s.backwards),
        "aborted while reducing": any(
            b.aborted for w in case.windows if w.may_refuse for s in w.micro_steps for b in s.backwards
        ),
        "aborted in a block": any(b.aborted and b.aborted_at >= 0 for b in backwards),
        "failing forward": any(step.failing for step in steps),
        "zero_grad": any(step.zero_grad_after for step in steps),
        "allreduce_gradients": any(step.reduced_after for step in steps),
    }
    return found | {name for name, holds in facts.items() if holds}


FEATURES = (
    "block chain branches reentrant nonreentrant detached cut on_ranks fail"
    " linear mlp norm scalar table empty tied sparse fp32 bf16 fp16"
    " offload_optimizer offload_param no_sync coalesce_grad_reduction scale set published"
    " frozen unmanaged delayed jitter clipped penalty scale_wrt_gas aborted zero_grad allreduce_gradients"
).split() + [
    *(f"stage {stage}" for stage in range(4)),
    *(f"world {world}" for world in range(1, 5)),
    *(f"{route} forward" for route in ("engine", "module", "submodule", "parameter")),
    *(f"{kind} backward" for kind in ("engine", "loss", "scale", "output", "inputs")),
    *("boundary by hand", "some ranks", "aborted while reducing", "aborted in a block", "failing forward"),
]


def test_every_feature_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000):
        seen.update(features_of(drawn_case(SeededChoices(seed), WORLDS, [seed % 4])))
    rare = {feature: seen[feature] for feature in FEATURES if seen[feature] < 4}
    assert not rare, f"hardly ever drawn in 1000 cases: {rare}"


class TestWhatRuns(DistributedTest):
    world_size = 2

    def test_engines_run_under_checkpoints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a case says is what the engine's model does."""
        calls: Counter[bool] = Counter()
        real = torch.utils.checkpoint.checkpoint

        def counted(*args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
            calls[use_reentrant] += 1
            return real(*args, use_reentrant=use_reentrant, **kwargs)

        monkeypatch.setattr(model, "checkpoint", counted)
        program = ("chain", ("reentrant", ("nonreentrant", ("block", 0))), ("nonreentrant", ("block", 0)))
        step = MicroStep((Forward("engine", program),), (Backward(),))
        run_case(Case((("linear", 1),), (Window((step,)),), 2, {"zero_optimization": {"stage": 2}}))
        # the reentrant one runs its inside in forward and again in backward
        assert calls == {True: 1, False: 3}

    def test_frozen_weights_under_a_non_reentrant_checkpoint(self) -> None:
        """torch keeps a recomputed tensor that needs no gradient as it is; the parameter itself, where an operator
        saved that. When the module has run, the parameter is empty again (stage 3)."""
        program = ("nonreentrant", ("chain", ("block", 1), ("block", 0)))
        step = MicroStep((Forward("engine", program),), (Backward(),))
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        run_case(Case((("linear", 1), ("scalar", 1)), (Window((step,)),), 2, config, frozen_blocks=(1,)))

    @pytest.mark.world_size(1)
    def test_weights_in_use_when_a_backward_died_are_the_weights(self) -> None:
        """Found by a campaign: on one rank, weights that a context held while a backward died stayed the context's copy
        and missed every later update (stage 3)."""
        by_hand = Forward("parameter", ("parameter", 0))
        aborted = Backward(outputs=(1,), retain=True, aborted=True)
        steps = (
            MicroStep((Forward("submodule", ("block", 0)),), (Backward(),)),
            MicroStep((by_hand, Forward("engine", ("block", 0), 1)), (Backward(), aborted)),
        )
        config = {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "gradient_accumulation_steps": 2,
        }
        run_case(Case((("linear", 1), ("linear", 1)), (Window(steps, may_refuse=True),), config=config))
