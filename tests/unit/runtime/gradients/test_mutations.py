# SPDX-License-Identifier: Apache-2.0
"""The gradient check must notice a broken reducer, and broken gathers of partitioned weights: each mutation breaks one
thing on purpose and has to be found out.

A mutation is found out by an error of the accounts or by a wrong number. Each runs twice: as it is, and with the
accounts switched off, where the numbers alone must tell. The transport is delayed and buffers are born full of NaN, so
that forgetting to wait or to write zeros is not a matter of luck.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.runtime.fp16.unfused_optimizer import ReplicatedOptimizer
from deepspeed.runtime.gradients import buckets, collectives, transport
from deepspeed.runtime.gradients.arithmetic import deliver
from deepspeed.runtime.gradients.backward_scope import BackwardScope
from deepspeed.runtime.gradients.buckets import Bucket, CommBuffer
from deepspeed.runtime.gradients.layout import BucketPlan, PerParameter
from deepspeed.runtime.gradients.ledger import GradientAccountingError, Ledger, ParameterRecord, Phase
from deepspeed.runtime.gradients.reducer import GradientReducer
from deepspeed.runtime.gradients.transport import BucketTransport
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.sharded_parameter import Gather, SecondaryShard, ShardedParameter
from deepspeed.utils.tensor_fragment import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.delayed_transport import BufferInFlightError, delayed_transport
from unit.reference import max_relative_error

STEPS = 2  # micro-steps per window
TOLERANCE = 1e-5

# ---------------------------------------------------------------------------------------------------- the scenario


class Model(nn.Module):
    """A trunk that is used several times under checkpoints of both kinds, two heads, and a side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.side = nn.Linear(5, 3)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 4)])

    def forward(self, x: Tensor, uses: int, head: int) -> Tensor:
        for use in range(uses):
            x = x + checkpoint(self.trunk, x, use_reentrant=use % 2 == 0)
        return self.heads[head](x)


@dataclass(frozen=True)
class Call:
    """One backward. ``uses``: of the trunk; ``head``: the other is unused; ``side``: with a branch past the engine."""

    uses: int
    head: int
    side: bool = True
    scale_wrt_gas: bool = True
    aborted: bool = False


# By window, by micro-step. The second window uses the trunk more often than the first, so that what was learnt about
# the number of firings is wrong in both of its backwards; in the third a head that had a gradient has none, and one
# micro-step has two backwards.
WINDOWS = (
    ((Call(2, 0),), (Call(2, 1),)),
    ((Call(3, 0),), (Call(3, 1, scale_wrt_gas=False),)),
    ((Call(2, 1),), (Call(1, 1), Call(2, 1, side=False))),
)
ABORTED = Call(2, 0, aborted=True)  # before the first micro-step of the last window, where nothing is reduced yet


def data(window: int, position: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * window + 10 * position + rank)
    return torch.randn(3, 5, generator=generator).to(dtype).requires_grad_()


def loss_of(model: Any, module: Model, call: Call, x: Tensor) -> Tensor:
    loss = model(x, call.uses, call.head).square().mean()
    return loss + module.side(x).square().mean() if call.side else loss


def reference(window: int, weights: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    exact = Model().double()
    exact.load_state_dict(weights)
    for rank in range(world_size):
        for position, calls in enumerate(WINDOWS[window]):
            for call in calls:
                share = 1.0 / world_size / (STEPS if call.scale_wrt_gas else 1)
                (loss_of(exact, exact, call, data(window, position, rank, torch.float64)) * share).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in exact.named_parameters()
    }


class Interrupted(Exception):
    """Raised in the middle of a backward."""


def run_aborted_backward(engine: Any) -> None:
    """A backward that dies when the heads have their gradients and the first use of the trunk has not."""

    def interrupt(_: Tensor) -> None:
        raise Interrupted

    x = data(9, 0, engine.global_rank)
    shifted = x * 1.0
    shifted.register_hook(interrupt)
    with pytest.raises(Interrupted):
        engine.backward(loss_of(engine, engine.module, ABORTED, shifted))


