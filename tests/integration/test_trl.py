# SPDX-License-Identifier: Apache-2.0
"""trl's trainers, as they come: supervised fine-tuning, of a model and of adapters, takes the way of its DDP run,
offloaded and in fp16 too, and resumes; so does preference optimization, whose reference model trl gives an engine of
its own."""

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
    assert_runs_as_asked,
    device_of,
    ds_config,
    file_rows,
    fp16_rows,
    host_rows,
    lora_config,
    make_data,
    make_model,
    training_options,
)
from unit.common import DistributedTest

pytest.importorskip("trl")

STEPS = 30
STAGES: list[dict[str, Any]] = [{"deepspeed": ds_config(stage)} for stage in range(4)]
FEW_STEPS = 12  # where transformers' Trainer takes the way of its DDP run over 30 steps, in tests of its own and peft's
CHECKPOINTING = {"deepspeed": ds_config(3), "gradient_checkpointing": True}  # as trl has it by default
DPO_TOLERANCES = {"tolerance": 5e-2, "norm_tolerance": 1e-1}  # its losses are small


def make_tokenizer() -> Any:
    """Words are numbers from 0 to 30."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(31)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="30")


def make_sft_trainer(
    folder: Path, accumulation: int, steps: int, stage: int | None, lora: bool = False, **options: Any
) -> Any:
    """With ``lora``, trl puts the adapters around the model; without, all weights are trained."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(map(str, row["input_ids"].tolist())) for row in make_data(96)]
    data = Dataset.from_dict({"text": texts})
    kept = {"gradient_checkpointing": False, "max_length": 16}
    if lora:
        kept["learning_rate"] = 5e-2
        torch.manual_seed(4)
    return SFTTrainer(
        model=make_model(),
        args=SFTConfig(**{**training_options(folder, stage, accumulation, steps), **kept, **options}),
        train_dataset=data,
        eval_dataset=data.select(range(21)),
        processing_class=make_tokenizer(),
        peft_config=lora_config() if lora else None,
    )


def make_dpo_trainer(folder: Path, accumulation: int, steps: int, stage: int | None, **options: Any) -> Any:
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
    kept = {"gradient_checkpointing": False}
    return DPOTrainer(
        model=make_model(),
        ref_model=make_model(),
        args=DPOConfig(**{**training_options(folder, stage, accumulation, steps), **kept, **options}),
        train_dataset=data,
        eval_dataset=data.select(range(21)),
        processing_class=make_tokenizer(),
    )


def assert_reference_follows(trainer: Any, row: dict[str, Any]) -> None:
    """The reference model is an engine of its own: partitioned at stage 3, its parameters where the model's are, at
    other stages whole; it never has an optimizer, and still has the weights that it began with."""
    asked = row["deepspeed"]["zero_optimization"]
    reference = trainer.ref_model
    assert isinstance(reference, deepspeed.DeepSpeedEngine) and reference is not trainer.deepspeed
    partitioned = asked["stage"] == 3
    assert reference.zero_optimization_stage() == (3 if partitioned else 0)
    assert device_of(reference.zero_offload_optimizer()) == "none"
    assert device_of(reference.zero_offload_param()) == device_of(asked.get("offload_param"))
    began = dict(make_model().named_parameters())
    with deepspeed.zero.GatheredParameters(list(reference.module.parameters())):
        for name, weight in reference.module.named_parameters():
            assert hasattr(weight, "ds_id") == partitioned
            assert torch.equal(weight, began[name].to(weight.dtype)), name


class TestTrl(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_sft_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        assert_rows_take_the_way(partial(make_sft_trainer, tmp_path, accumulation, STEPS, None), STAGES)

    def test_sft_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        rows = [*host_rows(), *file_rows(tmp_path), *fp16_rows(), CHECKPOINTING]
        assert_rows_take_the_way(partial(make_sft_trainer, tmp_path, 1, FEW_STEPS, None), rows)

    def test_sft_of_adapters_takes_the_way_of_ddp(self, tmp_path: Path) -> None:
        make = partial(make_sft_trainer, tmp_path, 1, FEW_STEPS, None, lora=True)
        assert_rows_take_the_way(make, [*STAGES, *host_rows(), *fp16_rows(), CHECKPOINTING], norm_tolerance=1e-1)
        with pytest.raises(ValueError, match="not supported with PEFT . DeepSpeed ZeRO-3"):
            make(**CHECKPOINTING, gradient_checkpointing_kwargs={"selective": True})

    @pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
    def test_sft_resumes(self, tmp_path: Path, lora: bool) -> None:
        for index, row in enumerate([*STAGES, host_rows()[-1]]):
            folder = tmp_path / f"run{index}"
            make = partial(make_sft_trainer, folder, 2, 6, None, lora=lora, **row)
            resumed = assert_resumes(make, folder, row)
            assert_runs_as_asked(resumed.deepspeed, row)
            resumed.deepspeed.destroy()

    def test_dpo_with_a_reference_model(self, tmp_path: Path) -> None:
        make = partial(make_dpo_trainer, tmp_path, 1, STEPS, None)
        assert_rows_take_the_way(make, STAGES, assert_reference_follows, **DPO_TOLERANCES)

    def test_dpo_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        make = partial(make_dpo_trainer, tmp_path, 1, FEW_STEPS, None)
        rows = [*host_rows()[1:], *fp16_rows()[2:]]
        assert_rows_take_the_way(make, rows, assert_reference_follows, **DPO_TOLERANCES)
