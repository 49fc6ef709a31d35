# SPDX-License-Identifier: Apache-2.0
"""What stage 0 shows in ``.grad`` after a backward that reduced is the whole gradient, also where parameters fire more
often than they were seen to, on all ranks or on one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from unit.common import DistributedTest
from unit.reference import max_relative_error

USES = {"on all ranks": [(2, 2), (3, 3), (2, 2)], "on one rank": [(2, 2), (2, 3), (1, 2)]}  # by window and rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, uses: int) -> Tensor:
        for _ in range(uses):
            x = x + checkpoint(self.trunk, x, use_reentrant=True)
        return self.head(x).square().mean()


def data(window: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * window + rank)
    return torch.randn(3, 5, generator=generator).to(dtype).requires_grad_()


def reference(weights: dict[str, Tensor], window: int, uses: tuple[int, ...]) -> dict[str, Tensor]:
    exact = Model().double()
    exact.load_state_dict(weights)
    for rank, times in enumerate(uses):
        (exact(data(window, rank, torch.float64), times) / len(uses)).backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


def backward(engine: Any, loss: Tensor, way: str) -> None:
    loss.backward() if way == "loss.backward" else engine.backward(loss)


class TestWhatIsShown(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    @pytest.mark.parametrize("way", ["engine.backward", "loss.backward"])
    @pytest.mark.parametrize("where", list(USES))
    def test_late_contributions_are_in_it(self, way: str, where: str) -> None:
        torch.manual_seed(7)
        model = Model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 0, "reduce_bucket_size": 24, "overlap_comm": True},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        for window, uses in enumerate(USES[where]):
            weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
            expected = reference(weights, window, uses)
            rank = engine.global_rank
            backward(engine, engine(data(window, rank, torch.float32), uses[rank]), way)
            shown = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
            missing = [name for name, gradient in shown.items() if gradient is None]
            assert not missing, f"window {window}: nothing is shown of {missing}"
            assert max_relative_error(shown, expected)[1] < 1e-5, f"window {window}"
            engine.step()
            after = {name: (weights[name] - value) / 0.05 for name, value in engine.module.state_dict().items()}
            assert max_relative_error(after, expected)[1] < 1e-4, f"window {window}: the update"
        engine.destroy()
