# SPDX-License-Identifier: Apache-2.0
"""The models that the step-time benchmark trains, in plain torch.

Both map one batch tensor to one scalar loss, so that every contender calls them the same way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a :class:`GPT`: sizes in elements, ``sequence`` in tokens, ``batch`` in sequences per rank.

    All blocks run ``uses`` times, one pass after the other. ``lr`` shrinks with the width: at that of a narrow model a
    wide one trains chaotically, and what contenders learn in a few steps says nothing.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    sequence: int
    batch: int
    lr: float = 3e-4
    uses: int = 1


@dataclass(frozen=True)
class TinyConfig:
    """Shape of a :class:`TinyLayers`: ``layers`` square Linear layers in blocks of ``block`` layers."""

    layers: int
    block: int
    width: int
    batch: int


MODELS = ("gpt", "reused", "tiny1000")
GPT_SIZES = {
    "small": GPTConfig(hidden=256, layers=6, heads=8, vocab=3584, sequence=128, batch=2, lr=3e-4),
    "large": GPTConfig(hidden=2048, layers=16, heads=16, vocab=32000, sequence=1024, batch=4, lr=3e-5),
}
TINY_SIZES = {
    "small": TinyConfig(layers=1000, block=50, width=16, batch=8),
    "large": TinyConfig(layers=2000, block=50, width=16, batch=8),
}


class GPTBlock(nn.Module):
    """Pre-norm causal attention and MLP, both with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.project = nn.Linear(config.hidden, config.hidden, bias=False)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.expand = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.contract = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with learned positions and an output projection of its own (not tied to the embedding)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``.

        Args:
            tokens: int64, ``[batch, sequence + 1]``.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for _ in range(self.config.uses):
            for block in self.blocks:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TinyBlock(nn.Module):
    """``block`` square Linear layers, each followed by tanh and added to its input."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.block))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class TinyLayers(nn.Module):
    """A thousand layers too small to hide any per-parameter overhead behind arithmetic.

    The layers are residual and start at ``1 / sqrt(layers)`` of their usual scale: a plain chain of this depth
    has no gradient at its first layer.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        if config.layers % config.block:
            raise ValueError(f"layers ({config.layers}) must be a multiple of block ({config.block})")
        self.config = config
        self.blocks = nn.ModuleList(TinyBlock(config) for _ in range(config.layers // config.block))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(config.width * config.layers))
                nn.init.zeros_(module.bias)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the mean squared distance of the outputs from their targets.

        Args:
            pairs: floating point, ``[batch, 2, width]``: inputs at index 0, targets at index 1.
        """
        x, target = pairs.unbind(1)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x.float(), target.float())


@dataclass(frozen=True)
class Workload:
    """One model with its data.

    Attributes:
        build: makes the model on the default device, in the default dtype.
        make_batch: makes the batch of a rank, given (rank, dtype of floating-point inputs).
        lr: AdamW learning rate at which the loss falls clearly within a few steps.
        samples: tokens (gpt) or rows (tiny1000) per rank and step.
        flops: floating-point operations of one forward and backward of one rank, or 0 if not counted.
        sample_name: what ``samples`` counts.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.dtype], Tensor]
    lr: float
    samples: int
    flops: float
    sample_name: str


def gpt_flops(config: GPTConfig) -> float:
    """Return the operations of a forward and backward: 6 per matrix weight and token, plus causal attention.

    The embedding look-ups are not matrix products and are not counted. A causal score matrix is half full:
    2 products x 2 operations x 3 (forward and backward) x sequence / 2 x hidden per token and layer.
    """
    tokens = config.batch * config.sequence
    layers = config.layers * config.uses
    weights = 12 * config.hidden**2 * layers + config.vocab * config.hidden
    attention = 6 * config.sequence * config.hidden * layers
    return float(tokens * (6 * weights + attention))


def gpt_workload(config: GPTConfig) -> Workload:
    def make_batch(rank: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randint(config.vocab, (config.batch, config.sequence + 1), generator=generator)

    tokens = config.batch * config.sequence
    return Workload(lambda: GPT(config), make_batch, config.lr, tokens, gpt_flops(config), "tokens")


def tiny_workload(config: TinyConfig) -> Workload:
    def make_batch(rank: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(config.batch, 2, config.width, generator=generator).to(dtype)

    return Workload(lambda: TinyLayers(config), make_batch, 1e-5, config.batch, 0.0, "rows")


def make_workload(name: str, size: str) -> Workload:
    """Return the workload ``name`` (of ``MODELS``) of ``size`` ("small" or "large").

    Raises:
        KeyError: unknown name or size.
    """
    if name == "gpt":
        return gpt_workload(GPT_SIZES[size])
    if name == "reused":
        return gpt_workload(replace(GPT_SIZES[size], uses=2))
    if name == "tiny1000":
        return tiny_workload(TINY_SIZES[size])
    raise KeyError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")


def build_model(workload: Workload, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the model in fp32 on ``device``, each weight already rounded to ``dtype``.

    Rounding first gives every contender the same master weights, whether it makes them from the fp32 or
    from the low-precision model.
    """
    torch.manual_seed(0)
    with device:
        model = workload.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model
