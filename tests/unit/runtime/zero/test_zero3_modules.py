# SPDX-License-Identifier: Apache-2.0
"""Modules of all kinds under ZeRO-3: what they may do with their parameters, and what they may return."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.graphs import (
    Batch,
    assert_gradients,
    expected_gradients,
    make_batch,
    make_engine,
    my_batch,
    run_micro_step,
    weights_of,
)

WINDOWS = 3


class SavedProduct(torch.autograd.Function):
    """x @ w.T, keeping what backward needs the way that torch asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class HeldProduct(torch.autograd.Function):
    """The same, keeping the tensors as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class WithFunction(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.function.apply(x, self.weight).tanh(), self.weight))


class Borrows(nn.Module):
    """Uses the weight of another module, reached as that module's attribute."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lender = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.lender[0].weight)


class Lends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.borrows = Borrows(self.first)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.borrows(self.first(x).tanh()))


class Tied(nn.Module):
    """A table that is an embedding and the weight of the head, by name and by borrowing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table((x > 0).long() + 2).sum(1)
        return self.last(self.head(hidden)) + x @ self.table.weight


@dataclasses.dataclass
class Output:
    hidden: Tensor
    rest: Any = None


class Holder:
    """Nothing that anybody knows how to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Returns(nn.Module):
    """A layer whose output is wrapped in some structure."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap((self.layer(x) * self.scale).tanh())


class Unwraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returns(wrap), Returns(wrap)])
        self.unwrap = unwrap
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.unwrap(layer(x))
        return self.last(x)


class GivesParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.rows = nn.Parameter(torch.randn(4, 3))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.weight.t(), self.rows[1:3]


class TakesParameters(nn.Module):
    """A child hands out its parameter, and views of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gives = GivesParameters()
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, transposed, rows = self.gives()
        return F.linear(x, weight) + (x @ transposed).tanh() * rows.sum(0) + self.bias


class Keeps(nn.Module):
    """Leaves tensors behind that the loss uses later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.key: Tensor | None = None
        self.view: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.key = hidden @ self.weight
        self.view = self.weight[1:] * 1.0
        return hidden.tanh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "key": None, "view": None}  # tensors with a graph cannot be copied


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = (self.layer(x) * self.scale).tanh()
        inner = self(x, depth - 1) if depth else self.last(x)
        return inner * self.scale[:3]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(3)])
        self.named = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, 5)), "b": nn.Parameter(torch.randn(3))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = (x @ weight).tanh()
        x = x @ self.listed[-1]
        return F.linear(x, self.named["w"], self.named["b"]) + sum(p.sum() for _, p in self.named.items())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).unsqueeze(0)
        return self.last(self.layer(hidden + self.attention(hidden, hidden, hidden)[0])).squeeze(0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(8, 3)
        self.cell = nn.LSTMCell(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gru(self.lstm(x)[0])[0]
        return self.cell(hidden)[0]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (1, 2), bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose1d(4, 3, 2)
        self.group = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x.view(8, 1, 1, 5))).relu()
        return self.group(self.up(hidden[:, :, 0])).mean(-1)


def reparametrized(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """Built the way that libraries do under zero.Init. In eval, since spectral norm iterates with each forward."""

    def wrapped(layer: nn.Linear) -> nn.Module:
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
            return wrap(layer)

    return lambda: nn.Sequential(wrapped(nn.Linear(5, 5)), nn.Tanh(), wrapped(nn.Linear(5, 3))).eval()


class Adapted(nn.Module):
    """A frozen layer, used twice, with a trained low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        once = self.base(x) + self.up(self.down(x))
        return self.base(once.tanh()) + self.up(self.down(once))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(), Adapted()])
        self.last = nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if x.is_leaf else x
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def through(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """One loss over the output."""
    yield (call(batch.x) - batch.target).square().mean()


def with_kept(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    yield (call(batch.x) - batch.target).square().mean() + module.key.square().sum() + module.view.sum()


def twice(call: Callable[..., Tensor], module: nn.Module, batch: Batch) -> Iterable[Tensor]:
    """Through the engine, and through the bare module, whose children are called one by one."""
    hidden = batch.y
    for child in module.children():
        hidden = child(hidden)
    yield (call(batch.x) - batch.target).square().mean() + hidden.square().mean()


SOME = {
    "tuple": (lambda t: (t, None), lambda o: o[0]),
    "dict": (lambda t: {"a": None, "b": [t]}, lambda o: o["b"][0]),
    "dataclass": (lambda t: Output(t, rest={"x": (1, "y")}), lambda o: o.hidden),
    "nested list": (lambda t: [[], [[t], 3]], lambda o: o[1][0][0]),
    "custom object": (Holder, lambda o: o.tensor),
    "detached beside": (lambda t: (t.detach(), t), lambda o: o[1]),
    "generator": (lambda t: (each for each in [t]), lambda o: next(o)),
}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Iterable[Tensor]]]] = {
    "function, saved": (lambda: WithFunction(SavedProduct), through),
    "function, held": (lambda: WithFunction(HeldProduct), through),
    "borrowed weight": (Lends, through),
    "tied weight": (Tied, through),
    **{f"returns {name}": (lambda pair=pair: Unwraps(*pair), through) for name, pair in SOME.items()},
    "returns parameters": (TakesParameters, through),
    "keeps tensors": (Keeps, with_kept),
    "recursive": (Recursive, through),
    "parameter lists": (Lists, through),
    "attention": (Attention, through),
    "recurrent": (Recurrent, through),
    "images": (Images, through),
    "called in parts": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), twice),
    "weight norm": (reparametrized(parametrizations.weight_norm), through),
    "spectral norm": (reparametrized(parametrizations.spectral_norm), through),
    "orthogonal": (reparametrized(parametrizations.orthogonal), through),
    "adapters": (lambda: Checkpointed(None), through),
    "adapters, reentrant": (lambda: Checkpointed(True), through),
    "adapters, not reentrant": (lambda: Checkpointed(False), through),
}


