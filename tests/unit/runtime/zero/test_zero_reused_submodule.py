# SPDX-License-Identifier: Apache-2.0
"""A submodule, a parameter or the whole model that takes part in one loss more than once.

The gradient must be the sum over the uses, averaged over ranks and micro-steps, whatever way each use came about:
through the engine, through ``engine.module`` around the engine, inside a checkpoint, or under other names. Every
gradient is compared with plain autograd in float64 on all ranks' data.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest

LEARNING_RATE = 0.125
LOSS_SCALE = 256.0
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Elements up to which weights stay whole at stage 3: none, some and all of these models, by dtype.
PERSISTENT = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 100_000}

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
FORMS = ["engine.backward", "tensor.backward"]
forms = pytest.mark.parametrize("form", FORMS)


# ---------------------------------------------------------------- models: odd sizes, which no world size divides


class Net(nn.Module):
    """Encoder, a square core that may be applied several times, decoder: 99 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.core = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.decoder = nn.Linear(6, 3)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        hidden = self.encoder(x)
        for _ in range(depth):
            hidden = self.core(hidden)
        return self.decoder(hidden)


class TiedNet(nn.Module):
    """The token embedding is the output matrix as well, and one bias belongs to two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.output = nn.Linear(5, 11, bias=False)
        self.second.bias = self.first.bias
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.second(torch.tanh(self.first(self.embedding(tokens)))))


class FrozenEncoderNet(Net):
    """The encoder does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


