# SPDX-License-Identifier: Apache-2.0
"""peft's adapters under transformers' Trainer: LoRA, whose base is frozen, and AdaLoRA, which reads gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from integration.tiny_llama import close, logged, make_data, make_model, make_trainer
from unit.common import DistributedTest

pytest.importorskip("peft")

STEPS = 30
ADALORA_STEPS = 10


def make_adapted(kind: str) -> Any:
    from peft import AdaLoraConfig, LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"]
    if kind == "lora":
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="gaussian")
    else:
        config = AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=2, total_step=ADALORA_STEPS, target_modules=targets
        )
    base = make_model()
    torch.manual_seed(4)
    return get_peft_model(base, config)


class TestPeft(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_lora_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        from peft import PeftModel

        options = {"learning_rate": 5e-2}
        plain = make_trainer(tmp_path, None, accumulation, STEPS, make_adapted("lora"), **options)
        plain.train()
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        assert len(losses) == STEPS and losses[-1] < losses[0] and norms[0] > 0
        for stage in range(4):
            trainer = make_trainer(tmp_path, stage, accumulation, STEPS, make_adapted("lora"), **options)
            trainer.train()
            got = logged(trainer, "loss"), logged(trainer, "grad_norm")
            assert close(got[0], losses, 2e-2), f"stage {stage}: losses {got[0]}, DDP {losses}"
            assert close(got[1], norms, 1e-1), f"stage {stage}: norms {got[1]}, DDP {norms}"
            folder = tmp_path / f"adapter{stage}"
            trainer.save_model(str(folder))
            trained = [p for n, p in trainer.model.named_parameters() if "lora_" in n]
            with deepspeed.zero.GatheredParameters(trained):
                expected = [p.detach().float().clone() for p in trained]
            trainer.deepspeed.destroy()
            deepspeed.comm.barrier()  # the main process saves
            loaded = PeftModel.from_pretrained(make_model(), folder)
            got = [p for n, p in loaded.named_parameters() if "lora_" in n]
            assert len(got) == len(expected) > 0
            assert all(torch.equal(a.float(), b) for a, b in zip(got, expected)), f"stage {stage}"

    def test_adalora_reads_gradients(self) -> None:
        """It cuts ranks by importance, which it takes from ``safe_get_full_grad`` between backward and step."""
        from transformers.integrations import HfDeepSpeedConfig

        plain: list[int] = []
        for stage in range(4):
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            }
            kept = HfDeepSpeedConfig(config)  # while it lives, peft knows that it runs under an engine
            engine, *_ = deepspeed.initialize(model=make_adapted("adalora"), config=config)
            batches = make_data(8 * ADALORA_STEPS)
            for step in range(ADALORA_STEPS):
                begin = 8 * step + 4 * deepspeed.comm.get_rank()
                rows = torch.stack([row["input_ids"] for row in batches[begin : begin + 4]])
                engine.backward(engine(input_ids=rows, labels=rows).loss)
                engine.module.base_model.update_and_allocate(step)
                engine.step()
            ranks = [sum(mask) for mask in engine.module.peft_config["default"].rank_pattern.values()]
            plain = plain or ranks
            assert ranks == plain and sum(ranks) < 4 * len(ranks), f"stage {stage}: {ranks}, stage 0 {plain}"
            engine.destroy()
            del kept
