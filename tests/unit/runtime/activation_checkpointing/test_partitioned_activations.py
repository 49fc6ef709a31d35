# SPDX-License-Identifier: Apache-2.0
"""Activations divided over ranks that share a model: each keeps its part, backward puts them together again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from unit.common import DistributedTest
from unit.runtime.activation_checkpointing.held_bytes import HeldBytes
from unit.runtime.activation_checkpointing.settings import all_ranks_share_one_model, unconfigured

ck = deepspeed.checkpointing
WIDTH, DEPTH, SLACK = 32, 4, 2048

runs = pytest.mark.parametrize("run", [ck.checkpoint, ck.non_reentrant_checkpoint], ids=["reentrant", "non_reentrant"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.2) + x


def a_tower(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(DEPTH)).to(dtype)


def loss_of(layers: nn.ModuleList, run: Callable[..., Tensor], rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, WIDTH, generator=generator).to(layers[0].linear.weight.dtype).requires_grad_() * 1
    torch.manual_seed(1)
    for layer in layers:
        h = run(layer, h)
    return h.float().square().mean()


def gradients(layers: nn.ModuleList, loss: Tensor) -> list[Tensor]:
    layers.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in layers.parameters()]


class TestPartitionedActivations(DistributedTest):
    world_size = [2, 3]

    @runs
    @pytest.mark.parametrize("contiguous", [False, True], ids=["apart", "contiguous"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_same_gradients(self, run: Callable[..., Tensor], contiguous: bool, dtype: torch.dtype) -> None:
        """Bitwise, also for 7 x 32 elements on 3 ranks, whose last part is padded, and for one element a rank."""
        layers = a_tower(dtype)
        with unconfigured():
            expected = {rows: gradients(layers, loss_of(layers, lambda f, x: f(x), rows)) for rows in (1, 7)}
            ck.configure(
                all_ranks_share_one_model(),
                partition_activations=True,
                contiguous_checkpointing=contiguous,
                num_checkpoints=DEPTH,
            )
            assert (ck.mp_size, ck.mp_rank) == (self.world_size, torch.distributed.get_rank())
            for rows in (7, 1, 7):
                actual = gradients(layers, loss_of(layers, run, rows))
                assert any(bool(grad.count_nonzero()) for grad in actual)
                for a, b in zip(actual, expected[rows], strict=True):
                    assert torch.equal(a, b)

    @runs
    @pytest.mark.parametrize("contiguous", [False, True], ids=["apart", "contiguous"])
    def test_each_rank_keeps_its_part(self, run: Callable[..., Tensor], contiguous: bool) -> None:
        layers, rows = a_tower(), 96
        activation = rows * WIDTH * 4
        with unconfigured():
            ck.configure(
                all_ranks_share_one_model(),
                partition_activations=True,
                contiguous_checkpointing=contiguous,
                num_checkpoints=DEPTH,
            )
            with HeldBytes() as held:
                loss = loss_of(layers, run, rows)
                # The input and the last result are whole.
                assert held.now() <= (2 + DEPTH / self.world_size) * activation + SLACK, held.now() / activation
                loss.backward()

    def test_different_activations_are_refused(self) -> None:
        """Parts of different tensors would make a third one, and nobody would notice."""
        with unconfigured():
            ck.configure(all_ranks_share_one_model(), partition_activations=True)
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
            loss = ck.checkpoint(Block(), x.requires_grad_() * 1).sum()
            with pytest.raises(RuntimeError, match="differs between the ranks of the model-parallel group"):
                loss.backward()

    def test_pieces_by_hand(self) -> None:
        with unconfigured():
            ck.configure(all_ranks_share_one_model())
            size, rank = self.world_size, torch.distributed.get_rank()
            x = torch.arange(10.0, requires_grad=True) * 1
            arguments = [x, "text", torch.arange(3), None]
            parts = ck.partition_activations(arguments, cpu_checkpoint=False, contiguous_checkpoint=False)
            assert parts[1:] == arguments[1:]
            share = -(-10 // size)
            assert (ck.get_partition_size(x), ck.get_partition_start(x)) == (share, rank * share)
            mine = x[rank * share : (rank + 1) * share]
            assert parts[0].kept.numel() == share and torch.equal(parts[0].kept[: mine.numel()], mine)
            kept = ck.get_partitioned_activations_for_backward(arguments, parts, contiguous_checkpoint=False)
            whole = ck.gather_partitioned_activations(kept)
            assert torch.equal(whole[0], x) and whole[0].requires_grad and whole[1:] == tuple(arguments[1:])

    def test_switched_on_and_off(self) -> None:
        layers = a_tower()
        with unconfigured():
            ck.configure(all_ranks_share_one_model())
            held = []
            for partition in (False, True, False):
                ck.partition_activations_in_checkpoint(partition)
                with HeldBytes() as counter:
                    loss = loss_of(layers, ck.checkpoint, 96)
                    held.append(counter.now())
                    loss.backward()
            assert held[0] == held[2] and held[1] < 0.8 * held[0]

    def test_group_that_is_gone_is_not_used(self) -> None:
        with unconfigured():
            unit = all_ranks_share_one_model()
            ck.configure(unit, partition_activations=True)
            deepspeed.comm.destroy_process_group(unit.get_tensor_model_parallel_group())
            assert (ck.mp_size, ck.mp_group) == (1, None)
            ck.checkpoint(Block(), torch.randn(8, WIDTH, requires_grad=True) * 1).sum().backward()
