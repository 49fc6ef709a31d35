# SPDX-License-Identifier: Apache-2.0
"""accelerate's loop over an engine, at the ZeRO stage that is asked for.

torchrun --nproc_per_node 2 examples/accelerate/train.py 3
"""

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.manual_seed(0)
PartialState(cpu=not torch.cuda.is_available())  # without a GPU: said before Accelerator counts processes
plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, deepspeed_plugin=plugin)

x = torch.randn(512, 16)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))

means = []
for epoch in range(8):
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    means.append(sum(losses) / len(losses))
    accelerator.print(f"epoch {epoch}: loss {means[-1]:.3f}, gradient norm {model.get_global_grad_norm():.3f}")
accelerator.end_training()
sys.exit(means[-1] > 0.5 * means[0])
