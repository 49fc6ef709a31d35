# SPDX-License-Identifier: Apache-2.0
"""Moving what an engine holds on the device to the host for a while, and back: room for another model in between."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.runtime.gradients.host_memory import HostMemory
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

Kind = OffloadStateTypeEnum
# What each of them needs on the device.
NEEDED = {
    "forward": {Kind.lp_params},
    "backward": {Kind.lp_params, Kind.lp_grads},
    "step": {Kind.lp_params, Kind.lp_grads, Kind.hp_params, Kind.optim_states},
}


@dataclass(eq=False)
class Movable:
    """One tensor that can be elsewhere for a while.

    Args:
        get: the tensor where it is now; None if there is none at the moment.
        put: sets another one in its place, of the same values.
    """

    get: Callable[[], torch.Tensor | None]
    put: Callable[[torch.Tensor], None]


def movable_data(tensor: torch.Tensor) -> Movable:
    """A tensor object that stays and gets other memory."""

    def put(value: torch.Tensor) -> None:
        tensor.data = value

    return Movable(lambda: tensor.data, put)


class HostCopies:
    """Tensors of one owner that are on the host at the moment.

    Pinned memory is kept for the next time, since to pin it takes longer than to copy; ``unpin`` frees it.
    """

    def __init__(self) -> None:
        self.away: dict[Any, list[tuple[Movable, torch.device]]] = {}  # by kind
        self._kept: dict[tuple[Any, int], torch.Tensor] = {}

    def offload(self, kind: Any, movables: list[Movable], pinned: bool, non_blocking: bool) -> None:
        """Copy to the host and let go of the device's memory. What is on the host by itself stays as it is."""
        if kind in self.away:
            return
        moved = []
        for number, movable in enumerate(movables):
            tensor = movable.get()
            if tensor is None or tensor.numel() == 0:
                continue
            host = self._memory((kind, number), tensor, pinned)
            host.copy_(tensor, non_blocking=non_blocking and pinned)
            movable.put(host)
            moved.append((movable, tensor.device))
        self.away[kind] = moved

    def reload(self, kind: Any, non_blocking: bool) -> None:
        """Copy back to where it was."""
        for movable, device in self.away.pop(kind, []):
            host = movable.get()
            movable.put(torch.empty_like(host, device=device, pin_memory=False).copy_(host, non_blocking=non_blocking))

    def _memory(self, key: tuple[Any, int], tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.dtype != tensor.dtype or kept.numel() != tensor.numel():
            kept = HostMemory(pinned).empty(tensor.numel(), tensor.dtype)
            if pinned:
                self._kept[key] = kept
        return kept.view(tensor.shape)

    def unpin(self) -> None:
        """Free the memory that is kept and not in use; the host waits until no copy reads it any more."""
        if self._kept and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] in self.away}


def check_target(device: Any) -> None:
    """ValueError unless it is host memory."""
    if device not in (OffloadDeviceEnum.cpu, "cpu"):
        name = getattr(device, "value", device)
        raise ValueError(f"offload_states: states can be moved to 'cpu', not to {name!r}")


def kinds_of(include: Container[OffloadStateTypeEnum] | None) -> list[OffloadStateTypeEnum]:
    """The kinds that are asked for; None: all.

    Raises:
        ValueError: something else is among them.
    """
    if include is None:
        return list(Kind)
    unknown = [item for item in include if item not in list(Kind)] if isinstance(include, Iterable) else []
    if unknown:
        raise ValueError(f"offload_states(include): {unknown} are none of {[kind.value for kind in Kind]}")
    return [kind for kind in Kind if kind in include]


def refuse_while_away(away: Container[OffloadStateTypeEnum], what: str, needed: str) -> None:
    """RuntimeError where something that ``needed`` (a key of ``NEEDED``) uses is on the host.

    Args:
        what: the caller, for the message.
    """
    missing = [kind.value for kind in Kind if kind in NEEDED[needed] and kind in away]
    if missing:
        raise RuntimeError(
            f"{what}: {', '.join(missing)} are on the host since engine.offload_states(); call engine.reload_states()"
        )


# ------------------------------------------------------------------------------------- of a torch optimizer alone

_copies: "weakref.WeakKeyDictionary[torch.optim.Optimizer, HostCopies]" = weakref.WeakKeyDictionary()


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The entries of a torch optimizer's state that have dimensions."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                yield value


def offload_optimizer_states(
    optimizer: torch.optim.Optimizer, device: Any, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move the state of a torch optimizer to the host. Its next step needs ``reload_optimizer_states``.

    Raises:
        ValueError: another device than the CPU.
    """
    check_target(getattr(device, "type", device))
    movables = [movable_data(tensor) for tensor in state_tensors(optimizer)]
    _copies.setdefault(optimizer, HostCopies()).offload(Kind.optim_states, movables, pin_memory, non_blocking)


def reload_optimizer_states(optimizer: torch.optim.Optimizer, device: Any = None, non_blocking: bool = False) -> None:
    """Move the state back to where it was."""
    _copies.setdefault(optimizer, HostCopies()).reload(Kind.optim_states, non_blocking)


def unpin_offloaded_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Free the pinned memory that is kept for the next ``offload_optimizer_states``."""
    _copies.setdefault(optimizer, HostCopies()).unpin()


offload_adam_states = offload_optimizer_states
reload_adam_states = reload_optimizer_states


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Devices on which an engine holds what ``state`` names.

    Args:
        model: an engine with a ZeRO optimizer.
    """
    movables = model.optimizer.movable_states(OffloadStateTypeEnum(state))
    return {tensor.device for movable in movables if (tensor := movable.get()) is not None}