def masters_of(engine: Any) -> dict[str, Tensor]:
    """The weights as the optimizer has them: at stage 3 what is gathered may differ when something is broken."""
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def worst_error(stage: int, **zero: Any) -> float:
    """Train through all windows; the largest relative error of a weight at the start, a gradient or its norm."""
    torch.manual_seed(7)
    model = Model()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 24, "overlap_comm": True, **zero},
    }
    if stage == 3:  # the biases stay whole, the matrices do not
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 7, "stage3_prefetch_bucket_size": 40}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    worst = max_relative_error(masters_of(engine), start)[1]
    for window in range(len(WINDOWS)):
        expected = reference(window, masters_of(engine), engine.world_size)
        if window == 2 and stage < 2:
            run_aborted_backward(engine)
        for position, calls in enumerate(WINDOWS[window]):
            for call in calls:
                loss = loss_of(engine, engine.module, call, data(window, position, engine.global_rank))
                engine.backward(loss, scale_wrt_gas=call.scale_wrt_gas)
            if position == STEPS - 1:
                actual = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
            engine.step()
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        norm_error = abs(float(engine.get_global_grad_norm()) / norm - 1.0)
        error = max_relative_error(actual, expected)[1]
        worst = max(worst, error, norm_error if math.isfinite(norm_error) else math.inf)
    engine.destroy()
    return worst


# ---------------------------------------------------------------------------------------------------- the mutations


def no_sweep(patch: pytest.MonkeyPatch) -> None:
    def finish_round(self: GradientReducer) -> None:
        self.transport.land_all()
        self._round_open = False
        self._next = 0
        self.ledger.reduced = True

    patch.setattr(GradientReducer, "_finish_round", finish_round)


def no_correcting_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientReducer, "reduce_pending", lambda self, loss_scale=None: None)


def no_accumulation_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientReducer, "_unit", lambda self: 1.0 / self.window_loss_scale)


def no_world_division(patch: pytest.MonkeyPatch) -> None:
    real = GradientReducer._scales

    def scales(self: GradientReducer, dtype: torch.dtype) -> tuple[float, float]:
        before, after = real(self, dtype)
        return before, after * self.channel.world_size

    patch.setattr(GradientReducer, "_scales", scales)


def scale_wrt_gas_ignored(patch: pytest.MonkeyPatch) -> None:
    real = GradientReducer.begin_backward

    def begin_backward(self: GradientReducer, scope: BackwardScope, *fired: ParameterRecord | None) -> None:
        scope.scale_by_accumulation = True
        real(self, scope, *fired)

    patch.setattr(GradientReducer, "begin_backward", begin_backward)


def contribution_doubled(patch: pytest.MonkeyPatch) -> None:
    real = ParameterRecord.take_gradient

    def take_gradient(self: ParameterRecord) -> Tensor | None:
        gradient = real(self)
        return gradient if gradient is None or self.name != "side.bias" else 2 * gradient

    patch.setattr(ParameterRecord, "take_gradient", take_gradient)


def contribution_lost(patch: pytest.MonkeyPatch) -> None:
    real = ParameterRecord.take_gradient

    def take_gradient(self: ParameterRecord) -> Tensor | None:
        gradient = real(self)
        return None if self.name == "side.bias" else gradient

    patch.setattr(ParameterRecord, "take_gradient", take_gradient)


def firing_counted_twice(patch: pytest.MonkeyPatch) -> None:
    real = ParameterRecord.count

    def count(self: ParameterRecord) -> None:
        real(self)
        self.seen += 1

    patch.setattr(ParameterRecord, "count", count)


def unused_left_unwritten(patch: pytest.MonkeyPatch) -> None:
    real = Bucket._take

    def take(self: Bucket, *args: Any) -> tuple[list[int], list[Tensor], list[int]]:
        present, gradients, _ = real(self, *args)
        return present, gradients, []

    patch.setattr(Bucket, "_take", take)


def gaps_left_unwritten(patch: pytest.MonkeyPatch) -> None:
    real = Bucket.fill

    def fill(self: Bucket, *args: Any) -> Tensor:
        self.plan.gaps = []
        return real(self, *args)

    patch.setattr(Bucket, "fill", fill)


def parking_overwrites(patch: pytest.MonkeyPatch) -> None:
    def overwrite(targets: list[Tensor], sources: list[Tensor], scale: float) -> None:
        with torch.no_grad():
            for target, source in zip(targets, sources):
                target.copy_(source * scale)

    patch.setattr(buckets, "add_scaled_each", overwrite)


def landing_overwrites(patch: pytest.MonkeyPatch) -> None:
    def overwrite(target: Tensor, parts: list[Tensor], scale: float, add: bool) -> None:
        deliver(target, parts, scale, add=False)

    patch.setattr(transport, "deliver", overwrite)


