# SPDX-License-Identifier: Apache-2.0
"""What is gathered ahead and what is kept under ZeRO-3: hints from the last iteration, which may be wrong."""

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.sharded_parameter import Gather, shard_of
from deepspeed.runtime.zero.usage_order import UsageOrder
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from unit.common import DistributedTest
from unit.graphs import make_engine, weights_of
from unit.reference import max_relative_error


def order_of(*events: str, distance: int = 0, longest: int = 100) -> UsageOrder:
    """An order that has learnt events like "ab": one named "ab" that uses items "a" and "b", each of size 10."""
    order: UsageOrder = UsageOrder(lambda item: 10, distance, longest)
    for event in events:
        order.visit(event, event)
    order.finish()
    return order


class TestUsageOrder:
    def test_knows_nothing_at_first(self):
        order: UsageOrder = UsageOrder(len, 100)
        assert len(order) == 0 and list(order.ahead()) == []
        assert order.visit("a", []) is None and order.keeps(None) == frozenset()
        order.finish()
        assert len(order) == 1

    def test_looks_ahead_of_the_present_place_once(self):
        order = order_of("a", "b", "c", "d")
        assert order.visit("a", "a") == 0
        ahead = order.ahead()
        assert [next(ahead), next(ahead)] == ["b", "c"]
        order.step_back()
        assert list(order.ahead()) == ["c", "d"]
        assert order.visit("b", "b") == 1 and list(order.ahead()) == []

    def test_finds_its_place_after_events_that_did_not_come(self):
        order = order_of("a", "b", "c", "d", "e")
        order.visit("a", "a")
        list(order.ahead())
        assert order.visit("d", "d") == 3
        assert list(order.ahead()) == ["e"]

    def test_goes_back_to_an_event_that_comes_again(self):
        order = order_of("a", "b", "c")
        assert [order.visit(event, event) for event in ("a", "b", "c", "b")] == [0, 1, 2, 1]
        assert list(order.ahead()) == ["c"]

    def test_takes_the_next_of_several_places(self):
        order = order_of("a", "b", "a", "c", "a", "d")
        assert [order.visit(event, event) for event in ("b", "a", "d", "a")] == [1, 2, 5, 0]

    def test_unknown_events_lose_nothing(self):
        order = order_of("a", "b", "c")
        assert [order.visit(event, event) for event in ("a", "x", "b", "c")] == [0, None, 1, 2]
        order.finish()
        assert [order.visit(event, event) for event in ("a", "x", "b", "c")] == [0, 1, 2, 3]

    def test_a_shorter_iteration_replaces_the_order(self):
        order = order_of("a", "b", "c")
        order.visit("c", "c")
        order.finish()
        assert len(order) == 1 and order.visit("a", "a") is None
        order.finish()
        order.finish()  # an iteration without events teaches nothing
        assert order.visit("a", "a") == 0

    def test_the_items_count_as_well_as_the_events(self):
        order = order_of("a", "b", "a", distance=100)
        assert order.keeps(0) == {"a"}
        for event, items in (("a", ""), ("b", "b"), ("a", "")):
            order.visit(event, items)
        order.finish()
        assert order.keeps(0) == frozenset()

    @pytest.mark.parametrize("distance, kept", [(0, "d"), (19, "d"), (29, "d"), (30, "bd")])
    def test_keeps_what_is_used_again_within_the_distance(self, distance, kept):
        order = order_of("a", "b", "cc", "d", "bd", distance=distance)  # two "c" and "d" lie between the uses of "b"
        assert "".join(sorted(item for place in range(5) for item in order.keeps(place))) == kept

    def test_remembers_only_so_much(self):
        order: UsageOrder = UsageOrder(lambda item: 1, 0, longest=5)
        for _ in range(50):
            order.visit("a", "a")
        order.finish()
        assert len(order) == 5

    def test_forgets(self):
        order = order_of("a", "b", distance=100)
        order.forget()
        assert len(order) == 0 and order.visit("a", "a") is None and list(order.ahead()) == []


