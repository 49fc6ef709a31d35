# SPDX-License-Identifier: Apache-2.0
"""TensorBoard, W&B and Comet, against small stand-ins for their packages; TensorBoard also as itself where it is
installed."""

import importlib.util
import inspect
import os
import subprocess
import sys
import types

import pytest
import torch

from deepspeed.monitor import monitor as monitor_module
from deepspeed.monitor.comet import CometMonitor, EventsLogScheduler
from deepspeed.monitor.config import (
    CometConfig,
    TensorBoardConfig,
    WandbConfig,
    get_monitor_config,
)
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor

EVENTS = [("Train/Samples/lr", 0.1, 8), ("Train/Samples/train_loss", torch.tensor(2.5), 8), ("late", 1, 4)]


def fake_module(monkeypatch, name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeWriter:
    made = []

    def __init__(self, log_dir):
        self.log_dir, self.calls = log_dir, []
        FakeWriter.made.append(self)

    def add_scalar(self, tag, scalar_value, global_step):
        self.calls.append((tag, scalar_value, global_step))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.calls = arguments, []

    def log(self, data, step=None, commit=None):
        self.calls.append((data, step, commit))


class FakeExperiment:
    def __init__(self, **arguments):
        self.arguments, self.calls, self.name = arguments, [], None

    def set_name(self, name):
        self.name = name

    def log_metric(self, name, value, step=None):
        self.calls.append((name, value, step))


@pytest.fixture
def writers(monkeypatch):
    fake_module(monkeypatch, "tensorboard")
    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=FakeWriter)
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


@pytest.fixture
def wandb(monkeypatch):
    module = fake_module(monkeypatch, "wandb", run=None)
    module.started = []
    module.init = lambda **arguments: module.started.append(FakeRun(**arguments)) or module.started[-1]
    return module


@pytest.fixture
def comet(monkeypatch):
    module = fake_module(monkeypatch, "comet_ml", started=[])

    def start(*, api_key="mine", workspace=None, project_name=None, experiment_key=None, mode=None, online=None):
        module.started.append(FakeExperiment(api_key=api_key, project_name=project_name, mode=mode, online=online))
        return module.started[-1]

    module.start = start
    return module


@pytest.fixture
def rank_1(monkeypatch):
    monkeypatch.setattr(monitor_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(monitor_module.dist, "get_rank", lambda: 1)


# ---------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_scalars_are_flushed_with_each_call(tmp_path, writers):
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events(EVENTS[:2])
    (writer,) = writers
    assert writer.log_dir == str(tmp_path / "job")
    assert writer.calls == [("Train/Samples/lr", 0.1, 8), ("Train/Samples/train_loss", 2.5, 8), "flush"]
    monitor.write_events(EVENTS[2:], flush=False)
    assert writer.calls[3:] == [("late", 1, 4)]
    monitor.flush()
    monitor.close()
    monitor.close()
    assert writer.calls[4:] == ["flush", "close"]
    assert isinstance(writer.calls[1][1], float)


def test_tensorboard_without_an_output_path(tmp_path, writers, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    TensorBoardMonitor(TensorBoardConfig(enabled=True))
    assert writers[0].log_dir == str(tmp_path / "tensorboard" / "DeepSpeedJobName")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_itself_after_a_process_that_dies_at_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = (
        "import os\n"
        "from deepspeed.monitor.config import TensorBoardConfig\n"
        "from deepspeed.monitor.tensorboard import TensorBoardMonitor\n"
        f"config = TensorBoardConfig(enabled=True, output_path={str(tmp_path)!r}, job_name='job')\n"
        "monitor = TensorBoardMonitor(config)\n"
        "monitor.write_events([('Train/Samples/lr', 0.5, int(os.environ['STEP']))])\n"
        "os._exit(3)\n"
    )
    for step in ("8", "16"):
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "STEP": step}, check=False)
        assert done.returncode == 3
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/Samples/lr")] == [(8, 0.5), (16, 0.5)]


# ---------------------------------------------------------------------------------------------------- W&B


def test_wandb_logs_the_events_of_a_step_together(wandb):
    monitor = WandbMonitor(WandbConfig(enabled=True, group="g", team="t", project="p"))
    (run,) = wandb.started
    assert run.arguments == {"project": "p", "group": "g", "entity": "t"}
    monitor.write_events(EVENTS)
    assert run.calls == [
        ({"late": 1}, 4, None),
        ({"Train/Samples/lr": 0.1, "Train/Samples/train_loss": 2.5}, 8, None),
    ]
    monitor.log({"mine": 3}, step=9, commit=True)
    assert run.calls[-1] == ({"mine": 3}, 9, True)


