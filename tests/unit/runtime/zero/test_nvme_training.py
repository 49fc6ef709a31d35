# SPDX-License-Identifier: Apache-2.0
"""Training with optimizer state on NVMe is training with the state in memory: gradients, norms, weights, checkpoints;
also when the disk is full for a while."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor.errors import SwapError
from deepspeed.runtime.swap_tensor.file_home import FileHome, Phase
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.runtime.engine_cases import batches_of, gradients_of, make_config, make_engine, run_window
from unit.util import file_size_limit

# Several flat groups at every number of ranks, so that they take turns.
SETTINGS = {"sub_group_size": 20, "reduce_bucket_size": 100}


@pytest.fixture(autouse=True)
def python_threads(monkeypatch):
    monkeypatch.setenv("DS_AIO_ENGINE", "python")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def rprop(parameters):
    return torch.optim.Rprop(parameters, lr=0.01)


def adagrad(parameters):
    """Makes its state when it is made."""
    return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.25)


def cpu_adam(parameters):
    return DeepSpeedCPUAdam(parameters, lr=0.01)


def engine_of(
    stage: int, path: Any = None, optimizer: Any = adam, dtype: str = "fp32", gas: int = 1, **nvme: Any
) -> Any:
    """In memory without ``path``."""
    zero = dict(SETTINGS)
    # The same device for both, so that the same arithmetic is compared.
    zero["offload_optimizer"] = {"device": "cpu"}
    if path is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(path), **nvme}
    config = make_config(stage, dtype, gas, zero, gradient_clipping=0.5, zero_force_ds_cpu_optimizer=False)
    return make_engine(config, optimizer=optimizer)


def home_of(engine: Any) -> FileHome:
    (home,) = set(engine.optimizer.weights.homes)
    assert isinstance(home, FileHome) and len(home._groups) >= 2
    return home


def train(engine: Any, steps: range, dtype: str = "fp32", backwards: int = 1) -> dict[str, Any]:
    """Gradients, norm and weights of the last step."""
    gas = engine.gradient_accumulation_steps()
    for step in steps:
        data = batches_of(dist.get_rank(), gas, dtype, seed=step)
        run_window(engine, data)
        for _ in range(backwards - 1):
            engine.backward(engine(*data[0]))
        gradients = gradients_of(engine)
        engine.step()
        assert engine.was_step_applied()
    return {"gradients": gradients, "norm": engine.get_global_grad_norm(), "weights": weights_of(engine.module)}


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    found = {f"{name}.{key}": safe_get_full_optimizer_state(p, key) for name, p in named for key in keys}
    return found | {f"{name}.master": safe_get_full_fp32_param(p) for name, p in named}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


CASES = [
    {"buffer_count": 4},
    {
        "buffer_count": 12,
        "pipeline_read": True,
        "pipeline_write": True,
        "gas": 4,
        "dtype": "bf16",
        "optimizer": cpu_adam,
    },
    {"buffer_count": 4, "pipeline_read": True, "pipeline_write": True, "backwards": 2, "optimizer": rprop},
    {"buffer_count": 2, "pipeline_write": True, "gas": 4, "backwards": 2, "optimizer": adagrad, "pin_memory": False},
]


class TestNvme(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_same_as_in_memory(self, stage, tmpdir):
        for case in CASES[: 2 if stage == 1 else None]:
            case = dict(case)
            dtype, backwards = case.get("dtype", "fp32"), case.pop("backwards", 1)
            kind = {key: case[key] for key in ("optimizer", "dtype", "gas") if key in case}
            in_memory, on_nvme = engine_of(stage, **kind), engine_of(stage, tmpdir, **case)
            for steps in (range(2), range(2, 4)):
                same(train(on_nvme, steps, dtype, backwards), train(in_memory, steps, dtype, backwards))
            home = home_of(on_nvme)
            assert home.pool.most_made <= case["buffer_count"]
            assert sum(os.path.getsize(home.folder.path / name) for name in os.listdir(home.folder.path)) > 0
            in_memory.destroy()
            on_nvme.destroy()
        dist.barrier()
        assert os.listdir(tmpdir) == []

    def test_checkpoints_go_back_and_forth(self, tmpdir):
        """Saved in the moment after a step, while state is still being written; loaded in memory, and the other way."""
        nvme = tmpdir.mkdir(f"rank{dist.get_rank()}")
        saved = dist.get_world_size()
        options = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        for stage in (2, 3):
            expected, first = engine_of(stage), engine_of(stage, nvme, **options)
            train(expected, range(3))
            train(first, range(3))
            assert Phase.WRITING in {group.phase for group in home_of(first)._groups.values()}
            first.save_checkpoint(f"{tmpdir}/ckpt{saved}{stage}")
            third = engine_of(stage)
            third.load_checkpoint(f"{tmpdir}/ckpt{saved}{stage}")
            same(states_of(third), states_of(first))
            last = train(expected, range(3, 5))
            same(train(first, range(3, 5)), last)
            again = engine_of(stage, nvme, **options)
            again.load_checkpoint(f"{tmpdir}/ckpt{saved}{stage}")
            same(train(third, range(3, 4)), train(again, range(3, 4)))
            third.save_checkpoint(f"{tmpdir}/back{saved}{stage}")
            fourth = engine_of(stage, nvme, **options)
            train(fourth, range(7, 8))  # what it has is replaced
            fourth.load_checkpoint(f"{tmpdir}/back{saved}{stage}")
            same(train(fourth, range(4, 5)), last)
            same(states_of(fourth), states_of(expected))
            for engine in (expected, first, third, again, fourth):
                engine.destroy()

    def test_accessors_read_and_write_what_is_on_disk(self, tmpdir):
        in_memory, on_nvme = engine_of(3), engine_of(3, tmpdir, pipeline_write=True)
        for engine in (in_memory, on_nvme):
            train(engine, range(1))
            for name, parameter in engine.module.named_parameters():
                if name in ("shared.weight", "gain"):
                    value = torch.arange(float(parameter.ds_numel)).view(parameter.ds_shape)
                    safe_set_full_fp32_param(parameter, value / 50)
                    safe_set_full_optimizer_state(parameter, value / 100, "exp_avg_sq")
                    same(states_of(engine)[f"{name}.exp_avg_sq"], value / 100)
                    same(states_of(engine)[f"{name}.master"], value / 50)
        same(states_of(on_nvme), states_of(in_memory))
        same(train(on_nvme, range(1, 3)), train(in_memory, range(1, 3)))
        in_memory.destroy()
        on_nvme.destroy()

    @pytest.mark.parametrize("pipeline", [False, True])
    def test_disk_full_for_a_while(self, pipeline, tmpdir):
        """The step that meets it is finished, the next one raises and changes nothing, and goes on when there is
        space. All ranks meet it here; where only some do, the others wait for them."""
        in_memory = engine_of(2)
        on_nvme = engine_of(2, tmpdir, pipeline_read=pipeline, pipeline_write=pipeline)
        train(in_memory, range(1))
        train(on_nvme, range(1))
        expected = train(in_memory, range(1, 2))
        with file_size_limit(0):
            same(train(on_nvme, range(1, 2)), expected)
            run_window(on_nvme, batches_of(dist.get_rank(), 1, seed=2))
            for _ in range(2):
                with pytest.raises(SwapError, match="Nothing is lost"):
                    on_nvme.step()
        same(weights_of(on_nvme.module), expected["weights"])
        same(states_of(on_nvme), states_of(in_memory))
        on_nvme.step()
        train(in_memory, range(2, 3))
        same(states_of(on_nvme), states_of(in_memory))
        same(weights_of(on_nvme.module), weights_of(in_memory.module))
        in_memory.destroy()
        on_nvme.destroy()

    def test_section_aio_is_used(self, tmpdir):
        offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmpdir)}}
        aio = {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2, "single_submit": True}
        config = make_config(1, zero=offload, aio=aio | {"overlap_events": False}, zero_force_ds_cpu_optimizer=False)
        engine = make_engine(config, optimizer=adam)
        handle = engine.optimizer.weights.homes[0].handle
        assert (handle.get_block_size(), handle.get_queue_depth()) == (8192, 3)
        assert handle.get_intra_op_parallelism() == 2
        assert handle.get_single_submit() and not handle.get_overlap_events()
        engine.destroy()

    def test_missing_folder(self, tmpdir):
        with pytest.raises(FileNotFoundError, match="nvme_path .*missing.* does not exist"):
            engine_of(1, tmpdir.join("missing"))
