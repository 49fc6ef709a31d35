# SPDX-License-Identifier: Apache-2.0
"""Counts of the flops profiler against figures worked out by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.profiling.flops_profiler import (
    FlopsProfiler,
    get_model_profile,
    get_module_duration,
    get_module_flops,
    get_module_macs,
    wrapFunc,
)
from deepspeed.profiling.flops_profiler.profiler import MODULE_HOOK_MAPPING

BATCH, IN, OUT = 3, 5, 7


def counts(model, *inputs, **kwargs):
    flops, macs, _ = get_model_profile(model, args=list(inputs), print_profile=False, as_string=False, **kwargs)
    assert flops == 2 * macs
    return flops


def hooks_of(model):
    return [
        (name, kind)
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if getattr(module, kind)
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    linear = nn.Linear(IN, OUT, bias=bias)
    assert counts(linear, torch.ones(BATCH, IN)) == 2 * BATCH * IN * OUT
    assert counts(linear, torch.ones(2, BATCH, IN)) == 2 * 2 * BATCH * IN * OUT


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups):
    conv = nn.Conv2d(4, 6, kernel_size=(3, 2), stride=(2, 1), groups=groups)
    height, width = (9 - 3) // 2 + 1, 8 - 2 + 1
    multiplications = BATCH * 6 * height * width * (4 // groups) * 3 * 2
    assert counts(conv, torch.ones(BATCH, 4, 9, 8)) == 2 * multiplications


class Attention(nn.Module):
    def __init__(self, width, heads, fused):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [True, False])
def test_attention(fused):
    width, heads, length = 16, 4, 6
    projections = BATCH * length * width * (3 * width + width)
    scores_and_sum = 2 * BATCH * heads * length * length * (width // heads)
    assert counts(Attention(width, heads, fused), torch.randn(BATCH, length, width)) == 2 * (
        projections + scores_and_sum
    )


@pytest.mark.parametrize("fused, extra_matmuls", [(True, 1), (False, 0)])
def test_attention_backward(fused, extra_matmuls):
    """The fused kernel computes the scores again."""
    width, heads, length = 16, 4, 6
    model = Attention(width, heads, fused)
    x = torch.randn(BATCH, length, width, requires_grad=True)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    y = model(x)
    with profiler.counting_backward():
        y.sum().backward()
    forward, (backward, measured) = profiler.get_total_flops(), profiler.get_backward_flops()
    profiler.end_profile()
    one_matmul = 2 * BATCH * heads * length * length * (width // heads)
    assert measured and backward == 2 * forward + extra_matmuls * one_matmul


class UsesTwice(nn.Module):
    """``shared`` runs twice, once through each of its names; ``once`` in between."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(IN, IN)
        self.once = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN))
        self.alias = self.shared

    def forward(self, x):
        return self.alias(self.once(self.shared(x)))


def test_module_used_twice():
    model = UsesTwice()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(BATCH, IN))
    profiler.stop_profile()
    once, shared = 2 * BATCH * 2 * IN * OUT, 2 * 2 * BATCH * IN * IN
    assert get_module_flops(model.shared) == shared and profiler.records[model.shared].calls == 2
    assert get_module_flops(model.once) == once and get_module_macs(model.once) == once // 2
    assert get_module_flops(model.once[0]) == once // 2 and get_module_flops(model.once[1]) == 0
    assert profiler.get_total_flops() == get_module_flops(model) == once + shared
    assert profiler.get_total_params() == IN * IN + IN + 2 * IN * OUT + IN + OUT
    children = get_module_duration(model.shared) + get_module_duration(model.once)
    assert 0 < children < get_module_duration(model) < profiler.get_total_duration()
    profiler.end_profile()
    assert get_module_flops(model) == 0 and hooks_of(model) == []


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(IN, IN)

    def forward(self, x, depth=2):
        return self(self.linear(x), depth - 1) if depth else x


def test_module_that_calls_itself_counts_once():
    model = Recursive()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(BATCH, IN))
    profiler.stop_profile()
    assert get_module_flops(model) == profiler.get_total_flops() == 2 * 2 * BATCH * IN * IN
    assert profiler.records[model].calls == 1 and profiler.records[model.linear].calls == 2
    profiler.end_profile()


def test_calls_of_submodules_alone_count_and_the_callers_own_work_does_not():
    model = UsesTwice()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    x = model.shared(torch.ones(BATCH, IN))
    x @ x.t()
    model.once(x)
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_flops() == 2 * BATCH * IN * IN + 2 * BATCH * 2 * IN * OUT
    assert profiler.total.calls == 2
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0 and get_module_flops(model.shared) == 0
    profiler.end_profile()


@pytest.mark.parametrize("kind, gates", [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_modules(kind, gates):
    """Fused kernels hide their products from the counter; two layers, both directions."""
    steps, hidden = 6, 4
    model = nn.Sequential(kind(IN, hidden, num_layers=2, bidirectional=True))
    expected = 2 * 2 * BATCH * steps * gates * hidden * ((IN + hidden) + (2 * hidden + hidden))
    x = torch.ones(steps, BATCH, IN)
    assert counts(model, x) == expected
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 2])
    assert counts(model, packed) == expected * 12 // (steps * BATCH)


def test_recurrent_cell_and_projection():
    assert counts(nn.LSTMCell(IN, 4), torch.ones(BATCH, IN)) == 2 * BATCH * 4 * 4 * (IN + 4)
    assert counts(nn.LSTM(IN, 4, proj_size=2), torch.ones(6, BATCH, IN)) == 2 * 6 * BATCH * (4 * 4 * (IN + 2) + 4 * 2)
    assert len(MODULE_HOOK_MAPPING) == 6


