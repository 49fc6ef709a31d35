# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, as it comes: 30 steps take the way of its plain DDP run, in the losses and norms that it logs,
offloaded and in fp16 too; checkpoints resume; a saved model is whole; ``from_pretrained`` fills a partitioned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from integration.tiny_llama import close, ds_config, logged, make_model, make_trainer
from unit.common import DistributedTest

pytest.importorskip("transformers")

STEPS = 30
TOLERANCE = 2e-2  # what bf16 leaves of a loss, relative
NORM_TOLERANCE = 5e-2  # the norm of a gradient at weights that went apart by bf16 rounding for some steps


class TestTrainer(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        plain = make_trainer(tmp_path, None, accumulation, STEPS)
        plain.train()
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        evaluated = plain.evaluate()["eval_loss"]
        assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0] and norms[0] > 0
        for stage in range(4):
            trainer = make_trainer(tmp_path, stage, accumulation, STEPS)
            trainer.train()
            assert isinstance(trainer.deepspeed, deepspeed.DeepSpeedEngine)
            assert trainer.deepspeed.zero_optimization_stage() == stage
            got = logged(trainer, "loss"), logged(trainer, "grad_norm")
            assert close(got[0], losses, TOLERANCE), f"stage {stage}: losses {got[0]}, DDP {losses}"
            assert close(got[1], norms, NORM_TOLERANCE), f"stage {stage}: norms {got[1]}, DDP {norms}"
            assert close([trainer.evaluate()["eval_loss"]], [evaluated], TOLERANCE)
            trainer.deepspeed.destroy()

    def test_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        plain = make_trainer(tmp_path, None, 1, STEPS)
        plain.train()
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        host, files = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
        half = {"bf16": False, "fp16": True}
        rows: list[dict[str, Any]] = [
            {"deepspeed": ds_config(1, offload_optimizer=host)},
            {"deepspeed": ds_config(2, offload_optimizer=host)},
            {"deepspeed": ds_config(3, offload_optimizer=host)},
            {"deepspeed": ds_config(3, offload_optimizer=host, offload_param=host)},
            {"deepspeed": ds_config(3, offload_optimizer=files, offload_param=files)},
            *({"deepspeed": ds_config(stage), **half} for stage in range(4)),
        ]
        for row in rows:
            trainer = make_trainer(tmp_path, None, 1, STEPS, **row)
            trainer.train()
            engine, asked = trainer.deepspeed, row["deepspeed"]["zero_optimization"]
            for part, section in (
                ("offload_optimizer", engine.zero_offload_optimizer()),
                ("offload_param", engine.zero_offload_param()),
            ):
                assert (section.device if section else "none") == asked.get(part, {"device": "none"})["device"]
            assert engine.fp16_enabled() == ("fp16" in row)
            got = logged(trainer, "loss"), logged(trainer, "grad_norm")
            assert close(got[0], losses, TOLERANCE), f"{row}: losses {got[0]}, DDP {losses}"
            assert close(got[1], norms, NORM_TOLERANCE), f"{row}: norms {got[1]}, DDP {norms}"
            engine.destroy()

    def test_resumes_and_saves_whole_models(self, tmp_path: Path) -> None:
        from transformers import LlamaForCausalLM
        from transformers.integrations import unset_hf_deepspeed_config

        for stage in range(4):
            folder = tmp_path / f"stage{stage}"
            options = {"save_strategy": "steps", "save_steps": 3}
            whole = make_trainer(folder, stage, 2, 6, **options)
            whole.train()
            whole.save_model(str(folder / "model"))
            whole.deepspeed.destroy()
            resumed = make_trainer(folder, stage, 2, 6, **options)
            resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
            assert logged(resumed, "loss") == logged(whole, "loss"), f"stage {stage}"
            assert logged(resumed, "grad_norm") == logged(whole, "grad_norm"), f"stage {stage}"
            with deepspeed.zero.GatheredParameters(list(resumed.model.parameters())):
                weights = {name: weight.detach().clone() for name, weight in resumed.model.named_parameters()}
            resumed.deepspeed.destroy()
            del whole, resumed
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