class Switch(nn.Module):
    """A trunk of small pieces, then one of three branches."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](torch.tanh(self.trunk(x))).square().mean()


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def check_step(engine, step: int, *args, dtype: torch.dtype = torch.float64) -> None:
    """A step on every rank against plain autograd on the data of all."""
    world_size = torch_dist.get_world_size()
    weights = {name: w.double().requires_grad_() for name, w in weights_of(engine.module).items()}
    plain = type(engine.module)().double()
    for rank in range(world_size):
        given = [arg(rank) if callable(arg) else arg for arg in args]
        loss = torch.func.functional_call(plain, weights, (batch_of(rank, step).double(), *given))
        (loss / world_size).backward()
    mine = [arg(torch_dist.get_rank()) if callable(arg) else arg for arg in args]
    engine.backward(engine(batch_of(torch_dist.get_rank(), step), *mine))
    actual = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    expected = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}
    worst, error = max_relative_error(actual, expected)
    assert error < 1e-5, f"step {step}: {worst} has relative error {error:.3g}"
    engine.step()


def watch(engine, monkeypatch) -> list[str]:
    """Log of gathers (with the names of their weights) and of the modules that begin forward (after their gathers)."""
    log: list[str] = []
    start = Gather._start

    def noted(gather: Gather) -> None:
        log.append("gather " + " ".join(shard.name.strip("'") for shard in gather.shards))
        start(gather)

    monkeypatch.setattr(Gather, "_start", noted)
    for name, module in engine.module.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: log.append(f"in {name}"))
    return log


def make(model: nn.Module, **zero):
    options = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, **zero}
    return make_engine(model, 3, zero=options)


class TestPrefetch(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("bucket", [0, 80, 10**6])
    @pytest.mark.parametrize("limit", [60, 10**9])
    @pytest.mark.parametrize("reuse", [0, 10**9])
    def test_misses_cost_no_correctness(self, bucket, limit, reuse):
        torch.manual_seed(4)
        engine = make(
            Switch(),
            stage3_prefetch_bucket_size=bucket,
            stage3_max_live_parameters=limit,
            stage3_max_reuse_distance=reuse,
        )
        for step, which in enumerate([0, 1, 0, 0, 2, 1, 1, 0]):
            check_step(engine, step, which)
            with torch.no_grad():
                engine(batch_of(0, 0), 2 - which)
            assert all(p.shape == (0,) and p.ds_status.name == "NOT_AVAILABLE" for p in engine.module.parameters())

    def test_weights_are_on_their_way_before_their_module_begins(self, monkeypatch):
        engine = make(Switch(), stage3_prefetch_bucket_size=10**6, stage3_max_reuse_distance=0)
        log = watch(engine, monkeypatch)
        for step in range(2):
            log.clear()
            engine.backward(engine(batch_of(0, step), 0))
            early = log.index(next(line for line in log if "trunk.2.weight" in line)) < log.index("in trunk.0")
            assert early == (step == 1)
            engine.step()
        # in the second iteration the trunk's first module gathers, and all others find their weights under way
        begun = log.index("in trunk.0")
        assert not any(line.startswith("gather") for line in log[begun : log.index("in branches.0")])

    def test_no_more_than_a_bucket_ahead(self, monkeypatch):
        engine = make(Switch(), stage3_prefetch_bucket_size=80, stage3_max_reuse_distance=0)
        coordinator = engine.optimizer.parameter_offload.coordinator
        most = 0
        for module in engine.module.modules():

            def look(*_) -> None:
                nonlocal most
                most = max(most, coordinator._ahead)

            module.register_forward_pre_hook(look)
        for step in range(3):
            engine.backward(engine(batch_of(0, step), step % 2))
            engine.step()
        assert 0 < most <= 80
        assert coordinator._ahead == 0

    def test_small_weights_of_a_module_travel_together(self, monkeypatch):
        engine = make(Switch())
        log = watch(engine, monkeypatch)
        engine.backward(engine(batch_of(0, 0), 0))
        assert "gather trunk.0.weight trunk.0.bias" in log and "gather trunk.1.weight trunk.1.bias" in log

    def test_no_gather_for_what_backward_does_not_read(self, monkeypatch):
        engine = make(nn.Linear(8, 8), stage3_max_reuse_distance=0)
        log = watch(engine, monkeypatch)
        engine.backward(engine(batch_of(0, 0)).square().mean())  # the input wants no gradient
        assert log == ["gather weight bias", "in "]


class TestKeeping(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("distance, gathers", [(0, 3), (10**9, 2)])
    def test_between_two_uses_in_forward(self, distance, gathers, monkeypatch):
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8, bias=False)
                self.second = nn.Linear(8, 8, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.first(self.second(self.first(x)))

        engine = make(Twice(), stage3_max_reuse_distance=distance)
        log = watch(engine, monkeypatch)
        with torch.no_grad():
            for _ in range(2):
                log.clear()
                engine(batch_of(0, 0))
        assert sum(line.startswith("gather") for line in log) == gathers

    def test_a_limit_wins_over_keeping(self, monkeypatch):
        engine = make(Switch(), stage3_max_reuse_distance=10**9, stage3_max_live_parameters=80)
        for step in range(3):
            check_step(engine, step, 1)
        assert engine.optimizer.parameter_offload.coordinator.peak_numel <= 80

    def test_granularity(self, monkeypatch):
        """Modules that are finer than the threshold are gathered as one."""
        engine = make(Switch(), stage3_module_granularity_threshold=41)  # the trunk has 160 elements in 4 modules
        offload: DeepSpeedZeRoOffload = engine.optimizer.parameter_offload
        assert engine.module.trunk._ds_unit.whole and not engine.module._ds_unit.whole
        log = watch(engine, monkeypatch)
        for step in range(3):
            check_step(engine, step, step)
        together = "gather trunk.0.weight trunk.0.bias trunk.1.weight trunk.1.bias trunk.2.weight trunk.2.bias"
        assert together in log and offload.coordinator.available_numel == 0


class Experts(nn.Module):
    """Each sample's expert is chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, choices: tuple[int, ...]) -> Tensor:
        out = x * 0.5
        for choice in choices:
            out = out + self.experts[choice](x)
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.block = Experts()
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor, choices: tuple[int, ...]) -> Tensor:
        hidden = self.block(torch.tanh(self.before(x)), choices)
        return self.after(self.block(hidden, choices[:1])).square().mean()


