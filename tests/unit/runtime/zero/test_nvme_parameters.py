# SPDX-License-Identifier: Apache-2.0
"""Training with weights on NVMe (stage 3) is training with weights on the host."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.swap_tensor.errors import SwapError
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.runtime.engine_cases import OddModel, batches_of, gradients_of, make_config, make_engine, run_window
from unit.util import file_size_limit


@pytest.fixture(autouse=True)
def python_threads(monkeypatch):
    monkeypatch.setenv("DS_AIO_ENGINE", "python")


def engine_of(
    path: Any = None, state: str = "none", dtype: str = "fp32", gas: int = 1, model: Any = None, **nvme: Any
) -> Any:
    """Weights on the host without ``path``; masters and optimizer state in ``state``."""
    zero: dict[str, Any] = {
        "sub_group_size": 30,
        "stage3_param_persistence_threshold": 8,
        "stage3_prefetch_bucket_size": 60,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": state},
    }
    if path is not None:
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0, **nvme}
        zero["offload_optimizer"]["nvme_path"] = str(path)
    elif state == "nvme":
        zero["offload_optimizer"]["device"] = "cpu"
    config = make_config(3, dtype, gas, zero, gradient_clipping=0.5, zero_force_ds_cpu_optimizer=False)
    return make_engine(config, model, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))


def train(engine: Any, steps: range, dtype: str = "fp32") -> dict[str, Any]:
    for step in steps:
        run_window(engine, batches_of(dist.get_rank(), engine.gradient_accumulation_steps(), dtype, seed=step))
        gradients = gradients_of(engine)
        engine.step()
    return {"gradients": gradients, "norm": engine.get_global_grad_norm(), "weights": weights_of(engine.module)}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def note_results_of_read_ahead(store: Any) -> list[bool]:
    results: list[bool] = []
    read_ahead = store.read_ahead

    def noted(shard: Any) -> bool:
        results.append(read_ahead(shard))
        return results[-1]

    store.read_ahead = noted
    return results


class TestWeightsOnNvme(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    def test_same_as_on_the_host(self, tmpdir):
        for case in (
            {"state": "cpu", "buffer_count": 2},
            {"state": "nvme", "dtype": "bf16", "gas": 4},
            {"state": "none", "buffer_count": 1, "max_in_cpu": 30, "pin_memory": False},
        ):
            kind = {key: case[key] for key in ("state", "dtype", "gas") if key in case}
            dtype = case.get("dtype", "fp32")
            on_host, on_nvme = engine_of(**kind), engine_of(tmpdir, **case)
            store = on_nvme.optimizer.parameter_offload.store
            away = [shard for shard in on_nvme.optimizer.parameter_offload.shards if shard.store is not None]
            assert len(away) >= 4
            for shard in away:
                kept = shard.parameter.ds_tensor
                assert kept.untyped_storage().nbytes() <= 4 and kept.final_location == "nvme"
            in_memory = sum(s.slice_numel for s in on_nvme.optimizer.parameter_offload.shards if s.store is None)
            assert in_memory <= case.get("max_in_cpu", 0)
            ahead = note_results_of_read_ahead(store)
            for steps in (range(2), range(2, 4)):
                same(train(on_nvme, steps, dtype), train(on_host, steps, dtype))
            assert any(ahead), "nothing was read ahead"
            assert store.pool.most_made <= case.get("buffer_count", 5)
            on_host.destroy()
            on_nvme.destroy()
            same(weights_of(on_nvme.module), weights_of(on_host.module))
        dist.barrier()
        assert os.listdir(tmpdir) == []

    def test_checkpoints_accessors_and_gathered(self, tmpdir):
        saved = f"{tmpdir}/ckpt{dist.get_world_size()}"
        nvme = tmpdir.mkdir(f"rank{dist.get_rank()}")
        on_host, on_nvme = engine_of(state="cpu"), engine_of(nvme, state="nvme")
        for engine in (on_host, on_nvme):
            train(engine, range(1))
            named = dict(engine.module.named_parameters())
            value = torch.arange(49.0).view(7, 7) / 50
            safe_set_full_fp32_param(named["shared.weight"], value)
            same(safe_get_full_fp32_param(named["shared.weight"]), value)
            with deepspeed.zero.GatheredParameters([named["frozen.weight"], named["first.weight"]], modifier_rank=0):
                if dist.get_rank() == 0:
                    named["frozen.weight"].data.fill_(0.125)
                    named["first.weight"].data.mul_(0.5)
        same(weights_of(on_nvme.module), weights_of(on_host.module))
        on_nvme.save_checkpoint(saved)
        expected = train(on_host, range(1, 3))
        same(train(on_nvme, range(1, 3)), expected)
        for engine in (engine_of(state="cpu"), engine_of(nvme, state="cpu", buffer_count=1)):
            engine.load_checkpoint(saved)
            same(train(engine, range(1, 3)), expected)
            engine.destroy()
        on_host.destroy()
        on_nvme.destroy()

    def test_disk_full_for_a_while(self, tmpdir):
        on_host, on_nvme = engine_of(state="cpu"), engine_of(tmpdir, state="cpu")
        with file_size_limit(0):
            same(train(on_nvme, range(1)), train(on_host, range(1)))
            run_window(on_nvme, batches_of(dist.get_rank(), 1, seed=1))
            with pytest.raises(SwapError, match="Nothing is lost"):
                on_nvme.step()
        same(weights_of(on_nvme.module), weights_of(on_host.module))
        on_nvme.step()
        train(on_host, range(1, 2))
        same(train(on_nvme, range(2, 3)), train(on_host, range(2, 3)))
        on_host.destroy()
        on_nvme.destroy()

    def test_without_an_optimizer(self, tmpdir):
        config = make_config(3, zero={"offload_param": {"device": "nvme", "nvme_path": str(tmpdir), "max_in_cpu": 0}})
        expected = OddModel()
        engine = deepspeed.initialize(model=OddModel(), config=config)[0]
        batch = batches_of(0, 1)[0]
        with torch.no_grad():
            for _ in range(2):
                same(engine(*batch), expected(*batch))
        engine.destroy()

    def test_refusals(self, tmpdir):
        model = OddModel()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"parameter '.*weight' has .*buffer_size 7 must be at least"):
            engine_of(tmpdir, model=model, buffer_size=7)
        same(weights_of(model), before)
        dist.barrier()
        assert os.listdir(tmpdir) == []
        with pytest.raises(FileNotFoundError, match="offload_param.nvme_path"):
            engine_of(tmpdir.join("missing"))
