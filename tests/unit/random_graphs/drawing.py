# SPDX-License-Identifier: Apache-2.0
"""How a case is drawn from choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unit.random_graphs.cases import (
    GAIN,
    INPUT,
    LOSS_SCALE,
    Backward,
    Case,
    Edit,
    Forward,
    MicroStep,
    Program,
    Window,
    blocks_with_gradient,
    contains,
)
from unit.random_graphs.choices import Choices, SeededChoices, some

WORLDS = (1, 2, 2, 2, 3, 3, 4)
STAGES = (0, 1, 1, 2, 2, 2, 3, 3, 3)
DEFAULT = None  # in a table of options: the key is left out of the config

ZERO_OPTIONS: dict[str, list[Any]] = {
    "reduce_bucket_size": [DEFAULT, 1, 7, 20, 64, 200],
    "contiguous_gradients": [DEFAULT, False],
    "round_robin_gradients": [DEFAULT, DEFAULT, True],
    "allgather_partitions": [DEFAULT, DEFAULT, DEFAULT, False],
    "allgather_bucket_size": [DEFAULT, 2, 64],
}
HOST = {"device": "cpu"}
OFFLOAD_OPTIONS: dict[str, list[Any]] = {"offload_optimizer": [DEFAULT, DEFAULT, DEFAULT, HOST]}
# Which weights stay whole, how far ahead they are gathered, how many at a time, how long they are kept.
STAGE_3_OPTIONS: dict[str, list[Any]] = {
    "offload_optimizer": [DEFAULT] * 4 + [HOST, {**HOST, "ratio": 0.5}],
    "offload_param": [DEFAULT] * 4 + [HOST],
    "stage3_param_persistence_threshold": [0, 0, 0, 10, 100_000],
    "stage3_model_persistence_threshold": [DEFAULT, 20],
    "stage3_prefetch_bucket_size": [DEFAULT, 0, 10, 40, 200],
    "stage3_max_live_parameters": [DEFAULT, 0, 30, 100],
    "stage3_max_reuse_distance": [DEFAULT, 0, 20],
    "sub_group_size": [DEFAULT, 1, 10, 30],
    "stage3_module_granularity_threshold": [DEFAULT, DEFAULT, DEFAULT, 15],
    "stage3_use_all_reduce_for_fetch_params": [DEFAULT] * 4 + [True],
    "stage3_allgather_sequential": [DEFAULT] * 4 + [True],
}


def draw_world_size(seed: int) -> int:
    """Number of ranks of ``draw_case(seed)``."""
    return SeededChoices(f"world {seed}").pick(WORLDS)


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    return drawn_case(SeededChoices(f"case {seed}"), [draw_world_size(seed)], STAGES, seed)


def drawn_case(choices: Choices, worlds: Sequence[int], stages: Sequence[int], seed: int | None = None) -> Case:
    """A case on one of ``worlds`` ranks, at one of ``stages``; ``seed`` of its data is drawn if not given."""
    world = choices.pick(sorted(worlds))
    dtype = choices.pick(["fp32"] * 6 + ["bf16"] * 3 + ["fp16"])
    config = _config(choices, dtype, choices.pick(sorted(stages)))
    blocks = _blocks(choices, dtype)
    draft = Case(
        blocks=blocks,
        world_size=world,
        config=config,
        dtype=dtype,
        width=choices.pick([3, 5, 6, 8]),
        seed=choices.number(0, 999) if seed is None else seed,
        frozen_blocks=some(choices, (i for i, (kind, _) in enumerate(blocks) if kind != "tied"), 12),
        two_groups=choices.maybe(30),
        boundary_by_hand=config.get("managed_gradient_accumulation", True) and choices.maybe(15),
        delayed=choices.maybe(50),
        jitter=world > 1 and choices.maybe(20),
    )
    windows = [_window(choices, draft) for _ in range(choices.pick([1, 2, 2, 3]))]
    windows[-1] = _aborted_while_reducing(choices, replace(draft, windows=tuple(windows)))
    return replace(draft, windows=tuple(windows))


# ---------------------------------------------------------------------------------------------------- config, model


def _options(choices: Choices, table: dict[str, list[Any]]) -> dict[str, Any]:
    drawn = {key: choices.pick(values) for key, values in table.items()}
    return {key: value for key, value in drawn.items() if value is not DEFAULT}


def _config(choices: Choices, dtype: str, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    managed = not choices.maybe(15)
    zero = {"stage": stage, **_options(choices, ZERO_OPTIONS)}
    if managed or stage >= 2:
        zero |= _options(choices, {"overlap_comm": [DEFAULT, True, True, False]})
    zero |= _options(choices, {"reduce_scatter": [DEFAULT, DEFAULT, False]})
    if stage in (1, 2):
        zero |= _options(choices, OFFLOAD_OPTIONS)
    if stage == 3:
        zero |= _options(choices, STAGE_3_OPTIONS)
    config["zero_optimization"] = zero
    config |= _options(choices, {"gradient_accumulation_steps": [DEFAULT, DEFAULT, 2, 2, 3, 4]})
    config |= _options(choices, {"gradient_clipping": [DEFAULT, DEFAULT, DEFAULT, 0.03125]})
    if not managed:
        config["managed_gradient_accumulation"] = False
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    config |= _options(choices, {"communication_data_type": [DEFAULT] * 7 + ["fp32", "fp32", "bf16"]})
    accumulation = choices.pick([DEFAULT] * 12 + ["fp32", "fp32", "bf16"])
    if accumulation is not DEFAULT:
        config["data_types"] = {"grad_accum_dtype": accumulation}
    if stage < 2 or not zero.get("reduce_scatter", True):
        config |= choices.pick([{}, {}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
    return config


def _blocks(choices: Choices, dtype: str) -> tuple[tuple[str, int], ...]:
    blocks: list[tuple[str, int]] = []
    kinds = ["linear", "linear", "mlp", "mlp", "norm", "scalar", "table", "empty", "tied"]
    kinds += ["sparse"] * (dtype == "fp32")  # torch adds no sparse 16-bit tensors on CPU
    for _ in range(choices.number(1, 6)):
        kind = choices.pick(kinds)
        owners = [i for i, (other, _) in enumerate(blocks) if other == "linear"]
        if kind == "tied" and not owners:
            kind = "linear"
        if kind in ("linear", "norm", "scalar", "empty"):
            blocks.append((kind, 1))
        else:
            blocks.append((kind, choices.pick(owners) if kind == "tied" else choices.number(1, 9)))
    return tuple(blocks)


# ---------------------------------------------------------------------------------------------------- calls


def _program(choices: Choices, case: Case, depth: int = 3) -> Program:
    if depth == 0 or not choices.maybe(80):
        return ("block", choices.number(0, len(case.blocks) - 1))
    kinds = ["chain", "chain", "branches", "branches", "reentrant", "reentrant", "nonreentrant", "detached", "cut"]
    kind = choices.pick(kinds if case.stage == 3 else [*kinds, "on_ranks"])  # stage 3: all ranks run the same modules
    if kind in ("chain", "branches"):
        return (kind, *(_program(choices, case, depth - 1) for _ in range(choices.number(2, 3))))
    inner = _program(choices, case, depth - 1)
    return (kind, _ranks(choices, case), inner) if kind == "on_ranks" else (kind, inner)


def _ranks(choices: Choices, case: Case) -> tuple[int, ...]:
    return some(choices, range(case.world_size), 50)


def _forward(choices: Choices, case: Case, index: int) -> Forward:
    route = choices.pick(["engine", "engine", "engine", "module", "submodule", "parameter"])
    if route == "submodule":
        return Forward(route, ("block", choices.number(0, len(case.blocks) - 1)), index)
    if route == "parameter":
        return Forward(route, ("parameter", choices.number(0, len(case.blocks) - 1)), index)
    program = _program(choices, case)
    return Forward(route, program, index, contains(program, "reentrant") or not choices.maybe(50))


def _failing_forward(choices: Choices, case: Case) -> Forward:
    failing = ("chain", _program(choices, case, 2), ("fail",))
    if choices.maybe(50):
        failing = (choices.pick(["reentrant", "nonreentrant"]), failing)
    return Forward(choices.pick(["engine", "module"]), failing, 9)


def _window(choices: Choices, case: Case) -> Window:
    count = case.steps
    if not case.managed:
        count = 1
    elif case.boundary_by_hand:
        count = choices.number(1, 4)
    thawed = [i for i, (kind, _) in enumerate(case.blocks) if kind != "tied" and i not in case.frozen_blocks]
    frozen = some(choices, thawed, 8)
    partly_frozen = replace(case, frozen_blocks=case.frozen_blocks + frozen)
    steps = [_micro_step(choices, partly_frozen) for _ in range(count)]
    if count > 1 and choices.maybe(10):
        reset = choices.number(0, count - 2)
        steps[reset] = replace(steps[reset], zero_grad_after=True)
    steps = _backwards_of_some_ranks(choices, case, steps)
    alive = set(thawed) - set(frozen)
    steps = [_aborted(choices, case, step, i == count - 1, alive) for i, step in enumerate(steps)]
    edits = tuple(_edit(choices, case, steps, i) for i in range(count) if choices.maybe(15))
    return Window(tuple(steps), frozen, choices.pick(["update", "accessor"]), edits)


def _micro_step(choices: Choices, case: Case) -> MicroStep:
    forwards = tuple(_forward(choices, case, i) for i in range(choices.pick([1, 1, 2, 2, 3])))
    most = 4 if not case.managed else 3
    backwards = [_backward(choices, case, forwards) for _ in range(choices.number(1, most))]
    deferred = ""
    if choices.maybe(15):
        if case.stage >= 1 and case.managed and choices.maybe(50):
            deferred = "coalesce_grad_reduction"
        elif case.stage <= 1:
            deferred = "no_sync"
    for i, backward in enumerate(backwards):  # a graph is kept while a later backward needs it
        retain = any(set(backward.outputs) & set(later.outputs) for later in backwards[i + 1 :])
        backwards[i] = replace(backward, retain=retain)
    failing = (_failing_forward(choices, case),) if choices.maybe(6) else ()
    return MicroStep(
        forwards,
        tuple(backwards),
        lazy_forwards=choices.maybe(30),
        deferred_by=deferred,
        failing=failing,
        reduced_after=choices.maybe(6),
    )


def _backward(choices: Choices, case: Case, forwards: tuple[Forward, ...]) -> Backward:
    kinds = ["engine"] * 3 + ["scale"] * 2
    if case.dtype != "fp16":
        kinds = ["engine", "engine", "engine", "loss", "loss", "scale", "output"]
    kind = choices.pick(kinds)
    first = choices.number(0, len(forwards) - 1)
    outputs = sorted({first, *some(choices, range(len(forwards)), 40)})
    smooth = not any(contains(forwards[i].program, "reentrant") for i in outputs)
    if kind == "loss" and smooth and choices.maybe(20):
        kind = "inputs"
    if kind == "output":
        outputs = [first]
    return Backward(
        kind,
        tuple(outputs),
        scale_wrt_gas=kind != "engine" or not choices.maybe(20),
        penalty=kind != "output" and smooth and choices.maybe(20),
        inputs_seed=choices.number(0, 99) if kind == "inputs" else 0,
    )


def _backwards_of_some_ranks(choices: Choices, case: Case, steps: list[MicroStep]) -> list[MicroStep]:
    """Let some plain backwards run on some ranks only.

    Such a backward may not be followed, in its window, by a reduction that all ranks start without asking each other.
    """
    if case.stage == 3 or case.world_size == 1:
        return steps
    partitions = _reduces_in_each_backward(case)
    safe = True
    result = []
    for position in reversed(range(len(steps))):
        step = steps[position]
        reduces = partitions or position == len(steps) - 1
        if step.zero_grad_after or (step.deferred_by.startswith("coalesce") and reduces):
            safe = False
        backwards = []
        for backward in reversed(step.backwards):
            communicates = reduces and not step.deferred_by
            if backward.kind == "engine":
                safe = safe and not communicates
            elif (safe or not communicates) and choices.maybe(25):
                backward = replace(backward, ranks=_ranks(choices, case) or (0,))
            backwards.append(backward)
        result.append(replace(step, backwards=tuple(reversed(backwards))))
    return result[::-1]


# ---------------------------------------------------------------------------------------------------- faults, edits


def _aborted(choices: Choices, case: Case, step: MicroStep, last: bool, alive: set[int]) -> MicroStep:
    """Perhaps insert a backward that is aborted before anything of it was reduced, which training survives."""
    reduces = not step.deferred_by and (last or _reduces_in_each_backward(case))
    return step if reduces or not choices.maybe(30) else _with_aborted_backward(choices, case, step, alive)


def _with_aborted_backward(choices: Choices, case: Case, step: MicroStep, alive: set[int]) -> MicroStep:
    able = [f for f in step.forwards if f.route != "parameter" and f.input_requires_grad]
    if not able:
        return step
    kind = "engine" if case.dtype == "fp16" else choices.pick(["engine", "loss"])
    backwards = list(step.backwards)
    # the engine learns of an aborted loss.backward() by its next call
    places = [len(backwards)]
    places += [i for i, later in enumerate(backwards) if kind == "engine" or later.kind == "engine"]
    place, forward = choices.pick(places), choices.pick(able)
    for i, earlier in enumerate(backwards[:place]):
        if forward.index in earlier.outputs:
            backwards[i] = replace(earlier, retain=True)
    where = choices.pick([INPUT, *sorted(blocks_with_gradient(forward.program) & alive)])
    backwards.insert(place, Backward(kind, (forward.index,), retain=True, aborted=True, aborted_at=where))
    return replace(step, backwards=tuple(backwards))


def _aborted_while_reducing(choices: Choices, case: Case) -> Window:
    """The last window, perhaps with a backward that is aborted where it may have reduced, on all ranks in the same
    way: the window is right without it, or refused."""
    window = case.windows[-1]
    if not choices.maybe(8) or _differs_by_rank(case):
        return window
    thawed = {i for i, (kind, _) in enumerate(case.blocks) if kind != "tied"}
    alive = thawed - set(case.frozen_blocks) - set(window.frozen_blocks)
    last = window.micro_steps[-1]
    aborted = _with_aborted_backward(choices, case, replace(last, deferred_by="", reduced_after=False), alive)
    steps = tuple(replace(step, zero_grad_after=False) for step in window.micro_steps[:-1])
    return replace(window, micro_steps=(*steps, aborted), edits=(), may_refuse=True)


def _reduces_in_each_backward(case: Case) -> bool:
    """Also stage 1 where gradients land on the host."""
    return case.stage >= 2 or "offload_optimizer" in case.zero


def _differs_by_rank(case: Case) -> bool:
    steps = [step for window in case.windows for step in window.micro_steps]
    programs = any(contains(forward.program, "on_ranks") for step in steps for forward in step.forwards)
    return programs or any(backward.ranks is not None for step in steps for backward in step.backwards)


def _edit(choices: Choices, case: Case, steps: list[MicroStep], position: int) -> Edit:
    kinds = ["scale", "set"]
    reduces = position == len(steps) - 1 and not steps[position].deferred_by
    if case.stage == 0 and case.dtype == "fp32" and case.managed and reduces:
        kinds += ["published"] * 2
    block = choices.number(GAIN, len(case.blocks) - 1)
    return Edit(position, block, choices.pick(kinds), choices.pick([2.0, 0.5, -1.0]))
