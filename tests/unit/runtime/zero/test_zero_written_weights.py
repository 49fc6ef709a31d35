# SPDX-License-Identifier: Apache-2.0
"""Weights that the program writes past the engine are what the next step begins at, at every stage."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from unit.common import DistributedTest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATE = 2.0**-4


def make_engine(stage: int, dtype: str, **zero: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **zero},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any) -> None:
    """The same gradient on all ranks, so that a step by hand is one line."""
    x = torch.linspace(-1, 1, 10).view(2, 5).to(engine.module[0].weight.dtype)
    engine.backward(engine(x).float().square().mean())


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {n: deepspeed.utils.safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()}


class TestWrittenWeights(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    @pytest.mark.parametrize("dtype", list(DTYPES))
    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_a_state_dict_that_is_loaded_into_the_module(self, stage: int, dtype: str) -> None:
        for zero in ({}, {"offload_optimizer": {"device": "cpu"}} if stage else {}):
            engine = make_engine(stage, dtype, **zero)
            step(engine)
            engine.step()
            wanted = {n: torch.full_like(w, 0.5 + i / 8) for i, (n, w) in enumerate(engine.module.state_dict().items())}
            engine.module.load_state_dict(wanted)
            step(engine)
            moved = gradients(engine)
            engine.step()
            for name, master in masters(engine).items():
                expected = wanted[name].float() - RATE * moved[name]
                assert torch.allclose(master, expected, atol=1e-6), (stage, dtype, zero, name)
                weight = engine.module.get_parameter(name)
                assert torch.equal(weight, master.to(weight.dtype))
            engine.destroy()

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_digits_of_masters_stay_where_nothing_was_written(self, stage: int) -> None:
        """Weights that were exchanged for a while and put back, and one element that was set."""
        engine = make_engine(stage, "bf16")
        step(engine)
        engine.step()
        before = masters(engine)
        assert any(not torch.equal(m, m.bfloat16().float()) for m in before.values()), "masters have no digits to lose"
        kept = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        engine.module.load_state_dict(kept)
        with torch.no_grad():
            engine.module[1].weight[1, 2] = 2.0
        before["1.weight"][1, 2] = 2.0
        step(engine)
        moved = gradients(engine)
        engine.step()
        for name, master in masters(engine).items():
            assert torch.allclose(master, before[name] - RATE * moved[name], atol=1e-6), (stage, name)
        engine.destroy()
