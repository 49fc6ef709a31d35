# SPDX-License-Identifier: Apache-2.0
"""trl's trainers, as they come: supervised fine-tuning takes the way of its DDP run; so does preference optimization,
whose reference model trl gives an engine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.tiny_llama import close, logged, make_data, make_model, training_options
from unit.common import DistributedTest

pytest.importorskip("trl")

STEPS = 30
STAGES = (0, 1, 2, 3)


def make_tokenizer() -> Any:
    """Words are numbers from 0 to 30."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(31)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="30")


class TestTrl(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_sft_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        texts = [" ".join(map(str, row["input_ids"].tolist())) for row in make_data(96)]
        data = Dataset.from_dict({"text": texts})

        def train(stage: int | None) -> Any:
            arguments = SFTConfig(
                **training_options(tmp_path, stage, accumulation, STEPS), gradient_checkpointing=False, max_length=16
            )
            trainer = SFTTrainer(
                model=make_model(), args=arguments, train_dataset=data, processing_class=make_tokenizer()
            )
            trainer.train()
            return trainer

        plain = train(None)
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        assert len(losses) == STEPS and losses[-1] < losses[0]
        for stage in STAGES:
            trainer = train(stage)
            got = logged(trainer, "loss"), logged(trainer, "grad_norm")
            assert close(got[0], losses, 2e-2), f"stage {stage}: losses {got[0]}, DDP {losses}"
            assert close(got[1], norms, 5e-2), f"stage {stage}: norms {got[1]}, DDP {norms}"
            trainer.deepspeed.destroy()

    def test_dpo_with_a_reference_model(self, tmp_path: Path) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        rows = [[str(number) for number in row["input_ids"].tolist()] for row in make_data(64)]
        data = Dataset.from_dict(
            {
                "prompt": [" ".join(row[:4]) + " " for row in rows],
                "chosen": [" ".join(row[4:8]) for row in rows],
                "rejected": [" ".join(reversed(row[4:8])) for row in rows],
            }
        )

        def train(stage: int | None) -> Any:
            trainer = DPOTrainer(
                model=make_model(),
                ref_model=make_model(),
                args=DPOConfig(**training_options(tmp_path, stage, 1, STEPS), gradient_checkpointing=False),
                train_dataset=data,
                processing_class=make_tokenizer(),
            )
            trainer.train()
            return trainer

        plain = train(None)
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        assert len(losses) == STEPS and losses[-1] < losses[0]
        for stage in STAGES:
            trainer = train(stage)
            got = logged(trainer, "loss"), logged(trainer, "grad_norm")
            assert close(got[0], losses, 5e-2), f"stage {stage}: losses {got[0]}, DDP {losses}"
            assert close(got[1], norms, 1e-1), f"stage {stage}: norms {got[1]}, DDP {norms}"
            trainer.deepspeed.destroy()
