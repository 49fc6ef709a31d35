# SPDX-License-Identifier: Apache-2.0
"""Several losses, backwards, forwards or engines that share an autograd graph; parameters that only some of them use.

The gradient of an accumulation window must be the mean over ranks and micro-steps of everything that was sent
backward in it, whatever the number and order of forwards and backwards. Every gradient is compared with plain autograd
in float64 on all ranks' data.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

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


class Net(nn.Module):
    """Encoder and two heads: 78 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int | None = 0) -> Any:
        """The output of one head, or of both as a pair when ``head`` is None."""
        hidden = self.encoder(x)
        return tuple(h(hidden) for h in self.heads) if head is None else self.heads[head](hidden)


class Batch(NamedTuple):
    """Inputs x, y: (8, 5); target: (8, 3); where in training it belongs; the number of micro-steps in the window."""

    x: Tensor
    y: Tensor
    target: Tensor
    rank: int
    window: int
    micro_step: int
    micro_steps: int

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return self._replace(x=function(self.x), y=function(self.y), target=function(self.target))


class Backward(NamedTuple):
    """One backward call. With ``gradient`` or ``inputs`` it is a call of the tensor's own ``backward``."""

    tensor: Tensor
    retain_graph: bool = False
    gradient: Tensor | None = None
    inputs: list[nn.Parameter] | None = None


Graph = Callable[[Callable, nn.Module, Batch], Iterator[Backward]]


# ------------------------------------------------------- micro-steps: call is the engine, module its bare module
# What is yielded is sent backward before the generator goes on.


def mse(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def one_loss(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x), batch.target))


def two_losses_of_one_graph(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    first, second = call(batch.x, head=None)
    losses = mse(first, batch.target), second.square().mean()
    yield Backward(losses[0], retain_graph=True)
    yield Backward(losses[1])


def three_losses_of_one_output(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    out = call(batch.x)
    yield Backward(mse(out, batch.target), retain_graph=True)
    yield Backward(out.square().mean(), retain_graph=True)
    yield Backward(out.mean() + module.encoder(batch.y).mean())


def same_loss_twice(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    loss = mse(call(batch.x), batch.target)
    yield Backward(loss, retain_graph=True)
    yield Backward(loss)


def forward_backward_twice(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x), batch.target))
    yield Backward(mse(call(batch.y), batch.target))


def backwards_of_different_parts(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(module.encoder(batch.y).square().mean())
    yield Backward(mse(call(batch.x, head=1), batch.target))
    yield Backward(mse(call(batch.y, head=0), batch.target))


def two_forwards_one_loss(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x) * call(batch.y), batch.target))


def two_forwards_two_backwards(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    losses = mse(call(batch.x), batch.target), mse(call(batch.y), batch.target)
    yield Backward(losses[0])
    yield Backward(losses[1])


def two_forwards_two_backwards_reversed(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    losses = mse(call(batch.x), batch.target), mse(call(batch.y), batch.target)
    yield Backward(losses[1])
    yield Backward(losses[0])


def forward_without_backward(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    with torch.no_grad():
        goal = call(batch.y)
    call(batch.y)  # a graph that is never used
    yield Backward(mse(call(batch.x), goal))


def head_in_first_micro_step_only(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x, head=1 if batch.micro_step == 0 else 0), batch.target))


def head_in_last_micro_step_only(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x, head=1 if batch.micro_step + 1 == batch.micro_steps else 0), batch.target))