def engine_of(build: Callable[[], nn.Module], **options: Any) -> Any:
    torch.manual_seed(11)
    return make_engine(build(), 3, **options)


def train(engine: Any, losses: Callable[..., Iterable[Tensor]], windows: int = WINDOWS, first: int = 0) -> None:
    """Steps whose gradients are compared with those of a plain copy in float64."""
    for window in range(first, first + windows):
        expected = expected_gradients(engine.module, losses, lambda rank, w=window: [make_batch(rank, w)], 1)
        run_micro_step(engine, losses, "engine.backward", my_batch(engine, window))
        assert_gradients(engine, expected, torch.float32, f"window {window}")
        engine.step()


def assert_nothing_whole(engine: Any) -> None:
    for name, parameter in engine.module.named_parameters():
        assert parameter.shape == (0,) or parameter.ds_persist, name
        assert not parameter.ds_active_sub_modules, name


class TestGradients(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("case", CASES)
    def test_nothing_persistent(self, case: str) -> None:
        build, losses = CASES[case]
        engine = engine_of(build, zero={"stage3_prefetch_bucket_size": 30})
        train(engine, losses)
        assert_nothing_whole(engine)
        engine.destroy()

    @pytest.mark.parametrize("case", CASES)
    def test_small_ones_persistent_under_init(self, case: str) -> None:
        build, losses = CASES[case]
        torch.manual_seed(11)
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            module = build()
        engine = make_engine(module, 3, zero={"stage3_param_persistence_threshold": 10})
        train(engine, losses)
        assert_nothing_whole(engine)
        engine.destroy()


class TestBorrowing(DistributedTest):
    """Parameters of other modules, which nobody can see coming."""

    world_size = 2
    reuse_dist_env = True

    def test_a_parameter_by_reference_is_registered(self) -> None:
        class ByReference(nn.Module):
            def __init__(self, weight: nn.Parameter) -> None:
                super().__init__()
                self.kept = {"weight": weight}

            def forward(self, x: Tensor) -> Tensor:
                return x @ self.kept["weight"].t()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
                self.borrows = ByReference(self.first.weight)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.borrows(self.middle(self.first(x).tanh())))

        engine = engine_of(Model, zero={"stage3_max_reuse_distance": 0})  # nothing is whole by luck
        borrows, weight = engine.module.borrows, engine.module.first.weight
        x = my_batch(engine, 0).x
        with pytest.raises(RuntimeError):
            engine(x)
        deepspeed.zero.register_external_parameter(borrows, weight)
        assert [p for _, p in borrows.ds_external_parameters()] == [weight]
        train(engine, through)
        deepspeed.zero.unregister_external_parameter(borrows, weight)
        assert list(borrows.ds_external_parameters()) == []
        with pytest.raises(RuntimeError):
            engine(x)
        with pytest.raises(RuntimeError, match="not registered"):
            deepspeed.zero.unregister_external_parameter(borrows, weight)
        with pytest.raises(RuntimeError, match="torch.nn.Parameter"):
            deepspeed.zero.register_external_parameter(borrows, torch.ones(2))
        engine.destroy()

    def test_registered_in_the_constructor(self) -> None:
        """As speech models do for a weight norm, before there is an engine."""

        class Positional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(5, 5)
                with deepspeed.zero.GatheredParameters(self.layer.weight, modifier_rank=0):
                    self.layer = parametrizations.weight_norm(self.layer, dim=1)
                for name in ("original0", "original1"):
                    weight = getattr(self.layer.parametrizations.weight, name)
                    deepspeed.zero.register_external_parameter(self, weight)
                self.last = nn.Linear(5, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.layer(x))

        torch.manual_seed(11)
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            module = Positional()
        engine = make_engine(module, 3)
        train(engine, through)
        assert_nothing_whole(engine)
        engine.destroy()

    def test_a_hidden_weight_is_not_used_in_silence(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.last = nn.Linear(1, 1, bias=False), nn.Linear(5, 3)
                self.kept = [self.scale.weight]

            def forward(self, x: Tensor) -> Tensor:
                return self.last(x).sum() + (x[:, :1] * self.kept[0]).sum()

        engine = engine_of(Model)
        with pytest.raises(RuntimeError, match="scale.weight.*partitioned"):
            engine.backward(engine(my_batch(engine, 0).x))
        engine.destroy()

    def test_former_weight_norm(self) -> None:
        """Its weight is made in a hook in front of the forward."""

        def build() -> nn.Module:
            torch.manual_seed(11)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(5, 5)) for _ in range(2)))

        plain, engine = build(), make_engine(build(), 3)
        for window in range(WINDOWS):
            plain.zero_grad()
            for rank in range(dist.get_world_size()):
                (plain(make_batch(rank, window).x).square().mean() / dist.get_world_size()).backward()
            engine.backward(engine(my_batch(engine, window).x).square().mean())
            expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
            assert_gradients(engine, expected, torch.float32, f"window {window}")
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= 0.125 * parameter.grad
            engine.step()
        engine.destroy()


