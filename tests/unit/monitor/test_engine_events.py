# SPDX-License-Identifier: Apache-2.0
"""The events that the engine writes at each boundary: their values, their steps, and that off means off."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.runtime import engine_monitor
from deepspeed.runtime.engine_monitor import StepEvents, count_tokens
from unit.common import DistributedTest
from unit.runtime import engine_cases as cases

GAS = 3
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}


def monitored(folder: Path, stage: int = 1, dtype: str = "fp32", gas: int = GAS, **top: Any) -> dict:
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return cases.make_config(stage, dtype, gas, csv_monitor=section, **top)


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of an event, on every rank the same (the files are rank 0's)."""
    dist.barrier()
    path = folder / "job" / f"Train_Samples_{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as opened:
        header, *body = csv.reader(opened)
    assert header == ["step", name]
    return [(int(step), float(value)) for step, value in body]


def mean_over_ranks(values: list[float]) -> float:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    flat = [value for one in everyone for value in one]
    return sum(flat) / len(flat)


def window(engine: Any, seed: int = 0, dtype: str = "fp32") -> list[float]:
    """Run a window with data that differs per rank and micro-step; the losses of this rank."""
    losses = []
    for batch in cases.batches_of(dist.get_rank(), engine.gradient_accumulation_steps(), dtype, seed):
        loss = engine(*batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


class TestValues(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_loss_norms_and_counts_of_each_window(self, tmp_path, stage):
        engine = cases.make_engine(monitored(tmp_path, stage, gradient_clipping=0.5))
        assert engine.monitor.enabled
        assert [monitor.writes for monitor in engine.monitor.monitors] == [dist.get_rank() == 0]
        reducer = engine._stepper.reducer
        losses, norms, issued, moved = [], [], [0], [0]
        for seed in (0, 1):
            losses.append(mean_over_ranks(window(engine, seed)))
            norms.append(float(engine.get_global_grad_norm()))
            issued.append(reducer.transport.collectives_issued)
            moved.append(reducer.transport.bytes_communicated)
        assert engine.global_samples == 24 and abs(losses[0] - losses[1]) > 1e-3 and max(norms) > 0.5
        assert rows(tmp_path, "train_loss") == [(12, pytest.approx(losses[0])), (24, pytest.approx(losses[1]))]
        assert rows(tmp_path, "grad_norm") == list(zip((12, 24), norms))
        clipped = [pytest.approx(min(norm, 0.5), rel=1e-5) for norm in norms]
        assert rows(tmp_path, "grad_norm_clipped") == list(zip((12, 24), clipped))
        assert rows(tmp_path, "lr") == [(12, 0.1), (24, 0.1)]
        assert rows(tmp_path, "skipped_steps") == [(12, 0), (24, 0)]
        assert rows(tmp_path, "gradient_collectives") == [(12, issued[1]), (24, issued[2] - issued[1])]
        assert rows(tmp_path, "gradient_bytes") == [(12, moved[1]), (24, moved[2] - moved[1])]
        assert issued[1] > 0 and moved[1] >= 4 * cases.TRAINABLE
        assert all(value > 0 for _, value in rows(tmp_path, "samples_per_second"))
        assert rows(tmp_path, "loss_scale") == [] and rows(tmp_path, "tokens_per_second") == []

    def test_the_learning_rate_is_the_one_after_the_schedule(self, tmp_path):
        scheduler = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
        }
        engine = cases.make_engine(monitored(tmp_path, scheduler=scheduler))
        rates = []
        for seed in (0, 1, 2):
            window(engine, seed)
            rates.append(engine.get_lr()[0])
        assert len(set(rates)) == 3 and [value for _, value in rows(tmp_path, "lr")] == rates

    def test_fp16_and_a_skipped_step(self, tmp_path):
        engine = cases.make_engine(monitored(tmp_path, 2, fp16=FP16, gradient_clipping=1.0))
        window(engine, 0, "fp16")
        batch = cases.batches_of(dist.get_rank(), 1, "fp16", 1)[0]
        for _ in range(GAS):
            engine.backward(engine(*batch) * float("inf"))
            engine.step()
        assert not engine.was_step_applied()
        assert rows(tmp_path, "loss_scale") == [(12, 256.0), (24, 128.0)]
        assert rows(tmp_path, "skipped_steps") == [(12, 0), (24, 1)]
        assert [value for _, value in rows(tmp_path, "grad_norm")][1] == float("inf")
        assert [step for step, _ in rows(tmp_path, "grad_norm_clipped")] == [12]
        assert [value for _, value in rows(tmp_path, "train_loss")][1] == float("inf")

    def test_a_resumed_job_appends(self, tmp_path):
        for seed in (0, 1):
            engine = cases.make_engine(monitored(tmp_path))
            engine.global_samples = 12 * seed
            window(engine, seed)
            engine.destroy()
        assert [step for step, _ in rows(tmp_path, "train_loss")] == [12, 24]

    def test_own_events_go_the_same_way(self, tmp_path):
        engine = cases.make_engine(monitored(tmp_path))
        engine.monitor.write_events([("Eval/accuracy", 0.25 + dist.get_rank(), 12)])
        dist.barrier()
        assert (tmp_path / "job" / "Eval_accuracy.csv").read_text() == "step,accuracy\n12,0.25\n"


class TestLoss(DistributedTest):
    """The loss is the one whose gradient the step applies, or it is left out."""

    world_size = 2

    def run_window(self, engine: Any, backward: Any, seed: int = 0) -> list[float]:
        losses = []
        for i, batch in enumerate(cases.batches_of(dist.get_rank(), GAS, "fp32", seed)):
            loss = engine(*batch)
            losses.append(loss.item())
            backward(i, loss)
            engine.step()
        return losses

    @pytest.mark.parametrize("dtype", ["fp32", "fp16"])
    def test_every_spelling_that_the_engine_sees(self, tmp_path, dtype):
        engine = cases.make_engine(monitored(tmp_path, **({"fp16": FP16} if dtype == "fp16" else {})))
        for i, spelling in enumerate(
            (
                lambda loss: engine.backward(loss),
                lambda loss: engine.scale(loss).backward(),
                lambda loss: engine.backward(loss / GAS, scale_wrt_gas=False),
                lambda loss: (engine.backward(loss * 0.25, retain_graph=True), engine.backward(loss * 0.75)),
            )
        ):
            losses = []
            for batch in cases.batches_of(dist.get_rank(), GAS, dtype, seed=i):
                loss = engine(*batch)
                losses.append(loss.item())
                spelling(loss)
                engine.step()
            mean = mean_over_ranks(losses)
            assert rows(tmp_path, "train_loss")[-1] == (12 * (i + 1), pytest.approx(mean, rel=1e-5)), i

    def test_a_backward_that_the_engine_does_not_see_leaves_the_loss_out(self, tmp_path, monkeypatch):
        said = io.StringIO()
        monkeypatch.setattr(sys, "stderr", said)
        engine = cases.make_engine(monitored(tmp_path))
        rank = dist.get_rank()
        self.run_window(engine, lambda i, loss: loss.backward())
        assert rows(tmp_path, "train_loss") == []
        self.run_window(engine, lambda i, loss: loss.backward() if i == 1 and rank == 1 else engine.backward(loss))
        assert rows(tmp_path, "train_loss") == []
        mean = mean_over_ranks(self.run_window(engine, lambda i, loss: engine.backward(loss)))
        assert rows(tmp_path, "train_loss") == [(36, pytest.approx(mean))]
        assert len(rows(tmp_path, "grad_norm")) == 3
        assert said.getvalue().count("train_loss is left out") == (rank == 0)

    @pytest.mark.parametrize("by", ["engine", "optimizer"])
    def test_a_dropped_window_does_not_count(self, tmp_path, by):
        engine = cases.make_engine(monitored(tmp_path, gas=1))
        batches = cases.batches_of(dist.get_rank(), 2)
        engine.backward(engine(*batches[0]))
        (engine if by == "engine" else engine._stepper).zero_grad()
        loss = engine(*batches[1])
        engine.backward(loss)
        engine.step()
        mean = mean_over_ranks([loss.item()])
        # the engine does not hear of a window that the optimizer drops, but it sees that the counts do not agree
        assert rows(tmp_path, "train_loss") == ([(4, pytest.approx(mean))] if by == "engine" else [])

    def test_an_aborted_backward_does_not_count(self, tmp_path):
        engine = cases.make_engine(monitored(tmp_path, gas=1, stage=0))
        batch = cases.batches_of(dist.get_rank(), 1)[0]
        bad = engine(*batch)
        bad.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            engine.backward(bad)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        assert rows(tmp_path, "train_loss") == [(4, pytest.approx(mean_over_ranks([loss.item()])))]

    def test_a_rank_without_a_backward_has_no_part_in_the_mean(self, tmp_path):
        engine = cases.make_engine(monitored(tmp_path, gas=1, stage=0, managed_gradient_accumulation=False))
        loss = engine(*cases.batches_of(0, 1)[0])
        if dist.get_rank() == 0:
            engine.scale(loss).backward()
        engine.step()
        assert [value for _, value in rows(tmp_path, "train_loss")] == [pytest.approx(loss.item())]


def fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids).square().mean()