def head_on_one_rank_only(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    outs = call(batch.x, head=None)
    yield Backward(mse(outs[0], batch.target) + (mse(outs[1], batch.target) if batch.rank == 0 else 0.0))


def heads_alternate_over_ranks_and_time(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    head = (batch.rank + batch.micro_step + batch.window) % 2
    yield Backward(mse(call(batch.x, head=head), batch.target))


def encoder_reused_on_one_rank(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    loss = mse(call(batch.x), batch.target)
    if batch.rank % 2:
        loss = loss + module.encoder(batch.y).square().mean()
    yield Backward(loss)


def gradient_penalty(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    x = batch.x.clone().requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    yield Backward(mse(out, batch.target) + slope.square().mean())


def parameter_gradient_penalty(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    loss = mse(call(batch.x), batch.target)
    slopes = torch.autograd.grad(loss, list(module.encoder.parameters()), create_graph=True)
    yield Backward(loss + sum(slope.square().sum() for slope in slopes))


def backward_of_some_inputs(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(mse(call(batch.x), batch.target), inputs=list(module.encoder.parameters()))


def backward_of_inputs_in_turn(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    loss = mse(call(batch.x), batch.target)
    yield Backward(loss, retain_graph=True, inputs=list(module.heads.parameters())[:1])
    yield Backward(loss, inputs=list(module.encoder.parameters()))


def backward_of_an_output(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    yield Backward(call(batch.x), gradient=batch.target)


def backward_of_an_output_and_a_loss(call: Callable, module: nn.Module, batch: Batch) -> Iterator[Backward]:
    out = call(batch.x)
    yield Backward(out, retain_graph=True, gradient=batch.target)
    yield Backward(out.square().mean() + module.encoder(batch.y).mean())


GRAPHS: dict[str, Graph] = {
    graph.__name__: graph
    for graph in (
        one_loss,
        two_losses_of_one_graph,
        three_losses_of_one_output,
        same_loss_twice,
        forward_backward_twice,
        backwards_of_different_parts,
        two_forwards_one_loss,
        two_forwards_two_backwards,
        two_forwards_two_backwards_reversed,
        forward_without_backward,
        head_in_first_micro_step_only,
        head_in_last_micro_step_only,
        head_on_one_rank_only,
        heads_alternate_over_ranks_and_time,
        encoder_reused_on_one_rank,
        gradient_penalty,
        parameter_gradient_penalty,
        backward_of_some_inputs,
        backward_of_inputs_in_turn,
        backward_of_an_output,
        backward_of_an_output_and_a_loss,
    )
}
# At stage 3 every rank runs the same modules, except inside of a leaf module, which the whole model is here. What goes
# around it cannot be made so; see test_zero_rank_dependent_graphs.py.
RANK_DEPENDENT = ("head_on_one_rank_only", "heads_alternate_over_ranks_and_time")
BELOW_STAGE_3 = ("encoder_reused_on_one_rank",)
# What has no loss to scale cannot train in fp16.
WITH_LOSSES = tuple(name for name in GRAPHS if not name.startswith("backward_of_"))
SELECTED = (
    "two_losses_of_one_graph",
    "backwards_of_different_parts",
    "two_forwards_two_backwards",
    "head_in_first_micro_step_only",
    "head_on_one_rank_only",
    "heads_alternate_over_ranks_and_time",
    "backward_of_inputs_in_turn",
    "backward_of_an_output",
)


# ---------------------------------------------------------------- training, and the reference


def make_batch(dtype: torch.dtype, rank: int, window: int, micro_step: int, micro_steps: int) -> Batch:
    """Different for every rank and micro-step; any rank can make any rank's. Rounded to ``dtype``, on the CPU."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * window + micro_step)
    x, y, target = (torch.randn(8, width, generator=generator).to(dtype) for width in (5, 5, 3))
    return Batch(x, y, target, rank, window, micro_step, micro_steps)


def make_model(seed: int = 1234) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def stage_options(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Options of stage 3 that make small models as awkward as large ones; none for the other stages."""
    if stage < 3:
        return {}
    return {"stage3_param_persistence_threshold": PERSISTENT[dtype], "stage3_prefetch_bucket_size": 40}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights. Collective."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def make_engine(model: nn.Module, stage: int, dtype: torch.dtype, accumulation: int, parameters: Any = None) -> Any:
    if dtype is torch.float16 and not get_accelerator().is_fp16_supported():
        pytest.skip("the accelerator does not support fp16")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **stage_options(stage, dtype), "reduce_bucket_size": 60},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16, "loss_scale": LOSS_SCALE},
    }
    optimizer = torch.optim.SGD(parameters or list(model.parameters()), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def send_backward(engine: Any, request: Backward, form: str) -> None:
    tensor, retain_graph = request.tensor, request.retain_graph
    if request.gradient is not None or request.inputs is not None:
        tensor.backward(request.gradient, retain_graph=retain_graph, inputs=request.inputs)
    elif form == "engine.backward":
        engine.backward(tensor, retain_graph=retain_graph)
    elif engine.fp16_enabled():
        engine.scale(tensor).backward(retain_graph=retain_graph)
    else:
        tensor.backward(retain_graph=retain_graph)


def train_window(engine: Any, graph: str, dtype: torch.dtype, form: str, window: int, micro_steps: int) -> None:
    """All forwards and backwards of one accumulation window, without its last ``step()``."""
    for micro_step in range(micro_steps):
        if micro_step:
            engine.step()
        batch = make_batch(dtype, dist.get_rank(), window, micro_step, micro_steps)
        batch = batch.map(lambda tensor: tensor.to(engine.device))
        for request in GRAPHS[graph](engine, engine.module, batch):
            send_backward(engine, request, form)


def reference_gradients(reference: nn.Module, graph: str, dtype: torch.dtype, window: int, micro_steps: int) -> None:
    """Put the mean over ranks and micro-steps in ``.grad`` of the float64 module."""
    reference.zero_grad(set_to_none=True)
    for rank in range(dist.get_world_size()):
        for micro_step in range(micro_steps):
            batch = make_batch(dtype, rank, window, micro_step, micro_steps).map(lambda tensor: tensor.double())
            for tensor, retain_graph, gradient, inputs in GRAPHS[graph](reference, reference, batch):
                tensor.backward(gradient, retain_graph=retain_graph, inputs=inputs)
    average_gradients(reference, micro_steps)


def average_gradients(reference: nn.Module, micro_steps: int) -> None:
    """From the sum over ranks and micro-steps to the mean; zeros where nothing was used."""
    for parameter in reference.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size() * micro_steps


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for into, value in zip(target.parameters(), weights_of(source).values()):
            into.copy_(value)


def step_and_get_gradients(engine: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient that the optimizer sees. In fp16, where a gradient may be shown with its loss scale, it is read
    from what SGD does to the fp32 master weights."""
    parameters = dict(engine.module.named_parameters())
    if dtype is torch.float16:
        before = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in parameters.items()}
        engine.step()
        return {name: (before[name] - safe_get_full_fp32_param(p)) / LEARNING_RATE for name, p in parameters.items()}
    gradients = {name: safe_get_full_grad(parameter) for name, parameter in parameters.items()}
    gradients = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    engine.step()
    return gradients


def faults(actual: dict[str, Tensor], reference: nn.Module, tolerance: float) -> list[str]:
    """What is wrong with each parameter's gradient, relative to its norm. Exactly zero where the reference is."""
    found = []
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
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


def check_gradients(graph: str, stage: int, dtype: torch.dtype, form: str, micro_steps: int) -> list[str]:
    """Train two windows; the second one starts from what the first one left behind."""
    model = make_model()
    reference = copy.deepcopy(model).double()
    if stage == 3 and graph in RANK_DEPENDENT:
        deepspeed.utils.set_z3_leaf_modules(model, [Net])
    engine = make_engine(model, stage, dtype, micro_steps)
    found = []
    for window in range(2):
        copy_weights(engine.module, reference)
        reference_gradients(reference, graph, dtype, window, micro_steps)
        train_window(engine, graph, dtype, form, window, micro_steps)
        gradients = step_and_get_gradients(engine, dtype)
        where = f"{graph}, accumulation {micro_steps}, window {window}"
        found += [f"{where}: {fault}" for fault in faults(gradients, reference, TOLERANCE[dtype])]
    engine.destroy()
    return found


def check_all(stage: int, *args: Any, graphs: Iterable[str] = GRAPHS, accumulation: tuple[int, ...] = (2,)) -> None:
    """Run every graph and report all that fail, by name."""
    found = []
    for graph in graphs:
        if stage == 3 and graph in BELOW_STAGE_3:
            continue
        for micro_steps in accumulation:
            try:
                found += check_gradients(graph, stage, *args, micro_steps)
            except Exception as error:  # noqa: BLE001 - what one graph raises must not hide the others
                found.append(f"{graph}, accumulation {micro_steps}: raised {type(error).__name__}: {error}")
    assert not found, f"{len(found)} faults\n" + "\n".join(found)


def every_other(graphs: Iterable[str], turn: int) -> list[str]:
    """Half of the graphs; the next ``turn`` has the other half."""
    return [graph for index, graph in enumerate(graphs) if (index + turn) % 2 == 0]


class TestSharedLossGraph(DistributedTest):
    """Every graph at every stage in both forms, and in every dtype. Forms, dtypes and accumulation take turns from
    graph to graph and from stage to stage, so that every two of them meet."""

    world_size = 2

    @stages
    @forms
    def test_gradients(self, stage: int, form: str) -> None:
        turn = stage + FORMS.index(form)
        check_all(stage, torch.float32, form, graphs=every_other(GRAPHS, turn), accumulation=(1,))
        check_all(stage, torch.float32, form, graphs=every_other(GRAPHS, turn + 1), accumulation=(2,))

    @stages
    def test_gradients_in_bf16(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage // 2):
            check_all(stage, torch.bfloat16, form, graphs=every_other(GRAPHS, turn))

    @pytest.mark.parametrize("stage", [1, 2, 3], ids=lambda stage: f"stage{stage}")
    def test_gradients_in_fp16(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage):
            check_all(stage, torch.float16, form, graphs=every_other(WITH_LOSSES, turn))

    @stages
    def test_long_accumulation(self, stage: int) -> None:
        for turn, micro_steps in enumerate((3, 8), start=stage):
            graphs = every_other(SELECTED, turn)
            check_all(stage, torch.float32, "engine.backward", graphs=graphs, accumulation=(micro_steps,))


class TestSharedLossGraphOnOtherWorldSizes(DistributedTest):
    world_size = [1, 3, 4]

    @stages
    def test_gradients(self, stage: int) -> None:
        for turn, form in enumerate(FORMS, start=stage + dist.get_world_size()):
            check_all(stage, torch.float32, form, graphs=every_other(SELECTED, turn))


class TestParameterGroups(DistributedTest):
    world_size = 2

    @stages
    @forms
    def test_gradients_and_weights(self, stage: int, form: str) -> None:
        """Three groups, in an order unlike the model's, each with its own learning rate."""
        rates = [0.25, 0.0625, 0.125]

        def groups(model: Net) -> list[dict[str, Any]]:
            parts = [
                model.heads[1].parameters(),
                [model.encoder[0].bias],
                [model.encoder[0].weight, *model.heads[0].parameters()],
            ]
            return [{"params": list(part), "lr": rate} for part, rate in zip(parts, rates)]

        model = make_model()
        reference = copy.deepcopy(model).double()
        engine = make_engine(model, stage, torch.float32, 2, parameters=groups(model))
        torch_optimizer = torch.optim.SGD(groups(reference), lr=1.0)
        graph = "two_losses_of_one_graph"
        for window in range(3):
            reference_gradients(reference, graph, torch.float32, window, 2)
            train_window(engine, graph, torch.float32, form, window, 2)
            assert not faults(step_and_get_gradients(engine, torch.float32), reference, 1e-5)
            torch_optimizer.step()
        for weight, wide in zip(weights_of(engine.module).values(), reference.parameters()):
            torch.testing.assert_close(weight.cpu().double(), wide, rtol=1e-5, atol=1e-6)


class TestManualBoundary(DistributedTest):
    world_size = 2

    @stages
    @forms
    def test_window_of_the_callers_choice(self, stage: int, form: str) -> None:
        """Three micro-batches, one backward each, and one ``step()``; then five. Division by the configured count."""
        model = make_model()
        reference = copy.deepcopy(model).double()
        engine = make_engine(model, stage, torch.float32, 4)
        for window, micro_steps in enumerate((3, 5)):
            copy_weights(engine.module, reference)
            reference_gradients(reference, "one_loss", torch.float32, window, micro_steps)
            for parameter in reference.parameters():
                parameter.grad *= micro_steps / 4
            for micro_step in range(micro_steps):
                engine.set_gradient_accumulation_boundary(micro_step + 1 == micro_steps)
                batch = make_batch(torch.float32, dist.get_rank(), window, micro_step, micro_steps)
                for request in one_loss(engine, engine.module, batch.map(lambda tensor: tensor.to(engine.device))):
                    send_backward(engine, request, form)
            assert not faults(step_and_get_gradients(engine, torch.float32), reference, 1e-5), f"window {window}"
        assert engine.global_steps == 2


class TestTwoEngines(DistributedTest):
    world_size = 2

    @stages
    @forms
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_one_loss_over_both(self, stage: int, form: str, dtype: torch.dtype) -> None:
        models = [make_model(seed) for seed in (1, 2)]
        references = [copy.deepcopy(model).double() for model in models]
        engines = [make_engine(model, stage, dtype, 2) for model in models]

        def loss(first: Callable, second: Callable, bare: nn.Module, batch: Batch) -> Tensor:
            joint = mse(first(batch.x) + second(batch.y), batch.target)
            return joint + (second(batch.x, head=1) * first(batch.y, head=1)).mean() + bare.encoder(batch.y).mean()

        for window in range(2):
            for engine, reference in zip(engines, references):
                copy_weights(engine.module, reference)
                reference.zero_grad(set_to_none=True)
            for rank in range(dist.get_world_size()):
                for micro_step in range(2):
                    batch = make_batch(dtype, rank, window, micro_step, 2).map(lambda tensor: tensor.double())
                    loss(*references, references[1], batch).backward()
            for micro_step in range(2):
                batch = make_batch(dtype, dist.get_rank(), window, micro_step, 2)
                batch = batch.map(lambda tensor: tensor.to(engines[0].device))
                send_backward(engines[0], Backward(loss(*engines, engines[1].module, batch)), form)
                if micro_step == 0:
                    for engine in engines:
                        engine.step()
            for engine, reference in zip(engines, references):
                average_gradients(reference, 2)
                assert not faults(step_and_get_gradients(engine, dtype), reference, TOLERANCE[dtype])

    @stages
    @forms
    @pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "zero_grad"])
    def test_adversaries(self, stage: int, form: str, frozen: bool) -> None:
        """A generator learns through a discriminator that is frozen meanwhile, or whose gradients are then dropped."""
        models = [make_model(1), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))]
        references = [copy.deepcopy(model).double() for model in models]
        generator, discriminator = (make_engine(model, stage, torch.float32, 1) for model in models)

        def judge(critic: Callable, creator: Callable, batch: Batch) -> Tensor:
            return critic(creator(batch.x).detach()).square().mean() - critic(batch.target).mean()

        for window in range(3):
            mine = make_batch(torch.float32, dist.get_rank(), window, 0, 1).map(lambda t: t.to(generator.device))
            everyone = [
                make_batch(torch.float32, rank, window, 0, 1).map(lambda t: t.double())
                for rank in range(dist.get_world_size())
            ]
            for engine, reference in zip((generator, discriminator), references):
                copy_weights(engine.module, reference)
                reference.zero_grad(set_to_none=True)
            for batch in everyone:
                references[1](references[0](batch.x)).square().mean().neg().backward()
            discriminator.module.requires_grad_(not frozen)
            send_backward(generator, Backward(-discriminator(generator(mine.x)).square().mean()), form)
            discriminator.module.requires_grad_(True)
            average_gradients(references[0], 1)
            assert not faults(step_and_get_gradients(generator, torch.float32), references[0], 1e-5)

            copy_weights(generator.module, references[0])
            references[1].zero_grad(set_to_none=True)
            for batch in everyone:
                judge(references[1], references[0], batch).backward()
            if not frozen:
                discriminator.zero_grad()
            send_backward(discriminator, Backward(judge(discriminator, generator, mine)), form)
            average_gradients(references[1], 1)
            assert not faults(step_and_get_gradients(discriminator, torch.float32), references[1], 1e-5)
