# SPDX-License-Identifier: Apache-2.0
"""The situation of the report: the data, the model, and a loss in which the encoder works twice."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

SIDE = 8  # digits are SIDE x SIDE pixels
HIDDEN, LATENT = 128, 16
MICRO_BATCH = 32  # images per rank and micro-step
ACCUMULATION = 8  # micro-steps per optimizer step

MAIN_TERMS = ("reconstruction",)
AUXILIARY_TERMS = ("agreement", "spread")
ALL_TERMS = MAIN_TERMS + AUXILIARY_TERMS


class Batch(NamedTuple):
    """Images of shape (MICRO_BATCH, SIDE * SIDE) in [0, 1], and a second view of each: shifted by a pixel, noisy."""

    images: Tensor
    second_view: Tensor


class Autoencoder(nn.Module):
    """Two small MLPs. The encoder is what the main and the auxiliary path share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, SIDE * SIDE))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.encoder(images)
        return latent, self.decoder(latent)


def loss_terms(model: Callable[[Tensor], tuple[Tensor, Tensor]], encoder: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The terms of the loss, each a scalar.

    ``model`` may be a wrapper (DeepSpeed's engine, DDP); ``encoder`` is the bare module inside it: the same weights.
    """
    latent, reconstruction = model(batch.images)  # main path: through the wrapper
    second_latent = encoder(batch.second_view)  # auxiliary path: past the wrapper

    precision = torch.promote_types(latent.dtype, torch.float32)  # bf16 is too coarse for sums
    latent, reconstruction, second_latent = (t.to(precision) for t in (latent, reconstruction, second_latent))
    deviation = second_latent.var(dim=0).add(1e-4).sqrt()
    return {
        "reconstruction": F.mse_loss(reconstruction, batch.images.to(precision)),
        # Two views of one digit should have the same latent ...
        "agreement": F.mse_loss(second_latent, latent.detach()),
        # ... and different digits different ones. No kinks: at one, rounding alone can flip a gradient.
        "spread": (1.0 - deviation).square().mean(),
    }


class DigitShards:
    """scikit-learn's 1797 handwritten digits, dealt out to the ranks. What is drawn depends on (step, rank) alone."""

    def __init__(self, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        digits = torch.from_numpy(load_digits().data).float() / 16.0
        self.shards = [digits[rank::world_size] for rank in range(world_size)]
        self.dtype, self.device = dtype, device

    def window(self, step: int, rank: int) -> list[Batch]:
        """The micro-batches that ``rank`` accumulates in optimizer step ``step``."""
        generator = torch.Generator().manual_seed(len(self.shards) * step + rank)
        return [self._draw(self.shards[rank], generator) for _ in range(ACCUMULATION)]

    def all_windows(self, step: int) -> list[list[Batch]]:
        """The windows of all ranks, for the reference."""
        return [self.window(step, rank) for rank in range(len(self.shards))]

    def _draw(self, shard: Tensor, generator: torch.Generator) -> Batch:
        images = shard[torch.randint(len(shard), (MICRO_BATCH,), generator=generator)]
        shifted = images.view(-1, SIDE, SIDE).roll(1, dims=2).view_as(images)
        second_view = shifted + 0.1 * torch.randn(images.shape, generator=generator)
        return Batch(images.to(self.device, self.dtype), second_view.to(self.device, self.dtype))
