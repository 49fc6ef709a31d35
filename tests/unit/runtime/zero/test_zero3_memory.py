# SPDX-License-Identifier: Apache-2.0
"""What memory whole weights take under ZeRO-3: between steps, at most, in graphs, and over many steps."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.zero import sharded_parameter
from deepspeed.runtime.zero.saved_weights import SavedWeight
from deepspeed.runtime.zero.sharded_parameter import ShardedParameter, shard_of
from unit.common import DistributedTest
from unit.graphs import make_engine


def settled(count: Callable[[], object], expected: object, seconds: float = 2.0) -> object:
    """``count()`` as soon as it is what is expected, else after some time."""
    end = time.monotonic() + seconds
    while (now := count()) != expected and time.monotonic() < end:
        time.sleep(0.01)
    return now


class Census:
    """Counts the memory of whole weights by looking at the memory itself: what was ever shown and is not freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._shown: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        show = ShardedParameter.show

        def counted(shard: ShardedParameter, full: Tensor) -> None:
            storage = full.untyped_storage()
            self._shown[storage.data_ptr()] = (StorageWeakRef(storage), shard.numel)
            show(shard, full)
            self.peak = max(self.peak, self.live())

        monkeypatch.setattr(ShardedParameter, "show", counted)

    def settled(self, expected: int = 0) -> int:
        """As ``live``, once the threads of the transport have let go of what they moved."""
        return settled(self.live, expected)

    def live(self) -> int:
        """Elements of whole weights in memory now, whoever holds them."""
        self._shown = {place: entry for place, entry in self._shown.items() if not entry[0].expired()}
        return sum(numel for _, numel in self._shown.values())


def make(model: nn.Module, **zero) -> object:
    options = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **zero}
    return make_engine(model, 3, zero=options)


