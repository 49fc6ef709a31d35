# SPDX-License-Identifier: Apache-2.0
"""A linear layer cut into tiles, so that ZeRO-3 gathers one tile at a time instead of the whole weight."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.utils import is_zero_param


class TiledLinear(nn.Module):
    """``torch.nn.Linear`` as ``out_splits`` x ``in_splits`` smaller ones: ``linears[o][i]`` maps part i of the input to
    part o of the output. Sizes of parts differ by one at most, the larger ones come first. The bias belongs to the last
    tile of each row.

    The result is that of one linear layer up to the order of summation over the parts of the input.

    Args:
        in_features, out_features, bias: as for ``torch.nn.Linear``.
        in_splits, out_splits: number of parts.
        input_is_already_split: ``forward`` takes a sequence of ``in_splits`` tensors.
        combine_out_splits: return one tensor; otherwise a list of ``out_splits`` tensors.
        linear_cls: class of the tiles, called as ``linear_cls(in, out, bias=..., **kwargs)``; has ``weight`` of shape
            (out, in) and ``bias`` of shape (out,) or None.
        init_linear: a layer from which the parameters are copied (``copy_params_from``).

    Raises:
        ValueError: more parts than features, or fewer than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = _part_sizes("in", in_features, in_splits)
        self.out_sizes = _part_sizes("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(in_size, out_size, bias=bias and part == in_splits - 1, **kwargs)
                for part, in_size in enumerate(self.in_sizes)
            )
            for out_size in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Input (..., in_features), or the sequence of its parts; output (..., out_features), or the list of its parts.

        Raises:
            ValueError: the number of parts or a size is wrong.
        """
        parts = self._split_input(input_)
        outputs = [self._sum_of_tiles(row, parts) for row in self.linears]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Module) -> None:
        """Take the weights of ``other``, a layer of the same size with ``weight`` and, if this one has it, ``bias``.

        Parameters of either that ZeRO-3 partitions are gathered for it, tile by tile for this layer's; all ranks must
        call it then, and rank 0's values count.

        Raises:
            ValueError: the sizes differ, or one of the layers has a bias and the other has none.
        """
        bias = getattr(other, "bias", None)
        if (bias is not None) != self.use_bias:
            raise ValueError(
                f"copy_params_from: this TiledLinear has {'a' if self.use_bias else 'no'} bias,"
                f" {type(other).__name__} has {'one' if bias is not None else 'none'}"
            )
        with torch.no_grad(), _gathered([other.weight] if bias is None else [other.weight, bias]):
            if other.weight.shape != (self.out_features, self.in_features):
                raise ValueError(
                    f"copy_params_from: weight of shape {tuple(other.weight.shape)}, expected"
                    f" {(self.out_features, self.in_features)}"
                )
            for row, rows in zip(self.linears, other.weight.split(self.out_sizes, dim=0)):
                for tile, values in zip(row, rows.split(self.in_sizes, dim=1)):
                    with _gathered([tile.weight], modifier_rank=0):
                        tile.weight.copy_(values)
            if bias is not None:
                for row, values in zip(self.linears, bias.split(self.out_sizes)):
                    with _gathered([row[-1].bias], modifier_rank=0):
                        row[-1].bias.copy_(values)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias},"
            f" in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _split_input(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.input_is_already_split:
            if input_.shape[-1] != self.in_features:
                raise ValueError(f"input of {input_.shape[-1]} features, this TiledLinear has {self.in_features}")
            return split_tensor_along_last_dim(input_, self.in_sizes)
        if [part.shape[-1] for part in input_] != self.in_sizes:
            raise ValueError(
                f"input in parts of {[part.shape[-1] for part in input_]} features, expected {self.in_sizes}"
            )
        return input_

    def _sum_of_tiles(self, row: nn.ModuleList, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:]):
            total = total + tile(part)
        return total


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` over layers whose forward returns the pair (output without bias, bias), and which does the same.

    Both come in one piece, or both as lists of ``out_splits`` parts (``combine_out_splits=False``); the bias is None
    without one.
    """

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, Any]:
        parts = self._split_input(input_)
        outputs, biases = zip(*(self._pair_of_tiles(row, parts) for row in self.linears))
        if not self.combine_out_splits:
            return list(outputs), list(biases) if self.use_bias else None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if self.use_bias else None

    def _pair_of_tiles(
        self, row: nn.ModuleList, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        total, bias = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:]):
            output, bias = tile(part)
            total = total + output
        return total, bias  # that of the last tile


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Parts of ``tensor`` along its last dimension.

    Args:
        partitions: size of each part; they add up to the dimension.
        contiguous_split_chunks: copy the parts into memory of their own; otherwise they are views.
    """
    parts = torch.split(tensor, list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def _part_sizes(side: str, features: int, splits: int) -> list[int]:
    if not 1 <= splits <= features:
        raise ValueError(f"{side}_splits must be from 1 to {side}_features ({features}), got {splits}")
    size, larger = divmod(features, splits)
    return [size + 1] * larger + [size] * (splits - larger)


def _gathered(parameters: Iterable[nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """Whole parameters inside: those that ZeRO-3 partitions are gathered, others are there already."""
    partitioned = [parameter for parameter in parameters if is_zero_param(parameter)]
    if not partitioned:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters(partitioned, modifier_rank=modifier_rank)
