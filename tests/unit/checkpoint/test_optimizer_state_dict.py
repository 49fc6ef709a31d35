# SPDX-License-Identifier: Apache-2.0
"""``engine.optimizer.state_dict()`` is what this rank's file of a checkpoint holds; client libraries ask for it."""

from pathlib import Path

import pytest
import torch

import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.graphs import make_engine, make_model, mse, my_batch


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in inner for tensor in tensors_of(entry)]


class TestOptimizerStateDict(DistributedTest):
    world_size = 2

    def test_is_what_a_checkpoint_holds(self, tmp_path: Path) -> None:
        for stage in range(4):
            engine = make_engine(make_model(), stage, torch.bfloat16)
            batch = my_batch(engine, 0, dtype=torch.bfloat16)
            engine.backward(mse(engine(batch.x), batch.target))
            engine.step()
            state = engine.optimizer.state_dict()
            with pytest.raises(NotImplementedError, match="optimizer.load_state_dict"):
                engine.optimizer.load_state_dict(state)
            engine.save_checkpoint(str(tmp_path), tag=f"stage{stage}")
            if stage == 0:
                file = tmp_path / "stage0" / "mp_rank_00_model_states.pt"
                saved = torch.load(file, weights_only=False)["optimizer"]
            else:
                file = tmp_path / f"stage{stage}" / f"bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
                saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
                assert state["zero_stage"] == saved["zero_stage"] == stage
            assert state.keys() == saved.keys(), f"stage {stage}"
            mine, theirs = tensors_of(state), tensors_of(saved)
            assert len(mine) == len(theirs) > 0
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs)), f"stage {stage}"
            engine.destroy()
