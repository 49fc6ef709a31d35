# SPDX-License-Identifier: Apache-2.0
"""Small models, data and configs that many tests share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SimpleModel(nn.Module):
    """``nlayers`` square linear layers and a cross-entropy loss over their output as logits.

    Args:
        hidden_dim: width of every layer and number of classes.
        empty_grad: add a linear layer, ``linear2``, that takes no part in forward, so its gradients stay None.
        nlayers: number of layers in use.
    """

    def __init__(self, hidden_dim: int, empty_grad: bool = False, nlayers: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(nlayers)])
        if empty_grad:
            self.linear2 = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of inputs ``x``, (batch, hidden_dim), against classes ``y``, (batch,) of int64."""
        for linear in self.linears:
            x = linear(x)
        return nn.functional.cross_entropy(x, y)


def random_dataset(
    total_samples: int,
    hidden_dim: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> TensorDataset:
    """Pairs of normal inputs, (hidden_dim,) of ``dtype``, and classes below ``hidden_dim``.

    The same on every rank; ``seed`` makes it independent of the global generator. See ``rank_batches`` for data that
    differs between ranks.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    inputs = torch.randn(total_samples, hidden_dim, generator=generator).to(device=device, dtype=dtype)
    labels = torch.randint(hidden_dim, (total_samples,), generator=generator).to(device)
    return TensorDataset(inputs, labels)


def _micro_batch_size(model: Any) -> int:
    """What an engine says its micro-batch is; 1 for a plain module."""
    ask = getattr(model, "train_micro_batch_size_per_gpu", None)
    return ask() if ask is not None else 1


def _sampler(dataset: TensorDataset) -> DistributedSampler | None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DistributedSampler(dataset, shuffle=False)
    return None


def random_dataloader(
    model: Any,
    total_samples: int,
    hidden_dim: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
) -> DataLoader:
    """This rank's share of ``random_dataset``, different on each rank, in batches of the engine's micro-batch size."""
    dataset = random_dataset(total_samples, hidden_dim, device, dtype, seed)
    return DataLoader(dataset, batch_size=_micro_batch_size(model), sampler=_sampler(dataset))


def sequence_dataloader(
    model: Any,
    total_samples: int,
    hidden_dim: int,
    device: torch.device | str,
    seq_len: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
) -> DataLoader:
    """As ``random_dataloader`` for sequences: inputs (seq_len, hidden_dim), one class for each sample."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    inputs = torch.randn(total_samples, seq_len, hidden_dim, generator=generator).to(device=device, dtype=dtype)
    labels = torch.randint(hidden_dim, (total_samples,), generator=generator).to(device)
    dataset = TensorDataset(inputs, labels)
    return DataLoader(dataset, batch_size=_micro_batch_size(model), sampler=_sampler(dataset))


def rank_batches(
    rank: int, micro_steps: int, batch: int, hidden_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of one rank on the CPU, different for every rank and micro-step.

    Any process can compute those of any rank, which is what ``reference_gradients`` needs.
    """
    for step in range(micro_steps):
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1_009 * rank + step)
        inputs = torch.randn(batch, hidden_dim, generator=generator).to(dtype)
        yield inputs, torch.randint(hidden_dim, (batch,), generator=generator)


def create_config_from_dict(tmpdir: str | os.PathLike[str], config_dict: dict[str, Any]) -> str:
    """Write the config to ``temp_config.json`` below ``tmpdir``, the same for all ranks, and return its path."""
    path = Path(tmpdir) / "temp_config.json"
    # Written aside and renamed: other ranks write and read the same path.
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(config_dict))
    aside.replace(path)
    return str(path)


def get_args_from_dict(tmpdir: str | os.PathLike[str], config_dict: dict[str, Any]) -> argparse.Namespace:
    """Arguments as a launched script would have parsed them, with the config in a file below ``tmpdir``."""
    return argparse.Namespace(
        deepspeed=True,
        deepspeed_config=create_config_from_dict(tmpdir, config_dict),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )
