# SPDX-License-Identifier: Apache-2.0
"""Faults to put into the package, one at a time: what ``tests/mutation_check.py`` demands to be found out.

A mutation replaces a piece of source text, which must occur exactly once, in a copy of the package.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"

STATES = "unit/runtime/gradients/test_reducer_states.py"
GRAPHS = "unit/runtime/zero/test_zero_random_graphs.py"
NORM = "unit/runtime/test_engine_norm_and_clipping.py"
ACCESSORS = "unit/runtime/zero/test_zero_accessors.py"
WEIGHTS = "unit/runtime/zero/test_zero3_weights.py"
QUICK = (
    STATES,
    "unit/runtime/gradients/test_ledger.py",
    "unit/runtime/gradients/test_layout.py",
    "unit/runtime/gradients/test_buckets.py",
    "unit/runtime/gradients/test_agreement.py",
    GRAPHS,
    NORM,
    ACCESSORS,
    WEIGHTS,
)
"""The named quick subset of the suite: it must be red for every mutation, and green without one."""


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in ``file``, relative to the package. ``first`` of the quick subset are run before the
    others."""

    name: str
    file: str
    old: str
    new: str
    first: tuple[str, ...] = (STATES,)

    def apply(self, package: Path) -> None:
        """Write the fault into a copy of the package.

        Raises:
            ValueError: the text does not occur there exactly once: the mutation has to follow the code.
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"mutation {self.name!r}: its text occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def copy_package(folder: Path, package: Path = PACKAGE) -> Path:
    """Copy the package into ``folder``, without what was compiled; returns the copy."""
    copy = folder / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


REDUCER = "runtime/gradients/reducer.py"
TRANSPORT = "runtime/gradients/transport.py"
BUCKETS = "runtime/gradients/buckets.py"
LAYOUT = "runtime/gradients/layout.py"
LEDGER = "runtime/gradients/ledger.py"
SHARD = "runtime/gradients/gradient_shard.py"
SHARDED = "runtime/zero/sharded_parameter.py"
OFFLOAD = "runtime/zero/parameter_offload.py"
BASE = "runtime/base_optimizer.py"

MUTATIONS = (
    # the sweep and the rounds
    Mutation(
        "the sweep sends nothing",
        REDUCER,
        "            self._open_round(scope)\n            self._sweep(scope)\n        self._park()",
        "            self.transport.land_all()\n            self._round_open, self._next = False, 0\n"
        "            self.ledger.reduced = True\n"
        "        self._park()",
    ),
    Mutation(
        "what comes late is left in .grad",
        REDUCER,
        "            self._sweep(scope)\n        self._park()\n",
        "            self._sweep(scope)\n",
    ),
    Mutation(
        "no correcting round in step()",
        REDUCER,
        "            leftovers = bool(self.ledger.waiting())\n",
        "            leftovers = False\n",
    ),
    Mutation(
        "what comes late is dropped",
        REDUCER,
        "            if record.count() and self._eager:\n",
        "            last = record.count()\n            if record.phase.name == 'LATE':\n"
        "                record.drop_gradient()\n            if last and self._eager:\n",
    ),
    # numbers
    Mutation(
        "no division by the accumulation count",
        REDUCER,
        "return 1.0 / (self.schedule.steps * self.window_loss_scale)",
        "return 1.0 / self.window_loss_scale",
    ),
    Mutation(
        "no division by the loss scale",
        REDUCER,
        "return 1.0 / (self.schedule.steps * self.window_loss_scale)",
        "return 1.0 / self.schedule.steps",
    ),
    Mutation(
        "no division by the ranks",
        REDUCER,
        "return before, self._unit() / world / before",
        "return before, self._unit() / before",
    ),
    Mutation(
        "the division before the sum is not made good",
        REDUCER,
        "return before, self._unit() / world / before",
        "return before, self._unit() / world",
    ),
    Mutation(
        "a backward's own factor is ignored",
        REDUCER,
        "        self._factor = accumulation * self.window_loss_scale / scope.loss_scale\n",
        "        self._factor = 1.0\n",
    ),
    Mutation(
        "a firing outside of engine.backward is taken for the last one's",
        REDUCER,
        "        self._announced = None\n        if self._eager and",
        "        if self._eager and",
    ),
    Mutation(
        "parked contributions skip the factor before the sum",
        BUCKETS,
        "assign_scaled(data, self.local, pre_scale)",
        "assign_scaled(data, self.local, 1.0)",
    ),
    # waits
    Mutation(
        "a reduction is not awaited",
        TRANSPORT,
        "            if flight.reduction.work is not None:\n",
        "            if False:\n",
    ),
    Mutation(
        "a buffer in flight is filled again",
        TRANSPORT,
        "        while any(buffer in flight.buffers for flight in self.in_flight):\n",
        "        while False:\n",
        (STATES, GRAPHS),
    ),
    # what is in a bucket
    Mutation(
        "no zeros for a parameter that was not used",
        BUCKETS,
        "        for i in absent:\n            for piece in self._pieces[i]:\n"
        "                data[piece.offset : piece.offset + piece.stop - piece.start].zero_()\n",
        "",
    ),
    Mutation(
        "a parameter that was not used is left out of the rows (stage 3)",
        BUCKETS,
        "if self._cut_evenly and len(present) == len(self.records) and",
        "if self._cut_evenly and",
    ),
    Mutation(
        "a parameter in several buckets is taken again for each",
        LEDGER,
        "            self.buckets_left = self.buckets\n",
        "",
    ),
    Mutation(
        "padding and gaps are sent as they are",
        BUCKETS,
        "        for begin, end in self.plan.gaps:\n            data[begin:end].zero_()\n",
        "",
    ),
    Mutation(
        "parking overwrites",
        BUCKETS,
        "        elif not self.local_in_use:\n            self.local.zero_()\n",
        "        else:\n            self.local.zero_()\n",
    ),
    Mutation("a second round overwrites the first", BUCKETS, "scale, add=self.landed)", "scale, add=False)"),
    Mutation(
        "the last window stays in the shard",
        BUCKETS,
        "        self.local_in_use = False\n        self.landed = False\n",
        "        self.local_in_use = False\n",
    ),
    Mutation(
        "what was parked is sent twice",
        BUCKETS,
        "            assign_scaled(data, self.local, pre_scale)\n            self.local_in_use = False\n",
        "            assign_scaled(data, self.local, pre_scale)\n",
    ),
    # offsets and owners
    Mutation(
        "pieces of a bucket lie one element off",
        LAYOUT,
        "begin - offset, end - offset, begin - bucket.start)",
        "begin - offset, end - offset, max(0, begin - bucket.start - 1))",
    ),
    Mutation(
        "buckets go to another owner",
        LAYOUT,
        "Collective.REDUCE, owner=owner)",
        "Collective.REDUCE, owner=(owner + 1) % self.world_size)",
    ),
    Mutation(
        "every bucket lands at the start of its shard",
        LAYOUT,
        "(0, bucket.numel), start - group.shard_start",
        "(0, bucket.numel), 0",
    ),
    Mutation(
        "rows go to each other's ranks (stage 3)",
        LAYOUT,
        "                place = row * width + begin - start\n",
        "                place = (self.world_size - 1 - row) * width + begin - start\n",
    ),
    # aborted backwards, agreement, accounts
    Mutation(
        "contributions of an aborted backward stay",
        REDUCER,
        "                record.drop_gradient()\n        if round_was_open and not",
        "                pass\n        if round_was_open and not",
    ),
    Mutation(
        "half a round of an aborted backward passes",
        REDUCER,
        "        if sent:\n            self.ledger.poison = (",
        "        if False:\n            self.ledger.poison = (",
    ),
    Mutation(
        "an aborted backward leaves the other ranks waiting",
        REDUCER,
        "        if round_was_open and not self.transport.failed:\n",
        "        if False:\n",
    ),
    Mutation(
        "an aborted loss.backward() passes for a whole one",
        BASE,
        '    self.abort_backward("an exception in loss.backward()")\n\n    def _locate',
        "    self._end(scope)\n\n    def _locate",
        (GRAPHS,),
    ),
    Mutation(
        "other loss scales on other ranks pass",
        "runtime/gradients/agreement.py",
        "    one_scale = largest in (_NO_SCALE, -minus_smallest)\n",
        "    one_scale = True\n",
    ),
    Mutation(
        "windows dropped on one rank alone pass",
        "runtime/gradients/agreement.py",
        "(poisoned or newest != -minus_oldest or not one_scale)",
        "(poisoned or not one_scale)",
    ),
    Mutation("a firing is entered twice", LEDGER, "        self.seen += 1\n", "        self.seen += 2\n"),
    Mutation("the accounts are not checked", REDUCER, "        self.ledger.check_closed()\n", ""),
    Mutation(
        "a gradient set by hand passes",
        REDUCER,
        "        strays = self.ledger.strays()\n        if strays and not self.ledger.poison:",
        "        strays = []\n        if strays and not self.ledger.poison:",
    ),
    # norm and clipping
    Mutation(
        "the norm is this rank's alone",
        BASE,
        "            collectives.sum_over_ranks(total, self.reducer.group)\n",
        "            pass\n",
        (GRAPHS,),
    ),
    Mutation(
        "gradients are not clipped",
        BASE,
        "            factor = 1.0 / max(1.0, (norm.read() + CLIP_EPSILON) / self.clip_grad)\n",
        "            factor = 1.0\n",
        (GRAPHS, NORM),
    ),
    # accessors and what stage 0 shows
    Mutation(
        "what is shown inside no_sync counts a bucket twice",
        REDUCER,
        "in self._buckets_of[record.index]:\n            bucket.add_local_to",
        "in self._buckets_of[record.index] * 2:\n            bucket.add_local_to",
    ),
    Mutation(
        "an edit of .grad is lost (stage 0)",
        "runtime/fp16/unfused_optimizer.py",
        "            view.copy_(gradient)\n",
        "            pass\n",
        (GRAPHS, ACCESSORS),
    ),
    Mutation(
        "the accessor sets only the first element",
        "utils/tensor_fragment.py",
        "        own.copy_(value.reshape(-1)[self.begin : self.end].view(own.shape))\n",
        "        own[:1].copy_(value.reshape(-1)[self.begin : self.end][:1])\n",
        (GRAPHS,),
    ),
    # memory of the reduced gradient
    Mutation(
        "every part of a shard takes the front of a result",
        SHARD,
        "start - first : stop - first], start - begin, stop - begin",
        "start - first : stop - first], 0, stop - start",
        ("unit/runtime/gradients/test_buckets.py",),
    ),
    # weights of stage 3
    Mutation(
        "weights that stay whole are not refreshed",
        OFFLOAD,
        "not shard.aliased:\n                shard.hide()\n",
        "not (shard.aliased or shard.persistent):\n                shard.hide()\n",
        (GRAPHS, WEIGHTS),
    ),
    Mutation(
        "a weight is read with the padding in front",
        SHARDED,
        "        parameter.data = full.narrow(0, 0, self.numel).view(self.shape)\n",
        "        parameter.data = full.narrow(0, full.numel() - self.numel, self.numel).view(self.shape)\n",
        (GRAPHS, WEIGHTS),
    ),
    Mutation(
        "a rank keeps the slice beside its own",
        SHARDED,
        "        return min(self.ranks.rank * self.slice_numel, self.numel)\n",
        "        return min(self.ranks.rank * self.slice_numel + 1, self.numel)\n",
        (GRAPHS, WEIGHTS),
    ),
)