class TestTokens(DistributedTest):
    world_size = 2

    def test_tokens_of_all_ranks_in_training_forwards(self, tmp_path):
        engine = cases.make_engine(monitored(tmp_path, gas=2), model=Tokens())
        length = 7 if dist.get_rank() == 0 else 3
        ids = torch.zeros(2, length, dtype=torch.int64)
        for _ in range(2):
            engine.eval()
            engine(ids)
            engine.train()
            with torch.no_grad():
                engine(ids)
            engine.backward(engine(ids))
            engine.step()
        ((_, tokens),) = rows(tmp_path, "tokens_per_second")
        ((_, samples),) = rows(tmp_path, "samples_per_second")
        assert tokens / samples == pytest.approx((7 + 3) / 2)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    "args, kwargs, tokens",
    [
        ((ids(2, 5),), {}, 10),
        ((ids(2, 5, dtype=torch.int32), ids(2, 9)), {}, 10),
        ((), {"attention_mask": ids(2, 9), "input_ids": ids(13)}, 13),
        (({"labels": ids(2, 9), "input_ids": ids(2, 5)},), {}, 10),
        (([ids(2, 5), ids(2)],), {}, 10),
        ((3, ids(2, 5)), {}, 10),
        ((), {"x": ids(2, 5)}, 10),
        ((torch.zeros(2, 5), ids(2, 5)), {}, 0),  # floating inputs and labels
        ((ids(2),), {}, 0),  # one number per sample
        ((ids(2, 5, dtype=torch.bool),), {}, 0),
        ((ids(2, 5, dtype=torch.uint8),), {}, 0),  # an image
        ((), {"input_ids": None, "inputs_embeds": torch.zeros(2, 5)}, 0),
        ((), {}, 0),
    ],
)
def test_what_counts_as_tokens(args, kwargs, tokens):
    assert count_tokens(args, kwargs) == tokens


