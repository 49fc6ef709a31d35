# SPDX-License-Identifier: Apache-2.0
"""Adam, Adagrad and Lion in host memory, by their kernels and by torch, against float64 arithmetic and torch.optim."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepspeed.ops import cpu_optimizer
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder

SIZES = [0, 1, 7, 8, 9, 1023]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BUILDERS = {
    DeepSpeedCPUAdam: CPUAdamBuilder,
    DeepSpeedCPUAdagrad: CPUAdagradBuilder,
    DeepSpeedCPULion: CPULionBuilder,
}
KINDS = list(BUILDERS)
WHY_NOT = CPUAdamBuilder().why_not()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"kernels cannot be compiled: {WHY_NOT}")


@pytest.fixture(params=[pytest.param("kernel", marks=needs_compiler), "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two does the work. A kernel that cannot be loaded although there is a compiler fails the test."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_optimizer, "_native", lambda name: None)
    else:
        monkeypatch.setattr(cpu_optimizer, "_native", loaded)
    return request.param


def loaded(builder_name: str) -> Any:
    return next(builder() for builder in BUILDERS.values() if builder.__name__ == builder_name).load()


def options(kind: type) -> Iterator[dict[str, Any]]:
    decays = [0.0, 0.1]
    if kind is DeepSpeedCPUAdam:
        for decay, decoupled, correction, amsgrad in itertools.product(decays, *[[False, True]] * 3):
            yield {
                "weight_decay": decay,
                "adamw_mode": decoupled,
                "bias_correction": correction,
                "amsgrad": amsgrad,
            }
        yield {"betas": (0.3, 0.4), "weight_decay": 0.1}  # interpolates from the other end
    elif kind is DeepSpeedCPULion:
        yield from ({"weight_decay": decay, "betas": betas} for decay in decays for betas in ((0.9, 0.99), (0.3, 0.4)))
    else:
        yield from ({"weight_decay": decay, "eps": eps} for decay in decays for eps in (1e-10, 1e-3))


class Reference:
    """One optimizer in float64, for tensors of any shape; it steps from whatever values it is given."""

    def __init__(self, kind: type, lr: float, given: dict[str, Any]) -> None:
        self.kind, self.lr = kind, lr
        self.betas = given.get("betas", (0.9, 0.999))
        self.eps = given.get("eps", 1e-10 if kind is DeepSpeedCPUAdagrad else 1e-8)
        self.decay = given.get("weight_decay", 0.0)
        self.decoupled = given.get("adamw_mode", True)
        self.correction = given.get("bias_correction", True)

    def step(self, weight: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor], count: int) -> Any:
        """New weight and states."""
        return getattr(self, self.kind.__name__)(weight, gradient, states, count)

    def DeepSpeedCPUAdam(self, w, g, states, count):
        mean, square, *largest = states
        if self.decoupled:
            w = w * (1 - self.lr * self.decay)
        else:
            g = g + self.decay * w
        mean = self.betas[0] * mean + (1 - self.betas[0]) * g
        square = self.betas[1] * square + (1 - self.betas[1]) * g * g
        used = torch.maximum(largest[0], square) if largest else square
        first, second = (1 - beta**count if self.correction else 1.0 for beta in self.betas)
        w = w - self.lr * (mean / first) / ((used / second).sqrt() + self.eps)
        return w, [mean, square, *([used] if largest else [])]

    def DeepSpeedCPUAdagrad(self, w, g, states, count):
        g = g + self.decay * w
        total = states[0] + g * g
        return w - self.lr * g / (total.sqrt() + self.eps), [total]

    def DeepSpeedCPULion(self, w, g, states, count):
        direction = self.betas[0] * states[0] + (1 - self.betas[0]) * g
        mean = self.betas[1] * states[0] + (1 - self.betas[1]) * g
        return w * (1 - self.lr * self.decay) - self.lr * direction.sign(), [mean]


STATES = {DeepSpeedCPUAdam: 2, DeepSpeedCPUAdagrad: 1, DeepSpeedCPULion: 1}


def gradients(count: int, seed: int) -> list[torch.Tensor]:
    """Of the sum of all sizes; no element is small beside its momentum, whose sign could then depend on rounding."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(SIZES)
    signs = torch.randint(0, 2, (size,), generator=generator).mul(2).sub(1)
    return [signs * (0.5 + torch.rand(size, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_against_float64_with_all_options(kind: type, implementation: str) -> None:
    start = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(3))
    all_gradients = gradients(50, 4)
    for given in options(kind):
        parameters = [part.clone() for part in start.split(SIZES)]
        optimizer = kind(parameters, lr=1e-2, **given)
        reference = Reference(kind, 1e-2, given)
        weight = start.double()
        states = [torch.zeros_like(weight)] * (STATES[kind] + given.get("amsgrad", False))
        for count, gradient in enumerate(all_gradients, 1):
            for parameter, part in zip(parameters, gradient.split(SIZES)):
                parameter.grad = part.clone()
            optimizer.step()
            weight, states = reference.step(weight, gradient.double(), states, count)
        assert (weight - start).abs().min() > 1e-3
        torch.testing.assert_close(torch.cat(parameters).double(), weight, rtol=2e-6, atol=2e-6, msg=str(given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp32_states", [True, False])
def test_every_mix_of_dtypes_rounds_the_true_value(kind: type, fp32_states: bool, implementation: str) -> None:
    # Each step starts from what the optimizer has, so that one rounding is all that may lie between the two.
    start = torch.randn(1023 + 9, generator=torch.Generator().manual_seed(5))
    scale = torch.tensor(0.25) if fp32_states else 0.25
    signs, generator = start.sign(), torch.Generator().manual_seed(1)
    for master, grad, low in itertools.product(DTYPES, DTYPES, [None, *DTYPES]):
        parameter = start.to(master)
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, fp32_optimizer_states=fp32_states)
        reference = Reference(kind, 1e-2, {"weight_decay": 0.1})
        state, output = {}, None if low is None else torch.empty(start.numel(), dtype=low)
        states = [torch.zeros_like(start, dtype=torch.float64)] * STATES[kind]
        for count in range(1, 4):
            gradient = (signs * (0.5 + torch.rand(start.numel(), generator=generator))).to(grad)
            expected, states = reference.step(parameter.double(), gradient.double() * 0.25, states, count)
            optimizer.step_flat(parameter, gradient, state, optimizer.param_groups[0], output, scale)
            names = [name for name in state if name != "step"]
            assert len(names) == STATES[kind] and state["step"] == count
            for name, value in zip(names, states):
                assert state[name].dtype == (torch.float32 if fp32_states else master)
                assert_rounded(state[name], value)
            assert_rounded(parameter, expected)
            if output is not None:
                assert_rounded(output, expected)
            states = [state[name].double() for name in names]


def assert_rounded(found: torch.Tensor, true: torch.Tensor) -> None:
    """Half a unit in the last place of its dtype, and the error of fp32 arithmetic."""
    half_unit = torch.finfo(found.dtype).eps / 2 * true.abs() + torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - true).abs() <= half_unit * 1.001 + 2e-6 * true.abs().clamp(min=0.1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_ten_million_elements(kind: type, implementation: str) -> None:
    size = 10_000_000 if implementation == "kernel" else 1_000_000
    start = torch.linspace(-3, 3, size)
    gradient = (start * 1000).sin_()
    parameter = start.clone()
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.1)
    optimizer.step_flat(parameter, gradient, {}, optimizer.param_groups[0])
    reference = Reference(kind, 1e-2, {"weight_decay": 0.1})
    for begin in range(0, size, 500_000):
        part = slice(begin, begin + 500_000)
        weight = start[part].double()
        zero = [torch.zeros_like(weight)] * STATES[kind]
        expected, _ = reference.step(weight, gradient[part].double(), zero, 1)
        assert (parameter[part] - expected).abs().max() < 2e-6


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_instruction_set_threads_and_addresses_do_not_change_a_bit(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    native = BUILDERS[kind]().load()
    assert native.levels()[-1] == "portable"
    size = 70_001  # enough for two threads
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(size, generator=generator)
    before = torch.get_num_threads()
    extra = {"amsgrad": True} if kind is DeepSpeedCPUAdam else {}
    for master, grad, low in [DTYPES, DTYPES[::-1], [torch.bfloat16, torch.float16, torch.bfloat16]]:
        results = []
        gradient = torch.randn(size, generator=generator).to(grad)
        for level, threads, offset in [*((level, 1, 0) for level in native.levels()), (native.levels()[0], 2, 1)]:
            monkeypatch.setenv(cpu_optimizer.LEVEL_VARIABLE, level)
            torch.set_num_threads(threads)
            try:
                parameter = torch.empty(size + offset, dtype=master)[offset:].copy_(start)
                optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, **extra)
                state, output = {}, torch.zeros(size + offset, dtype=low)[offset:]
                for _ in range(2):
                    optimizer.step_flat(parameter, gradient, state, optimizer.param_groups[0], output)
            finally:
                torch.set_num_threads(before)
            results.append([parameter, output, *state.values()])
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0], other))
        assert not torch.equal(results[0][0], start.to(master))
    monkeypatch.setenv(cpu_optimizer.LEVEL_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="DS_CPU_SIMD='mmx'"):
        optimizer.step_flat(parameter, gradient, state, optimizer.param_groups[0])


