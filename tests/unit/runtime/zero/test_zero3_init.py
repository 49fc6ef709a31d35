# SPDX-License-Identifier: Apache-2.0
"""Models built under deepspeed.zero.Init: what is partitioned, with which values, and what an engine makes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import zeros_

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, ZeroParamStatus
from unit.common import DistributedTest
from unit.graphs import (
    ReusableNet,
    assert_gradients,
    encoder_twice,
    expected_gradients,
    make_batch,
    make_engine,
    my_batch,
    run_micro_step,
    weights_of,
)

FP32 = {"train_batch_size": 6, "zero_optimization": {"stage": 3}}


class Net(nn.Module):
    """Parameters of its own beside those of children, a tied weight, buffers, and values set after the fact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(7))
        self.norm = nn.BatchNorm1d(7)
        self.table = nn.Embedding(3, 7)
        self.head = nn.Linear(7, 3, bias=False)
        self.head.weight = self.table.weight
        late = torch.empty(4, 3)
        self.late = nn.Parameter(late)
        nn.init.normal_(self.late)
        self.register_buffer("places", torch.arange(11))
        self.register_buffer("ramp", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x) * self.scale)
        return self.head(hidden) @ self.late.t()


def build(seed: int = 3, **options: Any) -> Net:
    torch.manual_seed(seed)
    with deepspeed.zero.Init(**options):
        return Net()


