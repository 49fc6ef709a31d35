# SPDX-License-Identifier: Apache-2.0
"""Muon: its iteration against singular values in float64, its update, which parameters it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.ops.parameter_pieces import ParameterPieces, Piece
from deepspeed.runtime import named_optimizers
from deepspeed.runtime.named_optimizers import mark_matrices, muon_with_aux_adam
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.whole_matrices import batches
from unit.ops import update_reference

SHAPES = [(5, 5), (3, 8), (9, 4), (1, 6), (6, 1), (1, 1)]
# bf16 rounds each of some fifteen products, and the polynomial is steep
DIGITS = {"gram": 2e-4, "standard": 0.1}


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(matrix: Tensor, steps: int = 5) -> Tensor:
    """What the iteration converges to in exact arithmetic: its polynomial, applied to the singular values."""
    u, s, vh = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    a, b, c = original_muon.NS_COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", sorted(original_muon.NS_METHODS))
def test_singular_values_go_through_the_polynomial(method: str) -> None:
    zeropower = {
        "gram": original_muon.zeropower_via_gram_newtonschulz,
        "standard": original_muon.zeropower_via_newtonschulz5,
    }[method]
    for shape in SHAPES:
        matrix = random_matrix(*shape)
        result = zeropower(matrix, 5)
        assert result.dtype == original_muon.ns_compute_dtype(method) and result.shape == matrix.shape
        assert relative_error(result, exact(matrix)) < DIGITS[method], shape
        for scale in (1e-30, 1e30):
            assert relative_error(zeropower(matrix * scale, 5), exact(matrix)) < DIGITS[method], scale
    several = random_matrix(4, 3, 5)
    for one, result in zip(several, zeropower(several, 5)):
        assert relative_error(result, exact(one)) < DIGITS[method]
    values = torch.linalg.svdvals(zeropower(random_matrix(40, 60), 5).double())
    assert 0.6 < values.min() and values.max() < 1.25
    assert not zeropower(torch.zeros(3, 4), 5).any()


@pytest.mark.parametrize("method", sorted(original_muon.NS_METHODS))
def test_update_of_filters_heads_and_experts(method: str) -> None:
    def update(gradient: Tensor, **options: Any) -> Tensor:
        return original_muon.muon_update(gradient, torch.zeros_like(gradient), ns_method=method, **options)

    tall = random_matrix(8, 2)
    assert relative_error(update(tall), 2 * exact(tall)) < DIGITS[method], "twice as large for four times as tall"
    filters = random_matrix(4, 2, 3, 3)
    assert relative_error(update(filters).view(4, 18), exact(filters.view(4, 18))) < DIGITS[method]
    experts = random_matrix(3, 2, 5)
    together = update(experts, is_expert_group=True)
    heads = random_matrix(6, 5)
    in_heads = update(heads, num_heads=3)
    for index in range(3):
        assert relative_error(together[index], exact(experts[index])) < DIGITS[method]
        rows = slice(2 * index, 2 * index + 2)
        assert relative_error(in_heads[rows], exact(heads[rows])) < DIGITS[method]


def test_momentum_and_weight_decay() -> None:
    first, second = random_matrix(3, 4, seed=1), random_matrix(3, 4, seed=2)
    parameter = nn.Parameter(random_matrix(3, 4))
    optimizer = original_muon.Muon([parameter], lr=0.1, weight_decay=0.5, momentum=0.9)
    weight, momentum = parameter.detach().double().clone(), torch.zeros(3, 4, dtype=torch.float64)
    for gradient in (first, second):
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient.double()
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * exact(0.1 * gradient.double() + 0.9 * momentum)
        assert torch.equal(parameter.grad, gradient), "the gradient is left as it is"
    assert relative_error(parameter.detach(), weight) < 1e-5
    assert relative_error(optimizer.state[parameter]["momentum_buffer"], momentum) < 1e-6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.embed_positions = nn.Parameter(torch.zeros(3, 4))
        self.filters = nn.Conv2d(2, 3, 2)
        self.norm = nn.LayerNorm(4)
        self.chosen = nn.Linear(4, 4)
        self.refused = nn.Linear(4, 4, bias=False)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.refused.weight.use_muon = False


def test_which_parameters_are_matrices() -> None:
    model = Model()
    mark_matrices(model)
    names = {name for name, parameter in model.named_parameters() if parameter.use_muon}
    assert names == {"filters.weight", "chosen.weight"}


def test_numbers_reach_the_groups_that_know_them() -> None:
    model = Model()
    mark_matrices(model)
    own = {"params": list(model.norm.parameters()), "lr": 7.0}
    rest = [p for name, p in model.named_parameters() if not name.startswith("norm")]
    optimizer = muon_with_aux_adam([*rest, own], lr=0.5, adam_lr=0.25, momentum=0.8, eps=1e-3, weight_decay=0.1)
    numbers = [
        {key: group.get(key) for key in ("use_muon", "lr", "momentum", "eps", "weight_decay")}
        for group in optimizer.param_groups
    ]
    assert numbers == [
        {"use_muon": True, "lr": 0.5, "momentum": 0.8, "eps": None, "weight_decay": 0.1},
        {"use_muon": False, "lr": 0.25, "momentum": None, "eps": 1e-3, "weight_decay": 0.1},
        {"use_muon": False, "lr": 7.0, "momentum": None, "eps": 1e-3, "weight_decay": 0.1},
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 6, 2]


def test_the_method_that_is_fast_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.use_muon = True
    for device, given, expected in (("cpu", None, "gram"), ("cuda", None, "standard"), ("cuda", "gram", "gram")):
        accelerator = SimpleNamespace(device_name=lambda name=device: name)
        monkeypatch.setattr(named_optimizers, "get_accelerator", lambda found=accelerator: found)
        (group,) = muon_with_aux_adam([parameter], ns_method=given).param_groups
        assert group["ns_method"] == expected


@pytest.mark.parametrize(
    "kind, arguments",
    [
        (MuonWithAuxAdam, {}),
        (MuonWithAuxAdam, {"fallback_to_inline": True}),
        (MuonWithAuxAdam, {"adam_optimizer": torch.optim.AdamW, "adam_optimizer_kwargs": {"amsgrad": False}}),
        (original_muon.MuonWithAuxAdam, {}),
    ],
)
def test_the_other_parameters_get_adamw_also_after_loading(kind: Any, arguments: dict[str, Any]) -> None:
    gradients = [random_matrix(6, seed=seed) for seed in range(4)]
    numbers = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def fresh(matrix: Tensor, vector: Tensor) -> torch.optim.Optimizer:
        groups = [
            {"params": [nn.Parameter(matrix.clone())], "use_muon": True},
            {"params": [nn.Parameter(vector.clone())], "use_muon": False, **numbers},
        ]
        return kind(groups, **arguments)

    def run(optimizer: torch.optim.Optimizer, some: list[Tensor]) -> list[Tensor]:
        parameters = [group["params"][0] for group in optimizer.param_groups]
        for gradient in some:
            parameters[0].grad, parameters[1].grad = gradient.view(2, 3), gradient.clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    start = random_matrix(2, 3, seed=9), random_matrix(6, seed=10)
    straight = run(fresh(*start), gradients)
    before = fresh(*start)
    half = run(before, gradients[:2])
    after = fresh(*half)
    after.load_state_dict(before.state_dict())
    for ours, theirs in zip(run(after, gradients[2:]), straight):
        assert torch.equal(ours, theirs)
    expected = update_reference.adam(start[1], gradients, **numbers)
    torch.testing.assert_close(straight[1].double(), expected, rtol=1e-5, atol=1e-6)


def test_mistakes_are_named() -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))
    vector.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"not a tensor of shape \(3,\)"):
        MuonWithAuxAdam([{"params": [vector], "use_muon": True}]).step()
    with pytest.raises(ValueError, match="must say use_muon"):
        MuonWithAuxAdam([{"params": [matrix]}])
    with pytest.raises(ValueError, match=r"ns_method must be one of \['gram', 'standard'\], got 'svd'"):
        MuonWithAuxAdam([{"params": [matrix], "use_muon": True, "ns_method": "svd"}])
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.0"):
        original_muon.SingleDeviceMuon([matrix], momentum=1.0)
    with pytest.raises(ValueError, match="7 rows cannot be cut into 2 heads"):
        original_muon.orthogonalized(torch.ones(7, 2), num_heads=2)
    one, other = (MuonWithAuxAdam([{"params": [matrix], "use_muon": flag}]) for flag in (True, False))
    with pytest.raises(ValueError, match="groups with use_muon differ"):
        one.load_state_dict(other.state_dict())


def test_owners_have_equal_work_and_batches_bounded_size() -> None:
    """Nine equal matrices in thirds, one that lies on the last rank alone, one of which the middle rank has most."""
    thirds = tuple(Piece(12 * rank, 12 * rank + 12) for rank in range(3))
    even = [ParameterPieces(f"even{index}", torch.Size([6, 6]), thirds) for index in range(9)]
    alone = ParameterPieces("alone", torch.Size([6, 6]), (Piece(), Piece(), Piece(0, 36)))
    most = ParameterPieces("most", torch.Size([6, 6]), (Piece(0, 10), Piece(10, 36), Piece()))
    plan = batches([alone, most, *even], 3, 80)
    assert [[matrix.parameter.name for matrix in batch] for batch in plan] == [
        ["alone", "most"],
        ["even0", "even1"],
        ["even2", "even3"],
        ["even4", "even5"],
        ["even6", "even7"],
        ["even8"],
    ]
    flat = [matrix for batch in plan for matrix in batch]
    assert [matrix.owner for matrix in flat[:2]] == [2, 1]
    counts = [sum(matrix.owner == rank for matrix in flat) for rank in range(3)]
    assert sorted(counts) == [3, 4, 4]
    assert [matrix.shared for matrix in flat[:3]] == [False, True, True]
    assert [len(batch) for batch in batches([alone, most], 3, 1)] == [1, 1], "a matrix is never cut"
