# SPDX-License-Identifier: Apache-2.0
"""Build a model that is larger than what a rank may hold under ``deepspeed.zero.Init``, and train it with ZeRO-3.

    deepspeed --num_accelerators 2 examples/zero_init/train.py

The budget is three quarters of the model. Whenever a layer has its whole weight, all tensors that are alive are
counted. Exit status 1 if a rank ever held more, or if the loss does not fall.
"""

import argparse
import gc
import sys

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

MB = 1e6
BUDGET = 0.75  # of the model's weights
MICRO_BATCH = 8


class Layer(nn.Linear):
    """A linear layer that looks at the memory at the moment when its weight is whole: before it is partitioned."""

    most_bytes = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        Layer.most_bytes = max(Layer.most_bytes, bytes_of_tensors())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = Layer(width, width)
        self.outer = Layer(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def build(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.LayerNorm(width), nn.Linear(width, 1))


def main() -> int:
    options = parse_options()
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 2_000_000, "stage3_prefetch_bucket_size": 2_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    }

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(options.width, options.depth)
    taken = Layer.most_bytes

    numel = sum(parameter.ds_numel for parameter in model.parameters())
    held = sum(parameter.ds_tensor.nbytes for parameter in model.parameters())
    whole = 2 * numel
    report(f"{numel / 1e6:.1f}M parameters, {whole / MB:.0f} MB in bf16; a rank may take {BUDGET * whole / MB:.0f} MB")
    report(f"while it was built a rank held at most {taken / MB:.0f} MB of tensors, and holds {held / MB:.0f} MB now")

    losses = train(model, config, options)
    within = torch.tensor(float(taken <= BUDGET * whole and losses[-1] < losses[0]))
    dist.all_reduce(within, op=dist.ReduceOp.MIN)
    passed = bool(within)
    report("within the budget, and it learns" if passed else "OVER the budget, or the loss does not fall")
    dist.destroy_process_group()
    return 0 if passed else 1


def train(model: nn.Module, config: dict, options: argparse.Namespace) -> list[float]:
    """The mean loss of each step: a sign of the sum of the input, other inputs on each rank."""
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(MICRO_BATCH, options.width, generator=generator)
    wanted = inputs.sum(-1, keepdim=True).sign().to(engine.device)
    inputs = inputs.to(engine.device, torch.bfloat16)
    losses = []
    for step in range(options.steps):
        loss = nn.functional.mse_loss(engine(inputs).float(), wanted)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().cpu()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        report(f"step {step + 1}/{options.steps}  loss {losses[-1]:.4f}")
    return losses


def bytes_of_tensors() -> int:
    """Bytes of memory behind all tensors that are alive."""
    storages = (each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16, help="blocks, of two square layers each")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=0, help="set by launchers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