class TestLeafModules(DistributedTest):
    world_size = [2, 3]
    reuse_dist_env = True

    @pytest.mark.parametrize("bucket", [0, 10**6])
    @pytest.mark.parametrize("limit", [0, 10**9])
    def test_ranks_choose_different_experts(self, bucket, limit):
        torch.manual_seed(6)
        model = Mixture()
        set_z3_leaf_modules(model, [Experts])
        engine = make(model, stage3_prefetch_bucket_size=bucket, stage3_max_live_parameters=limit)
        plans = [
            lambda rank: (rank,),
            lambda rank: (0, rank),
            lambda rank: () if rank == 0 else (1, 2),
            lambda rank: tuple(range(rank)),
            lambda rank: (2,),
        ]
        for step, plan in enumerate(plans * 2):
            check_step(engine, step, plan)
            assert all(p.shape == (0,) for p in model.parameters())

    def test_unused_experts_have_zeros(self):
        model = Mixture()
        set_z3_leaf_modules(model, [Experts])
        engine = make(model)
        engine.backward(engine(batch_of(0, 0), (torch_dist.get_rank() % 2,)))
        for name, parameter in model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            assert (gradient.count_nonzero() == 0) == ("experts.2" in name), name
        engine.step()
        assert shard_of(model.before.weight).full is None