def plain(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def assert_partitioned(module: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, parameter in module.named_parameters():
        assert parameter.shape == (0,), name
        assert parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE, name
        assert parameter.ds_numel == parameter.ds_shape.numel()
        assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // world) == parameter.partition_numel()
        assert (parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size) == (rank, world)


def assert_values(module: nn.Module, expected: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """``module``'s whole weights are those of ``expected``, a plain module."""
    found = weights_of(module)
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype is dtype, name
        assert torch.equal(value, wanted[name].detach().to(dtype)), name
        assert name == "norm.bias" or wanted[name].abs().sum() > 0, name


def train_step(engine: Any, window: int) -> None:
    """One step of a ReusableNet; its gradients and what SGD makes of them are checked."""
    before = weights_of(engine.module)
    expected = expected_gradients(engine.module, encoder_twice, lambda rank: [make_batch(rank, window)], 1)
    run_micro_step(engine, encoder_twice, "engine.backward", my_batch(engine, window))
    assert_gradients(engine, expected, torch.float32, f"window {window}")
    engine.step()
    (group,) = engine.optimizer.param_groups
    after = weights_of(engine.module)
    for name, gradient in expected.items():
        right = (before[name].double() - group["lr"] * gradient).float()
        torch.testing.assert_close(after[name], right, rtol=1e-5, atol=1e-6)


class TestConstruction(DistributedTest):
    world_size = [1, 2, 3]
    reuse_dist_env = True

    def test_values_are_those_of_the_first_rank(self) -> None:
        module = build(seed=3 + dist.get_rank(), config_dict_or_path=FP32)
        assert_partitioned(module)
        assert_values(module, plain(3))
        assert_partitioned(module)
        assert module.head.weight is module.table.weight
        assert torch.equal(module.places, torch.arange(11)) and module.places.dtype is torch.int64
        assert module.norm.running_mean.shape == (7,)

    def test_converts_a_module_that_exists(self) -> None:
        module = plain(3 + dist.get_rank())
        identities = [id(parameter) for parameter in module.parameters()]
        deepspeed.zero.Init(module=module, config_dict_or_path=FP32)
        assert identities == [id(parameter) for parameter in module.parameters()]
        assert_partitioned(module)
        assert_values(module, plain(3))
        deepspeed.zero.Init(module=module, config_dict_or_path=FP32)  # again: nothing to do
        assert_partitioned(module)
        assert_values(module, plain(3))

    def test_dtypes(self) -> None:
        module = build(dtype=torch.bfloat16)
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert {p.ds_tensor.dtype for p in module.parameters()} == {torch.bfloat16}
        assert all(v.dtype is torch.bfloat16 for v in weights_of(module).values())
        given_by_config = build(config_dict_or_path={**FP32, "bf16": {"enabled": True}})
        assert given_by_config.first.weight.dtype is torch.bfloat16
        without_any = build()
        fp16 = deepspeed.get_accelerator().is_fp16_supported()
        assert without_any.first.weight.dtype is (torch.float16 if fp16 else torch.bfloat16)
        assert build(config=FP32).first.weight.dtype is torch.float32

    def test_a_model_is_never_whole_at_once(self) -> None:
        """Elements alive on a rank while a stack of layers is built: its shards and one layer."""
        layers, width = 6, 40
        alive = []

        class Layer(nn.Linear):
            def __init__(self) -> None:
                super().__init__(width, width, bias=False)
                alive.append(sum(p.numel() for p in known) + self.weight.numel())
                known.append(self.weight)

        known: list[Tensor] = []
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            nn.Sequential(*[Layer() for _ in range(layers)])
        assert alive == [width * width] * layers

    def test_trains_like_a_plain_model(self) -> None:
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = ReusableNet()
        engine = make_engine(module, 3)
        for window in range(3):
            train_step(engine, window)
        engine.destroy()


class TestArguments(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_disabled(self) -> None:
        module = build(enabled=False, remote_device="nvme", zero_quantized_weights=True)
        assert not any(hasattr(parameter, "ds_id") for parameter in module.parameters())
        assert torch.equal(module.first.weight, plain().first.weight)

    def test_remote_device(self) -> None:
        for device in ("cpu", "none", None):
            module = build(remote_device=device, pin_memory=True, config_dict_or_path=FP32)
            assert_partitioned(module)
            assert_values(module, plain())
        with pytest.raises(NotImplementedError, match="nvme"):
            build(remote_device="nvme", config_dict_or_path=FP32)
        assert torch.empty(2).dtype is torch.float32
        offload = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        assert_partitioned(build(config_dict_or_path={**FP32, **offload}))

    def test_config_from_a_file(self, tmpdir: Any) -> None:
        path = tmpdir.join(f"config{dist.get_rank()}.json")
        path.write(json.dumps({**FP32, "bf16": {"enabled": True}}))
        assert build(config_dict_or_path=str(path)).scale.dtype is torch.bfloat16

    def test_values_that_a_client_has_not_resolved_yet(self) -> None:
        """A configuration is handed to Init before its "auto" values are known."""
        auto = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": 0, "auto_cast": False},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "sub_group_size": 1e9,
                "offload_param": {"device": "none", "nvme_path": None},
                "offload_optimizer": {"device": "none", "nvme_path": None},
            },
            "steps_per_print": float("inf"),
            "msamp": {"enabled": False},
        }
        before = copy.deepcopy(auto)
        module = build(config_dict_or_path=auto)
        assert auto == before
        assert_partitioned(module)
        assert_values(module, plain())

    def test_group_and_mpu(self) -> None:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        module = build(config_dict_or_path=FP32, data_parallel_group=alone)
        assert {p.ds_zero_partition_world_size for p in module.parameters()} == {1}
        assert module.first.weight.ds_process_group is alone

        class Mpu:
            def get_data_parallel_group(self) -> Any:
                return alone

        assert build(config_dict_or_path=FP32, mpu=Mpu()).first.weight.ds_process_group is alone

    def test_tensor_overrides(self) -> None:
        with deepspeed.zero.Init(dtype=torch.bfloat16, tensor_overrides=[]):
            assert torch.zeros(2).dtype is torch.float32
            module = nn.Linear(3, 3)
        assert module.weight.dtype is torch.bfloat16
        with deepspeed.zero.Init(dtype=torch.bfloat16, tensor_overrides=[DeepSpeedTensorOverride.dtype]):
            assert torch.zeros(2).dtype is torch.bfloat16
            assert torch.zeros(2, dtype=torch.int32).dtype is torch.int32
            assert torch.arange(3).dtype is torch.int64
            assert torch.tensor([True]).dtype is torch.bool
        assert torch.zeros(2).dtype is torch.float32

    @pytest.mark.parametrize("efficient", [True, False])
    def test_mem_efficient_linear(self, efficient: bool) -> None:
        before = nn.functional.linear
        with deepspeed.zero.Init(mem_efficient_linear=efficient, config_dict_or_path=FP32):
            module = nn.Linear(3, 3)
        assert nn.functional.linear is before
        engine = make_engine(module, 3)
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        engine.destroy()

    def test_unbuilt_features_are_refused_by_name(self) -> None:
        for option in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "param_swapper"):
            with pytest.raises(NotImplementedError, match=option):
                deepspeed.zero.Init(config_dict_or_path=FP32, **{option: True})

    def test_meta_device(self) -> None:
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            assert torch.empty(2, device="meta").is_meta
            with torch.device("meta"):
                assert torch.empty(2).is_meta
            with pytest.raises(ValueError, match="meta"):
                nn.Linear(3, 3, device="meta")


class TestContext(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test_everything_is_as_before_afterwards(self) -> None:
        names = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
        before = [getattr(torch, name) for name in names]
        init, apply, linear = nn.Linear.__init__, nn.Module.apply, nn.functional.linear
        with pytest.raises(KeyError):
            with deepspeed.zero.Init(dtype=torch.bfloat16):
                nn.Linear(2, 2)
                raise KeyError
        assert before == [getattr(torch, name) for name in names]
        assert (init, apply, linear) == (nn.Linear.__init__, nn.Module.apply, nn.functional.linear)
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")

    def test_nested(self) -> None:
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            outer = nn.Linear(3, 3)
            with deepspeed.zero.Init(dtype=torch.bfloat16):
                inner = nn.Linear(3, 3)
            after = nn.Linear(3, 3)
        assert [m.weight.dtype for m in (outer, inner, after)] == [torch.float32, torch.bfloat16, torch.float32]
        assert [m.weight.shape for m in (outer, inner, after)] == [(0,)] * 3
        assert nn.Linear(3, 3).weight.shape == (3, 3)

    def test_nested_inside_a_constructor(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                with deepspeed.zero.Init(config_dict_or_path=FP32):
                    self.inner = nn.Linear(3, 5)
                self.own = nn.Parameter(torch.ones(4))

        module = Outer()
        assert module.inner.weight.shape == (0,) and module.own.shape == (4,)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = Outer()
        assert module.inner.weight.shape == (0,) and module.own.shape == (0,)

    def test_a_constructor_that_fails(self) -> None:
        class Fails(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.child = nn.Linear(2, 2)
                raise ValueError("no")

        with deepspeed.zero.Init(config_dict_or_path=FP32):
            with pytest.raises(ValueError, match="no"):
                Fails()
            module = nn.Linear(2, 3)
        assert module.weight.shape == (0,)

    def test_initialize_inside(self) -> None:
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            module = nn.Linear(3, 5)
            engine = make_engine(module, 3, dtype=torch.bfloat16)
            assert engine.optimizer.fp32_partitioned_groups_flat[0].dtype is torch.float32
            another = nn.Linear(3, 5)
        assert another.weight.shape == (0,)
        out = engine(torch.ones(2, 3, dtype=torch.bfloat16))
        engine.backward(out.sum())
        engine.step()
        engine.destroy()

    def test_apply_sees_whole_parameters(self) -> None:
        def initialise(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                assert module.weight.dim() == 2
                nn.init.constant_(module.weight, 1.0 + dist.get_rank())
                module.bias.data.fill_(3.0 + dist.get_rank())

        class Applies(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
                self.apply(initialise)

        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = Applies()
        assert_partitioned(module)
        for name, value in weights_of(module).items():
            assert torch.equal(value, torch.full_like(value, 1.0 if "weight" in name else 3.0)), name

    def test_a_parent_initialises_what_its_children_own(self) -> None:
        class Parent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
                nn.init.normal_(self.first.weight, std=10.0)
                nn.init.xavier_uniform_(tensor=self.second.weight)
                zeros_(self.second.bias)
                self.attention = nn.MultiheadAttention(6, 2)  # sets the bias of a child to 0

        former = nn.init.normal_
        torch.manual_seed(3 + dist.get_rank())
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = Parent()
        assert nn.init.normal_ is former
        assert_partitioned(module)
        torch.manual_seed(3)
        expected = dict(Parent().named_parameters())
        for name, value in weights_of(module).items():
            assert torch.equal(value, expected[name]), name
        assert not weights_of(module)["attention.out_proj.bias"].any()

    def test_parameters_replaced_by_a_parent(self) -> None:
        class Parent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.child = nn.Linear(3, 3)
                self.child.weight = nn.Parameter(torch.full((3, 3), 2.0))
                self.child.extra = nn.Parameter(torch.full((5,), 4.0))

        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = Parent()
        engine = make_engine(module.child, 3)
        values = weights_of(engine.module)
        assert torch.equal(values["weight"], torch.full((3, 3), 2.0))
        assert torch.equal(values["extra"], torch.full((5,), 4.0))
        assert_partitioned(engine.module)
        engine.destroy()

    def test_embedding_resized_afterwards(self) -> None:
        """The way a library grows a vocabulary: a new module, filled from the old one's whole weight."""
        torch.manual_seed(5)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
        old = module[0]
        assert old.weight.ds_shape == (5, 4)
        with deepspeed.zero.GatheredParameters(old.weight, modifier_rank=None):
            rows = old.weight.shape[0]
        assert rows == 5
        torch.manual_seed(6)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            new = nn.Embedding(8, 4)
        with deepspeed.zero.GatheredParameters([old.weight, new.weight], modifier_rank=0):
            if dist.get_rank() == 0:
                new.weight.data[:rows] = old.weight.data
        module[0] = new
        engine = make_engine(module, 3)
        engine.backward(engine(torch.tensor([[0, 7]])).square().sum())
        engine.step()
        values = weights_of(engine.module)
        assert values["0.weight"].shape == (8, 4)
        before = weights_of(old)["weight"]
        assert torch.equal(values["0.weight"][1:5], before[1:5])
        assert not torch.equal(values["0.weight"][0], before[0])
        engine.destroy()


class TestEngines(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_other_stages_refuse(self, stage: int) -> None:
        module = build(config_dict_or_path=FP32)
        with pytest.raises(ValueError, match="zero.Init.*stage to 3"):
            make_engine(module, stage)

    def test_the_engine_casts(self) -> None:
        module = build(config_dict_or_path=FP32)
        values = weights_of(module)
        engine = make_engine(module, 3, dtype=torch.bfloat16)
        for name, value in weights_of(engine.module).items():
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, values[name].to(torch.bfloat16)), name
        assert engine.module.norm.running_mean.dtype is torch.float32
        engine.destroy()

    def test_a_mixed_model(self) -> None:
        """One half built under Init, the other plain."""
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        module = ReusableNet()
        module.encoder = encoder
        engine = make_engine(module, 3)
        train_step(engine, 0)
        engine.destroy()

    @pytest.mark.parametrize("threshold", [0, 100_000])
    def test_one_engine_after_the_other(self, threshold: int) -> None:
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            module = ReusableNet()
        for round in range(3):
            engine = make_engine(module, 3, zero={"stage3_param_persistence_threshold": threshold})
            for window in range(2):
                train_step(engine, 10 * round + window)
            engine.destroy()
            assert_partitioned(module)
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
            assert sum(hooks) == 0
