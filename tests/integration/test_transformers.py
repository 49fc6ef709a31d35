# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, as it comes: 30 steps take the way of its plain DDP run, in the losses and norms that it logs,
offloaded and in fp16 too; checkpoints resume; a saved model is whole; ``from_pretrained`` fills a partitioned model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from integration.tiny_llama import (
    assert_resumes,
    assert_rows_take_the_way,
    ds_config,
    file_rows,
    fp16_rows,
    host_rows,
    logged,
    make_model,
    make_trainer,
    whole_weights,
)
from unit.common import DistributedTest

pytest.importorskip("transformers")

STEPS = 30


class TestTrainer(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    def take_the_way(self, folder: Path, accumulation: int, rows: list[dict[str, Any]]) -> None:
        assert_rows_take_the_way(partial(make_trainer, folder, None, accumulation, STEPS), rows, falls_to=0.8)

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        self.take_the_way(tmp_path, accumulation, [{"deepspeed": ds_config(stage)} for stage in range(4)])

    def test_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        self.take_the_way(tmp_path, 1, [*host_rows(), *file_rows(tmp_path), *fp16_rows()])

    def test_resumes_and_saves_whole_models(self, tmp_path: Path) -> None:
        from transformers import LlamaForCausalLM
        from transformers.integrations import unset_hf_deepspeed_config

        for stage in range(4):
            folder = tmp_path / f"stage{stage}"
            resumed = assert_resumes(partial(make_trainer, folder, stage, 2, 6), folder, f"stage {stage}")
            resumed.save_model(str(folder / "model"))
            weights = whole_weights(resumed)
            resumed.deepspeed.destroy()
            deepspeed.comm.barrier()  # the main process saves
            del resumed
            unset_hf_deepspeed_config()
            loaded = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
            for name, weight in loaded.named_parameters():
                assert torch.equal(weight, weights[name].to(torch.bfloat16)), f"stage {stage}: {name}"

    def test_from_pretrained_at_stage_3(self, tmp_path: Path) -> None:
        from transformers import LlamaForCausalLM

        folder = tmp_path / str(torch.distributed.get_rank() if torch.distributed.is_initialized() else "model")
        model = make_model()
        model.save_pretrained(folder)
        expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        trainer = make_trainer(tmp_path, 3, 1, 2, model)  # its config makes from_pretrained partition what it loads
        loaded = LlamaForCausalLM.from_pretrained(folder)
        for name, weight in loaded.named_parameters():
            assert hasattr(weight, "ds_id") and weight.ds_shape == expected[name].shape
            with deepspeed.zero.GatheredParameters(weight):
                assert torch.equal(weight, expected[name].to(weight.dtype)), name
        trainer = make_trainer(tmp_path, 3, 1, 2, loaded)
        trainer.train()
        assert len(logged(trainer, "loss")) == 2