class TestChanges(DistributedTest):
    """What becomes of a model after its engine was made."""

    world_size = 2
    reuse_dist_env = True

    def test_frozen_afterwards(self) -> None:
        engine = engine_of(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))
        train(engine, through, 2)
        frozen = weights_of(engine.module)["0.weight"]
        engine.module[0].requires_grad_(False)
        for window in (2, 3):
            engine.backward(next(iter(through(engine, engine.module, my_batch(engine, window)))))
            engine.step()
        assert torch.equal(weights_of(engine.module)["0.weight"], frozen)  # SGD: a gradient of zeros changes nothing
        engine.module[0].requires_grad_(True)
        train(engine, through, 2, first=4)
        engine.destroy()

    def test_an_exception_in_forward(self) -> None:
        class Fails(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
                self.fails = False

            def forward(self, x: Tensor) -> Tensor:
                x = self.layer(x)
                if self.fails:
                    raise KeyError("on purpose")
                return self.last(x)

        engine = engine_of(lambda: nn.Sequential(nn.Linear(5, 5), Fails()))
        train(engine, through, 1)
        for grad in (True, False):
            engine.module[1].fails = True
            with pytest.raises(KeyError), torch.set_grad_enabled(grad):
                engine(my_batch(engine, 0).x)
            if not grad:  # else backward could follow soon
                assert_nothing_whole(engine)
            engine.module[1].fails = False
            train(engine, through, 2, first=1)
            assert_nothing_whole(engine)
        engine.destroy()

    def test_an_exception_in_backward(self) -> None:
        def fail(_: Tensor) -> None:
            raise KeyError("on purpose")

        engine = engine_of(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)))
        train(engine, through, 1)
        hidden = engine.module[:3](my_batch(engine, 0).x)
        hidden.register_hook(fail)
        with pytest.raises(KeyError):
            engine.backward(engine.module[3](hidden).sum())
        engine.zero_grad()
        train(engine, through, 2, first=1)
        assert_nothing_whole(engine)
        engine.destroy()

    def test_a_module_attached_afterwards(self) -> None:
        """Its weights belong to nobody's optimizer: it runs, or says what to do."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(5, 3)
                self.extra: nn.Module | None = None

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                return x if self.extra is None else self.extra(x)

        engine = engine_of(Model)
        train(engine, through, 1)
        extra = nn.Linear(3, 3)
        engine.module.extra = extra
        batch = my_batch(engine, 1)
        out = engine(batch.x)
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            assert torch.allclose(out, extra(F.linear(batch.x, engine.module.first.weight, engine.module.first.bias)))
        engine.backward(out.square().mean())
        engine.step()
        assert extra.weight.shape == (3, 3)
        engine.destroy()

    def test_a_partitioned_module_attached_afterwards(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(5, 5)
                self.extra: nn.Module = nn.Identity()

            def forward(self, x: Tensor) -> Tensor:
                return self.extra(self.first(x))

        engine = engine_of(Model)
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            engine.module.extra = nn.Linear(5, 3)
        with pytest.raises(RuntimeError):
            engine(my_batch(engine, 1).x)
        engine.destroy()


class TestHooksOfTheUser(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("first", [True, False])
    def test_all_kinds_fire(self, first: bool) -> None:
        """Registered before or after the engine is made."""
        seen: dict[str, int] = {}

        def count(what: str) -> Callable[..., None]:
            def hook(*args: Any) -> None:
                seen[what] = seen.get(what, 0) + 1

            return hook

        def register(module: nn.Module) -> None:
            for name, parameter in module.named_parameters():
                parameter.register_hook(count(f"{name} gradient"))
                parameter.register_post_accumulate_grad_hook(count(f"{name} accumulated"))
            for name in ("0", "2"):
                child = module.get_submodule(name)
                child.register_forward_pre_hook(count(f"{name} before"))
                child.register_forward_hook(count(f"{name} after"))
                child.register_full_backward_pre_hook(count(f"{name} backward before"))
                child.register_full_backward_hook(count(f"{name} backward"))

        torch.manual_seed(11)
        module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        if first:
            register(module)
        engine = make_engine(module, 3)
        if not first:
            register(module)
        for window in range(1, 4):
            run_micro_step(engine, through, "engine.backward", my_batch(engine, window))
            engine.step()
            names = [f"{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
            wanted = {f"{name} {what}" for name in names for what in ("gradient", "accumulated")}
            wanted |= {f"{i} {w}" for i in (0, 2) for w in ("before", "after", "backward before", "backward")}
            assert seen == dict.fromkeys(wanted, window)
        engine.destroy()

    def test_hooks_see_whole_weights_and_change_gradients(self) -> None:
        engine = engine_of(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))
        shapes = []
        layer = engine.module[0]
        layer.register_forward_hook(lambda module, *_: shapes.append(module.weight.shape))
        layer.register_forward_pre_hook(lambda module, *_: shapes.append(module.weight.shape))
        expected = expected_gradients(engine.module, through, lambda rank: [make_batch(rank, 0)], 1)
        shapes.clear()
        layer.weight.register_hook(lambda grad: shapes.append(grad.shape) or grad * 2.0)
        run_micro_step(engine, through, "engine.backward", my_batch(engine, 0))
        assert shapes == [(5, 5)] * 3
        expected["0.weight"] *= 2.0
        assert_gradients(engine, expected, torch.float32)
        engine.destroy()

    def test_a_compiled_part(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(5, 5)
                self.pure = torch.compile(lambda x: (x * 2.0).tanh() + x, backend="aot_eager")
                self.last = nn.Linear(5, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.pure(self.first(x)))

        class Uncompiled(Model):
            def __init__(self) -> None:
                super().__init__()
                self.pure = lambda x: (x * 2.0).tanh() + x

        torch.manual_seed(11)
        plain = Uncompiled()
        engine = engine_of(Model)
        batches = [make_batch(rank, 0) for rank in range(dist.get_world_size())]
        for batch in batches:
            (next(iter(through(plain, plain, batch))) / len(batches)).backward()
        run_micro_step(engine, through, "engine.backward", my_batch(engine, 0))
        assert_gradients(engine, {n: p.grad for n, p in plain.named_parameters()}, torch.float32)
        engine.step()
        engine.destroy()
