# SPDX-License-Identifier: Apache-2.0
"""FusedAdam, FusedLion and FusedLamb against float64, on CPU (torch implementation) and on CUDA (kernels)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.fused_kernels import load_kernels
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.torch_updates import CHUNK
from unit.ops import update_reference

STEPS = 50
SIZES = [0, 1, 7, 8, 9, 1023, 4097]
LARGE = 10_000_000
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.99)}
FAMILIES = {"adam": FusedAdam, "lion": FusedLion, "lamb": FusedLamb}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adam": [
        {"adam_w_mode": w, "bias_correction": b, "amsgrad": a, "weight_decay": d, "eps": 1e-6}
        for w, b, a, d in itertools.product([True, False], [True, False], [False, True], [0.0, 0.1])
    ],
    "lion": [{"weight_decay": 0.0}, {"weight_decay": 0.1}],
    "lamb": [
        {"bias_correction": b, "eps_inside_sqrt": e, "weight_decay": d, "max_coeff": m, "min_coeff": 0.5, "eps": 1e-6}
        for b, e, d, m in itertools.product([True, False], [True, False], [0.0, 0.1], [0.7, 10.0])
    ],
}
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICES = ["cpu", CUDA]
HALVES = (torch.bfloat16, torch.float16)


def make(family: str, parameters: list[Any], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters or groups, or of copies of tensors."""
    owned = [torch.nn.Parameter(p.clone()) if type(p) is torch.Tensor else p for p in parameters]
    optimizer = FAMILIES[family](owned, **(NUMBERS | options))
    if optimizer.param_groups[0]["params"][0].is_cuda:
        assert load_kernels(optimizer.BUILDER) is not None, "the kernels must be what is tested"
    return optimizer