class Chain(nn.Module):
    """Square layers without bias, of ``width ** 2`` elements each."""

    def __init__(self, width: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class TestLimits(DistributedTest):
    world_size = 2

    def test_between_steps_only_persistent_weights_are_whole(self, monkeypatch):
        census = Census(monkeypatch)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        engine = make(model, stage3_param_persistence_threshold=10, stage3_prefetch_bucket_size=1000)
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
            whole = {name for name, p in model.named_parameters() if p.shape == p.ds_shape}
            assert whole == {"0.bias", "2.bias"}
            assert census.settled(11) == 11

    @pytest.mark.parametrize("reuse", [0, 10**9])
    @pytest.mark.parametrize("bucket", [0, 100, 10**9])
    @pytest.mark.parametrize("limit", [0, 200])
    def test_peak(self, limit, bucket, reuse, monkeypatch):
        census = Census(monkeypatch)
        engine = make(
            Chain(),
            stage3_max_live_parameters=limit,
            stage3_prefetch_bucket_size=bucket,
            stage3_max_reuse_distance=reuse,
        )
        coordinator = engine.optimizer.parameter_offload.coordinator
        for step in range(4):
            engine(torch.randn(4, 8))  # a forward whose backward never comes
            for _ in range(2):
                loss = engine(torch.randn(4, 8)).square().mean()
                engine.backward(loss, retain_graph=True)
                engine.backward(loss)
            engine.step()
            with torch.no_grad():
                engine(torch.randn(4, 8))
            # what one module needs at once may exceed the limit; a view autograd holds outlives a release by one node
            assert coordinator.peak_numel <= max(limit, 64), step
            assert census.peak <= max(limit, 64) + 64, step
        assert census.settled() == 0 and coordinator.available_numel == 0

    def test_a_kept_weight_is_not_let_go_by_the_module_that_needs_it(self):
        """It is needed again together with another one for which there is no room."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(6, 8)
                self.head = nn.Linear(8, 6)
                self.head.weight = self.table.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.table(tokens))

        engine = make(Tied(), stage3_max_live_parameters=50)
        for _ in range(3):
            engine.backward(engine(torch.arange(6)).square().mean())
            engine.step()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x * 2, x * 3, need_weights=False)[0]


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + x @ self.weight.t()) @ self.weight[2:5].t() @ self.weight.view(16, 4)[:3]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x[:, :3]))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.table(torch.arange(6).view(2, 3)) + x[:, :3, :8]))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    "product": Product,
    "convolution": Convolution,
    "attention": Attention,
    "table": Table,
    "layer_norm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "bilinear": lambda: nn.Sequential(nn.PReLU(4), nn.Linear(8, 8)),
    "recurrent": Recurrent,
}


class TestGraphs(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_keep_no_whole_weight(self, kind, monkeypatch):
        census = Census(monkeypatch)
        torch.manual_seed(0)
        engine = make(KINDS[kind](), stage3_max_reuse_distance=0)
        coordinator = engine.optimizer.parameter_offload.coordinator
        for step in range(2):
            out = engine(torch.randn(2, 4, 8, requires_grad=True))
            kept = coordinator.available_numel  # of the last module, whose backward comes next
            assert census.settled(kept) == kept and (step or not kept)
            engine.backward(out.square().mean())
            engine.step()
            assert census.settled() == 0

    def test_outputs_and_inputs_modified_in_place_are_noticed(self):
        """torch leaves it to hooks on saved tensors, and there are hooks at stage 3."""

        class InPlace(nn.Module):
            def __init__(self, when: str) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)
                self.scale = nn.Parameter(torch.ones(8))
                self.when = when

            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.exp(self.layer(x) * self.scale)
                if self.when == "inside":
                    hidden.mul_(2)
                return hidden

        for when in ("inside", "outside"):
            engine = make(InPlace(when))
            out = engine(torch.randn(2, 8))
            if when == "outside":
                out.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            engine.zero_grad()
            engine.destroy()

    def test_hooks_of_others_stay_on_top(self, monkeypatch):
        census = Census(monkeypatch)
        engine = make(Chain(), stage3_max_reuse_distance=0)
        with torch.autograd.graph.save_on_cpu():
            out = engine(torch.randn(4, 8))
        engine.backward(out.square().mean())
        engine.step()
        assert census.settled() == 0

    def test_sparse_tensors_can_be_saved(self):
        class Sparse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 4))

            def forward(self, x: Tensor) -> Tensor:
                return torch.sparse.mm(x, self.weight)

        engine = make(Sparse())
        engine.backward(engine(torch.eye(8).to_sparse()).square().mean())
        engine.step()


class Branches(nn.Module):
    """One of two layers in turn, each under a checkpoint if wanted."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.choices = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor, *which: int) -> Tensor:
        x = self.first(x)
        total = x.sum() * 0
        for choice in which:
            layer = self.choices[choice]
            out = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            total = total + out.square().mean()
        return total


def train_step(engine, step: int) -> None:
    engine.backward(engine(torch.randn(2, 8), step % 2))
    engine.step()


def two_branches(engine, step: int) -> None:
    engine.backward(engine(torch.randn(2, 8), 0, 1, step % 2))
    engine.step()


def evaluation_between(engine, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        engine(torch.randn(2, 8), step % 2)
    with torch.inference_mode():
        engine(torch.randn(2, 8), 1, 0)
    engine.train()
    with torch.no_grad():
        engine(torch.randn(2, 8), 1)
    train_step(engine, step)


def generation(engine, step: int) -> None:
    with torch.no_grad():
        for _ in range(step % 5):
            engine(torch.randn(1, 8), 0)
    train_step(engine, step)


def forward_alone(engine, step: int) -> None:
    engine(torch.randn(2, 8), step % 2)
    if step % 10 == 9:
        train_step(engine, step)


def grad_alone(engine, step: int) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    torch.autograd.grad(engine(x, step % 2), x)
    if step % 10 == 9:
        train_step(engine, step)


def failing_forward(engine, step: int) -> None:
    with pytest.raises(IndexError):
        engine(torch.randn(2, 8), 7)
    train_step(engine, step)


def failing_backward(engine, step: int) -> None:
    out = engine(torch.randn(2, 8), 0)
    out.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(out)
    engine.zero_grad()
    train_step(engine, step)


LOOPS = [
    train_step,
    two_branches,
    evaluation_between,
    generation,
    forward_alone,
    grad_alone,
    failing_forward,
    failing_backward,
]


def footprint(engine) -> dict[str, int]:
    """Numbers of things that must not grow."""
    gc.collect()
    things = gc.get_objects()
    coordinator = engine.optimizer.parameter_offload.coordinator
    orders = (coordinator._training, coordinator._inference)
    hooks = sum(
        len(table)
        for module in engine.module.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )
    return {
        "tensors": sum(1 for thing in things if isinstance(thing, Tensor)),
        "saved": sum(1 for thing in things if type(thing) is SavedWeight),
        "gathers": sum(1 for thing in things if type(thing) is sharded_parameter.Gather),
        "hooks": hooks,
        "whole": len(sharded_parameter.GATHERED),
        "available": coordinator.available_numel,
        "holds": len(coordinator._backward_holds) + len(coordinator._standing) + coordinator._running,
        "modules in use": sum(len(p.ds_active_sub_modules) for p in engine.module.parameters()),
        "order": max(len(order._events) for order in orders) // 100 + coordinator.trace_length // 50,
    }


def smallest_footprint(engine) -> dict[str, int]:
    """The transport lets go of tensors a moment later."""
    time.sleep(0.1)
    return footprint(engine)


def grown(engine, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in footprint(engine).items() if count > before[name]}


class TestManySteps(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("loop", LOOPS)
    def test_nothing_grows(self, loop):
        torch.manual_seed(1)
        engine = make(
            Branches(), stage3_prefetch_bucket_size=100, stage3_param_persistence_threshold=8, sub_group_size=40
        )
        for step in range(20):
            loop(engine, step)
        before = smallest_footprint(engine)
        for step in range(20, 90):
            loop(engine, step)
        assert settled(lambda: grown(engine, before), {}) == {}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_nothing_grows_under_checkpoints(self, reentrant):
        torch.manual_seed(1)
        engine = make(Branches(reentrant), stage3_prefetch_bucket_size=100)
        for step in range(10):
            two_branches(engine, step)
        before = smallest_footprint(engine)
        for step in range(10, 60):
            two_branches(engine, step)
        assert settled(lambda: grown(engine, before), {}) == {}

    def test_an_engine_without_optimizer(self):
        model = Branches()
        engine = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            },
        )[0]
        coordinator = engine.optimizer.coordinator
        for step in range(40):
            with torch.no_grad():
                engine(torch.randn(2, 8), step % 2)
            assert coordinator.available_numel == 0
        assert max(len(coordinator._training._events), len(coordinator._inference._events)) < 10

    def test_an_engine_in_the_forward_of_another(self):
        """A frozen teacher that the student calls."""
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        teacher = deepspeed.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=config)[0]

        class Student(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    wanted = teacher(x)
                return (self.layer(x) - wanted).square().mean()

        engine = make(Student())
        for _ in range(30):
            engine.backward(engine(torch.randn(2, 8)))
            engine.step()
        coordinator = teacher.optimizer.coordinator
        assert coordinator.available_numel == 0
        assert len(coordinator._training._events) == 0 and 0 < len(coordinator._inference) < 5


def tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, Tensor))