@needs_compiler
def test_conversions_are_torchs_for_every_kind_of_number(monkeypatch: pytest.MonkeyPatch) -> None:
    native = CPULionBuilder().load()
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(8), dtype=torch.int64)
    near_half = torch.arange(0x33000000 - 50, 0x33000000 + 50)  # around the smallest fp16
    ties = torch.arange(0x38800000 - 2**15, 0x38800000 + 2**15, 2**11)  # from subnormal to normal fp16
    edge = torch.arange(0x477FE000, 0x47801000, 2**8)  # where fp16 ends
    numbers = torch.cat([bits, near_half, ties, edge, edge - 2**31]).to(torch.int32).view(torch.float32)
    for level in native.levels():
        monkeypatch.setenv(cpu_optimizer.LEVEL_VARIABLE, level)
        for dtype in DTYPES[1:]:
            # With beta2 = 0 the momentum becomes the gradient, with lr = 0 the weight stays.
            lion = DeepSpeedCPULion([torch.zeros(1)], lr=0.0, betas=(0.0, 0.0))
            gradient, state = halves.view(dtype), {}
            keep = gradient.isfinite()
            lion.step_flat(torch.zeros(2**16), gradient, state, lion.param_groups[0])
            assert torch.equal(state["exp_avg"][keep], gradient.float()[keep])
            assert not state["exp_avg"][~keep].isfinite().any()
            output = torch.empty(numbers.numel(), dtype=dtype)
            lion.step_flat(numbers.clone(), torch.zeros_like(numbers), {}, lion.param_groups[0], output)
            torch.testing.assert_close(output, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


TORCHS = {DeepSpeedCPUAdam: torch.optim.AdamW, DeepSpeedCPUAdagrad: torch.optim.Adagrad}


@pytest.mark.parametrize("kind", list(TORCHS))
@pytest.mark.parametrize("given", [{}, {"amsgrad": True}, {"weight_decay": 0.1}], ids=str)
def test_what_is_not_finite_becomes_what_it_becomes_in_torch(
    kind: type, given: dict[str, Any], implementation: str
) -> None:
    if kind is DeepSpeedCPUAdagrad and "amsgrad" in given:
        return
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, 1e20, 1e-30, 1e-45, 0.0, -0.0, 1.0])
    first, weight = torch.cartesian_prod(odd, odd).unbind(1)
    ours, theirs = weight.clone(), weight.clone()
    given = {"weight_decay": 0.0, **given}
    optimizers = [kind([ours], **given), TORCHS[kind]([theirs], **given, foreach=False)]
    for gradient in (first, torch.ones_like(first), first.flip(0)):
        for optimizer, parameter in zip(optimizers, (ours, theirs)):
            parameter.grad = gradient.clone()
            optimizer.step()
            if "max_exp_avg_sq" in optimizer.state[parameter]:
                optimizer.state[parameter]["max_exp_avg_sq"][-1] = torch.nan  # the largest alone
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-7)
        for name, value in optimizers[1].state[theirs].items():
            torch.testing.assert_close(optimizers[0].state[ours][name], value, equal_nan=True, rtol=1e-5, atol=0)
    assert ours.isnan().any() and ours.isfinite().any()


