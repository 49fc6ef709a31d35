# SPDX-License-Identifier: Apache-2.0
"""Weights under ZeRO-3 are the same bits on all ranks after whatever wrote them, and nothing reads the padding of
shards."""

import hashlib
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.graphs import TOLERANCE, expected_gradients, make_batch, make_engine, my_batch, weights_of
from unit.reference import max_relative_error

PRIMES = (2, 7, 31)


class Scale(nn.Module):
    """A module with one weight of ``numel`` elements."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :1] * self.weight.to(x.dtype)).sum(dim=1)


class OddNet(nn.Module):
    """Weights of awkward sizes, in modules of their own and in the root, of the dtypes given in turn."""

    def __init__(self, sizes: Iterable[int], dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale(n, dtypes[i % len(dtypes)]) for i, n in enumerate(sizes))
        self.first = nn.Parameter(torch.randn(3, 5, dtype=dtypes[0]))
        self.empty = nn.Parameter(torch.randn(0, 4, dtype=dtypes[-1]))
        self.scalar = nn.Parameter(torch.randn((), dtype=dtypes[-1]))
        self.frozen = nn.Parameter(torch.randn(7, dtype=dtypes[0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        total = (x @ self.first.to(x.dtype).t()).sum(dim=1) * self.scalar.to(x.dtype)
        for scale in self.scales:
            total = total + scale(x)
        return total + self.empty.sum().to(x.dtype) + self.frozen.sum().to(x.dtype)


def losses(call, module, batch):
    yield (call(batch.x) - batch.target.sum(dim=1)).square().mean()


def poison_padding(engine) -> int:
    """NaN into everything in shards that is no weight; how many elements."""
    count = 0
    for parameter in engine.module.parameters():
        shard = shard_of(parameter)
        padding = shard.shard[shard.end - shard.begin :]
        padding.fill_(float("nan"))
        count += padding.numel()
    return count


def bits(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def everyone(value: object) -> list:
    gathered = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(gathered, value)
    return gathered


def check_weights(engine) -> dict[str, Tensor]:
    """What gathering gives is what the shards of all ranks hold, on every rank, bit by bit; returns it."""
    whole = weights_of(engine.module)
    digests = everyone({name: bits(weight) for name, weight in whole.items()})
    assert all(digest == digests[0] for digest in digests)
    rows = everyone({name: p.ds_tensor.detach().clone() for name, p in engine.module.named_parameters()})
    for name, parameter in engine.module.named_parameters():
        assembled = torch.cat([row[name] for row in rows])[: parameter.ds_numel].view(parameter.ds_shape)
        assert bits(assembled) == bits(whole[name]), name
        if shard_of(parameter).full is not None:
            assert bits(parameter.data) == bits(whole[name]), f"{name} stays whole and is stale"
    return whole


def check_gradients(engine, window: int, tolerance: float) -> None:
    """One micro-step on every rank against the reference; then the norm."""
    expected = expected_gradients(engine.module, losses, lambda rank: [make_batch(rank, window)], 1)
    expected = {name: gradient for name, gradient in expected.items() if gradient.numel()}
    for loss in losses(engine, engine.module, my_batch(engine, window)):
        engine.backward(loss)
    actual = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters() if name in expected}
    worst, error = max_relative_error(actual, expected)
    assert error <= tolerance, f"window {window}: {worst} has relative error {error:.3g}"
    engine.step()
    norm = sum(gradient.square().sum() for gradient in expected.values()).sqrt()
    assert abs(float(engine.get_global_grad_norm()) - norm) <= tolerance * norm


def awkward_sizes(world_size: int) -> list[int]:
    around = [world_size - 1, world_size, world_size + 1]
    return [0, 1, *around, *PRIMES, 3 * world_size - 1]


class TestBits(DistributedTest):
    world_size = [1, 2, 3, 4]

    @pytest.mark.parametrize("persistent", [0, 6])
    def test_after_every_write(self, persistent):
        world_size = torch_dist.get_world_size()
        torch.manual_seed(3 + torch_dist.get_rank())  # ranks begin with different weights
        model = OddNet(awkward_sizes(world_size))
        rank_0 = everyone({name: p.detach().clone() for name, p in model.named_parameters()})[0]
        engine = make_engine(model, 3, zero={"stage3_param_persistence_threshold": persistent, "sub_group_size": 4})
        for name, weight in check_weights(engine).items():
            assert bits(weight) == bits(rank_0[name])
        for window in range(3):
            assert sum(everyone(poison_padding(engine))) > 0 or world_size == 1
            check_gradients(engine, window, TOLERANCE[torch.float32])
            check_weights(engine)
        poison_padding(engine)
        torch.manual_seed(17)
        given = {name: torch.randn(weight.shape) for name, weight in rank_0.items()}
        engine.load_module_state_dict({"module": given})
        for name, weight in check_weights(engine).items():
            assert bits(weight) == bits(given[name])
        poison_padding(engine)
        modifier = world_size - 1
        with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=modifier):
            for parameter in engine.module.parameters():
                parameter.data.mul_(3.0 if torch_dist.get_rank() == modifier else float("nan"))
        for name, weight in check_weights(engine).items():
            assert bits(weight) == bits(given[name] * 3), name
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and parameter.ds_numel:
                assert torch.equal(safe_get_full_fp32_param(parameter), given[name] * 3)
        check_gradients(engine, 9, TOLERANCE[torch.float32])
        check_weights(engine)

    def test_refused_keys_leave_masters_and_weights_alike(self):
        engine = make_engine(OddNet(awkward_sizes(torch_dist.get_world_size())), 3)
        given = {name: torch.full(p.ds_shape, 2.0) for name, p in engine.module.named_parameters() if name != "first"}
        with pytest.raises(RuntimeError, match="missing \\['first'\\]"):
            engine.load_module_state_dict({"module": given})
        for name, weight in check_weights(engine).items():
            if weight.numel() and name != "frozen":
                master = safe_get_full_fp32_param(engine.module.get_parameter(name))
                assert torch.equal(master, weight) and (name == "first" or bool((weight == 2).all())), name

    def test_consolidated_state(self):
        model = OddNet(awkward_sizes(torch_dist.get_world_size()))
        engine = make_engine(model, 3)
        poison_padding(engine)
        whole = check_weights(engine)
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (torch_dist.get_rank() != 0)
        for name, value in (state or {}).items():
            assert bits(value) == bits(whole[name]), name
        assert state is None or set(state) == set(whole)


OPTIONS = {
    "default": {},
    "all_reduce": {"stage3_use_all_reduce_for_fetch_params": True},
    "sequential": {"stage3_allgather_sequential": True},
    "no_reduce_scatter": {"reduce_scatter": False},
    "sub_groups": {"sub_group_size": 3},
    "bucket_of_first": {"reduce_bucket_size": 15},
    "bucket_of_first_all_reduced": {"reduce_bucket_size": 15, "reduce_scatter": False},
    "not_contiguous": {"contiguous_gradients": False, "overlap_comm": False},
}
DTYPES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "mixed": (torch.bfloat16, torch.float32),
}
NAMES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}


class TestOptions(DistributedTest):
    world_size = [2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("options", list(OPTIONS))
    @pytest.mark.parametrize("dtypes", ["fp32", "mixed"])
    def test_right_and_the_same_everywhere(self, options, dtypes):
        torch.manual_seed(5)
        model = OddNet([5, 7, 3, 4, 2], DTYPES[dtypes])
        before = {name: bits(p) for name, p in model.named_parameters()}
        zero = {"stage3_param_persistence_threshold": 3, **OPTIONS[options]}
        engine = make_engine(model, 3, zero=zero)
        assert {name: bits(weight) for name, weight in check_weights(engine).items()} == before
        tolerance = TOLERANCE[torch.float32 if dtypes == "fp32" else torch.bfloat16]
        for window in range(3):
            poison_padding(engine)
            check_gradients(engine, window, tolerance)
            for name, weight in check_weights(engine).items():
                assert weight.dtype is dict(model.named_parameters())[name].dtype
                assert torch.isfinite(weight).all(), name

    @pytest.mark.parametrize("communication", ["fp32", "fp16", "bf16"])
    @pytest.mark.parametrize("dtypes", ["bf16", "fp32"])
    def test_communication_data_type(self, communication, dtypes):
        torch.manual_seed(5)
        dtype = DTYPES[dtypes][0]
        engine = make_engine(
            OddNet([5, 7, 60], DTYPES[dtypes]), 3, dtype, communication_data_type=communication
        )  # 60 elements are more than a bucket
        exact = communication == dtypes == "fp32"
        assert {str(bucket.comm_dtype) for bucket in engine.optimizer.reducer.buckets} == {NAMES[communication]}
        for window in range(2):
            check_gradients(engine, window, TOLERANCE[torch.float32 if exact else torch.bfloat16])
            check_weights(engine)

    @pytest.mark.parametrize("option", ["default", "all_reduce", "sequential"])
    def test_gathered_bits_do_not_depend_on_the_option(self, option):
        torch.manual_seed(5)
        model = OddNet([5, 7, 3])
        given = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = make_engine(model, 3, zero={"stage3_param_persistence_threshold": 0, **OPTIONS[option]})
        poison_padding(engine)
        seen = {}

        def look(module, args):
            seen.update({id(p): p.detach().clone() for p in module.parameters(recurse=False)})

        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        with torch.no_grad():
            engine(my_batch(engine, 0).x)
        for name, parameter in engine.module.named_parameters():
            assert bits(seen[id(parameter)]) == bits(given[name]), name


class TestDeterminism(DistributedTest):
    world_size = 3

    def test_from_run_to_run(self):
        runs = []
        for _ in range(2):
            torch.manual_seed(11)
            engine = make_engine(OddNet([5, 7, 3, 31]), 3, zero={"stage3_param_persistence_threshold": 4})
            for window in range(4):
                for loss in losses(engine, engine.module, my_batch(engine, window)):
                    engine.backward(loss)
                engine.step()
            runs.append({name: bits(weight) for name, weight in check_weights(engine).items()})
            engine.destroy()
        assert runs[0] == runs[1]


class Adapted(nn.Module):
    """A bf16 base, frozen or not, with an fp32 adapter, as adapters are trained."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5, dtype=torch.bfloat16).requires_grad_(not frozen)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 5)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)) * self.scale.to(x.dtype)
        return (low + self.up(self.down(x))).sum(dim=1) + self.shift.sum()


class TestAdapters(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("persistent", [0, 5, 100_000])
    @pytest.mark.parametrize("frozen", [True, False])
    def test_base_and_adapter_keep_their_dtypes(self, frozen, persistent):
        torch.manual_seed(2)
        model = Adapted(frozen)
        with torch.no_grad():
            model.shift.add_(1.0)
        engine = make_engine(model, 3, zero={"stage3_param_persistence_threshold": persistent})
        for window in range(3):
            check_gradients(engine, window, TOLERANCE[torch.bfloat16])
            weights = check_weights(engine)
        assert weights["base.weight"].dtype is torch.bfloat16 and weights["down.weight"].dtype is torch.float32
