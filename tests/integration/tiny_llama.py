# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, data for it, a Trainer around it, and what is demanded of its runs: what the tests of transformers,
peft and trl share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepspeed

TOLERANCE = 2e-2  # what bf16 leaves of a loss, relative
NORM_TOLERANCE = 5e-2  # the norm of a gradient at weights that went apart by bf16 rounding for some steps


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


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def make_adapted(config: Any = None) -> Any:
    """The model with peft's adapters around it, LoRA's by default; its own weights are frozen."""
    from peft import get_peft_model

    base = make_model()
    torch.manual_seed(4)
    return get_peft_model(base, config or lora_config())


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


def host_rows() -> list[dict[str, Any]]:
    """Options of runs in host memory: the optimizer at stages 1 to 3, at stage 3 the parameters as well, all of them:
    with the threshold that transformers fills in, adapters and norms are persistent."""
    host = {"device": "cpu"}
    rows = [{"deepspeed": ds_config(stage, offload_optimizer=host)} for stage in (1, 2, 3)]
    both = {"offload_optimizer": host, "offload_param": host, "stage3_param_persistence_threshold": 0}
    return [*rows, {"deepspeed": ds_config(3, **both)}]


def file_rows(folder: Path) -> list[dict[str, Any]]:
    """Options of a run whose optimizer and parameters are in files, below ``folder``."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    return [{"deepspeed": ds_config(3, offload_optimizer=files, offload_param=files)}]


def fp16_rows() -> list[dict[str, Any]]:
    """Options of runs in fp16, at stages 0 to 3."""
    return [{"deepspeed": ds_config(stage), "bf16": False, "fp16": True} for stage in range(4)]


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


def device_of(section: Any) -> str:
    """Where an ``offload_...`` section of a config, an engine's or a dict's, puts things; "none" without a section."""
    if section is None:
        return "none"
    return section["device"] if isinstance(section, dict) else section.device


def assert_runs_as_asked(engine: Any, options: dict[str, Any]) -> None:
    """The stage, the offload and the precision of ``options`` are those of the engine that the library made."""
    asked = options["deepspeed"]["zero_optimization"]
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.zero_optimization_stage() == asked["stage"]
    assert device_of(engine.zero_offload_optimizer()) == device_of(asked.get("offload_optimizer"))
    assert device_of(engine.zero_offload_param()) == device_of(asked.get("offload_param"))
    assert engine.fp16_enabled() == options.get("fp16", False)
    assert engine.bfloat16_enabled() == options.get("bf16", True)


def assert_way_of(
    plain: Any,
    trainer: Any,
    name: Any,
    tolerance: float = TOLERANCE,
    norm_tolerance: float = NORM_TOLERANCE,
) -> None:
    """Losses and norms of each step that ``trainer`` logged, and what it evaluates to, are those of ``plain``, its DDP
    run. ``plain`` must have been evaluated as its last act, and made in front of any engine: the libraries remember in
    the process that they run under one. ``name`` says in messages which run it was."""
    assert isinstance(plain.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    for key, allowed in (("loss", tolerance), ("grad_norm", norm_tolerance)):
        got, expected = logged(trainer, key), logged(plain, key)
        assert len(expected) == plain.args.max_steps
        assert close(got, expected, allowed), f"{name}: {key} {got}, DDP {expected}"
    got, expected = [trainer.evaluate()["eval_loss"]], logged(plain, "eval_loss")
    assert close(got, expected, tolerance), f"{name}: evaluated to {got}, DDP {expected}"


def assert_rows_take_the_way(
    make: Callable[..., Any],
    rows: list[dict[str, Any]],
    check: Callable[[Any, dict[str, Any]], None] | None = None,
    falls_to: float = 1.0,
    **tolerances: float,
) -> None:
    """``make(**options)`` makes a trainer; each of ``rows`` are options of one that takes the way of the DDP run, whose
    loss falls below ``falls_to`` times its first. ``check(trainer, row)`` demands more of each."""
    plain = make()
    plain.train()
    plain.evaluate()
    losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
    assert losses[-1] < falls_to * losses[0] and norms[0] > 0
    for row in rows:
        trainer = make(**row)
        trainer.train()
        assert_runs_as_asked(trainer.deepspeed, row)
        assert_way_of(plain, trainer, row, **tolerances)
        if check is not None:
            check(trainer, row)
        trainer.deepspeed.destroy()


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights of the trained model, by name."""
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def assert_resumes(make: Callable[..., Any], folder: Path, name: Any, steps: int = 6) -> Any:
    """``make(**options)`` makes a trainer of that many steps whose folder is ``folder``. A second one that resumes from
    what the first saved half way logs the same, to the last bit, and ends at the same weights; it is returned."""
    options = {"save_strategy": "steps", "save_steps": steps // 2}
    whole = make(**options)
    whole.train()
    expected = whole_weights(whole)
    whole.deepspeed.destroy()
    resumed = make(**options)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
    for key in ("loss", "grad_norm"):
        assert len(logged(resumed, key)) == steps
        assert logged(resumed, key) == logged(whole, key), f"{name}: {key}"
    weights = whole_weights(resumed)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], weight) for key, weight in expected.items()), name
    return resumed
