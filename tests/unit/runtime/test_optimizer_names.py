# SPDX-License-Identifier: Apache-2.0
"""What a name in the config resolves to: by device, by whether kernels can be had, under offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.runtime import named_optimizers
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigTypeError
from deepspeed.runtime.named_optimizers import named_optimizer
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

AdamW, Adam = torch.optim.AdamW, torch.optim.Adam
HOST = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

# name, device, whether kernels can be had, offload: class
RESOLVED: list[tuple[str, str, bool, bool, type]] = [
    ("AdamW", "cpu", True, False, AdamW),
    ("AdamW", "cuda", True, False, FusedAdam),
    ("adam", "cuda", True, False, FusedAdam),
    ("AdamW", "cuda", False, False, AdamW),
    ("AdamW", "cuda", True, True, DeepSpeedCPUAdam),
    ("AdamW", "cpu", True, True, DeepSpeedCPUAdam),
    ("Adagrad", "cuda", True, False, torch.optim.Adagrad),
    ("Adagrad", "cuda", True, True, DeepSpeedCPUAdagrad),
    ("LION", "cpu", True, False, FusedLion),
    ("Lion", "cuda", False, False, FusedLion),
    ("Lion", "cuda", True, True, DeepSpeedCPULion),
    ("lamb", "cpu", True, False, FusedLamb),
    ("Lamb", "cuda", True, True, FusedLamb),
    ("Muon", "cuda", True, False, MuonWithAuxAdam),
    ("SGD", "cuda", True, False, torch.optim.SGD),
    ("NAdam", "cpu", True, False, torch.optim.NAdam),
]


def resolve(
    name: str, params: dict[str, Any] | None = None, groups: list[Any] | None = None, **top: Any
) -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": name, "params": params or {}}, **top})
    return named_optimizer(name, groups or list(model.parameters()), model, config)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let parameters seem to be on a device, where kernels can be had or not."""

    def pretend(device: str, kernels: bool = True) -> None:
        monkeypatch.setattr(named_optimizers.Request, "devices", lambda request: {device})
        monkeypatch.setattr(named_optimizers, "load_kernels", lambda builder: object() if kernels else None)

    return pretend


def test_names_resolve_to_the_best_there_is(pretend: Any) -> None:
    for name, device, kernels, offloaded, cls in RESOLVED:
        pretend(device, kernels)
        optimizer = resolve(name, {"lr": 0.5}, **(HOST if offloaded else {}))
        assert type(optimizer) is cls, (name, device, kernels, offloaded)
        assert all(group["lr"] == 0.5 for group in optimizer.param_groups)


def test_nothing_is_compiled_for_parameters_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_now(builder: OpBuilder) -> None:
        raise AssertionError(f"{builder.name} is compiled")

    monkeypatch.setattr(OpBuilder, "load_or_none", compile_now)
    for name in ("Adam", "AdamW", "Adagrad", "Lion", "Lamb", "Muon", "SGD"):
        resolve(name, {"lr": 0.1})
    resolve("AdamW", {"bias_correction": False})
    monkeypatch.setattr(named_optimizers.Request, "devices", lambda request: {"cuda"})
    with pytest.raises(AssertionError, match="is compiled"):  # elsewhere it is, and this test would notice
        resolve("AdamW", {"lr": 0.1})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kind_of_weight_decay(device: str, pretend: Any) -> None:
    """AdamW is always decoupled; Adam is unless told otherwise; without a number there is none, on every device."""
    pretend(device)

    def decoupled(optimizer: torch.optim.Optimizer) -> bool:
        return optimizer.adam_w_mode if isinstance(optimizer, FusedAdam) else type(optimizer) is AdamW

    for name, params, expected in (
        ("AdamW", {}, True),
        ("AdamW", {"adam_w_mode": False}, True),
        ("Adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, False),
    ):
        optimizer = resolve(name, params)
        assert decoupled(optimizer) is expected, (name, params)
        if "torch_adam" not in params:
            assert optimizer.param_groups[0]["weight_decay"] == 0.0
    offloaded = resolve("Adam", {"adam_w_mode": False, "fp32_optimizer_states": False}, **HOST)
    assert not offloaded.adam_w_mode and not offloaded.fp32_optimizer_states


def test_torchs_adam_when_it_is_asked_for(pretend: Any) -> None:
    pretend("cuda")
    for params in ({"torch_adam": True}, {"fused": True}, {"foreach": False}):
        optimizer = resolve("AdamW", params)
        assert type(optimizer) is AdamW
        assert optimizer.param_groups[0]["fused"] is (None if "foreach" in params else True)
    assert type(resolve("AdamW", {"torch_adam": True}, **HOST)) is AdamW
    with pytest.raises(ValueError, match="bias_correction false is not possible with torch's Adam"):
        resolve("AdamW", {"torch_adam": True, "bias_correction": False})


def test_bias_correction_is_honoured_everywhere(pretend: Any) -> None:
    for device, top in (("cpu", {}), ("cuda", {}), ("cuda", HOST)):
        pretend(device, kernels=False)
        optimizer = resolve("AdamW", {"lr": 0.1, "betas": [0.9, 0.99], "bias_correction": False}, **top)
        for parameter in optimizer.param_groups[0]["params"]:
            before = parameter.detach().clone()
            parameter.grad = torch.full_like(parameter, 2.0)
            optimizer.step()
            torch.testing.assert_close(before - parameter, torch.full_like(parameter, 0.1 * 0.2 / (0.04**0.5)))


def test_states_of_sixteen_bits_are_made_by_the_optimizer_of_the_host() -> None:
    options = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for name in ("AdamW", "Lion"):
        assert resolve(name, **HOST).fp32_optimizer_states
        assert not resolve(name, **HOST, bf16={"enabled": True, **options}).fp32_optimizer_states


def test_flags_are_set_by_name() -> None:
    for name, marked in (("Muon", True), ("AdamW", False)):
        model = nn.Linear(3, 2)
        deepspeed.set_optimizer_flags(DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": name}}), model)
        assert getattr(model.weight, "use_muon", False) is marked


@pytest.mark.parametrize(
    "name, params, error, message",
    [
        ("MuAdamW", {}, NotImplementedError, "'MuAdamW' is not built"),
        ("OneBitAdam", {}, AssertionError, "'OneBitAdam' does not exist any more"),
        ("Adamm", {}, AssertionError, "'Adamm' is neither"),
        ("sgd", {}, AssertionError, "'sgd' is neither"),
        ("lr_scheduler", {}, AssertionError, "'lr_scheduler' is neither"),
        ("Lion", {"eps": 1}, DeepSpeedConfigTypeError, "eps' is no argument of FusedLion"),
        ("Lamb", {"coeff": 1}, DeepSpeedConfigTypeError, "coeff' is no argument of FusedLamb"),
        ("Muon", {"per_head_muon": True}, NotImplementedError, "per_head_muon is not built"),
        ("Muon", {"ns_methods": "gram"}, DeepSpeedConfigTypeError, "did you mean 'ns_method'"),
        ("Muon", {"ns_method": "exact"}, ValueError, "ns_method must be one of"),
    ],
)
def test_what_cannot_be_had_is_named(name: str, params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(name, params)
