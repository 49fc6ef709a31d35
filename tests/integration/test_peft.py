# SPDX-License-Identifier: Apache-2.0
"""peft's adapters under transformers' Trainer: LoRA, whose base is frozen, takes the way of its plain DDP run,
offloaded and in fp16 too, and resumes; AdaLoRA reads gradients."""

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
    ds_config,
    file_rows,
    fp16_rows,
    host_rows,
    make_adapted,
    make_data,
    make_model,
    make_trainer,
    whole_weights,
)
from unit.common import DistributedTest

pytest.importorskip("peft")

STEPS = 30
ADALORA_STEPS = 10


def make_adalora_config() -> Any:
    from peft import AdaLoraConfig

    return AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=2, total_step=ADALORA_STEPS, target_modules=["q_proj", "v_proj"]
    )


def make_lora_trainer(folder: Path, stage: int | None, accumulation: int, steps: int, **options: Any) -> Any:
    return make_trainer(folder, stage, accumulation, steps, make_adapted(), learning_rate=5e-2, **options)


def assert_adapters_load(trainer: Any, folder: Path, name: Any) -> None:
    """peft reads what ``trainer`` saves, to the last bit."""
    from peft import PeftModel

    trainer.save_model(str(folder))
    expected = {key: weight for key, weight in whole_weights(trainer).items() if "lora_" in key}
    deepspeed.comm.barrier()  # the main process saves
    loaded = PeftModel.from_pretrained(make_model(), folder)
    got = {key: weight for key, weight in loaded.named_parameters() if "lora_" in key}
    assert got.keys() == expected.keys() and len(got) > 0
    assert all(torch.equal(got[key].float(), weight.float()) for key, weight in expected.items()), name


class TestPeft(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    def take_the_way(self, folder: Path, accumulation: int, rows: list[dict[str, Any]]) -> None:
        def adapters_load(trainer: Any, row: dict[str, Any]) -> None:
            assert_adapters_load(trainer, folder / f"adapter{rows.index(row)}", row)

        make = partial(make_lora_trainer, folder, None, accumulation, STEPS)
        assert_rows_take_the_way(make, rows, adapters_load, norm_tolerance=1e-1)

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_lora_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        self.take_the_way(tmp_path, accumulation, [{"deepspeed": ds_config(stage)} for stage in range(4)])

    def test_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        self.take_the_way(tmp_path, 1, [*host_rows(), *file_rows(tmp_path), *fp16_rows()])

    def test_resumes(self, tmp_path: Path) -> None:
        """Checkpoints are without the frozen base, as Trainer asks of the engine where the model is peft's."""
        for index, row in enumerate([*({"deepspeed": ds_config(stage)} for stage in range(4)), host_rows()[-1]]):
            folder = tmp_path / f"run{index}"
            resumed = assert_resumes(partial(make_lora_trainer, folder, None, 2, 6, **row), folder, row)
            assert_runs_as_asked(resumed.deepspeed, row)
            resumed.deepspeed.destroy()

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
            engine, *_ = deepspeed.initialize(model=make_adapted(make_adalora_config()), config=config)
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
