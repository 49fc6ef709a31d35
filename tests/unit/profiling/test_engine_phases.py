# SPDX-License-Identifier: Apache-2.0
"""What an engine prints and leaves behind with flops profiler, timers, ranges and memory breakdown."""

import contextlib
import io
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.profiling import engine_phases, memory
from deepspeed.profiling.engine_phases import EngineTimers
from deepspeed.utils import nvtx
from unit.common import DistributedTest
from unit.runtime.engine_cases import make_config, make_engine

WIDTH, BATCH, GAS = 6, 2, 2
LAYER = 2 * BATCH * WIDTH * WIDTH  # FLOPs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def batch():
    return torch.ones(BATCH, WIDTH, requires_grad=True)


def train(engine, windows, by_engine=True):
    for _ in range(windows * engine.gradient_accumulation_steps()):
        loss = engine(batch())
        if by_engine:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class TestFlopsProfiler(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [0, 2, 3])
    def test_profiles_one_step_on_rank_0(self, stage, tmp_path, monkeypatch):
        monkeypatch.setattr(nvtx, "_requested", False)
        path = tmp_path / "profile.txt"
        section = {"enabled": True, "profile_step": 1, "output_file": str(path), "module_depth": 0}
        engine = make_engine(make_config(stage, gas=GAS, flops_profiler=section), Model())
        hooks = count_hooks(engine.module)
        train(engine, 1)
        assert engine.phases.flops_profiler is None and not path.exists() and count_hooks(engine.module) == hooks
        with torch.no_grad():
            engine(batch())  # an evaluation between steps is no part of one
        engine.backward(engine(batch()))
        watched = 3 if dist.get_rank() == 0 else 0
        assert count_hooks(engine.module) == hooks + 2 * watched and not path.exists()
        engine.step()
        engine.backward(engine(batch()))
        engine.step()
        assert count_hooks(engine.module) == hooks
        train(engine, 1)
        dist.barrier()
        text = path.read_text()
        dist.barrier()
        path.unlink(missing_ok=True)
        train(engine, 2)
        assert not path.exists()
        profiler = engine.phases.flops_profiler
        if dist.get_rank() == 1:
            assert profiler is None
            return
        assert profiler.get_total_flops() == GAS * 2 * LAYER and profiler.total.calls == GAS
        assert profiler.get_backward_flops() == (GAS * 4 * LAYER, True)
        assert re.search(rf"parameters of the model\s+{2 * (WIDTH * WIDTH + WIDTH)}\n", text)
        assert text.count("flops profile of step 1") == 1
        assert "(first)" not in text and re.search(r"backward FLOPs \(measured\)\s+1.15 KFLOPS", text)
        assert re.search(r"latency of backward\s+\d", text) and re.search(r"data-parallel ranks\s+2\n", text)
        engine.destroy()
        assert profiler.get_total_flops() == 0

    def test_plain_backward_is_estimated(self):
        config = make_config(1, flops_profiler={"enabled": True, "profile_step": 0, "recompute_fwd_factor": 1.0})
        engine = make_engine(config, Model())
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train(engine, 1, by_engine=False)
        assert printed.getvalue().count("flops profile of step 0") == (dist.get_rank() == 0)
        if dist.get_rank() == 0:
            assert engine.phases.flops_profiler.get_backward_flops() == (3 * 2 * LAYER, False)
        engine.destroy()

    def test_a_failing_step_leaves_no_hook(self):
        engine = make_engine(make_config(1, flops_profiler={"enabled": True, "profile_step": 0}), Model())
        hooks = count_hooks(engine.module)
        with pytest.raises(RuntimeError, match="shape"):
            engine(torch.ones(BATCH, WIDTH + 1))
        assert count_hooks(engine.module) == hooks
        train(engine, 2)
        engine.destroy()

    def test_destroy_in_the_middle_of_a_profile(self):
        model = Model()
        engine = make_engine(make_config(1, gas=GAS, flops_profiler={"enabled": True, "profile_step": 0}), model)
        engine.backward(engine(batch()))
        engine.destroy()
        assert count_hooks(model) == 0

    def test_a_step_that_has_passed_is_said(self, monkeypatch):
        said = []
        monkeypatch.setattr(engine_phases.logger, "warning", lambda text, step: said.append(text % step))
        engine = make_engine(make_config(0, flops_profiler={"enabled": True, "profile_step": 1}), Model())
        engine.global_steps = 5
        train(engine, 2)
        assert len(said) == (dist.get_rank() == 0) and all("step 1 had passed" in text for text in said)
        engine.destroy()


