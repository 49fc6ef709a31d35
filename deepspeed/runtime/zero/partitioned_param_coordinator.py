# SPDX-License-Identifier: Apache-2.0
"""Which whole weights are there at any time: gathers them for modules, ahead of modules, and lets go of them.

Every decision follows from the sequence of modules and from sizes alone, so that ranks which run the same modules make
the same gathers.
"""

from collections import UserDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.gradients.backward_scope import BackwardScope, watch_end
from deepspeed.runtime.zero.saved_weights import SavedWeight
from deepspeed.runtime.zero.sharded_parameter import (
    NOT_AVAILABLE,
    SecondaryShard,
    ShardedParameter,
    start_gathers,
)
from deepspeed.runtime.zero.usage_order import UsageOrder

USES_READ_AHEAD = 64  # of modules, that are looked through for shards in files


class ZeRoTraceMode(Enum):
    """What is known of the order of modules."""

    RECORD = 1
    COMPLETE = 2
    INVALID = 3


class InflightParamRegistry(UserDict):
    """Parameters whose gather is under way, by parameter."""


class Use(NamedTuple):
    """A module runs forward, or its backward begins."""

    module: torch.nn.Module
    backward: bool


def iter_params(module: torch.nn.Module, recurse: bool = False) -> Iterable[torch.nn.Parameter]:
    """Parameters of a module, each once."""
    return (parameter for _, parameter in module.named_parameters(recurse=recurse))


