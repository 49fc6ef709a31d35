# SPDX-License-Identifier: Apache-2.0
"""Random-number generators: separate named states, and the states of a moment to run something once more under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator

MODEL_PARALLEL_RNG = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named states of the device's generator beside the default one.

    Ranks that share a model draw the same numbers from the default state (dropout on replicated activations) and
    different ones from a state of their own (dropout on activations that are split).
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Copy of the states by name: uint8 CPU tensors, which are replaced and never written."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Use ``states``, as :meth:`get_states` gave them, from now on."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make the state ``name``, as ``seed`` starts it. The default state stays as it is.

        Raises:
            ValueError: the name or the seed has been added before.
        """
        if name in self.states_:
            raise ValueError(f"random state {name!r} exists already: reset() the tracker before adding it again")
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} has been added already: two states of one seed draw the same numbers")
        self.seeds_.add(seed)
        self.states_[name] = _state_of_seed(seed)

    def replace(self, name: str, seed: int) -> None:
        """Start the state ``name`` afresh from ``seed``, whether it exists or not."""
        self.seeds_.add(seed)
        self.states_[name] = _state_of_seed(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from the state ``name`` inside; the default state continues afterwards where it was.

        Raises:
            KeyError: no such state.
        """
        if name not in self.states_:
            raise KeyError(f"no random state {name!r}, there are {sorted(self.states_)}: add(name, seed) it first")
        accelerator = get_accelerator()
        outer = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outer)


def _state_of_seed(seed: int) -> torch.Tensor:
    accelerator = get_accelerator()
    present = accelerator.get_rng_state()
    accelerator.manual_seed(seed)
    state = accelerator.get_rng_state()
    accelerator.set_rng_state(present)
    return state


class RandomStates:
    """All generator states of the moment in which it was made; a context inside which they are in force again.

    It covers the CPU, the devices of ``values``, the current device and the tracker, and may be entered any number of
    times. On leaving, the states from before are back.

    Args:
        values: tensors, whose devices count; anything else is ignored.
        tracker: named states.
    """

    def __init__(self, values: Iterable[Any], tracker: CudaRNGStatesTracker) -> None:
        self._tracker = tracker
        self._devices = sorted(_device_indices(values))
        self._captured = self._read()
        self._outer: list[tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]] = []

    def _read(self) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        accelerator = get_accelerator()
        devices = [accelerator.get_rng_state(index) for index in self._devices]
        return torch.get_rng_state(), devices, self._tracker.get_states()

    def _write(self, states: tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        host, devices, named = states
        torch.set_rng_state(host)
        for index, state in zip(self._devices, devices):
            get_accelerator().set_rng_state(state, index)
        self._tracker.set_states(named)

    def __enter__(self) -> None:
        self._outer.append(self._read())
        self._write(self._captured)

    def __exit__(self, *exception: Any) -> None:
        self._write(self._outer.pop())


def _device_indices(values: Iterable[Any]) -> set[int]:
    """Devices with a generator of their own. A device that nobody has used yet is not initialised for this."""
    accelerator = get_accelerator()
    kind = torch.device(accelerator.device_name()).type
    if kind == "cpu":
        return set()
    found = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.device.type == kind}
    if kind != "cuda" or torch.cuda.is_initialized():
        found.add(accelerator.current_device())
    return found