class TestTimers(DistributedTest):
    world_size = 1
    reuse_dist_env = True

    def test_breakdown_per_micro_step_and_per_step(self, monkeypatch):
        said = []
        monkeypatch.setattr(engine_phases, "print_rank_0", said.append)
        engine = make_engine(make_config(1, gas=GAS, wall_clock_breakdown=True, steps_per_print=3), Model())
        train(engine, 2)
        assert said == [] and set(engine.get_wall_clock_timers()) == {
            "fwd_microstep",
            "bwd_microstep",
            "step_microstep",
        }
        elapsed = {name: timer.elapsed(reset=False) for name, timer in engine.timers.get_timers().items()}
        assert elapsed["bwd_inner_microstep"] + elapsed["bwd_allreduce_microstep"] <= elapsed["bwd_microstep"]
        assert all(value > 0 for value in elapsed.values())
        for name in ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"):
            assert elapsed[name] == pytest.approx(elapsed[f"{name}_microstep"], rel=0.2)
        before = dict(elapsed)
        train(engine, 1)
        micro, whole = (dict(re.findall(r"(\w+): ([\d.]+)", line)) for line in said[0].splitlines())
        assert len(said) == 1
        # means over 6 micro-steps and 3 steps
        assert float(micro["fwd_microstep"]) >= before["fwd_microstep"] / 6 - 0.01
        assert float(whole["fwd"]) == pytest.approx(GAS * float(micro["fwd_microstep"]), rel=0.2, abs=0.02)
        assert engine.timers("fwd").elapsed() == 0.0
        engine.destroy()

    def test_the_flops_profiler_alone_prints_no_times(self, monkeypatch):
        said = []
        monkeypatch.setattr(engine_phases, "print_rank_0", said.append)
        engine = make_engine(make_config(1, flops_profiler={"enabled": True, "profile_step": 9}), Model())
        train(engine, 2)
        assert said == [] and engine.timers("fwd").elapsed() == 0.0  # read and forgotten
        engine.destroy()

    def test_names(self):
        assert EngineTimers(False, False).active_timers() == []
        assert EngineTimers(True, False).active_timers() == [
            *("fwd_microstep", "bwd_microstep", "bwd_inner_microstep", "bwd_allreduce_microstep", "step_microstep")
        ]
        assert EngineTimers(False, True).active_timers() == ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
        assert len(EngineTimers(True, True).active_timers()) == 10


def labels_of(profile):
    return Counter(event.name for event in profile.events() if event.name.startswith("deepspeed."))


class TestRanges(DistributedTest):
    world_size = 1
    reuse_dist_env = True

    def test_every_phase_has_a_label_in_a_torch_profile(self):
        engine = make_engine(make_config(1, gas=GAS), Model())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(engine, 1)
        labels = labels_of(profile)
        for phase in ("forward", "backward", "autograd", "sweep", "step"):
            assert labels[f"deepspeed.{phase} (Model)"] == GAS
        assert labels["deepspeed.norm"] == labels["deepspeed.update"] == 1
        assert labels["deepspeed.reduce_bucket_0 (first.weight to second.bias)"] == 1
        engine.destroy()

    def test_gathers_name_their_parameters(self):
        engine = make_engine(make_config(3, zero={"stage3_param_persistence_threshold": 0}), Model())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(engine, 1)
        gathers = [label for label in labels_of(profile) if label.startswith("deepspeed.gather ")]
        assert gathers and all(re.search(r"\('?(first|second)\.(weight|bias)", label) for label in gathers)
        engine.destroy()

    def test_device_ranges_only_while_somebody_looks(self, monkeypatch):
        pushed, popped = [], []
        accelerator = nvtx.get_accelerator()
        monkeypatch.setattr(type(accelerator), "range_push", lambda self, name, domain=None: pushed.append(name))
        monkeypatch.setattr(type(accelerator), "range_pop", lambda self, domain=None: popped.append(domain))
        monkeypatch.setattr(nvtx, "_requested", False)
        decorated = nvtx.instrument_w_nvtx(labels_of)
        engine = make_engine(make_config(2), Model())
        train(engine, 1)
        with nvtx.profiler_range("mine"):
            pass
        assert pushed == popped == []
        with torch.profiler.profile() as profile:
            train(engine, 1)
        decorated(profile)
        assert len(pushed) == len(popped) and "deepspeed.update" in pushed and "labels_of" not in pushed
        engine.destroy()
        pushed.clear()
        engine = make_engine(make_config(2, wall_clock_breakdown=True), Model())
        train(engine, 1)
        decorated(profile)
        assert {"deepspeed.forward (Model)", "deepspeed.norm", "labels_of"} <= set(pushed)
        pushed.clear()
        monkeypatch.setattr(nvtx, "enable_nvtx", False)
        train(engine, 1)
        assert pushed == []
        engine.destroy()


class TestReports(DistributedTest):
    world_size = 2

    def test_memory_at_steps_per_print(self, monkeypatch):
        said = []
        monkeypatch.setattr(memory, "print_rank_0", said.append)
        engine = make_engine(make_config(1, memory_breakdown=True, steps_per_print=2), Model())
        train(engine, 3)
        (text,) = said
        lines = text.splitlines()
        assert lines[0].startswith("memory after step 2 | mem_allocated") and len(lines) == 4
        assert lines[1].split()[:2] == ["rank", "weights"] and [line.split()[0] for line in lines[2:]] == ["0", "1"]
        assert engine.memory_breakdown() is True
        engine.destroy()