def test_a_nan_reaches_the_weight_in_lion(implementation: str) -> None:
    parameter = torch.ones(40)
    parameter.grad = torch.ones(40)
    parameter.grad[17], parameter.grad[38], parameter.grad[3] = torch.nan, torch.inf, -torch.inf
    DeepSpeedCPULion([parameter], lr=0.5).step()
    expected = torch.full((40,), 0.5)
    expected[17], expected[3] = torch.nan, 1.5
    assert torch.equal(parameter.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_layout_does_not_change_a_bit(kind: type, implementation: str) -> None:
    shape = (4, 6, 5, 3)
    start, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(9))
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.clone(),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        lambda t: torch.stack([t, t], dim=-1)[..., 1],
        lambda t: torch.cat([t, t], dim=2)[:, :, 5:],
    ]
    results = []
    for of_weight, of_gradient, of_low in [(0, 0, 0), (1, 1, 1), (1, 0, 2), (0, 2, 3), (2, 3, 1), (3, 1, 4), (4, 4, 0)]:
        parameter = layouts[of_weight](start)
        output = layouts[of_low](torch.zeros(shape))
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.1)
        state = {}
        for _ in range(2):
            before = gradient.clone()
            optimizer.step_flat(parameter, layouts[of_gradient](gradient), state, optimizer.param_groups[0], output)
            assert torch.equal(gradient, before)
        results.append((parameter, output, *state.values()))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))
    assert torch.equal(results[0][0], results[0][1]) and not torch.equal(results[0][0], start)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_repeats_one_element(kind: type, implementation: str) -> None:
    one, two = torch.ones(6, 4), torch.ones(6, 4)
    for parameter, gradient in ((one, torch.ones(()).expand(6, 4)), (two, torch.ones(6, 4))):
        parameter.grad = gradient
        kind([parameter], lr=0.1).step()
    assert torch.equal(one, two) and not torch.equal(one, torch.ones(6, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_many_tensors_in_one_call_are_each_their_own(kind: type, implementation: str) -> None:
    # Threads share all tensors of a group: their borders fall into, between and beside tensors.
    sizes = [0, 3, 40_000, 64, 0, 100, 30_001, 65, 5, 0]
    starts = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    together, alone = ([start.clone() for start in starts] for _ in range(2))
    for parameter in [*together, *alone]:
        parameter.grad = parameter.cos()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kind(together, lr=0.1).step()
    finally:
        torch.set_num_threads(before)
    for parameter in alone:
        kind([parameter], lr=0.1).step()
    assert all(torch.equal(one, two) for one, two in zip(together, alone))


@pytest.mark.parametrize("kind", list(TORCHS))
def test_state_goes_to_torch_and_back(kind: type, implementation: str) -> None:
    def step(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = parameter.sin()
        optimizer.step()

    ours, theirs = ([torch.linspace(1, 2, size) for size in (5, 30)] for _ in range(2))
    ours_optimizer = kind([{"params": ours[:1], "lr": 0.02}, {"params": ours[1:]}], weight_decay=0.1)
    theirs_optimizer = TORCHS[kind]([{"params": theirs[:1]}, {"params": theirs[1:]}])
    step(ours_optimizer, ours)
    for target, source in zip(theirs, ours):
        target.copy_(source)
    theirs_optimizer.load_state_dict(copy.deepcopy(ours_optimizer.state_dict()))  # torch does not copy
    for _ in range(2):
        step(ours_optimizer, ours)
        step(theirs_optimizer, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    back = kind([{"params": ours[:1]}, {"params": ours[1:]}])
    back.load_state_dict(theirs_optimizer.state_dict())
    assert [group["lr"] for group in back.param_groups] == [group["lr"] for group in ours_optimizer.param_groups]
    for _ in range(2):
        step(back, ours)
        step(theirs_optimizer, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert back.state[ours[0]]["step"] == 5
    assert set(back.state[ours[0]]) == set(theirs_optimizer.state[theirs[0]])


def test_moments_of_16_bit_parameters_keep_their_digits_when_loaded(implementation: str) -> None:
    parameter = torch.randn(50).bfloat16()
    parameter.grad = torch.randn(50).bfloat16()
    optimizer = DeepSpeedCPUAdam([parameter])
    optimizer.step()
    other = DeepSpeedCPUAdam([parameter])
    other.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "param_groups": loaded["param_groups"]})
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    for name, value in optimizer.state[parameter].items():
        assert other.state[parameter][name].dtype == torch.float32
        assert torch.equal(other.state[parameter][name], value)
    other.step()  # on tensors of its own
    assert not torch.equal(other.state[parameter]["exp_avg"], saved["state"][0]["exp_avg"])
    low = DeepSpeedCPUAdam([parameter], fp32_optimizer_states=False)
    low.load_state_dict(saved)
    assert low.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_torchs_settings_that_have_a_meaning_here(implementation: str) -> None:
    ours, theirs = torch.ones(9), torch.ones(9)
    theirs_optimizer = torch.optim.AdamW([theirs], lr=0.1, maximize=True)
    ours_optimizer = DeepSpeedCPUAdam([ours])
    ours_optimizer.load_state_dict(theirs_optimizer.state_dict())
    for parameter, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
        parameter.grad = torch.full((9,), 0.5)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert (ours > 1.05).all()
    state = torch.optim.AdamW([theirs], differentiable=True).state_dict()
    with pytest.raises(ValueError, match="not differentiable"):
        ours_optimizer.load_state_dict(state)

    ours, theirs = torch.ones(9), torch.ones(9)
    theirs_optimizer = torch.optim.Adagrad([theirs], lr=0.1, lr_decay=0.5, initial_accumulator_value=0.25)
    ours_optimizer = DeepSpeedCPUAdagrad(
        [{"params": [ours], "lr_decay": 0.5, "initial_accumulator_value": 0.25}], lr=0.1
    )
    for _ in range(3):
        for parameter, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
            parameter.grad = torch.full((9,), 0.5)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_another_dtype_than_the_parameter(implementation: str) -> None:
    parameter = torch.ones(30, requires_grad=True)
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip("this torch wants gradients of the parameter's dtype")
    parameter.grad_dtype = torch.bfloat16
    parameter.grad = torch.full((30,), 0.3, dtype=torch.bfloat16)
    DeepSpeedCPUAdam([parameter], lr=0.1).step()
    assert parameter.dtype == torch.float32
    torch.testing.assert_close(parameter.detach(), torch.full((30,), 0.9))


def test_64_bit_parameters_step_in_64_bits(implementation: str) -> None:
    start = torch.randn(20, dtype=torch.float64)
    for kind in KINDS:
        parameter = start.clone()
        parameter.grad = torch.randn(20, dtype=torch.float64)
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.1)
        optimizer.step()
        zero = torch.zeros_like(start)
        expected, _ = Reference(kind, 1e-2, {"weight_decay": 0.1}).step(start, parameter.grad, [zero] * STATES[kind], 1)
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


def test_closure_missing_gradients_and_subgroups(implementation: str) -> None:
    parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
    optimizer = DeepSpeedCPUAdam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], lr=0.25)

    def closure() -> torch.Tensor:
        loss = (parameters[0] ** 2).sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) == 4.0
    assert [float(parameter.detach()[0]) for parameter in parameters] == pytest.approx([0.75, 1.0, 1.0])
    assert list(optimizer.state) == [parameters[0]]
    parameters[1].grad = parameters[2].grad = torch.ones(4)
    optimizer.step_subgroup(2)
    assert [float(parameter.detach()[0]) for parameter in parameters] == pytest.approx([0.75, 1.0, 0.5])
    with pytest.raises(IndexError, match="3 parameters, and none at 3"):
        optimizer.step_subgroup(3)
    with pytest.raises(NotImplementedError, match="cannot be undone"):
        optimizer.rollback_subgroup(0)
    # The first has two steps behind it and the others fewer: each has its own correction.
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [2, 1, 2]
    assert float(parameters[1].detach()[0]) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda p: DeepSpeedCPUAdam(p, lr=-1), ValueError, "lr must not be negative"),
        (lambda p: DeepSpeedCPUAdam(p, betas=(0.9, 1.0)), ValueError, "1.0"),
        (lambda p: DeepSpeedCPULion(p, weight_decay=-0.1), ValueError, "weight_decay must not be negative"),
        (lambda p: DeepSpeedCPUAdagrad(p, eps=-1), ValueError, "eps must not be negative"),
        (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), ValueError, "amsgrad"),
    ],
)
def test_bad_arguments_are_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build([torch.ones(3)])


