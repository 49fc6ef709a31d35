# SPDX-License-Identifier: Apache-2.0
"""torch's own tools around an engine: compile, func, profiler, distributed checkpoint. docs/torch_features.md says what
works; gradients are compared with plain autograd on all ranks' data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from unit.common import DistributedTest
from unit.graphs import weights_of
from unit.reference import max_relative_error, reference_gradients
from unit.runtime import engine_cases as cases

WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.inner(x))


class Net(nn.Module):
    """A block that is used twice, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.block = Block(7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.block(self.block(self.first(x)))), y)


def batch_of(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    return cases.batches_of(rank, 1, seed=seed)[0][:2]


def make_engine(stage: int, model: nn.Module | None = None, **config: Any) -> Any:
    return cases.make_engine(cases.make_config(stage, **config), Net() if model is None else model)


def expected_gradients(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    plain = Net()
    plain.load_state_dict(weights)
    batches = [[batch_of(rank, seed)] for rank in range(WORLD_SIZE)]
    return reference_gradients(plain, lambda model, batch: model(*batch), batches)


def train_and_compare(engine: Any, note: str, windows: int = 2) -> None:
    for seed in range(windows):
        weights = {name.replace("_orig_mod.", ""): w for name, w in weights_of(engine.module).items()}
        expected = expected_gradients(weights, seed)
        engine.backward(engine(*batch_of(dist.get_rank(), seed)))
        found = {n.replace("_orig_mod.", ""): safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        name, error = max_relative_error(found, expected)
        assert error < 1e-5, f"{note}, window {seed}: gradient of {name} is off by {error:.2g}"
        engine.step()


class Graphs:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.kept.append(graph)
        return graph.forward


class TestCompile(DistributedTest):
    world_size = WORLD_SIZE
    reuse_dist_env = True

    def test_the_whole_model(self) -> None:
        for stage in STAGES:
            torch._dynamo.reset()
            graphs = Graphs()
            engine = make_engine(stage)
            assert not engine.is_compiled
            engine.compile(backend=graphs)
            assert engine.is_compiled
            train_and_compare(engine, f"compiled at stage {stage}")
            assert graphs.kept or stage == 3, f"nothing was compiled at stage {stage}"
            engine.destroy()

    def test_blocks_that_are_gathered_as_a_whole_are_compiled(self) -> None:
        for checkpointed in (False, True):
            torch._dynamo.reset()
            graphs = Graphs()
            model = Net()
            if checkpointed:
                model.block.forward = partial(checkpoint, model.block.forward, use_reentrant=False)
            set_z3_leaf_modules(model, [Block])
            engine = make_engine(3, model, zero={"stage3_param_persistence_threshold": 0})
            engine.compile(backend=graphs)
            train_and_compare(engine, f"whole blocks, checkpointed: {checkpointed}")
            operators = {node.target for graph in graphs.kept for node in graph.graph.nodes}
            assert checkpointed or torch.tanh in operators, operators
            assert checkpointed or any(getattr(target, "__name__", "") == "linear" for target in operators), operators
            assert engine.module.block.inner.weight.numel() == 0, "the block's weights are released after use"
            engine.destroy()

    def test_backward_through_aot_autograd(self) -> None:
        torch._dynamo.reset()
        engine = make_engine(2)
        engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})
        train_and_compare(engine, "aot_eager")

    def test_a_reused_submodule(self) -> None:
        for stage in (1, 3):
            for how in ("in place", "wrapped before initialize"):
                torch._dynamo.reset()
                graphs = Graphs()
                model = Net()
                if how == "in place":
                    engine = make_engine(stage, model)
                    model.block.compile(backend=graphs)
                else:
                    model.block = torch.compile(model.block, backend=graphs)
                    engine = make_engine(stage, model)
                train_and_compare(engine, f"submodule compiled {how} at stage {stage}")
                assert graphs.kept or stage == 3, f"nothing was compiled at stage {stage}, {how}"
                engine.destroy()

    def test_what_is_refused(self) -> None:
        engine = make_engine(3)
        with pytest.raises(NotImplementedError, match="DeepCompile"):
            engine.compile(schedule=[])
        with pytest.raises(NotImplementedError, match="compiled_autograd_enabled"):
            engine.compile(compiled_autograd_enabled=True)
        with pytest.raises(ValueError, match="fullgraph"):
            engine.compile(compile_kwargs={"fullgraph": True})
        assert not engine.is_compiled


class TestFunctions(DistributedTest):
    world_size = WORLD_SIZE
    reuse_dist_env = True

    def test_functional_call_with_the_parameters_themselves_trains(self) -> None:
        rank = dist.get_rank()
        for stage in (0, 1, 2):
            engine = make_engine(stage)
            expected = expected_gradients(weights_of(engine.module), 0)
            loss = functional_call(engine.module, dict(engine.module.named_parameters()), batch_of(rank, 0))
            engine.backward(loss)
            found = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            name, error = max_relative_error(found, expected)
            assert error < 1e-5, f"stage {stage}: {name} is off by {error:.2g}"
            engine.step()
            assert engine.was_step_applied()

    def test_functional_call_with_other_tensors_leaves_the_engine_alone(self) -> None:
        rank = dist.get_rank()
        for stage in STAGES:
            engine = make_engine(stage)
            others = {name: weight.requires_grad_() for name, weight in weights_of(engine.module).items()}
            loss = functional_call(engine.module, others, batch_of(rank, 0))
            ours = dict(zip(others, torch.autograd.grad(loss, list(others.values()))))
            plain = Net()
            plain.load_state_dict({name: value.detach() for name, value in others.items()})
            plain(*batch_of(rank, 0)).backward()
            expected = {name: p.grad.double() for name, p in plain.named_parameters()}
            assert max_relative_error(ours, expected)[1] < 1e-5, f"stage {stage}"
            train_and_compare(engine, f"after functional_call at stage {stage}", windows=1)
            engine.destroy()

    def test_gradients_per_sample(self) -> None:
        x, y = (torch.cat(parts) for parts in zip(batch_of(0, 0), batch_of(1, 0)))
        for stage in STAGES:
            engine = make_engine(stage)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                weights = {name: p.detach() for name, p in engine.module.named_parameters()}

                def loss_of(
                    weights: dict[str, Tensor], x: Tensor, y: Tensor, module: nn.Module = engine.module
                ) -> Tensor:
                    return functional_call(module, weights, (x[None], y[None]))

                each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
            mean = {name: value.mean(0) for name, value in each.items()}
            expected = expected_gradients({n: w.detach() for n, w in weights_of(engine.module).items()}, 0)
            name, error = max_relative_error(mean, expected)
            assert error < 1e-5, f"stage {stage}: {name} is off by {error:.2g}"
            train_and_compare(engine, f"after vmap at stage {stage}", windows=1)
            engine.destroy()


class TestProfiler(DistributedTest):
    world_size = WORLD_SIZE

    def test_around_steps(self) -> None:
        for stage in (0, 2, 3):
            engine = make_engine(stage)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for seed in range(2):
                    with torch.profiler.record_function("my step"):
                        engine.backward(engine(*batch_of(dist.get_rank(), seed)))
                        engine.step()
                    profile.step()
            events = {event.key: event.count for event in profile.key_averages()}
            assert events["my step"] == 2
            assert any("allreduce" in name or "reduce_scatter" in name or "all_reduce" in name for name in events)
            train_and_compare(engine, f"after the profiler at stage {stage}", windows=1)
            engine.destroy()


class TestDistributedCheckpoint(DistributedTest):
    world_size = WORLD_SIZE
    reuse_dist_env = True

    def test_weights_out_and_in(self, tmpdir: str) -> None:
        for stage in STAGES:
            engine = make_engine(stage)
            train_and_compare(engine, f"stage {stage}", windows=1)
            wanted = weights_of(engine.module)
            folder = str(Path(str(tmpdir)) / f"stage{stage}")
            parameters = list(engine.module.parameters())
            with deepspeed.zero.GatheredParameters(parameters):
                dcp.save({"model": get_model_state_dict(engine.module)}, checkpoint_id=folder)
            engine.destroy()

            other = Net()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.add_(1.0)
            engine = make_engine(stage, other)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                state = {"model": get_model_state_dict(engine.module)}
                dcp.load(state, checkpoint_id=folder)
                set_model_state_dict(engine.module, state["model"])
            found = weights_of(engine.module)
            assert all(torch.equal(found[name], weight) for name, weight in wanted.items()), f"stage {stage}"
            train_and_compare(engine, f"after loading at stage {stage}")
            moved = max((w - wanted[n]).abs().max().item() for n, w in weights_of(engine.module).items())
            assert 0 < moved < 0.5, f"stage {stage}: the steps began at other weights"
            engine.destroy()

    def test_partitioned_weights_are_refused_by_name(self) -> None:
        engine = make_engine(3)
        whole = weights_of(engine.module)
        with pytest.raises(RuntimeError, match=r"first\.weight.*partitioned.*GatheredParameters.*save_checkpoint"):
            get_model_state_dict(engine.module)
        named = hasattr(nn.Module, "register_load_state_dict_pre_hook")  # torch 2.5; before, sizes that differ
        with pytest.raises(RuntimeError, match=r"set_model_state_dict.*modifier_rank=0" if named else "size mismatch"):
            set_model_state_dict(engine.module, whole)
        engine.module.state_dict()  # itself stays what it was
        train_and_compare(engine, "after a refusal", windows=1)
