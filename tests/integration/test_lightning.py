# SPDX-License-Identifier: Apache-2.0
"""lightning's ``DeepSpeedStrategy``, as it comes: it takes the way of lightning's DDP, offloaded and in fp16 too, and
resumes.

The strategy insists on lightning's accelerator for CUDA, so without a GPU the test brings one that says it is, and
whose devices are the host's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from integration.tiny_llama import close
from unit.common import DistributedTest

lightning = pytest.importorskip("lightning")

STEPS = 30


def host_accelerator() -> Any:
    from lightning.pytorch.accelerators.cuda import CUDAAccelerator

    class HostAccelerator(CUDAAccelerator):
        def setup_device(self, device: torch.device) -> None: ...

        def setup(self, trainer: Any) -> None: ...

        def teardown(self) -> None: ...

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            return list(range(int(devices)))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return int(os.environ["WORLD_SIZE"])

        @staticmethod
        def is_available() -> bool:
            return True

    return HostAccelerator()


def make_data(examples: int) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(examples, 7, generator=generator)
    return DataLoader(TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x.sum(1)], dim=1)), batch_size=4)


class Regression(lightning.LightningModule):
    """An encoder that is applied twice."""

    def __init__(self, on_host: bool = False) -> None:
        super().__init__()
        self.on_host = on_host  # with an optimizer made for that, as lightning leaves it to the module
        torch.manual_seed(3)
        self.encoder = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 2)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        out = self.head(self.encoder(self.encoder(x.to(self.head.weight.dtype))))
        return nn.functional.mse_loss(out.float(), y)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.trainer.strategy.__class__.__name__ == "DDPStrategy":
            squares = [p.grad.square().sum() for p in self.parameters()]
            self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_train_batch_end(self, *_: Any) -> None:
        engine = self.trainer.model
        if isinstance(engine, deepspeed.DeepSpeedEngine):
            if engine.micro_steps % self.trainer.accumulate_grad_batches == 0:
                self.norms.append(float(engine.get_global_grad_norm()))

    def configure_optimizers(self) -> Any:
        kind = DeepSpeedCPUAdam if self.on_host else torch.optim.AdamW
        return kind(self.parameters(), lr=0.02, weight_decay=0.01)


def fit(
    folder: Path,
    stage: int | None,
    accumulation: int,
    steps: int,
    epochs: int = 1,
    resume: Path | None = None,
    precision: str = "bf16-mixed",
    **options: Any,
) -> Any:
    """``stage`` None is DDP; ``options`` are the strategy's. The steps make up this many epochs."""
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "test")
    os.environ.setdefault("GROUP_RANK", "0")
    plugged = {"cluster_environment": TorchElasticEnvironment(), "process_group_backend": "gloo"}
    trainer = lightning.Trainer(
        accelerator="cpu" if stage is None else host_accelerator(),
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(**plugged) if stage is None else DeepSpeedStrategy(stage=stage, **plugged, **options),
        precision=precision,
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    model = Regression("offload_optimizer" in options)
    trainer.fit(model, make_data(8 * steps * accumulation // epochs), ckpt_path=resume)
    return trainer, model


def window_means(losses: list[float], accumulation: int) -> list[float]:
    return [sum(losses[i : i + accumulation]) / accumulation for i in range(0, len(losses), accumulation)]


class TestLightning(DistributedTest):
    world_size = 2
    init_distributed = False
    exec_timeout = 400

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_takes_the_way_of_ddp(self, tmp_path: Path, accumulation: int) -> None:
        trainer, plain = fit(tmp_path, None, accumulation, STEPS)
        (evaluated,) = trainer.validate(plain, make_data(48), verbose=False)
        assert len(plain.losses) == STEPS * accumulation and len(plain.norms) == STEPS
        for stage in range(4):
            trainer, model = fit(tmp_path, stage, accumulation, STEPS)
            losses, expected = (window_means(m.losses, accumulation) for m in (model, plain))
            assert close(losses, expected, 2e-2), f"stage {stage}: {losses}, DDP {expected}"
            # lightning divides the loss by the accumulation count, and sets the engine to do so as well.
            norms = [norm * accumulation for norm in model.norms]
            assert close(norms, plain.norms, 5e-2), f"stage {stage}: {norms}, DDP {plain.norms}"
            (got,) = trainer.validate(model, make_data(48), verbose=False)
            assert close([got["val_loss"]], [evaluated["val_loss"]], 2e-2)

    def test_offload_and_fp16_take_the_same_way(self, tmp_path: Path) -> None:
        _, plain = fit(tmp_path, None, 1, STEPS)
        optimizer = {"offload_optimizer": True}
        both = {**optimizer, "offload_parameters": True}
        devices = {"offload_optimizer_device": "nvme", "offload_params_device": "nvme", "nvme_path": str(tmp_path)}
        half = {"precision": "16-mixed", "initial_scale_power": 8}  # nothing overflows in 30 steps
        rows: list[tuple[int, dict[str, Any]]] = [
            (1, optimizer),
            (2, optimizer),
            (3, optimizer),
            (3, both),
            (3, {**both, **devices}),
            *((stage, half) for stage in range(4)),
        ]
        for stage, options in rows:
            trainer, model = fit(tmp_path, stage, 1, STEPS, **options)
            section = trainer.model.zero_offload_optimizer()
            expected = options.get("offload_optimizer_device", "cpu") if "offload_optimizer" in options else "none"
            assert (section.device if section else "none") == expected
            assert trainer.model.fp16_enabled() == ("precision" in options)
            assert close(model.losses, plain.losses, 2e-2), f"{stage}, {options}: {model.losses}, DDP {plain.losses}"
            assert close(model.norms, plain.norms, 5e-2), f"{stage}, {options}: {model.norms}, DDP {plain.norms}"

    def test_resumes(self, tmp_path: Path) -> None:
        """With the same weights, and on the way of a DDP run that was resumed: at which batch is lightning's matter."""

        def stop_and_resume(stage: int | None) -> Any:
            trainer, _ = fit(tmp_path, stage, 1, 4)
            checkpoint = tmp_path / f"stage-{stage}.ckpt"
            trainer.save_checkpoint(checkpoint)
            return fit(tmp_path, stage, 1, 8, epochs=2, resume=checkpoint)[1]

        expected = stop_and_resume(None).losses
        assert len(expected) == 4
        for stage in range(1, 4):
            _, whole = fit(tmp_path, stage, 1, 8, epochs=2)
            losses = stop_and_resume(stage).losses
            assert losses[0] == whole.losses[4], f"stage {stage}"
            assert close(losses, expected, 2e-2), f"stage {stage}: {losses}, DDP {expected}"