def hint_is_truth(patch: pytest.MonkeyPatch) -> None:
    real = ParameterRecord.count

    def count(self: ParameterRecord) -> bool:
        last = real(self)
        if self.phase is Phase.LATE:
            self.drop_gradient()
        return last

    patch.setattr(ParameterRecord, "count", count)


def no_wait(patch: pytest.MonkeyPatch) -> None:
    real = collectives.reduce_buffer

    def reduce_buffer(*args: Any) -> collectives.Reduction:
        return collectives.Reduction(None, real(*args).parts)

    patch.setattr(collectives, "reduce_buffer", reduce_buffer)


def buffer_reused_without_waiting(patch: pytest.MonkeyPatch) -> None:
    def free_buffer(self: BucketTransport, bucket: Bucket, slot: int) -> CommBuffer:
        return self.pool.get(slot, bucket.comm_dtype, bucket.device)

    patch.setattr(BucketTransport, "_free_buffer", free_buffer)


def last_window_left_in_shard(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Bucket) -> None:
        self.local_in_use = False

    patch.setattr(Bucket, "drop", drop)


def parked_kept_over_the_window(patch: pytest.MonkeyPatch) -> None:
    real = Bucket.fill

    def fill(self: Bucket, *args: Any) -> Tensor:
        parked = self.local_in_use
        data = real(self, *args)
        self.local_in_use = parked
        return data

    patch.setattr(Bucket, "fill", fill)


def aborted_backward_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientReducer, "abort_backward", lambda self, reason, announced=False: self._park())


def released_memory_is_reused(patch: pytest.MonkeyPatch) -> None:
    """A weight is released too early: a graph still has a view of it."""
    real = ShardedParameter.hide

    def hide(self: ShardedParameter) -> None:
        if self.full is not None:
            self.full.fill_(math.nan)
        real(self)

    patch.setattr(ShardedParameter, "hide", hide)


def released_in_use(patch: pytest.MonkeyPatch) -> None:
    """A weight is released when its module begins, and not gathered again when the module asks for it."""
    real = PartitionedParameterCoordinator.fetch_forward

    def fetch_forward(
        self: PartitionedParameterCoordinator, module: nn.Module, shards: list[ShardedParameter]
    ) -> int | None:
        place = real(self, module, shards)
        self.release_forward(module, shards, None)
        return place

    patch.setattr(PartitionedParameterCoordinator, "fetch_forward", fetch_forward)
    patch.setattr(ZeROOrderedDict, "__getitem__", OrderedDict.__getitem__)


def stale_shard_gathered(patch: pytest.MonkeyPatch) -> None:
    real = Gather._sources
    first: dict[ShardedParameter, Tensor] = {}

    def sources(self: Gather) -> list[Tensor]:
        return [first.setdefault(shard, data.clone()) for shard, data in zip(self.shards, real(self))]

    patch.setattr(Gather, "_sources", sources)


def persistent_weights_left_stale(patch: pytest.MonkeyPatch) -> None:
    real = DeepSpeedZeRoOffload.weights_written

    def weights_written(self: DeepSpeedZeRoOffload, shards: list[ShardedParameter]) -> None:
        real(self, [shard for shard in shards if not shard.persistent])

    patch.setattr(DeepSpeedZeRoOffload, "weights_written", weights_written)


def padding_read(patch: pytest.MonkeyPatch) -> None:
    """The whole value ends with the padding instead of before it."""
    real = ShardedParameter.show

    def show(self: ShardedParameter, full: Tensor) -> None:
        real(self, full)
        self.parameter.data = full[full.numel() - self.numel :].view(self.shape)

    patch.setattr(ShardedParameter, "show", show)


def wrong_slice_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ShardedParameter, "begin", property(lambda self: min(self.ranks.rank * self.slice_numel + 1, self.numel))
    )


