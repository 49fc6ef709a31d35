# SPDX-License-Identifier: Apache-2.0
"""From a model parameter to its true gradient, its fp32 master weight and its optimizer state, wherever these are
partitioned.

Each parameter of an engine holds one ``ParameterLink``, with a weak reference to the optimizer: a model that outlives
its engine does not keep the engine's memory. All ``safe_*_full_*`` functions are collective: every rank of the
data-parallel group calls them.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.gradient_shard import GradientShard
from deepspeed.runtime.gradients.layout import FlatGroup, master_dtype
from deepspeed.runtime.gradients.ledger import ParameterRecord

LINK = "_ds_link"


@dataclass
class fragment_address:
    """A range of elements: ``numel`` of them from ``start``."""

    numel: int
    start: int


@dataclass
class tensor_fragment:
    """What this rank owns of one parameter: its range in the weights (lp) and the matching range of the master (hp)."""

    lp_fragment: torch.Tensor
    lp_fragment_address: fragment_address
    hp_fragment: torch.Tensor
    hp_fragment_address: fragment_address
    gradient_dict: dict
    offload_gradient_dict: dict
    use_offload: bool
    param_group_index: int
    optim_fragment: dict | None = None

    def update_hp(self) -> None:
        """Weights to master."""
        self.hp_fragment.data.copy_(self.lp_fragment.data)

    def update_lp(self) -> None:
        """Master to weights, rounded."""
        self.lp_fragment.data.copy_(self.hp_fragment.data)

    def get_optim_state_keys(self) -> list[str]:
        return list(self.optim_fragment or {})

    def get_optim_state_fragment(self, key: str) -> torch.Tensor:
        if key not in (self.optim_fragment or {}):
            raise ValueError(f"{key} not found in optimizer state fragment")
        return self.optim_fragment[key]

    def set_optim_state_fragment(self, flat_hp_partition: torch.Tensor, optim_fragment: dict) -> None:
        """Take this parameter's part of each entry that is laid out like ``flat_hp_partition``; others as they are."""
        begin, numel = self.hp_fragment_address.start, self.hp_fragment_address.numel
        self.optim_fragment = {
            key: value.narrow(0, begin, numel) if _alike(value, flat_hp_partition) else value
            for key, value in optim_fragment.items()
        }

    def get_hp_fragment_address(self) -> fragment_address:
        return self.hp_fragment_address

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self.hp_fragment if optim_state_key is None else self.get_optim_state_fragment(optim_state_key)


