# SPDX-License-Identifier: Apache-2.0
"""accelerate, as it comes: 30 steps take the way of its plain DDP run, in losses and norms, offloaded and in fp16
too; a run that is saved and resumed goes on as if it had not stopped; weights come out whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from unit.common import DistributedTest

pytest.importorskip("accelerate")

STEPS = 30
TOLERANCE = 2e-2  # what bf16 leaves of a loss or a norm, relative
CLIP = 0.5  # below the first norms, so that clipping acts


class Net(nn.Module):
    """An encoder that is applied twice, the second time to what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.encoder(x)))


def make_data(examples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(examples, 7, generator=generator)
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x.sum(1), x[:, 2]], dim=1))


class Run:
    """One training run. ``stage`` None is accelerate's DDP; ``options`` are DeepSpeedPlugin's."""

    def __init__(
        self, stage: int | None, accumulation: int, precision: str = "bf16", config: Any = None, **options: Any
    ) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)  # accelerate's own way to have several Accelerators in one process
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        # Without a GPU accelerate counts one process under DeepSpeed, unless its state says several on CPU before.
        PartialState(cpu=True)
        plugin = None
        if config is not None:
            plugin = DeepSpeedPlugin(hf_ds_config=config)
        elif stage is not None:
            plugin = DeepSpeedPlugin(
                zero_stage=stage,
                gradient_accumulation_steps=accumulation,
                gradient_clipping=CLIP,
                zero3_save_16bit_model=True,
                **options,
            )
        self.accelerator = Accelerator(
            cpu=stage is None,
            mixed_precision=precision,
            gradient_accumulation_steps=accumulation,
            deepspeed_plugin=plugin,
        )
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        loader = DataLoader(make_data(4 * 2 * STEPS * accumulation), batch_size=4)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, begin: int, end: int) -> None:
        """Optimizer steps from ``begin`` to ``end``, over their part of the data."""
        self.model.train()
        accumulation = self.accelerator.gradient_accumulation_steps
        total = 0.0
        for position, (x, y) in enumerate(self.loader):
            if not begin * accumulation <= position < end * accumulation:
                continue
            with self.accelerator.accumulate(self.model):
                out = self.model(x.to(self.model_dtype)).float()
                loss = nn.functional.mse_loss(out, y)
                total += self.accelerator.reduce(loss.detach(), reduction="mean").item() / accumulation
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                norm = norm if norm is not None else self.model.get_global_grad_norm()
                self.norms.append(float(norm))
                self.losses.append(total)
                total = 0.0

    @property
    def model_dtype(self) -> torch.dtype:
        if not isinstance(self.model, deepspeed.DeepSpeedEngine):
            return torch.float32
        return torch.float16 if self.model.fp16_enabled() else torch.bfloat16

    def evaluate(self) -> float:
        """Over all examples, gathered from all ranks."""
        self.model.eval()
        loader = self.accelerator.prepare(DataLoader(make_data(50), batch_size=4))
        squares: list[Tensor] = []
        with torch.no_grad():
            for x, y in loader:
                out = self.model(x.to(self.model_dtype)).float()
                squares.append(self.accelerator.gather_for_metrics((out - y).square().mean(dim=1)))
        assert len(torch.cat(squares)) == 50
        return torch.cat(squares).mean().item()

    def weights(self) -> dict[str, Any]:
        """Whole, as accelerate gives them to be saved; on the main process."""
        return self.accelerator.get_state_dict(self.model)

    def end(self) -> None:
        self.accelerator.free_memory()


def close(values: list[float], expected: list[float]) -> bool:
    return len(values) == len(expected) and all(abs(v - e) <= TOLERANCE * abs(e) for v, e in zip(values, expected))


class TestAccelerate(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 300

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_ends_where_ddp_ends(self, accumulation: int) -> None:
        plain = Run(None, accumulation)
        plain.train(0, STEPS)
        expected, evaluated = plain.weights(), plain.evaluate()
        assert plain.losses[-1] < 0.5 * plain.losses[0]
        assert plain.norms[0] > CLIP
        for stage in range(4):
            run = Run(stage, accumulation)
            run.train(0, STEPS)
            assert close(run.losses, plain.losses), f"stage {stage}: {run.losses}, DDP {plain.losses}"
            assert close(run.norms, plain.norms), f"stage {stage}: {run.norms}, DDP {plain.norms}"
            assert close([run.evaluate()], [evaluated])
            weights = run.weights()
            if run.accelerator.is_main_process:
                assert weights.keys() == {name.removeprefix("module.") for name in expected}
                for name, weight in weights.items():
                    assert weight.shape == expected.get(name, expected.get(f"module.{name}")).shape
            run.end()

    def test_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        """The plugin's options for offload; a config of one's own for fp16, whose first loss scale fits 30 steps."""
        plain = Run(None, 1)
        plain.train(0, STEPS)
        assert plain.losses[-1] < 0.5 * plain.losses[0]
        half = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "fp16": {"enabled": True, "initial_scale_power": 8},
        }
        optimizer = {"offload_optimizer_device": "cpu"}
        both = {**optimizer, "offload_param_device": "cpu"}
        paths = {f"offload_{part}_nvme_path": str(tmp_path) for part in ("optimizer", "param")}
        files = {"offload_optimizer_device": "nvme", "offload_param_device": "nvme", **paths}
        rows: list[tuple[int, dict[str, Any]]] = [
            (1, optimizer),
            (2, optimizer),
            (3, optimizer),
            (3, both),
            (3, files),
            *((s, {"precision": "fp16", "config": {**half, "zero_optimization": {"stage": s}}}) for s in range(4)),
        ]
        for stage, options in rows:
            run = Run(stage, 1, **options)
            for part in ("optimizer", "param"):  # what was asked for is what runs
                section = getattr(run.model, f"zero_offload_{part}")()
                assert (section.device if section else "none") == options.get(f"offload_{part}_device", "none")
            assert run.model.fp16_enabled() == ("precision" in options)
            run.train(0, STEPS)
            assert close(run.losses, plain.losses), f"stage {stage}, {options}: {run.losses}, DDP {plain.losses}"
            assert close(run.norms, plain.norms), f"stage {stage}, {options}: {run.norms}, DDP {plain.norms}"
            run.end()

    def test_resumes(self, tmp_path: Path) -> None:
        for stage in range(4):
            folder = str(tmp_path / f"stage{stage}")
            whole = Run(stage, 2)
            whole.train(0, 4)
            whole.accelerator.save_state(folder)
            whole.train(4, 8)
            whole.end()
            resumed = Run(stage, 2)
            resumed.accelerator.load_state(folder)
            resumed.train(4, 8)
            assert resumed.losses == whole.losses[4:], f"stage {stage}"
            assert resumed.norms == whole.norms[4:], f"stage {stage}"
            assert resumed.schedule.get_last_lr() == whole.schedule.get_last_lr()
            resumed.end()