def test_tensors_that_cannot_be_stepped_are_refused() -> None:
    optimizer = DeepSpeedCPUAdam([torch.ones(3)])
    group = optimizer.param_groups[0]
    ones = torch.ones(3)
    for master, gradient, low, error, message in [
        (ones, ones.to("meta"), None, RuntimeError, "a gradient is on meta"),
        (ones.to("meta"), ones, None, RuntimeError, "a parameter is on meta"),
        (ones, ones.to_sparse(), None, RuntimeError, "does not take sparse"),
        (ones, ones.int(), None, RuntimeError, "a gradient is torch.int32"),
        (ones.cfloat(), ones.cfloat(), None, RuntimeError, "a parameter is torch.complex64"),
        (ones, torch.ones(4), None, ValueError, r"a gradient has shape \(4,\), its parameter \(3,\)"),
        (ones, ones, torch.ones(2), ValueError, "a low-precision weight has shape"),
    ]:
        with pytest.raises(error, match=message):
            optimizer.step_flat(master, gradient, {}, group, low)
    assert torch.equal(ones, torch.ones(3))


def test_optimizers_are_numbered() -> None:
    first, second = (DeepSpeedCPULion([torch.ones(1)]) for _ in range(2))
    assert second.optimizer_id == first.optimizer_id + 1
