# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmarks that compute: what is exposed, what hooks cost, what disagrees, what the model says."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def load(name: str) -> ModuleType:
    """A module of the benchmarks, which import each other by their plain names."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


# ------------------------------------------------------------------ exposed communication, hooks


def test_uncovered_is_what_no_other_interval_covers() -> None:
    observe = load("observe")
    assert observe.merged([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        draws = torch.randint(0, 30, (2, 4, 2), generator=generator).tolist()
        pieces, cover = ([tuple(sorted(pair)) for pair in half] for half in draws)
        inside = lambda point, intervals: any(begin <= point < end for begin, end in intervals)  # noqa: E731
        expected = sum(inside(point, pieces) and not inside(point, cover) for point in range(30))
        assert observe.uncovered(pieces, cover) == expected, (pieces, cover)


def test_a_trace_tells_communication_from_compute() -> None:
    kernel = lambda name, ts, dur: {"cat": "kernel", "name": name, "ts": ts, "dur": dur}  # noqa: E731
    events = [
        kernel("ncclDevKernel_ReduceScatter", 0, 100),
        kernel("gemm", 50, 100),
        {"cat": "cpu_op", "name": "c10d::x", "ts": 0, "dur": 500},
        kernel("ncclDevKernel_AllGather", 140, 20),
    ]
    assert load("observe").exposed_in_trace({"traceEvents": events}) == pytest.approx(60e-6)


def test_hooks_are_timed_in_place_and_left_as_they_were() -> None:
    observe = load("observe")
    weight = torch.nn.Parameter(torch.ones(2))
    seen = []
    weight.register_hook(lambda gradient: time.sleep(0.01))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    clock = observe.HookClock()
    with clock.installed([weight, torch.nn.Parameter(torch.ones(1))]):
        (3 * weight).sum().backward()
    assert clock.calls == 2 and 0.01 <= clock.seconds < 1.0
    (3 * weight).sum().backward()
    assert clock.calls == 2 and [gradient.tolist() for gradient in seen] == [[3, 3], [6, 6]]


# ------------------------------------------------------------------ what is printed, and what disagrees


def figures(losses: list[float], calls: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "seconds": [0.1],
        "parts": {"forward": [0.03], "backward": [0.05], "step": [0.02]},
        "peak_bytes": 1,
        "losses": losses,
        "collectives": {"calls": {"reduce": calls}, "bytes": {"reduce": 8}, "ring_bytes": 8.0},
        "exposed_seconds": 0.01,
        "hook_seconds": None,
        "hook_calls": 0,
    } | more


def test_disagreements_are_told_beside_the_figures() -> None:
    report, models = load("report"), load("models")
    good, bad = report.Round([figures([8.0, 6.0])] * 2), report.Round([figures([8.0, 7.5])] * 2)
    runs = {"ddp": [good], "zero1": [bad], "zero2": [report.Round([figures([8.0, 6.0]), figures([8.0, 6.0], 2)])]}
    found = report.disagreements("gpt", "bfloat16", "ddp", runs)
    assert len(found) == 2 and "zero1, round 0: the loss fell by 0.5" in found[0] and "zero2: collectives" in found[1]
    assert report.disagreements("gpt", "bfloat16", "ddp", {"ddp": [good], "zero1": [good]}) == []
    rows = report.compare(models.make_workload("gpt", "small"), "bfloat16", "ddp", runs)
    table = report.format_table("title", "ddp", "tokens", rows)
    assert "exposed" in table and "hooks" in table and "zero2" in table


def test_a_run_that_disagrees_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    step_time, report = load("step_time"), load("report")
    falls = {"ddp": 6.0, "zero1": 7.9, "zero2": 6.0}

    def run_round(task: Any, ranks: int, peer: Path | None) -> Any:
        if task.contender == "zero2":
            raise RuntimeError("gpt, zero2: rank 1 ended with 1")
        return report.Round([figures([8.0, falls[task.contender]], parameters=10)] * ranks)

    monkeypatch.setattr(step_time, "run_round", run_round)
    path = tmp_path / "out.json"
    command = "step_time.py --models gpt --rounds 2 --contenders ddp zero1 zero2 --json"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(path)])
    with pytest.raises(SystemExit) as exit_info:
        step_time.main()
    written = json.loads(path.read_text())
    assert [row["contender"] for row in written["models"]["gpt"]] == ["ddp", "zero1"]
    assert len(written["faults"]) == 2 and "rank 1 ended" in written["faults"][0]
    assert all(fault in str(exit_info.value) for fault in written["faults"]) and "zero1" in capsys.readouterr().out


def test_in_turns_a_ratio_is_of_the_same_turn_and_of_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    in_turns = load("in_turns")
    fall = {"losses": [2.0, 1.0]}

    def rank(scale: float, *steps: float) -> dict[str, Any]:
        return {"ddp": {"seconds": [1.0, 10.0, 2.0]} | fall, "zero1": {"seconds": [scale * s for s in steps]} | fall}

    ranks = [rank(1.0, 0.5, 5.0, 1.0), rank(1.0, 0.4, 6.0, 0.1)]
    assert in_turns.ratios(in_turns.slowest(ranks))["zero1"] == [0.5, 0.6, 0.5]
    monkeypatch.setattr(in_turns, "run_ranks", lambda *_, **__: ranks)
    assert in_turns.main(["--contenders", "ddp", "zero1", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "0.500" in shown.out and not shown.err
    ranks[1]["zero1"]["losses"] = [2.0, 2.0]
    assert in_turns.main(["--contenders", "ddp", "zero1", "--device", "cpu"]) == 1, "a step that does nothing is fast"
    assert "zero1" in capsys.readouterr().err


def test_a_peer_is_an_interpreter_or_a_folder(tmp_path: Path) -> None:
    step_time = load("step_time")
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.touch()
    (tmp_path / "site" / "deepspeed").mkdir(parents=True)
    assert step_time.peer_python(python) == step_time.peer_python(tmp_path / "env") == (str(python), [])
    assert step_time.peer_python(tmp_path / "site") == (sys.executable, [str(tmp_path / "site")])
    assert step_time.peer_python(None)[1][0] == str(BENCHMARKS.parent)
    with pytest.raises(FileNotFoundError, match="--peer"):
        step_time.peer_python(tmp_path)


def test_a_reused_encoder_has_the_parameters_of_one_and_the_arithmetic_of_two() -> None:
    models = load("models")
    config = models.GPTConfig(hidden=8, layers=2, heads=2, vocab=11, sequence=4, batch=2, lr=1e-3)
    once, twice = (models.gpt_workload(models.replace(config, uses=uses)) for uses in (1, 2))
    counts = [sum(p.numel() for p in workload.build().parameters()) for workload in (once, twice)]
    assert counts[0] == counts[1] and once.flops < twice.flops < 2 * once.flops
    one, two = (models.build_model(workload, torch.device("cpu"), torch.float32) for workload in (once, twice))
    batch = once.make_batch(0, torch.float32)
    assert abs(one(batch).item() - two(batch).item()) > 1e-6


# ------------------------------------------------------------------ the scaling model


def test_buckets_are_those_of_the_layout() -> None:
    """The model counts buckets as the package cuts them, for one flat group of four parameters of 64 elements."""
    from deepspeed.runtime.gradients import layout
    from deepspeed.runtime.gradients.ledger import ParameterRecord

    model = load("scaling_model")
    for ranks in (2, 4, 8):
        for size in (16, 64, 70, 1000):
            for stage in (0, 1, 3):
                records = [ParameterRecord(torch.nn.Parameter(torch.zeros(64)), str(i), i) for i in range(4)]
                groups = layout.make_flat_groups([records])
                kind = {0: layout.Replicated, 1: layout.FlatPartition, 3: layout.PerParameter}[stage]
                plans = kind(groups, 0, ranks, size).buckets
                collective, sizes = model.buckets_of(stage, 256, size, ranks)
                assert {plan.collective.value for plan in plans} == {collective}, (ranks, size, stage)
                assert len(sizes) == len(plans) and sum(sizes) == 256, (ranks, size, stage)


def test_pipeline_with_two_buffers() -> None:
    end = load("scaling_model").pipeline_end
    assert end([1, 2, 3], [0.5, 0.5, 0.5]) == 3.5, "what fits beside backward leaves only the last exposed"
    assert end([1, 2, 3], [10, 10, 10]) == 31, "where communication is longer, it all follows the first bucket"
    # the third waits for the first's buffer until 11, by which all that follows is late
    assert end([1, 2, 3, 100], [10, 1, 1, 1]) == 100 + (11 - 3) + 1
    assert end([], []) == 0.0 and end([1, 2, 3], [0, 0, 0]) == 3


def test_collectives_of_the_model() -> None:
    model = load("scaling_model")
    link = model.Link(bandwidth=1e9, hop=1e-6, call=1e-5)
    for kind in ("all_reduce", "reduce", "reduce_scatter", "all_gather"):
        assert model.collective_seconds(kind, 1e9, 1, link) == 0.0
        assert model.collective_seconds(kind, 0, 4, link) >= 1e-5 + 3e-6
    pair = [model.collective_seconds(kind, 8e9, 4, link) for kind in ("reduce_scatter", "all_gather")]
    assert sum(pair) - 1e-5 == pytest.approx(model.collective_seconds("all_reduce", 8e9, 4, link))
    with pytest.raises(ValueError, match="unknown collective"):
        model.collective_seconds("gossip", 1, 2, link)


def test_what_the_model_advises() -> None:
    model = load("scaling_model")
    gpt, machine = model.MODELS["gpt-0.94b"], model.MACHINES["h200"]
    assert model.step_seconds(gpt, machine, 1, 2, 5e8) == pytest.approx(54e-3, rel=0.05), "measured on one H200"
    for ranks in (8, 64, 1024):
        for stage in (0, 2, 3):
            best = model.best_bucket(gpt, machine, ranks, stage)
            steps = [model.step_seconds(gpt, machine, ranks, stage, size) for size in model.BUCKETS]
            assert model.step_seconds(gpt, machine, ranks, stage, best) == min(steps)
    # one owner per bucket: on many ranks latency, hence one bucket
    assert model.best_bucket(gpt, machine, 1024, 2) > gpt.elements > model.best_bucket(gpt, machine, 64, 2)


def test_constants_are_found_again() -> None:
    model = load("scaling_model")
    constants = [2e-3, 5e-5, 1e-8, 6e-4]
    seconds = [model.predicted(case, constants) for case in model.FITTED]
    assert model.fitted(model.FITTED, seconds) == pytest.approx(constants)
