# SPDX-License-Identifier: Apache-2.0
"""A linear layer in tiles is the linear layer: outputs and gradients, for any cut."""

import sys
import types

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias, split_tensor_along_last_dim
from unit.common import DistributedTest

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class PairLinear(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


def make(in_features, out_features, bias=True, cls=nn.Linear):
    torch.manual_seed(0)
    return cls(in_features, out_features, bias=bias, dtype=torch.float64)


def whole(tiled, attribute="grad"):
    """Weight and bias, or their gradients, put together from the tiles."""

    def get(parameter):
        return parameter.grad if attribute == "grad" else parameter.detach()

    weight = torch.cat([torch.cat([get(tile.weight) for tile in row], dim=1) for row in tiled.linears])
    return weight, torch.cat([get(row[-1].bias) for row in tiled.linears]) if tiled.use_bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(8, 6), (7, 5), (1, 3), (5, 1)])
@pytest.mark.parametrize("in_splits", [1, 2, 3, 7])
@pytest.mark.parametrize("out_splits", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_equals_the_linear_layer(sizes, in_splits, out_splits, bias, shape):
    in_features, out_features = sizes
    if in_splits > in_features or out_splits > out_features:
        with pytest.raises(ValueError, match="_splits must be from 1 to"):
            TiledLinear(*sizes, in_splits=in_splits, out_splits=out_splits)
        return
    linear = make(*sizes, bias)
    tiled = TiledLinear(*sizes, bias, in_splits, out_splits, init_linear=linear, dtype=torch.float64)
    x = torch.randn(*shape, in_features, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weights = torch.randn(*shape, out_features, dtype=torch.float64)
    output, expected = tiled(x), linear(y)
    torch.testing.assert_close(output, expected, **EXACT)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **EXACT)
    gradients = whole(tiled)
    torch.testing.assert_close(gradients[0], linear.weight.grad, **EXACT)
    assert (gradients[1] is None) == (not bias)
    if bias:
        torch.testing.assert_close(gradients[1], linear.bias.grad, **EXACT)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in linear.parameters())


def test_sizes_of_parts():
    tiled = TiledLinear(8, 7, in_splits=3, out_splits=2)
    assert tiled.in_sizes == [3, 3, 2] and tiled.out_sizes == [4, 3]
    assert [[tuple(tile.weight.shape) for tile in row] for row in tiled.linears] == [
        [(4, 3), (4, 3), (4, 2)],
        [(3, 3), (3, 3), (3, 2)],
    ]
    assert [name for name, _ in tiled.named_parameters() if "bias" in name] == ["linears.0.2.bias", "linears.1.2.bias"]


@pytest.mark.parametrize(("in_splits", "out_splits"), [(0, 1), (1, 0), (-1, 1)])
def test_numbers_of_parts_below_one(in_splits, out_splits):
    with pytest.raises(ValueError, match="must be from 1 to"):
        TiledLinear(4, 4, in_splits=in_splits, out_splits=out_splits)


def test_parts_in_and_parts_out():
    linear = make(7, 5)
    tiled = TiledLinear(
        7, 5, True, 3, 2, input_is_already_split=True, combine_out_splits=False, init_linear=linear, dtype=torch.float64
    )
    x = torch.randn(4, 7, dtype=torch.float64)
    output = tiled(split_tensor_along_last_dim(x, tiled.in_sizes))
    assert isinstance(output, list) and [part.shape for part in output] == [(4, 3), (4, 2)]
    torch.testing.assert_close(torch.cat(output, dim=-1), linear(x), **EXACT)
    with pytest.raises(ValueError, match=r"parts of \[2, 2, 3\] features, expected \[3, 2, 2\]"):
        tiled(x.split([2, 2, 3], dim=-1))
    with pytest.raises(ValueError, match=r"expected \[3, 2, 2\]"):
        tiled(x.split([3, 4], dim=-1))


def test_input_of_a_wrong_size():
    with pytest.raises(ValueError, match="input of 6 features, this TiledLinear has 7"):
        TiledLinear(7, 5, in_splits=2)(torch.zeros(1, 6))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2)])
def test_bias_returned(splits, combine, bias):
    linear = make(7, 5, bias, PairLinear)
    tiled = TiledLinearReturnBias(
        7,
        5,
        bias,
        *splits,
        combine_out_splits=combine,
        linear_cls=PairLinear,
        init_linear=linear,
        dtype=torch.float64,
    )
    x = torch.randn(4, 7, dtype=torch.float64)
    output, made_bias = tiled(x)
    if not combine:
        assert len(output) == splits[1]
        output = torch.cat(output, dim=-1)
        made_bias = torch.cat(made_bias) if bias else made_bias
    expected, expected_bias = linear(x)
    torch.testing.assert_close(output, expected, **EXACT)
    assert (made_bias is None) == (not bias)
    if bias:
        assert torch.equal(made_bias, expected_bias)


def test_tiles_of_another_class_with_its_arguments():
    class Scaled(nn.Linear):
        def __init__(self, in_features, out_features, bias, scale):
            super().__init__(in_features, out_features, bias)
            self.scale = scale

        def forward(self, x):
            return super().forward(x) * self.scale

    linear = nn.Linear(4, 3)
    tiled = TiledLinear(4, 3, in_splits=2, linear_cls=Scaled, init_linear=linear, scale=2.0)
    x = torch.randn(2, 4)
    torch.testing.assert_close(tiled(x), linear(x) * 2)


