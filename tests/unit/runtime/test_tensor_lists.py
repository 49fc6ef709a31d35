# SPDX-License-Identifier: Apache-2.0
"""Norms, alignment and cutting of lists, against their definitions; the decorators for torch.compile."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from deepspeed.runtime import compiler, utils


@pytest.mark.parametrize("norm_type", [1, 2, 3, float("inf")])
def test_norms_of_several_tensors(norm_type: float) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(())]
    everything = torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
    expected = torch.linalg.vector_norm(everything, norm_type).item()
    assert utils.get_global_norm_of_tensors(tensors, norm_type).item() == pytest.approx(expected)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    assert utils.get_weight_norm(parameters, norm_type) == pytest.approx(expected)
    with pytest.raises(NotImplementedError, match="moe_ep_group"):
        utils.get_global_norm_of_tensors(tensors, moe_ep_group=object())


def test_clipping_of_tensors() -> None:
    tensors = [torch.full((4,), 3.0), torch.full((4,), 4.0)]  # norm 10
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=20.0) == pytest.approx(10.0)
    assert tensors[0][0] == 3.0
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=1.0) == pytest.approx(10.0)
    assert utils.get_global_norm_of_tensors(tensors).item() == pytest.approx(1.0)
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=2.0) == 2.0
    assert tensors[0][0].item() == pytest.approx(0.15), "the norm that is given counts"


def test_parts_of_equal_weight_are_the_best_there_are() -> None:
    draw = random.Random(1)
    for _ in range(60):
        weights = [draw.randint(0, 9) for _ in range(draw.randint(1, 8))]
        parts = draw.randint(1, 4)
        bounds = utils.partition_balanced(weights, parts)
        assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == len(weights) and bounds == sorted(bounds)

        def heaviest(bounds: tuple[int, ...], weights: list[int] = weights) -> int:
            return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

        inner = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
        assert heaviest(tuple(bounds)) == min(heaviest((0, *cuts, len(weights))) for cuts in inner)
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


def test_lists_and_structures(tmp_path: Path) -> None:
    aligned = utils.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)
    assert torch.cat(aligned).tolist() == [1.0] * 5 + [0.0] * 3
    assert len(utils.align_dense_tensors([torch.ones(4)], 4)) == 1
    nested = {"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.bfloat16),)], "b": 1}
    assert utils.get_tensor_bytes(nested) == 16
    assert utils.compare_tensors_in_structures(nested, {"b": 1, "a": [torch.zeros(3), (nested["a"][1][0].clone(),)]})
    assert not utils.compare_tensors_in_structures([torch.zeros(2)], [torch.ones(2)])
    assert not utils.compare_tensors_in_structures([torch.zeros(2)], [torch.zeros(2), 1])
    copied = utils.copy_to_device(nested, "cpu", torch.is_tensor)
    assert copied["a"][0] is not nested["a"][0] and copied["b"] == 1
    pair = Pair(torch.ones(2), [torch.zeros(1)])
    for found in (utils.copy_to_device(pair, "cpu", torch.is_tensor), utils.move_to_device(pair, "cpu")):
        assert (
            type(found) is Pair
            and torch.equal(found.first, pair.first)
            and torch.equal(found.second[0], torch.zeros(1))
        )
    empty, full = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.ones(1))
    assert utils.filter_empty_parameters([{"params": [empty, full], "lr": 1.0}]) == [{"params": [full], "lr": 1.0}]
    assert utils.get_only_unique_item([2, 2]) == 2
    with pytest.raises(RuntimeError, match="1.*2"):
        utils.get_only_unique_item([1, 2])
    assert utils.call_to_str("f", 1, b="x") == "f(1, b='x')"
    utils.ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    assert (tmp_path / "a" / "b").is_dir()
    with utils.noop_context():
        assert utils.noop_decorator(len) is len


def test_decorators_for_the_compiler() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len([node for node in graph.graph.nodes if node.op == "call_function"]))
        return graph.forward

    assert compiler.is_compile_supported() and not compiler.is_compiling()
    assert compiler.enable("2.0")(len) is len and compiler.enable()(len) is len and compiler.dummy_decorator(len) is len
    for keep_out in (compiler.disable, compiler.lazy_disable, compiler.enable("99.0")):
        torch._dynamo.reset()
        inner = keep_out(lambda x: x * 3)
        graphs.clear()
        found = torch.compile(lambda x, inner=inner: inner(x + 1) + 2, backend=backend)(torch.ones(2))
        assert found.tolist() == [8.0, 8.0]
        assert graphs == [1, 1], "the multiplication is in neither graph"