class Recorder:
    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled


def test_nothing_is_read_in_forward_and_backward():
    """A tensor on the meta device has no value: reading it, which would wait for a real device, raises."""
    events = StepEvents(Recorder(True), torch.device("cpu"), None)
    loss = torch.zeros((), device="meta", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        loss.item()
    for _ in range(2):
        events.saw_inputs((torch.zeros(2, 5, device="meta", dtype=torch.int64),), {})
        events.saw_loss(loss.reshape(1), 0.5)
    assert events._loss.device.type == "meta" and events._loss.dtype == torch.float64 and events._tokens == 20


class TestNoDeviceSynchronisation(DistributedTest):
    world_size = 1
    requires_cuda_env = True

    def test_in_forward_and_backward_with_a_monitor(self, tmp_path):
        """torch raises where the host waits for the device."""
        engine = cases.make_engine(monitored(tmp_path), model=Tokens())
        ids = torch.zeros(2, 7, dtype=torch.int64, device=engine.device)
        for step in range(2 * GAS):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                engine.backward(engine(ids))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.step()
        assert len(rows(tmp_path, "train_loss")) == 2


class TestOff(DistributedTest):
    world_size = 2

    def test_without_monitors_nothing_is_kept_or_sent(self, monkeypatch):
        def never(*_: Any) -> None:
            raise AssertionError("called without an enabled monitor")

        monkeypatch.setattr(engine_monitor, "count_tokens", never)
        monkeypatch.setattr(StepEvents, "_over_ranks", never)
        engine = cases.make_engine(cases.make_config(1, gas=2, csv_monitor={"enabled": False}))
        assert not engine.monitor.enabled
        window(engine)
        assert engine.global_steps == 1 and engine._step_events._loss is None

    def test_a_monitor_that_cannot_be_made_leaves_no_engine(self, tmp_path):
        (tmp_path / "job").write_text("a file where the folder should be")
        if dist.get_rank() == 0:
            with pytest.raises(FileExistsError):
                cases.make_engine(monitored(tmp_path))
