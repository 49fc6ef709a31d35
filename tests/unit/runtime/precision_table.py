# SPDX-License-Identifier: Apache-2.0
"""The table of ``docs/precision.md``: dtypes read from engines while they train.

From the repository's root: ``PYTHONPATH=.:tests python -m unit.runtime.precision_table`` writes it into the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepspeed
from unit.runtime import precision_loop as plain
from unit.runtime.precision_loop import MixedNet

PAGE = Path(__file__).parents[3] / "docs" / "precision.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COLUMNS = (
    "config",
    "stage",
    "weights",
    "masters",
    "optimizer state",
    "gradient from autograd",
    "waits on the rank",
    "collective",
    "reduced gradient",
    "loss scale",
)
MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
STATES = {"bf16": {**MASTERS["bf16"], "bf16_optimizer_states": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "`bf16`": {"bf16": {"enabled": True}},
    '`bf16`, `grad_accum_dtype: "bf16"`': {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    '`bf16`, `communication_data_type: "fp32"`': {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "`bf16_master_weights_and_grads`": MASTERS,
    "the same, `bf16_optimizer_states`": STATES,
    'the same, `grad_accum_dtype: "fp32"`': {**STATES, "data_types": {"grad_accum_dtype": "fp32"}},
    "`fp16`": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    '`fp16`, `grad_accum_dtype: "fp16"`': {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
    "`torch_autocast` bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "`torch_autocast` fp16": {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"initial_scale_power": 4},
    },
    '`bf16`, `keep_in_fp32_modules: ["norm"]`': {
        "bf16": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["norm"]},
    },
}


def named(dtypes: Iterable[torch.dtype]) -> str:
    """Short names, the narrowest first; a dash for none."""
    return ", ".join(SHORT[d] for d in sorted(set(dtypes), key=lambda d: (d.itemsize, str(d)))) or "-"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def observe(stage: int, config: dict[str, Any]) -> tuple[str, ...]:
    """What one engine has in two micro-steps, in the order of ``COLUMNS`` from the third on."""
    settings = {
        "train_micro_batch_size_per_gpu": plain.SAMPLES,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        **config,
    }
    engine = deepspeed.initialize(model=MixedNet(), optimizer=adamw, config=settings)[0]
    stepper = engine._stepper
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    from_autograd: set[torch.dtype] = set()
    for parameter in trained:
        parameter.register_hook(lambda gradient: from_autograd.add(gradient.dtype))
    first, second = plain.batches_of(0, 0, 2)
    engine.backward(engine(*first))
    waits = [bucket.local.dtype for bucket in stepper.reducer.buckets if bucket.local_in_use]
    engine.step()
    engine.backward(engine(*second))
    reduced = [shard.dtype for shard in stepper.reducer.shards]
    engine.step()
    assert engine.was_step_applied(), (stage, config)
    entries = [entry for state in stepper.state.values() for entry in state.values()]
    result = (
        named(p.dtype for p in trained),
        named(_masters(stepper)),
        named(entry.dtype for entry in entries if isinstance(entry, Tensor) and entry.dim()),
        named(from_autograd),
        named(waits),
        named(bucket.comm_dtype for bucket in stepper.reducer.buckets),
        named(reduced),
        "dynamic" if stepper.dynamic_loss_scale else "-",
    )
    engine.destroy()
    return result


def _masters(stepper: Any) -> list[torch.dtype]:
    """None where weights are their own masters."""
    if stepper.reducer.layout.replicated:
        return [master.dtype for record, master in stepper.masters.items() if master is not record.parameter]
    return [master.dtype for master in stepper.weights.masters]


def table() -> str:
    """Stages that keep the same share a row."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, config in CONFIGS.items():
        rows: dict[tuple[str, ...], list[int]] = {}
        partitioned_only = config.get("bf16", {}).get("bf16_master_weights_and_grads", False)
        for stage in range(1 if partitioned_only else 0, 4):
            rows.setdefault(observe(stage, config), []).append(stage)
        for seen, stages in rows.items():
            lines.append(f"| {name} | {', '.join(map(str, stages))} | {' | '.join(seen)} |")
    return "\n".join(lines)


def parts_of_page() -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands after it."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN + "\n")
    shown, after = rest.split("\n" + END)
    return before, shown, after


def main() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
    deepspeed.init_distributed()
    before, _, after = parts_of_page()
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
