# SPDX-License-Identifier: Apache-2.0
"""The linear that keeps its parameters for the backward computes what torch's does, and keeps nothing else."""

import pytest
import torch
from torch import nn

from deepspeed.runtime.zero.linear import (
    LinearFunctionForZeroStage3,
    LinearModuleForZeroStage3,
    zero3_linear_wrap,
)

plain_linear = nn.functional.linear


def make(input_shape, out=3, bias=True, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    width = input_shape[-1]
    weight_shape = (width,) if out is None else (out, width)
    tensors = [torch.randn(input_shape, dtype=dtype), torch.randn(weight_shape, dtype=dtype)]
    if bias:
        tensors.append(torch.randn(() if out is None else (out,), dtype=dtype))
    return [tensor.requires_grad_() for tensor in tensors]


def copies(tensors):
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def run(function, tensors, weights):
    output = function(*tensors)
    (output * weights.to(output.dtype)).sum().real.backward()
    return output, [tensor.grad for tensor in tensors]


# torch's own linear has no bias beside a weight of one dimension
KINDS = {"matrix": (3, True), "matrix_no_bias": (3, False), "row": (1, True), "vector": (None, False)}


@pytest.mark.parametrize(("out", "bias"), KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4), (2, 1, 3, 4), (0, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128])
def test_forward_and_gradients(shape, out, bias, dtype):
    tensors = make(shape, out, bias, dtype)
    others = copies(tensors)
    weights = torch.randn(plain_linear(*tensors).shape, dtype=dtype)
    expected, gradients = run(plain_linear, others, weights)
    output, made = run(zero3_linear_wrap, tensors, weights)
    assert torch.equal(output, expected)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-12
    for one, other in zip(made, gradients):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("frozen", range(8))
def test_only_what_is_needed_is_kept(frozen):
    tensors = make((5, 4))
    for position, tensor in enumerate(tensors):
        tensor.requires_grad_(not frozen >> position & 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = zero3_linear_wrap(*tensors)
    needs_input, needs_weight, needs_bias = (tensor.requires_grad for tensor in tensors)
    expected = [tensors[0]] * needs_weight + [tensors[1]] * needs_input
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in expected]
    assert output.requires_grad == (needs_input or needs_weight or needs_bias)
    if output.requires_grad:
        output.sum().backward()
    assert [t.grad is not None for t in tensors] == [needs_input, needs_weight, needs_bias]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trainable", [True, False])
def test_weight_may_be_freed_and_gathered_into_other_memory(autocast, trainable):
    tensors = make((5, 4), dtype=torch.float32)
    tensors[1] = nn.Parameter(tensors[1].detach(), requires_grad=trainable)
    others = copies(tensors)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, expected = zero3_linear_wrap(*tensors), plain_linear(*others)
    stored = tensors[1].detach().clone()
    tensors[1].data = torch.empty(0)
    tensors[1].data = stored
    output.sum().backward()
    expected.sum().backward()
    for one, other in zip(tensors, others):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_weight_is_looked_into_only_in_the_backward():
    x, weight = make((5, 4), bias=False)
    output = zero3_linear_wrap(x, weight)
    weight.data = weight.data * 2  # as if gathered again, with other values
    output.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(5, 4))


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32)])
def test_autocast(dtypes):
    tensors = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(make((7, 4)), dtypes)]
    others = copies(tensors)
    weights = torch.randn(7, 3)
    with torch.autocast("cpu", torch.bfloat16):
        output, gradients = run(zero3_linear_wrap, tensors, weights)
        expected, wanted = run(plain_linear, others, weights)
    assert output.dtype == expected.dtype == torch.bfloat16 and torch.equal(output, expected)
    for one, other, dtype in zip(gradients, wanted, dtypes):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_autocast_leaves_double_precision_to_torchs_rule():
    tensors = make((5, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert zero3_linear_wrap(*tensors).dtype == plain_linear(*tensors).dtype == torch.float64


def test_other_uses_of_the_weight_under_autocast_keep_their_gradient():
    x, weight = make((5, 4), out=4, bias=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        zero3_linear_wrap(x.detach(), weight.detach())
        hidden = zero3_linear_wrap(x, weight)
        output = torch.mm(hidden, weight)
        (gradient,) = torch.autograd.grad(output.float().sum(), weight)
    exact = (x @ weight.t() @ weight).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, weight)[0], rtol=0.1, atol=0.3)


@pytest.mark.parametrize("out", [3, None])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_gradients_of_gradients(shape, out):
    assert torch.autograd.gradgradcheck(zero3_linear_wrap, make(shape, out, bias=out is not None))
    assert torch.autograd.gradcheck(zero3_linear_wrap, make(shape, out, bias=out is not None))


def test_every_gradient_can_be_differentiated():
    """gradgradcheck passes over gradients that require none."""
    tensors = make((5, 4))
    others = copies(tensors)
    for function, arguments in ((zero3_linear_wrap, tensors), (plain_linear, others)):
        first = torch.autograd.grad(function(*arguments).pow(3).sum(), arguments, create_graph=True)
        for gradient in first:
            assert gradient.requires_grad
        sum(gradient.square().sum() for gradient in first).backward()
    for one, other in zip(tensors, others):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_torch_func():
    x, weight, bias = (t.detach() for t in make((6, 4)))

    def loss(function):
        return lambda weight, bias, x: function(x, weight, bias).square().sum()

    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2)), in_dims=(None, None, 0)),
        lambda f: torch.func.grad(
            lambda w, b, x: torch.func.vmap(f, in_dims=(None, None, 0))(w, b, x).sum(), argnums=(0, 1, 2)
        ),
        lambda f: torch.func.jacrev(torch.func.grad(f)),
    ):
        made, expected = (transform(loss(f))(weight, bias, x) for f in (zero3_linear_wrap, plain_linear))
        torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


def test_vmap_over_weights():
    x, weight, bias = torch.randn(5, 2, 4), torch.randn(5, 3, 4), torch.randn(5, 3)
    made, expected = (torch.func.vmap(f)(x, weight, bias) for f in (zero3_linear_wrap, plain_linear))
    torch.testing.assert_close(made, expected)


def test_inference_and_no_grad():
    tensors = make((5, 4))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(zero3_linear_wrap(*tensors), plain_linear(*tensors))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    tensors = make((5, 4))
    others = copies(tensors)
    torch.utils.checkpoint.checkpoint(zero3_linear_wrap, *tensors, use_reentrant=reentrant).square().sum().backward()
    plain_linear(*others).square().sum().backward()
    for one, other in zip(tensors, others):
        torch.testing.assert_close(one.grad, other.grad)


def test_names():
    assert LinearFunctionForZeroStage3.generate_vmap_rule is True
    x = torch.ones(2, 4)
    assert LinearFunctionForZeroStage3.apply(x, torch.ones(3, 4)).shape == (2, 3)


@pytest.mark.parametrize("bias", [True, False])
def test_module(bias):
    torch.manual_seed(0)
    layer = LinearModuleForZeroStage3(100, 7, bias)
    plain = nn.Linear(100, 7, bias)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 100)
    assert torch.equal(layer(x), plain(x))
    assert layer.extra_repr() == plain.extra_repr()
    assert 0.09 < layer.weight.abs().max() <= 0.1
    assert LinearModuleForZeroStage3(0, 2)(torch.zeros(3, 0)).shape == (3, 2)