class TestEnd(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("persistent", [0, 10**6])
    @pytest.mark.parametrize("destroy", [True, False])
    def test_a_deleted_engine_leaves_nothing(self, destroy, persistent):
        def one() -> list[weakref.ref]:
            engine = make(Chain(), stage3_param_persistence_threshold=persistent)
            for _ in range(2):
                engine.backward(engine(torch.randn(4, 8)).square().mean())
                engine.step()
            engine(torch.randn(4, 8))
            shards = [shard_of(p) for p in engine.module.parameters()]
            watched = [engine, engine.module, engine.optimizer.parameter_offload, *engine.module.parameters(), *shards]
            if destroy:
                engine.destroy()
            return [weakref.ref(thing) for thing in watched]

        counts = []
        for _ in range(3):
            left = one()
            gc.collect()
            assert [ref() for ref in left if ref() is not None] == []
            counts.append(tensors())
        assert settled(tensors, 0, seconds=0.3) <= counts[1]

    def test_a_model_outlives_its_engine_and_gets_another(self):
        model = Chain()
        for _ in range(3):
            engine = make(model)
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
            engine.destroy()
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert all(p.shape == (0,) and not p._backward_hooks for p in model.parameters())

    def test_a_model_that_is_dropped_while_it_is_whole(self):
        with deepspeed.zero.Init():
            model = nn.Linear(8, 8)
        model.weight.all_gather()
        left = weakref.ref(model.weight)
        del model
        gc.collect()
        assert left() is None

    def test_nested_init_contexts(self):
        """A model that builds another under ``Init``, again and again."""

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.own = nn.Linear(4, 4)
                with deepspeed.zero.Init():
                    self.inner = nn.Linear(4, 4)

        counts = []
        for _ in range(4):
            with deepspeed.zero.Init():
                model = Outer()
            assert all(p.shape == (0,) for p in model.parameters())
            del model
            gc.collect()
            counts.append(tensors())
        assert settled(tensors, 0, seconds=0.3) <= counts[1]
