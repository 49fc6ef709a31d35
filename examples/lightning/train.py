# SPDX-License-Identifier: Apache-2.0
"""lightning's DeepSpeedStrategy over an engine. The strategy wants GPUs.

python examples/lightning/train.py 3
"""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Product(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0].bfloat16()).float(), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(stage: int = 2, **options: Any) -> int:
    lightning.seed_everything(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=8, shuffle=True)
    model, strategy = Product(), DeepSpeedStrategy(stage=stage)
    trainer = lightning.Trainer(strategy=strategy, precision="bf16-mixed", max_epochs=8, logger=False, **options)
    trainer.fit(model, loader)
    return model.losses[-1] > 0.5 * model.losses[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
