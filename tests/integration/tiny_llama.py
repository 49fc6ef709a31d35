# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, data for it, and a Trainer around it: what the tests of transformers, peft and trl share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def make_data(examples: int) -> list[dict[str, torch.Tensor]]:
    """Counting modulo 31, from anywhere, in steps of one to three."""
    generator = torch.Generator().manual_seed(5)
    begins = torch.randint(31, (examples,), generator=generator)
    strides = torch.randint(1, 4, (examples,), generator=generator)
    rows = (begins[:, None] + strides[:, None] * torch.arange(12)) % 31
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def ds_config(stage: int | None, **zero: Any) -> dict[str, Any] | None:
    """Everything that transformers can fill in is left to it; ``zero`` are further keys of ``zero_optimization``. None
    for DDP."""
    if stage is None:
        return None
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},  # nothing overflows in 30 steps
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **zero,
        },
    }


def training_options(folder: Path, stage: int | None, accumulation: int, steps: int) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` and of its kin in trl."""
    return {
        "output_dir": str(folder),
        "deepspeed": ds_config(stage),
        "use_cpu": True,
        "bf16": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "max_grad_norm": 1.0,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
    }


def make_trainer(
    folder: Path, stage: int | None, accumulation: int, steps: int, model: Any = None, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**{**training_options(folder, stage, accumulation, steps), **options})
    data = make_data(160)
    return Trainer(model=model or make_model(), args=arguments, train_dataset=data, eval_dataset=data[:21])


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry and "train_runtime" not in entry]


def close(values: list[float], expected: list[float], tolerance: float) -> bool:
    return len(values) == len(expected) and all(abs(v - e) <= tolerance * abs(e) for v, e in zip(values, expected))