class PartlyUsedNet(Net):
    """Has a layer that takes no part, a frozen parameter, and a trainable parameter without elements, last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Linear(3, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * self.frozen
        return out + self.empty(out).sum()


class Batch(NamedTuple):
    """Inputs x, y: (8, 5); target: (8, 3); tokens and classes: (8,) int64."""

    x: Tensor
    y: Tensor
    target: Tensor
    tokens: Tensor
    classes: Tensor


# ---------------------------------------------------------------- losses: call is the engine, module its bare module


def mse(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def reentrant(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True)


def recomputed(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def plain(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x), batch.target)


def encoder_twice(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x), batch.target) + module.encoder(batch.y).square().mean()


def encoder_three_times(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    again = module.encoder(batch.y) * module.encoder(batch.x + batch.y)
    return mse(call(batch.x), batch.target) + again.mean()


def only_around_the_engine(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(module(batch.x), batch.target)


def whole_model_twice(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x), batch.target) + mse(module(batch.y), batch.target)


def output_fed_back(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    out = call(batch.x)
    return mse(out, batch.target) + module.encoder(torch.cat([out, batch.y[:, :2]], dim=1)).square().mean()


def recurrent(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x, depth=4), batch.target)


def recurrent_around_the_engine(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x, depth=2), batch.target) + module.core(module.core(module.encoder(batch.y))).mean()


def detached_use(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return (
        mse(call(batch.x), batch.target) + (module.encoder(batch.y).detach() - module.encoder(batch.x)).square().mean()
    )


def scaled_own_parameters(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    scaled = {name: 0.5 * parameter for name, parameter in module.named_parameters()}
    return mse(call(batch.x), batch.target) + mse(torch.func.functional_call(module, scaled, (batch.y,)), batch.target)


def weight_penalty(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    penalty = sum(parameter.square().mean() for parameter in module.parameters() if parameter.numel())
    return mse(call(batch.x), batch.target) + 0.5 * penalty


def tied(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(call(batch.tokens), batch.classes)


def tied_and_reused(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return tied(call, module, batch) + module.output(module.embedding(batch.classes)).square().mean()


def reentrant_use(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x), batch.target) + reentrant(module.encoder, batch.y).square().mean()


def reentrant_uses(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    first, second = reentrant(module.encoder, batch.x), reentrant(module.encoder, batch.y)
    return mse(call(batch.x), batch.target) + (first * second).mean() + first.square().mean()


def nested_reentrant(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return module.core(reentrant(module.core, module.encoder(x)))

    return mse(call(batch.x), batch.target) + reentrant(region, batch.y).square().mean()


def reentrant_through_the_engine(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(reentrant(call, batch.x), batch.target) + module.encoder(batch.y).square().mean()


def recomputed_uses(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    return mse(call(batch.x), batch.target) + recomputed(module.encoder, batch.y).square().mean()


def mixed_checkpoints(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return module.core(recomputed(module.encoder, x))

    uses = reentrant(region, batch.y) * recomputed(module.encoder, batch.x) + module.encoder(batch.y)
    return mse(call(batch.x), batch.target) + uses.square().mean()


def only_reentrant_around_the_engine(call: Callable, module: nn.Module, batch: Batch) -> Tensor:
    hidden = reentrant(module.encoder, batch.x) + reentrant(module.encoder, batch.y)
    return mse(module.decoder(hidden), batch.target)


GRAPHS: dict[str, tuple[type[nn.Module], Callable[[Callable, nn.Module, Batch], Tensor]]] = {
    "plain": (Net, plain),
    "encoder twice": (Net, encoder_twice),
    "encoder three times": (Net, encoder_three_times),
    "only around the engine": (Net, only_around_the_engine),
    "whole model twice": (Net, whole_model_twice),
    "output fed back": (Net, output_fed_back),
    "recurrent": (Net, recurrent),
    "recurrent around the engine": (Net, recurrent_around_the_engine),
    "detached use": (Net, detached_use),
    "scaled own parameters": (Net, scaled_own_parameters),
    "weight penalty": (Net, weight_penalty),
    "tied": (TiedNet, tied),
    "tied and reused": (TiedNet, tied_and_reused),
    "frozen encoder twice": (FrozenEncoderNet, whole_model_twice),
    "unused, frozen, empty": (PartlyUsedNet, whole_model_twice),
    "reentrant use": (Net, reentrant_use),
    "reentrant uses": (Net, reentrant_uses),
    "nested reentrant": (Net, nested_reentrant),
    "reentrant through the engine": (Net, reentrant_through_the_engine),
    "non-reentrant uses": (Net, recomputed_uses),
    "mixed checkpoints": (Net, mixed_checkpoints),
    "only reentrant, around the engine": (Net, only_reentrant_around_the_engine),
}
# These use weights outside of any module's forward, so at stage 3 they have to be held whole meanwhile.
WITH_WEIGHTS_IN_HAND = ("scaled own parameters", "weight penalty")
FEW_GRAPHS = (
    "plain",
    "encoder twice",
    "tied and reused",
    "unused, frozen, empty",
    "nested reentrant",
    "mixed checkpoints",
)


# ---------------------------------------------------------------- training, and the reference


def make_batch(dtype: torch.dtype, rank: int, window: int, micro_step: int) -> Batch:
    """Different for every rank and micro-step; any rank can make any rank's. Rounded to ``dtype``, on the CPU."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * window + micro_step)
    x, y, target = (torch.randn(8, width, generator=generator).to(dtype) for width in (5, 5, 3))
    tokens, classes = (torch.randint(11, (8,), generator=generator) for _ in range(2))
    return Batch(x, y, target, tokens, classes)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    return Batch(*(tensor.to(device) for tensor in batch))


def widened(batch: Batch) -> Batch:
    return Batch(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch))


def make_model(graph: str) -> nn.Module:
    torch.manual_seed(1234)
    return GRAPHS[graph][0]()