class PartitionedParameterCoordinator:
    """The gathered weights of one model on this rank.

    Sizes are numbers of elements.

    Args:
        prefetch_bucket_sz: most elements gathered ahead of their use.
        max_reuse_distance_in_numel: weights used again before so many others are kept after a forward.
        max_available_parameters_in_numel: most elements gathered; exceeded only by what one module needs at once.
        secondary: gathers in backward come from secondary shards.
    """

    def __init__(
        self,
        prefetch_bucket_sz: int,
        max_reuse_distance_in_numel: int,
        max_available_parameters_in_numel: int,
        secondary: bool = False,
    ) -> None:
        self._bucket = prefetch_bucket_sz
        self._limit = max_available_parameters_in_numel
        self._secondary = secondary
        self._training = UsageOrder(_numel, max_reuse_distance_in_numel)
        self._inference = UsageOrder(_numel, max_reuse_distance_in_numel)
        self._order = self._training
        self._gathered: dict[ShardedParameter, None] = {}  # through this coordinator, not persistent
        self._kept: dict[ShardedParameter, None] = {}  # free, but used again soon; oldest first
        self._ahead = 0  # elements gathered and not asked for yet
        self._backward_holds: list[tuple[ShardedParameter, int]] = []
        self._standing: dict[ShardedParameter, None] = {}  # hidden, with a stand-in for their shape
        self._scope: BackwardScope | None = None
        self._running = 0  # nested calls of modules of this model
        self.available_numel = 0
        self.peak_numel = 0
        self.gathers = 0
        self.reads_ahead = False  # shards rest in files

    # ------------------------------------------------------------------ forward

    def begin_forward(self, inference: bool) -> None:
        """A module of this model begins; only what the outermost one is for counts."""
        self._running += 1
        if self._running > 1:
            return
        if not inference:
            self._end_failed_backward()
        self._order = self._inference if inference else self._training

    def end_forward(self) -> None:
        """A module has ended; after the outermost one nothing follows in inference."""
        self._running -= 1
        if self._running == 0 and self._order is self._inference:
            self._finish(self._inference)
            self._order = self._training

    def fetch_forward(self, module: torch.nn.Module, shards: Sequence[ShardedParameter]) -> int | None:
        """Gather what ``module`` needs and begin to gather what follows; the module's place in the learnt order."""
        place = self._order.visit(Use(module, False), shards)
        for shard in shards:
            shard.parameter.ds_active_sub_modules.add(module.ds_id)
        self._fetch(shards, self._order)
        return place

    def fetch_external(self, module: torch.nn.Module, shard: ShardedParameter) -> None:
        """Gather a parameter of another module for the running ``module``."""
        shard.parameter.ds_active_sub_modules.add(module.ds_id)
        self._fetch([shard], None)

    def release_forward(self, module: torch.nn.Module, shards: Sequence[ShardedParameter], place: int | None) -> None:
        """``module`` has ended: let go of what nobody else uses and what is not used again soon."""
        kept = self._order.keeps(place)
        for shard in shards:
            if self._secondary and shard.full is not None and shard.secondary is not None:
                if shard.secondary.version != shard.version:
                    shard.secondary.keep(shard)
            shard.parameter.ds_active_sub_modules.discard(module.ds_id)
            if shard.free and shard in self._gathered:
                if shard in kept:
                    self._kept[shard] = None
                else:
                    self.release(shard)

    # ------------------------------------------------------------------ backward

    def fetch_backward(self, module: torch.nn.Module, shards: Sequence[ShardedParameter]) -> None:
        """Backward reaches ``module``: gather the weights whose values it needs there."""
        self._watch_backward()
        if shards:
            self._training.visit(Use(module, True), shards)
            self._fetch(shards, self._training)

    def hold_in_backward(self, shards: Sequence[ShardedParameter], token: int) -> None:
        """Keep whole weights until ``release_from_backward`` or the end of the backward, whoever uses them."""
        for shard in shards:
            shard.parameter.ds_active_sub_modules.add(token)
            self._backward_holds.append((shard, token))

    def release_from_backward(self, shards: Sequence[ShardedParameter], token: int) -> None:
        for shard in shards:
            shard.parameter.ds_active_sub_modules.discard(token)
            self.release_if_free(shard)

    def use_saved(self, saved: SavedWeight) -> torch.Tensor:
        """The view of a weight that a graph saved. Gathers the weight where no module has asked for it."""
        shard = saved.shard
        if shard.full is None:
            self._watch_backward()
            self._fetch([shard], None)
        view = saved.view()
        saved.used()
        if shard.saved == 0:
            self.release_if_free(shard)
        return view

    def stand_in(self, shard: ShardedParameter) -> None:
        """autograd is about to compare a gradient with a hidden weight; ``end_stand_in``, or the end of the backward,
        takes the stand-in away."""
        self._watch_backward()
        shard.stand_in()
        self._standing[shard] = None

    def end_stand_in(self, shard: ShardedParameter) -> None:
        if self._standing.pop(shard, shard) is None and shard.full is None and shard.gather is None:
            shard.hide()

    def release_if_free(self, shard: ShardedParameter) -> None:
        """Let go of a whole weight that nobody needs; whoever holds a view of it keeps the memory."""
        if shard.free and shard in self._gathered:
            self.release(shard)

    def _watch_backward(self) -> None:
        """Notice the end of the backward we are in."""
        inside = autograd.current_graph_task_id() != autograd.NO_GRAPH_TASK
        if inside and (
            self._scope is None or not (self._scope.is_certainly_running() or self._scope.awaits_outer_task)
        ):
            self._scope = BackwardScope(announced=False)
            watch_end(self._scope, self._on_backward_end)

    def _on_backward_end(self, scope: BackwardScope) -> None:
        if scope is self._scope:
            self.end_iteration()

    def _end_failed_backward(self) -> None:
        scope = self._scope
        outside = autograd.current_graph_task_id() == autograd.NO_GRAPH_TASK
        if scope is not None and outside and not scope.is_certainly_running():
            self.end_iteration()

    def end_iteration(self) -> None:
        """A backward, or a step, has ended: let go of everything, and learn the order."""
        if self._scope is not None:
            self._scope.release()
            self._scope = None
        for shard, token in self._backward_holds:
            shard.parameter.ds_active_sub_modules.discard(token)
        self._backward_holds.clear()
        for shard in list(self._standing):  # torch.autograd.grad adds to no gradient
            self.end_stand_in(shard)
        self._finish(self._training)

    def _finish(self, order: UsageOrder) -> None:
        for shard in list(self._gathered):
            if shard.free:
                self.release(shard)
        self._ahead = 0
        order.finish()

    # ------------------------------------------------------------------ gathering

    def _fetch(self, shards: Sequence[ShardedParameter], order: UsageOrder | None) -> None:
        needed = set(shards)
        for shard in shards:
            self._kept.pop(shard, None)
        missing = [shard for shard in shards if shard.parameter.ds_status is NOT_AVAILABLE]
        if missing:
            self._make_room(sum(shard.numel for shard in missing if not shard.persistent), needed)
            self._start(missing, order)
        if order is not None and self._ahead <= self._bucket // 2:
            self._prefetch(order, needed)
        if order is not None and self.reads_ahead:
            self._read_ahead(order)
        for shard in shards:
            if shard.ahead:
                shard.ahead = False
                self._ahead -= shard.numel
            if shard.gather is not None:
                shard.gather.wait()

    def _start(self, missing: list[ShardedParameter], order: UsageOrder | None) -> None:
        backward = order is not self._inference and self._scope is not None
        self.gathers += len(start_gathers(missing, prefer_secondary=self._secondary and backward))
        for shard in missing:
            if not shard.persistent:
                self._gathered[shard] = None
                self.available_numel += shard.numel
        self.peak_numel = max(self.peak_numel, self.available_numel)

    def _make_room(self, numel: int, needed: set[ShardedParameter]) -> None:
        """Let go of weights that nobody uses while there would be too many: first of those kept for later, where the
        one kept first is needed last; then of those that a graph may still ask for, which are gathered again then."""
        if self.available_numel + numel <= self._limit:
            return
        others = [shard for shard in self._gathered if shard not in self._kept]
        for shard in (*self._kept, *sorted(others, key=lambda shard: shard.ahead)):
            if self.available_numel + numel <= self._limit:
                return
            if shard.free and shard not in needed:
                self.release(shard)

    def _prefetch(self, order: UsageOrder, in_use: set[ShardedParameter]) -> None:
        """Begin to gather what the learnt order says comes next, up to a bucket."""
        room = min(self._bucket - self._ahead, self._limit - self.available_numel)
        chosen: dict[ShardedParameter, None] = {}
        if room <= 0:
            return
        for use in order.ahead():
            if use.backward and self._scope is None and not use.module._ds_unit.needed_in_backward():
                order.step_back()  # it has not run forward yet, so it is not known what its backward will need
                break
            wanted = [
                shard
                for shard in _shards_used(use)
                if shard.parameter.ds_status is NOT_AVAILABLE and shard not in chosen and shard not in in_use
            ]
            numel = sum(shard.numel for shard in wanted)
            if numel > room:
                order.step_back()
                break
            room -= numel
            chosen.update(dict.fromkeys(wanted))
        if chosen:
            self._start(list(chosen), order)
            for shard in chosen:
                if not shard.persistent:
                    shard.ahead = True
                    self._ahead += shard.numel

    def _read_ahead(self, order: UsageOrder) -> None:
        """Begin to read shards that rest in files and come after what is gathered ahead, as buffers allow."""
        for use in order.beyond(USES_READ_AHEAD):
            for shard in _shards_used(use):
                waits = shard.store is not None and shard.parameter.ds_status is NOT_AVAILABLE
                if waits and not shard.store.read_ahead(shard):
                    return

    def release(self, shard: ShardedParameter) -> None:
        """Let go of a whole weight that was gathered here."""
        if shard.ahead:
            self._ahead -= shard.numel
        self._gathered.pop(shard, None)
        self._kept.pop(shard, None)
        self.available_numel -= shard.numel
        shard.hide()

    def forget(self, shard: ShardedParameter) -> None:
        """Somebody else has hidden this weight, or will hide it."""
        if shard in self._gathered:
            if shard.ahead:
                shard.ahead = False
                self._ahead -= shard.numel
            del self._gathered[shard]
            self._kept.pop(shard, None)
            self.available_numel -= shard.numel

    def release_and_reset_all(self, module: torch.nn.Module | None = None) -> None:
        """Let go of every whole weight that is not persistent, whoever was using it."""
        for shard in list(self._gathered):
            shard.parameter.ds_active_sub_modules.clear()
            if not shard.held:
                self.release(shard)
        self.end_iteration()

    # ------------------------------------------------------------------ the learnt order, for outside code

    def is_complete_trace(self) -> bool:
        """Whether an order of modules is known."""
        return len(self._training) > 0

    def is_record_trace(self) -> bool:
        return not self.is_complete_trace()

    def is_invalid_trace(self) -> bool:
        """Never: an order that does not fit is a hint that misses, and is replaced at the end of the iteration."""
        return False

    def _invalidate_trace(self) -> None:
        """Forget the order of modules."""
        self._training.forget()
        self._inference.forget()

    def reset_step(self) -> None:
        """End the iteration."""
        self.end_iteration()

    @property
    def trace_length(self) -> int:
        """Uses in the learnt orders."""
        return len(self._training) + len(self._inference)


def _numel(shard: ShardedParameter) -> int:
    return shard.numel


def _shards_used(use: Use) -> list[ShardedParameter]:
    """What a use needs as far as it is known now; backward needs only weights whose values a graph has saved."""
    unit = use.module._ds_unit
    return unit.needed_in_backward() if use.backward else unit.shards


def make_secondary(shards: Iterable[ShardedParameter], ranks: Any) -> None:
    """Give each parameter a place for a secondary shard over ``ranks``."""
    for shard in shards:
        shard.secondary = SecondaryShard(ranks)
        if shard.ranks.checks_each_gather:
            ranks.check_each_gather()
        parameter = shard.parameter
        parameter.ds_zero_param_process_group = ranks.group
        parameter.ds_secondary_tensor_group_size = ranks.world_size
        parameter.ds_secondary_tensor_num_of_groups = shard.ranks.world_size // ranks.world_size
