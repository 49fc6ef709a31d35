# SPDX-License-Identifier: Apache-2.0
"""Muon and LAMB look at whole parameters: the same weights at every stage, with and without offload, as a float64 loop
over the mean gradient of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.runtime.zero.muon import original_muon, whole_matrices
from deepspeed.utils import safe_get_full_fp32_param
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.ops import update_reference
from unit.reference import reference_gradients
from unit.runtime import engine_cases as cases

STEPS = 3
ROUNDING = {"rtol": 1e-4, "atol": 2e-5}  # of sums in fp32, after orthogonalization
HOST = {"offload_optimizer": {"device": "cpu"}}
WAYS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (2, {"reduce_bucket_size": 40}),
    (2, HOST),
    (3, {"sub_group_size": 30}),
    (3, HOST),
    (3, {"stage3_prefetch_bucket_size": 0}),
]
MUON = {"lr": 0.05, "momentum": 0.9, "adam_lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}
LAMB = {"lr": 0.05, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}


def config_of(kind: str, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    params = MUON if kind == "Muon" else LAMB
    zero = zero | ({"reduce_scatter": False} if stage == 3 else {})
    config = cases.make_config(stage, zero=zero, optimizer={"type": kind, "params": params}, gradient_clipping=0.05)
    del config["zero_allow_untested_optimizer"]
    return config


def orthogonal(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix / (matrix.norm() + 1e-300), full_matrices=False)
    a, b, c = original_muon.NS_COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh * max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5


def muon_reference(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    if weight.dim() < 2:
        numbers = {"lr": MUON["adam_lr"], "betas": MUON["betas"], "eps": MUON["eps"], "weight_decay": 0.1}
        return update_reference.adam(weight, gradients, **numbers)
    w, momentum = weight.double(), 0.0
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient
        w = w * (1 - 0.05 * 0.1) - 0.05 * orthogonal(0.1 * gradient + 0.9 * momentum)
    return w


def expected_weights(kind: str, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """After ``STEPS`` clipped steps; gradients are those at the weights of the step before."""
    history: dict[str, list[Tensor]] = {}
    weights = {name: weight.double() for name, weight in start.items()}
    for step in range(STEPS):
        twin = cases.OddModel()
        twin.load_state_dict(weights)
        data = [cases.batches_of(rank, 1, seed=step) for rank in range(dist.get_world_size())]
        gradients = reference_gradients(twin, cases.loss_of, data)
        norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
        assert norm > 0.05, "it is clipped"
        for name, gradient in gradients.items():
            history.setdefault(name, []).append(gradient.double() * (0.05 / (norm + 1e-6)))
        for name, listed in history.items():
            if kind == "Muon":
                weights[name] = muon_reference(start[name], listed)
            else:
                weights[name] = update_reference.lamb(start[name], listed, **LAMB)
    return weights


def train(engine: Any, steps: range) -> None:
    for step in steps:
        cases.run_window(engine, cases.batches_of(dist.get_rank(), 1, seed=step))
        engine.step()


class TestWholeParameters(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("kind", ["Muon", "Lamb"])
    def test_every_stage_is_the_float64_loop(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        start = weights_of(cases.OddModel())
        expected = expected_weights(kind, start)
        for stage, zero in WAYS:
            # At stage 3 all matrices in one exchange, with two for the same owner; at last several exchanges.
            monkeypatch.setattr(whole_matrices, "BATCH", 60 if zero is WAYS[-1][1] else 1000)
            engine = cases.make_engine(config_of(kind, stage, zero))
            train(engine, range(STEPS))
            cases.check_same_on_all_ranks(engine.module)
            for name, weight in weights_of(engine.module).items():
                note = f"{kind}, stage {stage} with {zero}: {name}"
                torch.testing.assert_close(weight.double(), expected[name], **ROUNDING, msg=note)
                if name.startswith(("first", "last")):
                    assert not torch.equal(weight, start[name])
            engine.destroy()


class TestSixteenBitWeights(DistributedTest):
    world_size = 1
    reuse_dist_env = True

    @pytest.mark.parametrize("kind", ["Muon", "Lamb", "Lion"])
    def test_weights_are_the_rounded_masters_of_every_stage(self, kind: str) -> None:
        """On one rank the gradients of the stages are the same bit by bit."""
        found = []
        for stage in (0, 1, 3):
            config = config_of(kind, stage, {}) | {"bf16": {"enabled": True}}
            config["optimizer"]["params"] = {"lr": 0.05, "weight_decay": 0.1}
            engine = cases.make_engine(config)
            start = weights_of(engine.module)
            for step in range(STEPS):
                cases.run_window(engine, cases.batches_of(0, 1, "bf16", seed=step))
                engine.step()
            found.append(weights_of(engine.module))
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    master = safe_get_full_fp32_param(parameter)
                    assert master.dtype == torch.float32
                    assert torch.equal(master.bfloat16(), found[-1][name]), (kind, stage, name)
            engine.destroy()
        for other in found[1:]:
            for name, weight in found[0].items():
                torch.testing.assert_close(other[name], weight, rtol=2**-7, atol=1e-6, msg=f"{kind}: {name}")
        assert not torch.equal(found[0]["first.weight"], start["first.weight"])


class TestCheckpointsOfWholeParameters(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("kind", ["Muon", "Lamb"])
    def test_training_goes_on_after_loading(self, kind: str, tmpdir: Any) -> None:
        """Bit by bit, unless another stage adds in another order: orthogonalization (Muon) makes more of that."""
        for saved, loaded in ((2, 2), (3, 3), (1, 3)):
            rounding = {"rtol": 0.0, "atol": 0.0} if saved == loaded else ROUNDING
            one = cases.make_engine(config_of(kind, saved, {}))
            train(one, range(2))
            one.save_checkpoint(str(tmpdir), tag=f"{saved}{loaded}")
            train(one, range(2, 4))
            other = cases.make_engine(config_of(kind, loaded, {}), cases.OddModel(seed=5))
            other.load_checkpoint(str(tmpdir), tag=f"{saved}{loaded}")
            train(other, range(2, 4))
            for name, weight in weights_of(one.module).items():
                again = weights_of(other.module)[name]
                torch.testing.assert_close(again, weight, **rounding, msg=f"{kind} {saved} {loaded}: {name}")
            one.destroy()
            other.destroy()
