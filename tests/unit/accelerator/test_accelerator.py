# SPDX-License-Identifier: Apache-2.0
"""Choice of the accelerator, and the CPU accelerator's figures."""

import inspect
import os
import subprocess
import sys
import time

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, real_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


@pytest.mark.parametrize("cuda_there, expected", [(True, "cuda"), (False, "cpu")])
def test_automatic_choice_follows_the_machine(monkeypatch, cuda_there, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_there)
    assert get_accelerator().device_name() == expected


@pytest.mark.parametrize("name, communication", [("cpu", "gloo"), ("cuda", "nccl")])
def test_environment_wins_over_the_machine(monkeypatch, name, communication):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name == "cpu")
    monkeypatch.setenv("DS_ACCELERATOR", name)
    accelerator = get_accelerator()
    assert accelerator.device_name() == name
    assert accelerator.communication_backend_name() == communication
    assert get_accelerator() is accelerator


def test_unknown_name_is_refused_with_its_value(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    with pytest.raises(ValueError, match="abacus"):
        get_accelerator()


@pytest.mark.parametrize("name", [n for n in real_accelerator.SUPPORTED_ACCELERATOR_LIST if n not in ("cpu", "cuda")])
def test_known_name_without_implementation_says_so(monkeypatch, name):
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(NotImplementedError, match=f"{name}.*not supported here"):
        get_accelerator()


def test_set_accelerator():
    class Mine(CPU_Accelerator):
        pass

    mine = set_accelerator(Mine())
    assert get_accelerator() is mine
    with pytest.raises(TypeError, match="str"):
        set_accelerator("cpu")
    assert get_accelerator() is mine


def test_import_neither_chooses_nor_initialises_a_device():
    script = (
        "import torch\n"
        "def touched(*args, **kwargs): raise SystemExit('a device was touched')\n"
        "torch.cuda.init = torch.cuda._lazy_init = touched\n"
        "import deepspeed.accelerator, deepspeed.accelerator.cuda_accelerator, deepspeed.comm, deepspeed.utils.timer\n"
        "from deepspeed.accelerator import real_accelerator\n"
        "assert real_accelerator.ds_accelerator is None\n"
        "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("cls", [CPU_Accelerator, CUDA_Accelerator])
def test_signatures_match_the_abstract_ones(cls):
    for name, member in vars(DeepSpeedAccelerator).items():
        if name.startswith("_") or not callable(member):
            continue
        own, abstract = (len(inspect.signature(getattr(c, name)).parameters) for c in (cls, DeepSpeedAccelerator))
        assert own == abstract, name


def test_local_size_is_the_device_count(monkeypatch):
    cpu = CPU_Accelerator()
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert cpu.device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert cpu.device_count() == 3


def test_cpu_memory_figures_are_bytes_of_this_process():
    cpu = CPU_Accelerator()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    grown = cpu.memory_allocated()
    assert 60 * 2**20 < grown - before < 100 * 2**20
    del block
    assert cpu.max_memory_allocated() >= grown > cpu.reset_rss()
    assert grown < cpu.available_memory() + grown <= cpu.total_memory() * 2
    assert cpu.memory_stats()["allocated_bytes.all.current"] > 0


def test_cpu_events_measure_time():
    cpu = CPU_Accelerator()
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    time.sleep(0.02)
    end.record(cpu.current_stream())
    assert 15 < start.elapsed_time(end) < 1000
    with cpu.stream(cpu.Stream()):
        cpu.current_stream().wait_stream(cpu.default_stream())


def test_cpu_trains_in_all_three_dtypes():
    assert CPU_Accelerator().supported_dtypes() == [torch.float, torch.bfloat16, torch.half]


@pytest.mark.parametrize(
    "name, dtype", [("HalfTensor", torch.half), ("LongTensor", torch.long), ("ByteTensor", torch.uint8)]
)
def test_tensor_constructors(name, dtype):
    made = getattr(CPU_Accelerator(), name)([1, 2])
    assert made.dtype == dtype and made.tolist() == [1, 2]


def test_compile_backend_is_checked():
    cpu = CPU_Accelerator()
    cpu.set_compile_backend("eager")
    with pytest.raises(ValueError, match="no_such_backend"):
        cpu.set_compile_backend("no_such_backend")
    assert cpu.get_compile_backend() == "eager"


def test_visible_devices():
    environment = {}
    CUDA_Accelerator().set_visible_devices_envs(environment, [0, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,3"}


def test_rng_state_round_trip():
    cpu = CPU_Accelerator()
    cpu.manual_seed(5)
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert cpu.initial_seed() == 5