def _alike(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


class LiveFragment(tensor_fragment):
    """Shows weights, masters and the optimizer's state where they are when asked: states may be moved."""

    link: "ParameterLink"

    @property
    def lp_fragment(self) -> torch.Tensor:
        """This rank's part of the parameter's weights: 1-D."""
        link = self.link
        return link.record.parameter.data.view(-1).narrow(0, link.begin, link.end - link.begin)

    @lp_fragment.setter
    def lp_fragment(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise AttributeError("this fragment shows the model's own weights; write to them")

    @property
    def hp_fragment(self) -> torch.Tensor:
        """This rank's part of the parameter's master: 1-D."""
        return self.link.optimizer.own_master(self.link)

    @hp_fragment.setter
    def hp_fragment(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise AttributeError("this fragment shows the optimizer's own master; use safe_set_full_fp32_param")

    @property
    def optim_fragment(self) -> dict[str, Any] | None:
        """This rank's part of each entry of the parameter's optimizer state; None before the first step."""
        link = self.link
        state = link.optimizer.optimizer.state.get(link.optimizer.state_owner(link))
        if not state:
            return None
        return {key: link.own_part(v) if _alike(v, link.optimizer.state_owner(link)) else v for key, v in state.items()}

    @optim_fragment.setter
    def optim_fragment(self, value: dict | None) -> None:
        if value is not None:
            raise AttributeError("this fragment shows the optimizer's own state; use safe_set_full_optimizer_state")


class ParameterLink:
    """Where one parameter's gradient, master and state are: in the optimizer, which is held weakly."""

    def __init__(self, optimizer: Any, record: ParameterRecord, group: FlatGroup, position: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.record = record
        self.group = group
        own = group.own[position]
        self.begin, self.end = own.begin, own.end  # own elements of the parameter
        self.shard_begin = own.shard_begin  # and where they are in the shard

    def __reduce__(self) -> tuple[Any, ...]:
        """A parameter that is pickled belongs to no engine where it is loaded."""
        return type(None), ()

    @property
    def optimizer(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(f"parameter {self.record.name!r}: its engine is gone")
        return optimizer

    def leads_to(self, optimizer: Any) -> bool:
        return self._optimizer() is optimizer

    def own_part(self, shard: torch.Tensor | GradientShard) -> torch.Tensor:
        """This rank's elements of the parameter, out of a gradient shard or a 1-D tensor laid out like it."""
        return shard.narrow(0, self.shard_begin, self.end - self.begin)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Full tensor in the parameter's shape, fp32 or wider, from every rank's own elements. Collective unless
        replicated."""
        parameter = self.record.parameter
        full = torch.zeros(self.record.numel, dtype=master_dtype(own.dtype), device=parameter.device)
        full[self.begin : self.end].copy_(own.detach().reshape(-1))
        reducer = self.optimizer.reducer
        if not reducer.layout.replicated:
            collectives.sum_over_ranks(full, reducer.group)
        return full.view(self.record.shape)

    def scatter(self, value: torch.Tensor, own: torch.Tensor) -> None:
        """Write this rank's elements of a full tensor where they live."""
        if value.shape != self.record.shape:
            raise ValueError(
                f"parameter {self.record.name!r} has shape {tuple(self.record.shape)}, the value to set has"
                f" {tuple(value.shape)}"
            )
        own.copy_(value.reshape(-1)[self.begin : self.end].view(own.shape))


@torch.no_grad()
def link_parameters(optimizer: Any) -> None:
    """Give every trainable parameter of ``optimizer`` its link, and the fragment that outside code reads."""
    for group in optimizer.reducer.layout.groups:
        for position, record in enumerate(group.records):
            link = ParameterLink(optimizer, record, group, position)
            setattr(record.parameter, LINK, link)
            for function in PARAMETER_METHODS:
                setattr(record.parameter, function.__name__, _Method(function, record.parameter))
            optimizer.add_fragment(link)


def unlink_parameters(optimizer: Any) -> None:
    """Cut the links again, but not those that a newer engine over the same model has made since."""
    for record in optimizer.reducer.ledger.records:
        link = _link_of(record.parameter)
        if link is not None and link.leads_to(optimizer):
            for name in (LINK, *(function.__name__ for function in PARAMETER_METHODS)):
                delattr(record.parameter, name)
            if hasattr(record.parameter, "_hp_mapping"):
                del record.parameter._hp_mapping


def _link_of(param: torch.nn.Parameter) -> ParameterLink | None:
    return getattr(param, LINK, None)


def _own_gradient(link: ParameterLink) -> torch.Tensor:
    """This rank's elements of the true gradient, with everything pending reduced first (collective)."""
    optimizer = link.optimizer
    deferred_by = optimizer.reducer.schedule.deferred_by
    if deferred_by:
        raise ValueError(
            f"parameter {link.record.name!r}: inside {deferred_by} there is no gradient of all ranks yet, only what"
            " safe_get_full_grad shows of this rank's; ask for it afterwards"
        )
    optimizer.settle_gradients()
    reducer = optimizer.reducer
    if not reducer.ledger.reduced:
        raise ValueError(
            f"parameter {link.record.name!r} has no gradient: no backward has run since the last step or zero_grad();"
            " it exists from a backward to the step"
        )
    return link.own_part(reducer.shards[link.group.index])


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """True gradient of a parameter: the mean over ranks of what this window has accumulated so far, without loss scale.

    Collective. Inside ``no_sync()`` it is this rank's own contribution instead.

    Returns:
        fp32 tensor in the parameter's shape; None for a frozen parameter.

    Raises:
        ValueError: no backward has run in this window.
    """
    link = _link_of(param)
    if link is None:
        return None if param.grad is None else param.grad.float()
    if link.optimizer.reducer.schedule.deferred_by:
        return link.optimizer.reducer.local_gradient(link.record)
    return link.gather(_own_gradient(link))


@torch.no_grad()
def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's true gradient; the norm and the step use the new one. Collective.

    Args:
        value: the same on every rank, in the parameter's shape.
    """
    link = _link_of(param)
    if link is None:
        param.grad = value
        return
    link.scatter(value, _own_gradient(link))
    link.optimizer.gradient_edited(param)
    link.optimizer.gradients_edited()


def safe_update_full_grad_vectorized(
    param_list: list[torch.nn.Parameter], update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by ``update_func(gradient, parameter)``. Collective."""
    for param in param_list:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """fp32 master weight in the parameter's shape, on every rank; None for a frozen parameter. Collective."""
    link = _link_of(param)
    if link is None:
        return None
    with link.optimizer.resident(link, write=False):
        return link.gather(link.optimizer.own_master(link))


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace the fp32 master weight; the model's weight follows at once. Collective.

    Args:
        value: the same on every rank, in the parameter's shape.
    """
    link = _require_link(param)
    with link.optimizer.resident(link):
        link.scatter(value, link.optimizer.own_master(link))
    link.optimizer.write_weight(link, value)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """An entry of the optimizer's state, such as ``exp_avg``, in the parameter's shape. Collective.

    An entry without dimensions, such as ``step``, is returned as it is.

    Raises:
        ValueError: there is no such entry, or no step has been made.
    """
    link = _link_of(param)
    if link is None:
        return None
    with link.optimizer.resident(link, write=False):
        state = _state_entry(link, optim_state_key)
        return state.clone() if state.dim() == 0 else link.gather(link.optimizer.own_state(link, state))


@torch.no_grad()
def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace an entry of the optimizer's state. Collective."""
    link = _require_link(param)
    with link.optimizer.resident(link):
        link.scatter(value, link.optimizer.own_state(link, _state_entry(link, optim_state_key)))


def _require_link(param: torch.nn.Parameter) -> ParameterLink:
    link = _link_of(param)
    if link is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine, so it has no master weight"
        )
    return link


def _state_entry(link: ParameterLink, key: str) -> torch.Tensor:
    state = link.optimizer.optimizer.state.get(link.optimizer.state_owner(link), {})
    if key not in state:
        known = ", ".join(sorted(state)) or "nothing, since no step has been made"
        raise ValueError(f"{key} not found in the optimizer state of parameter {link.record.name!r}; it holds {known}")
    return torch.as_tensor(state[key])


# ----------------------------------------------------------------------------------------------- as methods


def get_full_hp_param(self: torch.nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
    """Method of each trained parameter: its whole fp32 master, or an entry of its optimizer state. Collective."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Method of each trained parameter: replace its fp32 master, or an entry of its optimizer state. Collective."""
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: torch.nn.Parameter) -> torch.Tensor | None:
    """Method of each trained parameter: ``safe_get_full_grad``. Collective."""
    return safe_get_full_grad(self)


def set_full_hp_grad(self: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Method of each trained parameter: ``safe_set_full_grad``. Collective."""
    safe_set_full_grad(self, value)


PARAMETER_METHODS = (get_full_hp_param, set_full_hp_param, get_full_hp_grad, set_full_hp_grad)


class _Method:
    """A function as a method of one parameter, which it does not keep alive and is not pickled with."""

    def __init__(self, function: Callable[..., Any], parameter: torch.nn.Parameter) -> None:
        self._function = function
        self._parameter = weakref.ref(parameter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._parameter(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


# ----------------------------------------------------------------------------------------------- own partition only


def _require_partitioned(param: torch.nn.Parameter, function: str) -> ParameterLink:
    if getattr(param, "ds_id", None) is None:
        raise AssertionError(
            f"{function}: the parameter is not partitioned by ZeRO-3, so it has no local partition of its own."
            f" Use {function.replace('local', 'full')}"
        )
    return _require_link(param)


def _write_local(link: ParameterLink, target: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise ValueError(
            f"this rank's partition of parameter {link.record.name!r} has shape {tuple(target.shape)}, the value to set"
            f" has {tuple(value.shape)}"
        )
    target.copy_(value)


def _local_gradient(link: ParameterLink) -> torch.Tensor:
    _own_gradient(link)  # settles, and raises where there is none
    optimizer = link.optimizer
    return optimizer.own_padded(link, optimizer.reducer.shards[link.group.index])


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's partition of a stage 3 parameter's true gradient: 1-D, padded. Collective.

    Raises:
        AssertionError: the parameter is not partitioned.
        ValueError: no backward has run in this window.
    """
    return _local_gradient(_require_partitioned(param, "safe_get_local_grad")).clone()


@torch.no_grad()
def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's partition of the true gradient. Collective."""
    link = _require_partitioned(param, "safe_set_local_grad")
    link.optimizer.gradient_edited(param)
    _write_local(link, _local_gradient(link), value)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's partition of the fp32 master: 1-D, padded."""
    link = _require_partitioned(param, "safe_get_local_fp32_param")
    with link.optimizer.resident(link, write=False):
        return link.optimizer.own_padded(link, link.optimizer.master_of(link)).clone()


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's partition of the master; the model's weight follows at once. Collective."""
    link = _require_partitioned(param, "safe_set_local_fp32_param")
    with link.optimizer.resident(link):
        _write_local(link, link.optimizer.own_padded(link, link.optimizer.master_of(link)), value)
    link.optimizer.write_local_weight(link, value)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """This rank's partition of an entry of the optimizer's state: 1-D, padded; entries without dimensions as they
    are."""
    link = _require_partitioned(param, "safe_get_local_optimizer_state")
    with link.optimizer.resident(link, write=False):
        state = _state_entry(link, optim_state_key)
        return (state if state.dim() == 0 else link.optimizer.own_padded(link, state)).clone()


@torch.no_grad()
def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's partition of an entry of the optimizer's state."""
    link = _require_partitioned(param, "safe_set_local_optimizer_state")
    with link.optimizer.resident(link):
        state = _state_entry(link, optim_state_key)
        _write_local(link, state if state.dim() == 0 else link.optimizer.own_padded(link, state), value)
