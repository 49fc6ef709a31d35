# SPDX-License-Identifier: Apache-2.0
"""What a graph keeps instead of a gathered weight, and what its backward gets: hooks for ``saved_tensors_hooks``.

torch makes a new tensor of what an unpack hook returns, so that a custom function would find its saved weight without
the attributes of the parameter (``ds_status``, or what a caller has put there), where without hooks it finds the
parameter itself. ``SavedParameter`` gives it a Parameter with those attributes.
"""

from typing import Any

import torch

from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.zero.sharded_parameter import AVAILABLE, GATHERED, ShardedParameter, gather_now, shard_of

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class SavedWeight:
    """What a graph keeps instead of (a view of) a gathered weight: where in it the view lies.

    ``ShardedParameter.saved`` counts those that backward has not come by. What is gathered follows from that count, so
    it must be the same on all ranks: that a graph was thrown away is not noticed, since when Python collects it differs
    from rank to rank. The count starts anew with each window.
    """

    __slots__ = ("shard", "size", "stride", "offset", "version", "window", "waiting")

    def __init__(self, shard: ShardedParameter, view: torch.Tensor) -> None:
        self.shard = shard
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset() - shard.full.storage_offset()
        self.version = (shard.version, shard.dropped)
        self.window = shard.window
        self.waiting = True
        shard.saved += 1

    def used(self) -> None:
        """Backward has come by."""
        if self.waiting and self.window == self.shard.window:
            self.shard.saved -= 1
        self.waiting = False

    def view(self) -> torch.Tensor:
        """The view, on the whole value that is there now.

        Raises:
            RuntimeError: the values are not those of the forward any more.
        """
        shard = self.shard
        if self.version != (shard.version, shard.dropped):
            raise RuntimeError(
                f"parameter {shard.name} was modified (by a step, by loading weights, or by leaving a"
                " GatheredParameters in which it was changed) between the forward and the backward of a graph that"
                " needs its former values. Run the forward again"
            )
        full = shard.full
        return full.as_strided(self.size, self.stride, full.storage_offset() + self.offset)


class SavedTensor:
    """Any other tensor that a graph keeps. torch leaves it to hooks to notice that it was modified since."""

    __slots__ = ("tensor", "version", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.version = autograd.version_of(tensor)

    def checked(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was modified in place since the forward.
        """
        now = autograd.version_of(self.tensor)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {tuple(self.tensor.shape)} and {self.tensor.dtype} that forward saved at version"
                f" {self.version} is at version {now} in backward. If it is a weight, it was written (by a step or by"
                " loading weights) between forward and backward: run the forward again"
            )
        if self.tensor.shape != self.shape and shard_of(self.tensor) is not None:
            gather_now([shard_of(self.tensor)])  # a persistent parameter, which somebody has let go of in between
        return self.tensor


class SavedParameter:
    """A partitioned parameter itself that a custom function saved.

    Args:
        saved: its value.
        parameter: whose attributes the function finds on it in backward.
    """

    __slots__ = ("saved", "parameter", "requires_grad")

    def __init__(self, saved: SavedWeight | SavedTensor, parameter: torch.nn.Parameter) -> None:
        self.saved = saved
        self.parameter = parameter
        self.requires_grad = parameter.requires_grad

    def named(self) -> torch.Tensor:
        """For torch to hand out: the whole value as a Parameter of its own with the parameter's attributes, which keeps
        its memory whatever becomes of the parameter."""
        value = unpack_weight(self.saved)
        alias = alias_of(self.parameter, value)
        if type(self.saved) is SavedWeight:
            alias.ds_status = AVAILABLE
        if not self.requires_grad:
            return alias  # torch hands this one out as it is
        handed = autograd.as_detached_subclass(_HandedOut, value)
        handed.alias = alias
        return handed


class _HandedOut(torch.Tensor):
    """Turns into its ``alias`` when torch detaches it, which is what torch does with all that an unpack hook returns
    for a tensor that requires grad: it hands out the result, as a leaf whose gradient goes to the parameter. Where
    the dispatch to Python is off, torch makes an ordinary tensor of it, with the same values."""

    alias: torch.nn.Parameter

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args = tuple(arg.alias if type(arg) is cls else arg for arg in args)
        return args[0] if func is torch.ops.aten.detach.default else func(*args, **(kwargs or {}))


def alias_of(parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.nn.Parameter:
    """Another Parameter over the memory of ``value``, with the attributes that ``parameter`` has now. Needs no
    gradient."""
    alias = torch.nn.Parameter(value, requires_grad=False)
    alias.__dict__.update(parameter.__dict__)
    return alias


def unpack_weight(packed: SavedWeight | SavedTensor | SavedParameter) -> torch.Tensor:
    """For ``saved_tensors_hooks``: the view that ``pack_weight`` was given, on whole values that are there now."""
    if type(packed) is SavedTensor:
        return packed.checked()
    if type(packed) is SavedParameter:
        return packed.named()
    coordinator = packed.shard.coordinator
    if coordinator is not None:
        return coordinator.use_saved(packed)
    gather_now([packed.shard])
    return packed.view()


def pack_weight(tensor: torch.Tensor) -> SavedWeight | SavedTensor | SavedParameter:
    """For ``saved_tensors_hooks``: keep the place of a gathered weight, not its memory."""
    shard = _gathered_at(tensor) if type(tensor) in _PLAIN_TYPES and autograd.has_memory(tensor) else None
    saved = SavedTensor(tensor) if shard is None else SavedWeight(shard, tensor)
    if shard_of(tensor) is not None and autograd.hook_is_called_by_custom_function():
        return SavedParameter(saved, tensor)
    return saved


def _gathered_at(tensor: torch.Tensor) -> ShardedParameter | None:
    """The parameter that ``tensor`` is (a view of), where a graph need not keep its memory."""
    shard = GATHERED.get(tensor.data_ptr()) or GATHERED.get(tensor.untyped_storage().data_ptr())
    if shard is None or shard.persistent or tensor.dtype is not shard.dtype or tensor.numel() == 0:
        return None
    inside = 0 <= tensor.storage_offset() - shard.full.storage_offset() < shard.numel
    return shard if inside else None
