# SPDX-License-Identifier: Apache-2.0
"""Utilities of one function or class each."""

import gc
import io
import mmap
import os
import subprocess
import sys
import types

import pytest
import torch

from deepspeed.runtime.python_gc import PythonGCManager
from deepspeed.utils import bwc, debug, numa, nvtx
from deepspeed.utils import pin_memory as pinning
from deepspeed.utils import torch as torch_releases
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.module_utils import recursive_getattr, recursive_setattr


@pytest.mark.parametrize("text, minutes", [(None, 10), ("30", 30), ("0.5", 0.5)])
def test_timeout_from_the_environment(text, minutes):
    env = {name: value for name, value in os.environ.items() if name != "DEEPSPEED_TIMEOUT"}
    if text is not None:
        env["DEEPSPEED_TIMEOUT"] = text
    script = "from deepspeed.constants import default_pg_timeout as t; print(t.total_seconds())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert float(done.stdout) == minutes * 60


def test_bad_timeout_is_refused(monkeypatch):
    from deepspeed import constants

    for text in ("soon", "0", "-1", "inf"):
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
        with pytest.raises(ValueError, match=f"DEEPSPEED_TIMEOUT='{text}'"):
            constants._timeout_from_environment()


@pytest.mark.parametrize(
    "minimum, maximum, expected",
    [
        ("2.4", None, True),
        ("2.10", None, True),
        ("2.13", "2.13", True),
        ("2.14", None, False),
        (None, "2.9", False),
        (2.4, 3.0, True),
    ],
)
def test_required_torch_version(monkeypatch, minimum, maximum, expected):
    monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
    assert torch_releases.required_torch_version(minimum, maximum) is expected


def test_required_torch_version_needs_a_bound():
    with pytest.raises(ValueError, match="min_version"):
        torch_releases.required_torch_version()


def test_functorch_detection():
    seen = []
    torch.func.grad(lambda x: (seen.append(torch_releases.is_functorch_transforming()), x.sum())[1])(torch.ones(2))
    assert seen == [True] and not torch_releases.is_functorch_transforming()


def test_register_grad_hook_fires_after_accumulation():
    param, seen = torch.nn.Parameter(torch.ones(2)), []
    handle = torch_releases.register_grad_hook(param, lambda p: seen.append(p.grad.clone()))
    (param * 3).sum().backward()
    handle.remove()
    (param * 3).sum().backward()
    assert [s.tolist() for s in seen] == [[3.0, 3.0]]


def test_recursive_attributes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU()))
    assert recursive_getattr(model, "1.0") is model[1][0]
    replacement = torch.nn.Tanh()
    recursive_setattr(model, "1.0", replacement)
    recursive_setattr(model, "extra", 5)
    assert model[1][0] is replacement and model.extra == 5
    with pytest.raises(AttributeError):
        recursive_getattr(model, "1.7")


def test_bwc_asks_the_newest_name_first():
    assert bwc.bwc_tensor_model_parallel_world_size() == bwc.bwc_pipeline_parallel_world_size() == 1
    assert bwc.bwc_tensor_model_parallel_rank() == 0 and bwc.bwc_tensor_model_parallel_group() is None
    old = types.SimpleNamespace(get_model_parallel_world_size=lambda: 4, get_pipe_parallel_world_size=lambda: 3)
    both = types.SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 2, get_model_parallel_world_size=lambda: 8
    )
    assert bwc.bwc_tensor_model_parallel_world_size(old) == 4 and bwc.bwc_pipeline_parallel_world_size(old) == 3
    assert bwc.bwc_tensor_model_parallel_world_size(both) == 2


