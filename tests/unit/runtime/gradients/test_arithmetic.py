# SPDX-License-Identifier: Apache-2.0
"""Scaled assignment and addition across dtypes: one rounding, in the target's dtype, at any size."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from deepspeed.runtime.gradients import arithmetic
from deepspeed.runtime.gradients.arithmetic import add_scaled, add_scaled_each, assign_scaled, deliver

CHUNK = 64
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "CHUNK", CHUNK)
    monkeypatch.setattr(arithmetic, "_kept", threading.local())  # scratches of the real size stay out of it


def values(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("target_dtype", "source_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("scale", [1.0, 0.25, -1.0 / 3.0])
def test_assign_rounds_once(target_dtype: torch.dtype, source_dtype: torch.dtype, scale: float) -> None:
    compute = torch.promote_types(target_dtype, source_dtype)
    for size in SIZES:
        source = values(size, source_dtype, 1)
        kept = source.clone()
        target = torch.full((size,), float("nan"), dtype=target_dtype)
        assign_scaled(target, source, scale)
        exact = source.double() * scale
        # one rounding to the target, after at most one in a wider dtype that computes
        bound = torch.finfo(target_dtype).eps / 2
        bound += torch.finfo(compute).eps if compute != target_dtype else torch.finfo(torch.float32).eps
        tiny = torch.finfo(target_dtype).smallest_normal * torch.finfo(target_dtype).eps
        assert bool(((target.double() - exact).abs() <= bound * exact.abs() + tiny).all())
        assert torch.equal(source, kept)


@pytest.mark.parametrize(("target_dtype", "source_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("scale", [1.0, -1.0 / 3.0])
def test_add_computes_in_the_targets_dtype(target_dtype: torch.dtype, source_dtype: torch.dtype, scale: float) -> None:
    for size in SIZES:
        source, start = values(size, source_dtype, 1), values(size, target_dtype, 2)
        kept, target = source.clone(), start.clone()
        add_scaled(target, source, scale)
        exact = start.double() + source.to(target_dtype).double() * scale
        magnitude = start.double().abs() + source.double().abs()
        assert bool(((target.double() - exact).abs() <= 2 * torch.finfo(target_dtype).eps * magnitude).all())
        assert torch.equal(source, kept)


def test_scaling_comes_before_the_range_of_the_target() -> None:
    target = torch.empty(2, dtype=torch.float16)
    assign_scaled(target, torch.tensor([1e6, -2e6], dtype=torch.bfloat16), 0.01)
    assert target.isfinite().all() and target[0].item() == pytest.approx(1e4, rel=0.01)


def test_many_small_additions_do_not_stop_in_fp32() -> None:
    """4096 contributions of 2^-12 to 1.0: bf16 would stay at 1.0."""
    total, one = torch.ones(3), torch.full((3,), 2.0**-12, dtype=torch.bfloat16)
    for _ in range(4096):
        add_scaled(total, one, 1.0)
    assert total.tolist() == [2.0] * 3


def test_each_adds_pairwise_in_any_shape_and_size() -> None:
    shapes = [(3, 5), (CHUNK + 1,), (2, CHUNK), (1,)]
    for source_dtype in (torch.float32, torch.bfloat16):
        sources = [torch.randn(shape).to(source_dtype) for shape in shapes]
        sources[0] = torch.randn(5, 3).to(source_dtype).t()  # gradients need not be contiguous
        targets = [torch.randn(shape) for shape in shapes]
        expected = [t + 0.5 * s.float() for t, s in zip(targets, sources)]
        add_scaled_each(targets, sources, 0.5)
        for target, right in zip(targets, expected):
            torch.testing.assert_close(target, right, rtol=1e-6, atol=1e-6)


def test_a_large_mixed_addition_makes_no_large_temporary() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not any(isinstance(a, torch.Tensor) for a in args):
                made.append(out.numel())
            if func in (torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor):
                made.append(out.numel())
            return out

    target, source = torch.zeros(8 * CHUNK), torch.ones(8 * CHUNK, dtype=torch.bfloat16)
    with Sizes():
        add_scaled(target, source, 0.5)
        assign_scaled(source, target, 2.0)
    assert target.unique().tolist() == [0.5] and source.unique().tolist() == [1.0]
    assert made and max(made) <= CHUNK


@pytest.mark.parametrize("numel", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parts_are_summed_wide_and_delivered_once(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    parts = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
    expected = 0.3 * torch.stack([part.double() for part in parts]).sum(0)
    target = torch.full((numel,), float("nan"), dtype=torch.promote_types(dtype, torch.float32))
    deliver(target, parts, 0.3, add=False)
    torch.testing.assert_close(target.double(), expected, rtol=1e-6, atol=1e-6)
    deliver(target, parts, 0.3, add=True)
    torch.testing.assert_close(target.double(), 2 * expected, rtol=1e-6, atol=1e-6)
    deliver(target, parts[:1], 1.0, add=False)
    torch.testing.assert_close(target.double(), parts[0].double())