def stage_options(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Options of stage 3 that make small models as awkward as large ones; none for the other stages."""
    if stage < 3:
        return {}
    return {"stage3_param_persistence_threshold": PERSISTENT[dtype], "stage3_prefetch_bucket_size": 40}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights. Collective."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def make_engine(
    model: nn.Module,
    stage: int,
    dtype: torch.dtype,
    accumulation: int,
    optimizer: type = torch.optim.SGD,
    **settings: Any,
) -> Any:
    if dtype is torch.float16 and not get_accelerator().is_fp16_supported():
        pytest.skip("the accelerator does not support fp16")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **stage_options(stage, dtype), **settings},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16, "loss_scale": LOSS_SCALE},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(trained, lr=LEARNING_RATE, weight_decay=0.0), config=config
    )
    return engine


def backward(engine: Any, loss: Tensor, form: str) -> None:
    if form == "engine.backward":
        engine.backward(loss)
    elif engine.fp16_enabled():
        engine.scale(loss).backward()
    else:
        loss.backward()


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those with elements; a partitioned parameter has them though it shows none."""
    named = model.named_parameters()
    return ((name, p) for name, p in named if p.requires_grad and getattr(p, "ds_numel", p.numel()))


def reference_gradients(reference: nn.Module, graph: str, dtype: torch.dtype, window: int, micro_steps: int) -> None:
    """Put the mean over ranks and micro-steps in ``.grad`` of the float64 module; zeros where nothing was used."""
    reference.zero_grad(set_to_none=True)
    for rank in range(dist.get_world_size()):
        for micro_step in range(micro_steps):
            batch = widened(make_batch(dtype, rank, window, micro_step))
            GRAPHS[graph][1](reference, reference, batch).backward()
    for _, parameter in trained_parameters(reference):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size() * micro_steps


def train_window(engine: Any, graph: str, dtype: torch.dtype, form: str, window: int, micro_steps: int) -> None:
    """All forwards and backwards of one accumulation window, without its last ``step()``."""
    for micro_step in range(micro_steps):
        if micro_step:
            engine.step()
        batch = to_device(make_batch(dtype, dist.get_rank(), window, micro_step), engine.device)
        held = engine.module.parameters() if graph in WITH_WEIGHTS_IN_HAND else []
        with deepspeed.zero.GatheredParameters(held):
            backward(engine, GRAPHS[graph][1](engine, engine.module, batch), form)


def step_and_get_gradients(engine: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient that the optimizer sees. In fp16, where a gradient may be shown with its loss scale, it is read
    from what SGD does to the fp32 master weights."""
    parameters = list(trained_parameters(engine.module))
    if dtype is torch.float16:
        before = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in parameters}
        engine.step()
        return {name: (before[name] - safe_get_full_fp32_param(p)) / LEARNING_RATE for name, p in parameters}
    gradients = {name: safe_get_full_grad(parameter) for name, parameter in parameters}
    gradients = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    engine.step()
    return gradients


def faults(actual: dict[str, Tensor], reference: nn.Module, tolerance: float) -> list[str]:
    """What is wrong with each parameter's gradient, relative to its norm. Exactly zero where the reference is."""
    found = []
    expected = {name: parameter.grad for name, parameter in trained_parameters(reference)}
    assert any(gradient.norm() > 0 for gradient in expected.values()), "the reference must not vanish"
    for name, gradient in expected.items():
        norm = gradient.norm().item()
        got = actual.get(name)
        if got is None:
            found += [f"{name}: no gradient, expected norm {norm:.3g}"] if norm else []
            continue
        error = (got.detach().cpu().double() - gradient).norm().item() / (norm or 1.0)
        if not error <= (tolerance if norm else 0.0):
            found.append(f"{name}: relative error {error:.3g}" if norm else f"{name}: {error:.3g} instead of 0")
    return found


def check_gradients(
    graph: str, stage: int, dtype: torch.dtype, form: str, micro_steps: int, **settings: Any
) -> list[str]:
    """Train two windows; the second one starts from what the first one left behind."""
    model = make_model(graph)
    reference = copy.deepcopy(model).double()
    engine = make_engine(model, stage, dtype, micro_steps, **settings)
    found = []
    for window in range(2):
        with torch.no_grad():
            for wide, weight in zip(reference.parameters(), weights_of(engine.module).values()):
                wide.copy_(weight)
        reference_gradients(reference, graph, dtype, window, micro_steps)
        train_window(engine, graph, dtype, form, window, micro_steps)
        gradients = step_and_get_gradients(engine, dtype)
        where = f"{graph}, accumulation {micro_steps}, window {window}"
        found += [f"{where}: {fault}" for fault in faults(gradients, reference, TOLERANCE[dtype])]
    engine.destroy()
    return found


def check_all(
    check: Callable[..., list[str]],
    *args: Any,
    graphs: Iterable[str] = GRAPHS,
    accumulation: tuple[int, ...] = (2,),
    **settings: Any,
) -> None:
    """Run every graph and report all that fail, by name."""
    found = []
    for graph in graphs:
        for micro_steps in accumulation:
            try:
                found += check(graph, *args, micro_steps, **settings)
            except Exception as error:  # noqa: BLE001 - what one graph raises must not hide the others
                found.append(f"{graph}, accumulation {micro_steps}: raised {type(error).__name__}: {error}")
    assert not found, f"{len(found)} faults\n" + "\n".join(found)


def check_weights(graph: str, stage: int, optimizer: type, form: str, micro_steps: int) -> list[str]:
    """Three fp32 steps, beside the same torch optimizer on the reference gradients."""
    model = make_model(graph)
    reference = copy.deepcopy(model).double()
    initial = {name: parameter.detach().clone() for name, parameter in trained_parameters(reference)}
    engine = make_engine(model, stage, torch.float32, micro_steps, optimizer=optimizer)
    torch_optimizer = optimizer(
        [p for p in reference.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0
    )
    for window in range(3):
        reference_gradients(reference, graph, torch.float32, window, micro_steps)
        torch_optimizer.step()
        train_window(engine, graph, torch.float32, form, window, micro_steps)
        engine.step()
    weights = weights_of(engine.module)
    found, moved = [], 0
    for name, wide in trained_parameters(reference):
        error = ((weights[name].cpu().double() - wide).norm() / wide.norm()).item()
        moved += bool(torch.any(wide != initial[name]))
        if not error <= 1e-5:
            found.append(f"{graph}, accumulation {micro_steps}: weight {name}: relative error {error:.3g}")
    assert moved, f"{graph}: no weight of the reference moved"
    engine.destroy()
    return found


def every_other(graphs: Iterable[str], turn: int) -> list[str]:
    """Half of the graphs; the next ``turn`` has the other half."""
    return [graph for index, graph in enumerate(graphs) if (index + turn) % 2 == 0]


class TestReusedSubmodule(DistributedTest):
    """Every graph at every stage in both forms, and in every dtype. Forms, dtypes, accumulation, optimizers and sizes
    of buckets take turns from graph to graph and from stage to stage, so that every two of them meet."""

    world_size = 2

    @stages
    @forms
    def test_gradients(self, stage: int, form: str) -> None:
        turn = stage + FORMS.index(form)
        check_all(check_gradients, stage, torch.float32, form, graphs=every_other(GRAPHS, turn), accumulation=(1,))
        check_all(check_gradients, stage, torch.float32, form, graphs=every_other(GRAPHS, turn + 1), accumulation=(2,))

    @stages
    def test_gradients_in_bf16(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage // 2):
            check_all(check_gradients, stage, torch.bfloat16, form, graphs=every_other(GRAPHS, turn))

    @pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
    def test_gradients_in_fp16(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage):
            check_all(check_gradients, stage, torch.float16, form, graphs=every_other(GRAPHS, turn))

    @stages
    def test_weights_after_three_steps(self, stage: int) -> None:
        for turn, optimizer in enumerate((torch.optim.SGD, torch.optim.AdamW), start=stage):
            check_all(check_weights, stage, optimizer, "engine.backward", graphs=every_other(GRAPHS, turn))

    @stages
    def test_small_buckets(self, stage: int) -> None:
        """Buckets smaller than a parameter, and buckets that end in the middle of a parameter."""
        for turn, (elements, form) in enumerate(zip((7, 40), FORMS), start=stage):
            graphs = every_other(GRAPHS, turn)
            check_all(check_gradients, stage, torch.float32, form, graphs=graphs, reduce_bucket_size=elements)

    @pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
    def test_long_accumulation(self, stage: int) -> None:
        for turn, micro_steps in enumerate((3, 8), start=stage):
            graphs = every_other(FEW_GRAPHS, turn)
            check_all(
                check_gradients, stage, torch.bfloat16, "engine.backward", graphs=graphs, accumulation=(micro_steps,)
            )


class TestReusedSubmoduleOnOtherWorldSizes(DistributedTest):
    world_size = [1, 3, 4]

    @stages
    def test_gradients(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage + dist.get_world_size()):
            check_all(check_gradients, stage, torch.float32, form, graphs=every_other(FEW_GRAPHS, turn))