def wrong_row_reduced(patch: pytest.MonkeyPatch) -> None:
    """The slices of a gradient go to each other's owners."""
    real = PerParameter._bucket

    def bucket(self: PerParameter, *args: Any) -> BucketPlan:
        plan = real(self, *args)
        rows = range(0, plan.numel, plan.numel // self.world_size)
        for piece in plan.pieces:
            piece.offset = rows[-1 - piece.offset // rows.step] + piece.offset % rows.step
        return plan

    patch.setattr(PerParameter, "_bucket", bucket)


def weights_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Gather) -> None:
        self._works = []
        self._take_out()

    patch.setattr(Gather, "_await", forget)


def secondary_shard_not_refreshed(patch: pytest.MonkeyPatch) -> None:
    real = SecondaryShard.keep

    def keep(self: SecondaryShard, shard: ShardedParameter) -> None:
        if self.data is None:
            real(self, shard)
        self.version = shard.version

    patch.setattr(SecondaryShard, "keep", keep)


def published_gradient_not_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicatedOptimizer, "retract_gradients", lambda self: None)


@dataclass(frozen=True)
class Mutation:
    """What is broken, at which stages that shows, and whether the numbers alone show it."""

    apply: Callable[[pytest.MonkeyPatch], None]
    stages: tuple[int, ...] = (0, 1, 2, 3)
    in_numbers: bool = True


# At stage 3 on the host a bucket leaves before the sweep only where it waits for nobody, so that whether a firing comes
# after its bucket has gone is a matter of time.
EARLY = (0, 1, 2)
MUTATIONS = [
    Mutation(no_sweep),
    Mutation(no_correcting_round, stages=EARLY),
    Mutation(no_accumulation_scale),
    Mutation(no_world_division),
    Mutation(scale_wrt_gas_ignored),
    Mutation(contribution_doubled),
    Mutation(contribution_lost),
    Mutation(firing_counted_twice, in_numbers=False),
    Mutation(unused_left_unwritten),
    Mutation(gaps_left_unwritten, stages=(1, 2, 3)),
    Mutation(parking_overwrites),
    Mutation(landing_overwrites),
    Mutation(hint_is_truth, stages=EARLY),
    Mutation(no_wait),
    Mutation(buffer_reused_without_waiting),
    Mutation(last_window_left_in_shard),
    Mutation(parked_kept_over_the_window),
    Mutation(aborted_backward_counts, stages=(0, 1)),
    Mutation(published_gradient_not_retracted, stages=(0,)),
    Mutation(released_memory_is_reused, stages=(3,)),
    Mutation(released_in_use, stages=(3,)),
    Mutation(stale_shard_gathered, stages=(3,)),
    Mutation(persistent_weights_left_stale, stages=(3,)),
    Mutation(padding_read, stages=(3,)),
    Mutation(wrong_slice_kept, stages=(3,)),
    Mutation(wrong_row_reduced, stages=(3,)),
    Mutation(weights_not_awaited, stages=(3,)),
]


def verdict(stage: int, **zero: Any) -> str:
    """``right``, or how the scenario went wrong."""
    try:
        with delayed_transport():
            error = worst_error(stage, **zero)
    except GradientAccountingError:
        return "refused by the accounts"
    except BufferInFlightError:
        return "a buffer in flight was written"
    except RuntimeError as error:
        if stage < 3:
            raise
        return f"a weight was not there ({error})"
    return "right" if error < TOLERANCE else f"wrong by {error:.1e}"


def born_full_of_nan(patch: pytest.MonkeyPatch) -> None:
    real = CommBuffer.__init__

    def init(self: CommBuffer, *args: Any) -> None:
        real(self, *args)
        self.data.fill_(math.nan)

    patch.setattr(CommBuffer, "__init__", init)


class TestMutations(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_unbroken_is_right(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        born_full_of_nan(monkeypatch)
        assert verdict(stage) == "right"

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.apply.__name__)
    def test_mutation_is_found_out(self, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
        born_full_of_nan(monkeypatch)
        mutation.apply(monkeypatch)
        verdicts = {stage: verdict(stage) for stage in mutation.stages}
        assert "right" not in verdicts.values(), verdicts
        if mutation.in_numbers:
            monkeypatch.setattr(Ledger, "check_closed", lambda self: None)
            verdicts = {stage: verdict(stage) for stage in mutation.stages}
            assert "right" not in verdicts.values(), f"with the accounts switched off: {verdicts}"
        print(f"{mutation.apply.__name__}: {verdicts}")


class TestSecondaryShards(DistributedTest):
    """Backward gathers weights among pairs of ranks (hpZ)."""

    world_size = 4

    def test_a_stale_one_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert verdict(3, zero_hpz_partition_size=2) == "right"
        secondary_shard_not_refreshed(monkeypatch)
        assert verdict(3, zero_hpz_partition_size=2).startswith("wrong")