def test_core_ranges(monkeypatch, tmp_path):
    assert numa.parse_range_list("0-2,5, 7-8") == [0, 1, 2, 5, 7, 8]
    for wrong in ("3-1", "a", "1-", "0-3,2", ""):
        with pytest.raises(ValueError):
            numa.parse_range_list(wrong)
    for node, cores in (("node0", "0-1"), ("node10", "4"), ("node2", "2-3"), ("node3", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert numa.get_numa_cores() == [[0, 1], [2, 3], [4]]


def test_numactl_command(monkeypatch):
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa, "check_for_numactl_pkg", lambda: True)
    monkeypatch.setattr(numa, "get_numa_cores", lambda: [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert numa.get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-C", "4,5,6,7", "--localalloc"])
    assert numa.get_numactl_cmd("2-5", 1, 0) == (4, ["numactl", "-C", "2,3,4,5"])
    with pytest.raises(ValueError, match="2 cores are not enough for 3"):
        numa.get_numactl_cmd("0-1", 3, 0)
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        numa.get_numactl_cmd("0-7", 2, 1)
    monkeypatch.setattr(numa, "check_for_numactl_pkg", lambda: False)
    with pytest.raises(RuntimeError, match="numactl"):
        numa.get_numactl_cmd("0-7", 2, 1)


def test_ranges_are_closed_after_an_error(monkeypatch):
    events = []
    device = types.SimpleNamespace(
        supports_nvtx_domain=True,
        range_push=lambda name, domain: events.append((name, domain)),
        range_pop=lambda domain: events.append(domain),
    )
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: device)
    monkeypatch.setattr(nvtx, "_requested", True)

    @nvtx.instrument_w_nvtx
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert len(events) == 2 and events[0][0].endswith("fails") and events[1] == events[0][1] == "DeepSpeed"
    monkeypatch.setattr(nvtx, "enable_nvtx", False)
    with pytest.raises(KeyError):
        fails()
    assert len(events) == 2


def test_collector_is_off_while_an_engine_holds_it():
    manager = PythonGCManager()
    assert gc.isenabled() and manager.collect() == 0
    first, second = manager.acquire(), manager.acquire()
    assert not gc.isenabled() and manager.active_engines == 2
    manager.release(first)
    manager.release(first)
    manager.release(None)
    assert not gc.isenabled() and manager.active_engines == 1
    manager.release(second)
    assert gc.isenabled() and manager.active_engines == 0


def test_collector_that_was_off_stays_off():
    manager = PythonGCManager()
    gc.disable()
    try:
        manager.release(manager.acquire())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_model_without_memory():
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        old_style, integers = torch.Tensor(2, 3), torch.arange(4)
        placed = torch.empty(2, device="cpu", dtype=torch.float32)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in model.parameters())
    assert (old_style.device.type, old_style.dtype, old_style.shape) == ("meta", torch.bfloat16, (2, 3))
    assert (integers.device.type, integers.dtype) == ("meta", torch.int64)
    assert (placed.device.type, placed.dtype) == ("cpu", torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loading_on_a_device_keeps_what_is_stored(device):
    stored = io.BytesIO()
    torch.save(torch.arange(4.0), stored)
    stored.seek(0)
    with OnDevice(torch.half, device):
        loaded = torch.load(stored)
        assert torch.zeros(1).dtype == torch.half
    assert loaded.dtype == torch.float32 and loaded.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_on_device_puts_everything_back(enabled):
    before = (torch.empty, torch.tensor, torch.Tensor.__new__, vars(torch.Tensor).get("__new__"))
    with pytest.raises(KeyError), OnDevice(torch.half, "cpu", enabled=enabled):
        assert (torch.empty(1).dtype is torch.half) is enabled
        raise KeyError
    assert (torch.empty, torch.tensor, torch.Tensor.__new__, vars(torch.Tensor).get("__new__")) == before
    assert torch.Tensor(2).dtype is torch.float32 and torch.Tensor([1.0]).tolist() == [1.0]


def test_native_pinned_memory(monkeypatch):
    registered = {}
    device = types.SimpleNamespace(
        device_name=lambda: "cuda",
        register_host_memory=registered.__setitem__,
        unregister_host_memory=registered.pop,
    )
    monkeypatch.setattr(pinning, "get_accelerator", lambda: device)
    memory = pinning.NativePinnedMemory()
    source = torch.arange(3000.0).view(3, 1000)
    pinned = memory.pin(source)
    flat = memory.pin(source, match_shape=False)
    assert torch.equal(pinned, source) and torch.equal(flat, source.view(-1))
    whole_pages = -(-12000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert registered == {pinned.data_ptr(): whole_pages, flat.data_ptr(): whole_pages}
    assert all(address % mmap.PAGESIZE == 0 for address in registered)
    assert memory.is_pinned(pinned) and not memory.is_pinned(source)
    memory.unpin(pinned)
    assert list(registered) == [flat.data_ptr()] and not memory.is_pinned(pinned) and torch.equal(pinned, source)
    with pytest.raises(ValueError, match="pinned"):
        memory.unpin(pinned)
    half = memory.pin_empty(torch.empty(0, dtype=torch.half), (5, 2))
    assert half.dtype is torch.half and half.shape == (5, 2)


def test_choice_of_pinned_memory(monkeypatch):
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    assert pinning.get_active_native_pinned_memory() is None
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert pinning.get_active_native_pinned_memory() is pinning.get_native_pinned_memory()
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "glue")
    with pytest.raises(ValueError, match="glue"):
        pinning.get_active_native_pinned_memory()


def test_names_go_away_with_their_objects():
    names = debug.WeakIdNameMap()
    module = torch.nn.Linear(1, 1)
    names[module] = "layer"
    assert names[module] == "layer" and len(names) == 1 and torch.nn.Linear(1, 1) not in names
    del module
    gc.collect()
    assert len(names) == 0
    with pytest.raises(KeyError, match="Linear"):
        names[torch.nn.Linear(1, 1)]


def test_debug_names(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    debug.debug_extract_module_and_param_names(model)
    weight = model[0].weight
    assert debug.debug_param2name_id_shape(weight) == "name=0.weight id=None shape=(3, 2)"
    assert debug.debug_param2name_id_numel(weight).endswith("numel=6")
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    weight.ds_id, weight.ds_shape = 7, torch.Size((3, 2))
    weight.data = torch.empty(0)
    assert debug.debug_param2name_id_shape_device(weight) == "name=0.weight id=7 shape=(3, 2) device=cpu"
    debug.print_rank0("silent")
    debug.print_rank("loud", force=True)
    debug.print_backward_tensors((model[0].bias * 2).sum())
    out = capsys.readouterr().out
    assert "silent" not in out and "[0] loud" in out and "AccumulateGrad name=0.bias" in out
    debug.debug_clear_module_and_param_names()
    assert debug.debug_param2name(weight) == debug.debug_module2name(model) == "unknown"