def test_wandb_uses_the_run_that_there_is(wandb):
    wandb.run = FakeRun()
    WandbMonitor(WandbConfig(enabled=True)).write_events(EVENTS[:1])
    assert wandb.started == [] and wandb.run.calls == [({"Train/Samples/lr": 0.1}, 8, None)]


# ---------------------------------------------------------------------------------------------------- Comet


def test_comet_starts_with_what_the_config_says_and_nothing_else(comet):
    config = CometConfig(enabled=True, project="p", mode="create", online=False, experiment_name="n")
    monitor = CometMonitor(config)
    (experiment,) = comet.started
    # api_key "mine" is the default of the stand-in: None is not passed on
    assert experiment.arguments == {"api_key": "mine", "project_name": "p", "mode": "create", "online": False}
    assert experiment.name == "n" and monitor.experiment is experiment and monitor.samples_log_interval == 100


def test_comet_before_project_was_renamed(monkeypatch, comet):
    def start(project=None):
        return FakeExperiment(project=project)

    monkeypatch.setattr(comet, "start", start)
    assert CometMonitor(CometConfig(enabled=True, project="p")).experiment.arguments == {"project": "p"}
    monkeypatch.delattr(comet, "start")
    with pytest.raises(ImportError, match="too old: pip install --upgrade comet_ml"):
        CometMonitor(CometConfig(enabled=True))


def test_comet_logs_every_so_many_samples(comet):
    monitor = CometMonitor(CometConfig(enabled=True, samples_log_interval=20))
    for step in (8, 16, 24, 28, 36, 48):
        monitor.write_events([("lr", 0.1, step), *([("rare", torch.tensor(1.5), step)] if step == 16 else [])])
    assert comet.started[0].calls == [("lr", 0.1, 8), ("rare", 1.5, 16), ("lr", 0.1, 28), ("lr", 0.1, 48)]


def test_events_scheduler():
    due = EventsLogScheduler(100).needs_logging
    assert [due("a", step) for step in (0, 50, 99, 100, 150, 350, 400, 450)] == [1, 0, 0, 1, 0, 1, 0, 1]
    assert due("b", 10) and not due("b", 109) and due("b", 110)
    assert due("b", 5), "a resumed job begins anew"


# ---------------------------------------------------------------------------------------------------- all of them


def test_master_writes_to_each_that_is_enabled(tmp_path, writers, wandb, comet):
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    sections = {"tensorboard": folder, "csv_monitor": folder, "wandb": {"enabled": True}, "comet": {"enabled": True}}
    master = MonitorMaster(get_monitor_config(sections))
    assert master.enabled and isinstance(master, Monitor)
    master.write_events([("lr", 0.1, 8)])
    assert ("lr", 0.1, 8) in writers[0].calls and comet.started[0].calls == [("lr", 0.1, 8)]
    assert wandb.started[0].calls == [({"lr": 0.1}, 8, None)]
    assert (tmp_path / "job" / "lr.csv").read_text() == "step,lr\n8,0.1\n"
    master.close()
    assert writers[0].calls[-1] == "close"


def test_master_without_monitors_is_disabled():
    master = MonitorMaster(get_monitor_config({"wandb": {"enabled": False, "project": "p"}}))
    assert not master.enabled and master.monitors == []
    master.write_events(EVENTS)


def test_other_ranks_are_enabled_and_silent(tmp_path, writers, wandb, comet, rank_1):
    sections = {key: {"enabled": True} for key in ("tensorboard", "csv_monitor", "wandb", "comet")}
    sections["tensorboard"]["output_path"] = sections["csv_monitor"]["output_path"] = str(tmp_path / "none")
    master = MonitorMaster(get_monitor_config(sections))
    assert master.enabled
    master.write_events(EVENTS)
    master.close()
    assert writers == wandb.started == comet.started == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "key, package, what",
    [("tensorboard", "tensorboard", "TensorBoard"), ("wandb", "wandb", "Weights"), ("comet", "comet_ml", "Comet")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_named_on_every_rank(monkeypatch, key, package, what, rank):
    monkeypatch.setattr(monitor_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(monitor_module.dist, "get_rank", lambda: rank)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"enables {what}.*pip install {package}, or set '{key}.enabled' to false"):
        MonitorMaster(get_monitor_config({key: {"enabled": True}}))
    MonitorMaster(get_monitor_config({key: {"enabled": False}}))


def test_monitors_share_one_interface():
    for kind in (TensorBoardMonitor, WandbMonitor, CometMonitor, MonitorMaster):
        assert issubclass(kind, Monitor)
        first, second, *optional = inspect.signature(kind.write_events).parameters.values()
        assert second.name == "event_list" and all(p.default is not p.empty for p in optional), kind
    with pytest.raises(TypeError, match="abstract"):
        Monitor(CometConfig())
