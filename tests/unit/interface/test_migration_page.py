# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md: its programs run, and those that stand side by side end at the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from unit.common import DistributedTest
from unit.graphs import weights_of

PAGE = Path(deepspeed.__file__).parents[1] / "docs" / "migration.md"
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    fully_shard = None


def blocks() -> dict[str, list[str]]:
    """The programs below each heading; those above the first one are under the empty name."""
    _, *sections = re.split(r"^# ", PAGE.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)
    parts = re.split(r"^## (.*)$", sections[0], flags=re.M)
    return {
        name: re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        for name, text in zip(["", *parts[1::2]], parts[::2], strict=True)
    }


@pytest.mark.skipif(not PAGE.exists(), reason="not a source tree")
class TestPage(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def run(self, program: str, **given: Any) -> dict[str, Any]:
        scope = dict(given)
        exec(compile(blocks()[""][0] + program, str(PAGE), "exec"), scope)
        return scope

    def check(self, section: str, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
        begin = self.run("")["make_model"]().state_dict()
        for name, weight in theirs.items():
            assert (weight - begin[name]).abs().max() > 1e-3, f"{section}: {name} was not trained"
            torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=f"{section}: {name}")

    def test_a_script_of_deepspeed(self) -> None:
        (program,) = blocks()["From DeepSpeed"]
        engine = self.run(program)["engine"]
        assert engine.global_steps == 4 and engine.was_step_applied()

    def test_ddp(self) -> None:
        theirs, ours = blocks()["From DDP"]
        self.check("DDP", weights_of(self.run(theirs)["model"]), weights_of(self.run(ours)["engine"].module))

    def test_fsdp2(self, tmpdir: str) -> None:
        theirs, ours, weights = blocks()["From FSDP2"]
        scope = self.run(ours + weights, FOLDER=str(tmpdir))
        found = weights_of(scope["engine"].module)
        assert scope["path"] and scope["norm"].item() == pytest.approx(found["first.weight"].norm().item())
        if fully_shard is not None:
            model = self.run(theirs)["model"]
            self.check("FSDP2", {name: p.detach().full_tensor() for name, p in model.named_parameters()}, found)