def test_copied_parameters_are_copies():
    linear = make(7, 5)
    tiled = TiledLinear(7, 5, True, 3, 2)
    tiled.copy_params_from(linear)
    weight, bias = whole(tiled, "data")
    assert torch.equal(weight, linear.weight.float()) and torch.equal(bias, linear.bias.float())
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(whole(tiled, "data")[0], weight)
    assert all(p.requires_grad and p.is_leaf for p in tiled.parameters())


def test_copy_from_a_layer_that_does_not_fit():
    with pytest.raises(ValueError, match="this TiledLinear has a bias, Linear has none"):
        TiledLinear(7, 5).copy_params_from(nn.Linear(7, 5, bias=False))
    with pytest.raises(ValueError, match="this TiledLinear has no bias, Linear has one"):
        TiledLinear(7, 5, bias=False).copy_params_from(nn.Linear(7, 5))
    with pytest.raises(ValueError, match=r"weight of shape \(7, 5\), expected \(5, 7\)"):
        TiledLinear(7, 5).copy_params_from(nn.Linear(5, 7))


def test_partitioned_parameters_are_gathered_one_tile_at_a_time(monkeypatch):
    """With a stand-in for GatheredParameters that takes from, and writes back to, what each parameter is made of."""
    open_now, most_open = [], []

    class GatheredParameters:
        def __init__(self, params, modifier_rank=None):
            self.params, self.modifier_rank = list(params), modifier_rank

        def __enter__(self):
            for param in self.params:
                assert param.numel() == 0
                param.data = param.whole.clone()
            open_now.extend(self.params)
            most_open.append(sum(p.numel() for p in open_now))

        def __exit__(self, *exc):
            for param in self.params:
                if self.modifier_rank is not None:
                    param.whole = param.data.clone()
                param.data = torch.empty(0)
                open_now.pop()

    module = types.ModuleType("partition_parameters")
    module.GatheredParameters = GatheredParameters
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", module)

    def partition(layer):
        for number, param in enumerate(layer.parameters()):
            param.ds_id, param.whole, param.data = number, param.detach().clone(), torch.empty(0)

    linear, tiled = nn.Linear(6, 4), TiledLinear(6, 4, in_splits=3, out_splits=2)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    partition(linear), partition(tiled)
    tiled.copy_params_from(linear)
    made = torch.cat([torch.cat([tile.weight.whole for tile in row], dim=1) for row in tiled.linears])
    assert torch.equal(made, weight)
    assert torch.equal(torch.cat([row[-1].bias.whole for row in tiled.linears]), bias)
    assert open_now == [] and max(most_open) == weight.numel() + bias.numel() + 4
    assert all(p.numel() == 0 for p in (*linear.parameters(), *tiled.parameters()))


@pytest.mark.parametrize("contiguous", [True, False])
def test_split_along_the_last_dimension(contiguous):
    x = torch.arange(24.0).reshape(2, 2, 6)
    parts = split_tensor_along_last_dim(x, [1, 2, 3], contiguous_split_chunks=contiguous)
    assert [part.shape for part in parts] == [(2, 2, 1), (2, 2, 2), (2, 2, 3)]
    assert torch.equal(torch.cat(parts, dim=-1), x)
    assert all(part.is_contiguous() for part in parts) == contiguous
    with pytest.raises(RuntimeError):
        split_tensor_along_last_dim(x, [1, 2])


class TestPartitioned(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("source_partitioned", [True, False])
    def test_copy_between_partitioned_layers(self, source_partitioned):
        """Each rank makes other values; those of rank 0 count."""
        torch.manual_seed(dist.get_rank())
        with deepspeed.zero.Init(dtype=torch.float32, enabled=source_partitioned):
            linear = nn.Linear(7, 5)
        with deepspeed.zero.Init(dtype=torch.float32):
            tiled = TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=linear)
            assert all(p.numel() == 0 for p in tiled.parameters())
        assert all(p.numel() == 0 for p in tiled.parameters())
        torch.manual_seed(0)
        expected = nn.Linear(7, 5)
        with deepspeed.zero.GatheredParameters(list(tiled.parameters())):
            weight, bias = whole(tiled, "data")
        assert torch.equal(weight, expected.weight) and torch.equal(bias, expected.bias)

    def test_trained_like_the_whole_layer(self):
        """Two steps of ZeRO-3 over the tiles are two steps of plain torch over the layer."""
        torch.manual_seed(0)
        linear = nn.Linear(7, 5)
        with deepspeed.zero.Init(dtype=torch.float32):
            tiled = TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=linear)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(
            model=tiled, config=config, optimizer=torch.optim.AdamW(tiled.parameters(), lr=0.1)
        )
        optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
        for step in range(2):
            inputs = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(inputs[dist.get_rank()]).square().mean())
            engine.step()
            optimizer.zero_grad()
            linear(inputs).square().mean().backward()
            optimizer.step()
        with deepspeed.zero.GatheredParameters(list(tiled.parameters())):
            weight, bias = whole(tiled, "data")
        torch.testing.assert_close(weight, linear.weight.detach())
        torch.testing.assert_close(bias, linear.bias.detach())