def test_backward_of_hidden_kernels_is_twice_their_forward():
    model = nn.LSTM(IN, 4)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    y, _ = model(torch.ones(6, BATCH, IN, requires_grad=True))
    with profiler.counting_backward():
        y.sum().backward()
    assert profiler.get_backward_flops() == (2 * profiler.get_total_flops(), True)
    profiler.end_profile()


def test_backward_measured_and_estimated():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN))
    profiler = FlopsProfiler(model, recompute_fwd_factor=0.5)
    profiler.start_profile()
    forward = 2 * BATCH * 2 * IN * OUT
    loss = model(torch.ones(BATCH, IN)).sum()
    assert profiler.get_backward_flops() == (2.5 * forward, False)
    with profiler.counting_backward():
        loss.backward()
    # the input needs no gradient, which saves one product in the first layer
    assert profiler.get_backward_flops() == (2 * forward - forward // 2, True)
    profiler.end_profile()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, IN))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant, recomputed", [(True, 2), (False, 1)])
def test_recomputation_belongs_to_the_backward(use_reentrant, recomputed):
    """Without reentrance torch stops recomputing before the last layer, whose output nobody needs again."""
    model = Checkpointed(use_reentrant)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    layer = 2 * BATCH * IN * IN
    loss = model(torch.ones(BATCH, IN, requires_grad=True)).sum()
    loss.backward()
    assert profiler.get_total_flops() == 2 * layer and profiler.total.calls == 1
    loss = model(torch.ones(BATCH, IN, requires_grad=True)).sum()
    with profiler.counting_backward():
        loss.backward()
    assert profiler.get_total_flops() == 4 * layer
    assert profiler.get_backward_flops() == ((4 + recomputed) * layer, True)
    profiler.end_profile()


def test_ignored_modules_are_left_out_with_their_children():
    model = UsesTwice()
    shared = 2 * 2 * BATCH * IN * IN
    assert counts(model, torch.ones(BATCH, IN), ignore_modules=[nn.Sequential]) == shared
    assert counts(model, torch.ones(BATCH, IN), ignore_modules=[nn.Linear]) == 0


def test_wrapped_function_counts_by_its_formula():
    def kernel(a, b):
        return a @ b + (a @ b)  # what the counter would see is replaced

    wrapped = wrapFunc(kernel, lambda a, b: (1000, 400))

    class Model(nn.Module):
        def forward(self, x):
            return wrapped(x, x.t())

    flops, macs, params = get_model_profile(Model(), (BATCH, IN), print_profile=False, as_string=False)
    assert (flops, macs, params) == (1000, 400, 0)
    assert wrapped(torch.ones(2, 2), torch.ones(2, 2)).sum() == 16


def test_failing_forward_leaves_no_counter_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(IN, IN)

        def forward(self, x):
            self.linear(x)
            raise KeyError("x")

    model = Fails()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(KeyError):
        model(torch.ones(BATCH, IN))
    assert not profiler._counter.counting
    profiler.end_profile()
    assert hooks_of(model) == []
    with pytest.raises(KeyError):
        get_model_profile(model, (BATCH, IN), print_profile=False, warm_up=0)
    assert hooks_of(model) == []


def test_stopping_within_a_forward_is_refused():
    model = nn.Linear(IN, IN)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    handle = model.register_forward_pre_hook(lambda *_: profiler.stop_profile())
    with pytest.raises(RuntimeError, match="while the model runs"):
        model(torch.ones(BATCH, IN))
    handle.remove()
    profiler.end_profile()
    assert hooks_of(model) == []


class Partitions(nn.Module):
    """Stands in for ZeRO-3: weights are empty but for the time of their module's forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        for module in inner.modules():
            whole = {}
            for name, parameter in module.named_parameters(recurse=False):
                parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape
                whole[name] = parameter.data
                parameter.data = torch.empty(0)
            module.register_forward_pre_hook(lambda m, _, whole=whole: self.fill(m, whole))
            module.register_forward_hook(lambda m, *_, whole=whole: self.fill(m, dict.fromkeys(whole, torch.empty(0))))

    @staticmethod
    def fill(module, values):
        for name, value in values.items():
            getattr(module, name).data = value

    def forward(self, x):
        return self.inner(x)


def test_partitioned_parameters_count_whole():
    model = Partitions(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN)))
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    with torch.no_grad():
        flops, _, params = get_model_profile(model, args=[torch.ones(BATCH, IN)], print_profile=False, as_string=False)
    assert flops == 2 * BATCH * 2 * IN * OUT and params == 2 * IN * OUT + IN + OUT


def test_generate_mode_and_bad_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(IN, IN)

        def forward(self, x):
            return self.linear(x)

        def generate(self, x, tokens):
            for _ in range(tokens):
                x = self(x)
            return x

    kwargs = {"x": torch.ones(BATCH, IN), "tokens": 3}
    flops, *_ = get_model_profile(Model(), kwargs=kwargs, mode="generate", print_profile=False, as_string=False)
    assert flops == 3 * 2 * BATCH * IN * IN
    with pytest.raises(ValueError, match="mode"):
        get_model_profile(Model(), kwargs=kwargs, mode="train")
    with pytest.raises(ValueError, match="input"):
        get_model_profile(Model())
    with pytest.raises(ValueError, match="input"):
        get_model_profile(Model(), (1, IN), args=[1])