def values(size: int, steps: int, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A weight and gradients of different size, some zero."""
    generator = torch.Generator(device).manual_seed(size)
    weight = torch.randn(size, generator=generator, device=device)
    gradients = [torch.randn(size, generator=generator, device=device) * 10.0 ** (i % 3 - 2) for i in range(steps)]
    for gradient in gradients:
        gradient[1::5] = 0
    return weight, gradients


def assert_close(
    family: str, actual: torch.Tensor, weight: torch.Tensor, gradients: list[torch.Tensor], **options: Any
) -> None:
    """``actual`` is what float64 gives, up to the rounding of fp32 in each step."""
    expected = getattr(update_reference, family)(weight, gradients, **NUMBERS, **options)
    actual = actual.double()
    if family == "lion":
        expected, closest = expected
        decided = closest > 1e-6
        assert decided.double().mean() > 0.9 if decided.numel() > 1000 else True
        actual, expected = actual[decided], expected[decided]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_with_all_options(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group per combination of options, with a parameter of each size."""
    monkeypatch.setitem(CHUNK, "cpu", 1000)  # so that small tensors are walked in chunks
    drawn = [values(size, STEPS, device) for size in SIZES]
    groups = [
        {"params": [torch.nn.Parameter(weight.clone()) for weight, _ in drawn], **options}
        for options in OPTIONS[family]
    ]
    optimizer = make(family, groups)
    for step in range(STEPS):
        for group in groups:
            for parameter, (_, gradients) in zip(group["params"], drawn):
                parameter.grad = gradients[step]
        optimizer.step()
    for group, options in zip(groups, OPTIONS[family]):
        ended = [parameter.detach() for parameter in group["params"]]
        assert not any(torch.equal(end, weight) for end, (weight, _) in zip(ended, drawn) if weight.numel())
        if family == "lamb":  # whose norms are those of one parameter
            for end, (weight, gradients) in zip(ended, drawn):
                assert_close(family, end, weight, gradients, **options)
            continue
        weight, gradients = (torch.cat([w for w, _ in drawn]), [torch.cat(g) for g in zip(*[g for _, g in drawn])])
        assert_close(family, torch.cat(ended), weight, gradients, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_million_elements(family: str, device: str) -> None:
    """On CPU a single step, which is enough to walk them."""
    options = OPTIONS[family][-1]
    weight, gradients = values(LARGE, STEPS if device == "cuda" else 1, device)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = make(family, [parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    if family != "lamb":  # which needs all of them for its norms
        picked = slice(None, None, 1 if device == "cuda" else 997)
        parameter, weight, gradients = parameter[picked], weight[picked], [grad[picked] for grad in gradients]
    assert_close(family, parameter.detach(), weight, gradients, **options)


def kinds(device: str) -> Iterator[tuple[torch.dtype, torch.dtype, torch.dtype | None]]:
    """dtypes of master, gradient and low-precision weights."""
    yield from itertools.product([torch.float32], [torch.float32, *HALVES], [None, *HALVES])
    for half in HALVES:
        yield from [(half, half, None), (half, torch.float32, None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale_on_device", [False, True])
def test_flat_step_scales_updates_and_rounds(family: str, scale_on_device: bool, device: str) -> None:
    options = OPTIONS[family][-1]
    for size, (master_dtype, grad_dtype, low_dtype) in itertools.product([1, 9, 8195], kinds(device)):
        weight, gradients = values(size, 3, device)
        weight = weight.to(master_dtype).float()
        optimizer = make(family, [weight.to(master_dtype)], **options)
        (master,) = optimizer.param_groups[0]["params"]
        # a slice of a larger tensor, at an odd address
        around = None if low_dtype is None else torch.zeros(size + 2, dtype=low_dtype, device=device)
        low = None if around is None else around[1:-1]
        scale = torch.tensor(0.25, device=device) if scale_on_device else 0.25
        if master_dtype != torch.float32:  # moments of 16 bits: one step, of gradients whose squares fp16 has
            gradients = [torch.where(gradients[0] == 0, 0.0, gradients[0].sign() * (0.5 + gradients[0].abs()))]
        for gradient in gradients:
            optimizer.step_flat(
                master, gradient.to(grad_dtype), optimizer.state[master], optimizer.param_groups[0], low, scale
            )
        assert master.dtype == master_dtype
        seen = [gradient.to(grad_dtype).float() * 0.25 for gradient in gradients]
        if master_dtype == torch.float32:
            assert_close(family, master.detach(), weight, seen, **options)
        else:
            expected = getattr(update_reference, family)(weight, seen, **NUMBERS, **options)
            expected = expected[0] if family == "lion" else expected
            torch.testing.assert_close(master.detach().double(), expected, rtol=2**-7, atol=1e-4)
        if low is not None:
            assert torch.equal(low, master.detach().to(low_dtype)) and not around[0] and not around[-1]
        assert optimizer.state[master]["step"] == len(gradients)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_tensors_and_odd_addresses(family: str, device: str) -> None:
    """More tensors than one launch takes, some of them views that no vector access may touch, two groups."""
    options = OPTIONS[family][-1]
    drawn = [values(size, 2, device) for size in range(1, 140)]
    base = torch.cat([torch.zeros(1, device=device), *[weight for weight, _ in drawn]])
    views = list(base[1:].split([weight.numel() for weight, _ in drawn]))
    for view in views:
        view.requires_grad_()
    groups = [{"params": views[::2]}, {"params": views[1::2], "lr": 2e-2}]
    optimizer = FAMILIES[family](groups, **NUMBERS, **options)
    for step in range(2):
        for view, (_, gradients) in zip(views, drawn):
            view.grad = gradients[step]
        optimizer.step()
    for index, (view, (weight, gradients)) in enumerate(zip(views, drawn)):
        changed = NUMBERS | ({"lr": 2e-2} if index % 2 else {})
        expected = getattr(update_reference, family)(weight, gradients, **changed, **options)
        expected = expected[0] if family == "lion" else expected
        torch.testing.assert_close(view.detach().double(), expected, rtol=1e-5, atol=2e-6)
    assert base[0] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_are_scaled_and_rounded_together(family: str, device: str) -> None:
    """Some have low-precision weights beside them, of either dtype, and some have none."""
    options = OPTIONS[family][-1]
    drawn = [values(size, 3, device) for size in (4, 9, 1000, 1023, 2050)]
    optimizer = make(family, [weight for weight, _ in drawn], **options)
    parameters = optimizer.param_groups[0]["params"]
    low = {
        parameter: torch.zeros_like(parameter, dtype=dtype)
        for parameter, dtype in zip(parameters, [None, torch.bfloat16, torch.float16, torch.bfloat16, None])
        if dtype is not None
    }
    for step in range(3):
        for parameter, (_, gradients) in zip(parameters, drawn):
            parameter.grad = gradients[step]
        optimizer.step_each(low, torch.tensor(0.25, device=device))
    for parameter, (weight, gradients) in zip(parameters, drawn):
        assert_close(family, parameter.detach(), weight, [gradient * 0.25 for gradient in gradients], **options)
        if parameter in low:
            assert torch.equal(low[parameter], parameter.detach().to(low[parameter].dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_that_joined_late_have_their_own_step(family: str) -> None:
    options = OPTIONS[family][0]
    (early, gradients), (late, _) = values(33, 3, "cpu"), values(34, 3, "cpu")
    optimizer = make(family, [early, late], **options)
    first, second = optimizer.param_groups[0]["params"]
    for step, gradient in enumerate(gradients):
        first.grad = gradient
        second.grad = torch.ones(34) if step == 2 else None
        optimizer.step()
    assert_close(family, first.detach(), early, gradients, **options)
    assert_close(family, second.detach(), late, [torch.ones(34)], **options)


def test_state_is_named_as_in_torch() -> None:
    """A checkpoint of torch's AdamW goes on in FusedAdam, and the other way round."""
    weight, gradients = values(100, 6, "cpu")
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizers = [cls([torch.nn.Parameter(weight.clone())], **options) for cls in (FusedAdam, torch.optim.AdamW)]

    def run(optimizer: torch.optim.Optimizer, some: list[torch.Tensor]) -> None:
        for gradient in some:
            optimizer.param_groups[0]["params"][0].grad = gradient
            optimizer.step()

    for optimizer in optimizers:
        run(optimizer, gradients[:3])
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert set(states[0]["state"][0]) == set(states[1]["state"][0])
    optimizers[0].load_state_dict(states[1])
    optimizers[1].load_state_dict(states[0])
    for optimizer in optimizers:
        run(optimizer, gradients[3:])
    fused, ours = (optimizer.param_groups[0]["params"][0] for optimizer in optimizers)
    torch.testing.assert_close(fused, ours, rtol=1e-6, atol=1e-7)
    assert_close("adam", fused.detach(), weight, gradients, weight_decay=0.1, eps=1e-8)


def test_wide_and_strided_parameters() -> None:
    """fp64 stays fp64, and memory that is not contiguous is updated in place."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    strided = torch.randn(6, 4, generator=generator).t()
    parameters = [
        torch.nn.Parameter(wide.clone()),
        torch.nn.Parameter(strided.clone(memory_format=torch.preserve_format)),
    ]
    gradients = [torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.randn(4, 6, generator=generator)]
    optimizer = FusedAdam(parameters, weight_decay=0.1, **NUMBERS)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    optimizer.step()
    for parameter, weight, gradient, digits in zip(parameters, [wide, strided], gradients, [1e-12, 1e-6]):
        expected = update_reference.adam(weight, [gradient], eps=1e-8, weight_decay=0.1, **NUMBERS)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=digits, atol=digits)


def test_lamb_clips_the_norm_of_all_gradients_and_tells_its_ratios() -> None:
    (one, (first,)), (other, (second,)) = values(20, 1, "cpu"), values(30, 1, "cpu")
    optimizer = FusedLamb(
        [torch.nn.Parameter(one.clone()), torch.nn.Parameter(other.clone())], max_grad_norm=0.01, eps=1.0
    )
    factor = 0.01 / torch.cat([first, second]).double().norm()
    assert factor < 1
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], (first, second)):
        parameter.grad = gradient
    optimizer.step()
    ratios = optimizer.get_lamb_coeffs()
    for parameter, weight, gradient, ratio in zip(
        optimizer.param_groups[0]["params"], (one, other), (first, second), ratios
    ):
        clipped = gradient.double() * factor
        expected = update_reference.lamb(weight, [clipped], 1e-3, (0.9, 0.999), 1.0, 0.0)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)
        moved = (weight - parameter.detach()).double().norm()
        direction = clipped / (clipped.abs() + 1.0)
        assert ratio == pytest.approx(float(moved / (1e-3 * direction.norm())), rel=1e-3)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda p: FusedAdam(p, lr=-1.0), ValueError, "FusedAdam: lr must not be negative, got -1.0"),
        (lambda p: FusedAdam(p, betas=(0.9, 1.0)), ValueError, r"FusedAdam: betas .* got \(0.9, 1.0\)"),
        (lambda p: FusedLion(p, betas=(-0.1, 0.9)), ValueError, "FusedLion: betas"),
        (lambda p: FusedLamb(p, eps=float("nan")), ValueError, "FusedLamb: eps must not be negative, got nan"),
        (lambda p: FusedLamb(p, min_coeff=2.0, max_coeff=1.0), ValueError, "min_coeff <= max_coeff"),
        (lambda p: FusedLamb(p, amsgrad=True), RuntimeError, "no AMSGrad"),
        (lambda p: FusedAdam(p).step(grads=[p]), RuntimeError, r"FusedAdam.step\(\) does not take grads"),
        (lambda p: FusedLion(p).step(scale=2.0), RuntimeError, "does not take scale"),
    ],
)
def test_bad_arguments_are_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build([torch.nn.Parameter(torch.ones(2))])


def test_gradients_that_cannot_be_used_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="FusedAdam does not take sparse gradients"):
        FusedAdam([parameter]).step()
    optimizer = FusedAdam([parameter])
    with pytest.raises(ValueError, match="6 elements of parameter, 5 of gradient"):
        optimizer.step_flat(parameter, torch.ones(5), {}, optimizer.param_groups[0])


def test_closure_and_zero_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([parameter], set_grad_none=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert (parameter < 1).all()
    optimizer.zero_grad()
    assert torch.equal(parameter.grad, torch.zeros(3))
    optimizer.zero_grad(set_to_none=True)
    assert parameter.grad is None
