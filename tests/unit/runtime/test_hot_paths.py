# SPDX-License-Identifier: Apache-2.0
"""What a step does per parameter is counted, so that a slow path cannot creep in unseen.

Times depend on the machine; counts do not. Counted are calls of the package's functions, and calls of Python functions
that those make, and tensor operations: as the slope between two models that differ in nothing but the number of layers,
less what the bare model does. Limits are what was counted and a quarter of a call: one more function or operation per
parameter is red. Newer Python makes fewer calls, since comprehensions are functions of their own before 3.12.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from unit.common import DistributedTest

PACKAGE = str(Path(deepspeed.__file__).parent)
FEW, MANY = 6, 16  # layers, of one parameter each
WIDTH = 4
SLACK = 0.25
PHASES = ("forward", "backward", "step")

# Stage 3 with weights that stay whole, and with weights that are gathered around every module.
CONFIGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 gathered": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
}
# Python calls and tensor operations per parameter, beyond the bare model's: Python 3.11, torch 2.13, two ranks.
LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    "0": {"forward": (0, 0), "backward": (8, 1), "step": (1, 1)},
    "1": {"forward": (0, 0), "backward": (7, 0), "step": (1, 0)},
    "2": {"forward": (0, 0), "backward": (7, 0), "step": (1, 0)},
    "3": {"forward": (13, 0), "backward": (9, 0), "step": (19, 4)},
    "3 gathered": {"forward": (145, 7), "backward": (47, 5), "step": (4, 0)},
}
# Of a step, whatever the number of parameters: the bucket, the norm, and the weights by one broadcast per owner. Where
# weights are gathered around modules, that is one broadcast per owner for each of them.
COLLECTIVES = {"0": (1, 0), "1": (4, 0), "2": (4, 0), "3": (4, 0), "3 gathered": (2, 2)}


class Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Operations(TorchDispatchMode):
    """Counts tensor operations, and collectives apart."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.collectives += 1
        else:
            self.operations += 1
        return func(*args, **(kwargs or {}))


def python_calls(run: Callable[[], Any]) -> int:
    """Calls on this thread, while ``run`` runs, of the package's functions and of Python functions by them."""
    calls = 0

    def own(frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and (own(frame) or own(frame.f_back))

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


class Bare:
    """The model alone, with the interface of an engine."""

    def __init__(self, layers: int) -> None:
        self.module = Chain(layers)

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def destroy(self) -> None:
        pass


def make_engine(layers: int, zero: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    return deepspeed.initialize(model=Chain(layers), config=config)[0]


def counted(engine: Any) -> dict[str, tuple[int, int, int]]:
    """Python calls, tensor operations and collectives of each phase of a step, after three steps."""
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    losses: list[Tensor] = []
    phases = {
        "forward": lambda: losses.append(engine(x)),
        "backward": lambda: engine.backward(losses.pop()),
        "step": engine.step,
    }
    calls = {name: python_calls(run) for name, run in phases.items()}
    result = {}
    for name, run in phases.items():
        with Operations() as seen:
            run()
        result[name] = (calls[name], seen.operations, seen.collectives)
    engine.destroy()
    return result


def slopes(make: Callable[[int], Any]) -> tuple[dict[str, tuple[float, float]], list[int]]:
    """Per phase: calls and operations per layer. And the collectives of a step of the small and the large model."""
    few, many = counted(make(FEW)), counted(make(MANY))
    per_layer = {
        phase: tuple((many[phase][kind] - few[phase][kind]) / (MANY - FEW) for kind in (0, 1)) for phase in PHASES
    }
    return per_layer, [sum(counts[phase][2] for phase in PHASES) for counts in (few, many)]


class TestHotPaths(DistributedTest):
    world_size = 2

    def test_work_per_parameter(self) -> None:
        bare, none = slopes(Bare)
        assert none == [0, 0] and bare["backward"][1] > 0, "the bare model is counted, and communicates nothing"
        faults = []
        for name, zero in CONFIGS.items():
            found, collectives = slopes(lambda layers, zero=zero: make_engine(layers, zero))
            assert found["backward"][0] > 1, "each parameter has a hook, which is a Python function"
            for phase in PHASES:
                added = [found[phase][kind] - bare[phase][kind] for kind in (0, 1)]
                for kind, what in enumerate(("Python calls", "tensor operations")):
                    if added[kind] > LIMITS[name][phase][kind] + SLACK:
                        limit = LIMITS[name][phase][kind]
                        faults.append(f"stage {name}, {phase}: {added[kind]:.2f} {what} per parameter, were {limit}")
            fixed, per_layer = COLLECTIVES[name]
            if collectives != [fixed + per_layer * layers for layers in (FEW, MANY)]:
                faults.append(f"stage {name}: {collectives} collectives, were {fixed} and {per_layer} per layer")
        assert not faults, "\n".join(faults)
