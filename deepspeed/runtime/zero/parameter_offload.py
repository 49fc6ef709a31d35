# SPDX-License-Identifier: Apache-2.0
"""Hooks that give each module its whole weights while it runs, and take them back.

Forward: a hook before and one after each module that owns parameters. Backward: a graph keeps the place of a weight
instead of its memory (``saved_tensors_hooks``), so that what backward needs is known exactly; a hook in front of the
nodes that made a module's outputs gathers it in time, and a saved weight that nobody gathered in time is gathered when
autograd asks for it. So no graph can meet a weight that is not there.
"""

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.utils import tensors_in
from deepspeed.runtime.zero.optimizer_offload import shard_memory, shard_store
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, make_secondary
from deepspeed.runtime.zero.saved_weights import alias_of, pack_weight, unpack_weight
from deepspeed.runtime.zero.sharded_parameter import (
    ShardedParameter,
    ShardRanks,
    all_written,
    gather_now,
    ranks_of,
    rest_shards,
    shard_of,
    shards_of,
    start_gathers,
)
from deepspeed.utils import groups

EXTERNAL = "_external_params"
UNIT = "_ds_unit"
FWD_MODULE_STACK: list[torch.nn.Module] = []  # modules of any engine that run forward now, innermost last

_module_ids = itertools.count()
_call_tokens = itertools.count(-1, -1)  # name calls of modules beside the modules themselves in ds_active_sub_modules
_weights_by_place = torch.autograd.graph.saved_tensors_hooks(pack_weight, unpack_weight)


class ZeROOrderedDict(OrderedDict):
    """Parameters of a module. Asking for a partitioned one while a module runs gathers it for that module.

    Args:
        parent_module: whose parameters these are.
    """

    def __init__(self, parent_module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_module = parent_module

    def __getitem__(self, key: str) -> Any:
        parameter = super().__getitem__(key)
        if FWD_MODULE_STACK:
            shard = shard_of(parameter)
            if shard is not None:
                if shard.full is None or shard.free:
                    _user_of(shard).use_external(shard)
                if not (parameter.requires_grad or shard.persistent) and _others_save_tensors():
                    # They may keep a saved tensor that needs no gradient as the object itself, and the parameter's own
                    # is empty once the module has run. What the alias points to lives as long as the graph does.
                    return alias_of(parameter, parameter.data)
        return parameter

    # OrderedDict's own go through __getitem__, and listing parameters must gather nothing
    def items(self) -> Any:
        return dict.items(self)

    def values(self) -> Any:
        return dict.values(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict:
        return OrderedDict((key, copy.deepcopy(value, memo)) for key, value in self.items())

    def __reduce__(self) -> Any:
        return (OrderedDict, (list(self.items()),))


def ensure_zero_ordered_dict(module: torch.nn.Module) -> None:
    """Let ``module`` keep its parameters in a ``ZeROOrderedDict``."""
    if not isinstance(module._parameters, ZeROOrderedDict):
        set_on(module, "_parameters", ZeROOrderedDict(module, module._parameters))


def set_on(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set an attribute of ``module`` itself: what torch.compile wraps a module in hands attributes to the module
    inside, which would lose its own."""
    object.__setattr__(module, name, value)


def _others_save_tensors() -> bool:
    """Whether a graph that is built now is kept by the hooks of others, as those of a non-reentrant checkpoint."""
    if not (torch.is_grad_enabled() and autograd.saved_tensors_hooks_are_allowed()):
        return False
    hooks = autograd.top_saved_tensors_hooks()
    return hooks is not None and hooks[0] is not pack_weight


def _user_of(shard: ShardedParameter) -> "ModuleUnit":
    """The innermost running module of the engine that the parameter belongs to, else the innermost of any."""
    for module in reversed(FWD_MODULE_STACK):
        unit = module._ds_unit
        if unit.offload.coordinator is shard.coordinator:
            return unit
    return FWD_MODULE_STACK[-1]._ds_unit


class _Frame:
    """One running call of a module."""

    __slots__ = ("place", "hooked", "fetched", "token")

    def __init__(self) -> None:
        self.token = next(_call_tokens)
        self.place: int | None = None  # in the learnt order
        self.hooked = False  # whether it set the hooks for saved tensors
        self.fetched: list[ShardedParameter] = []


class ModuleUnit:
    """One module whose parameters are gathered together, with its hooks.

    Args:
        offload: the owner.
        module: whose forward is watched.
        whole: it includes everything below it: parameters of all descendants are gathered with it, in backward too,
            whatever runs inside. So ranks may do different things there.
    """

    def __init__(self, offload: "DeepSpeedZeRoOffload", module: torch.nn.Module, whole: bool) -> None:
        self.offload: DeepSpeedZeRoOffload | None = offload
        self.module = module
        self.whole = whole
        # Code of others may hand a weight from forward to backward past autograd, as an attribute of a custom
        # function's context: there all weights are whole until backward has left the module.
        self.holds_in_backward = whole or runs_own_code(module)
        self.shards: list[ShardedParameter] = []
        self._unhooked = False  # whether it ever ran where saved weights could not be watched
        self._frames: list[_Frame] = []
        self.collect()

    def collect(self) -> None:
        """Find the parameters: own ones, and those registered as used by this module."""
        own = shards_of(self.module.parameters(recurse=self.whole))
        external = shards_of(getattr(self.module, EXTERNAL, {}).values())
        self.shards = own + [shard for shard in external if shard not in own]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleUnit":
        """A copied module is an ordinary one: its hooks do nothing."""
        return _idle_unit()

    def __reduce__(self) -> Any:
        return (_idle_unit, ())

    def needed_in_backward(self) -> list[ShardedParameter]:
        """Parameters whose values a graph will ask for."""
        if self.holds_in_backward or self._unhooked:
            return self.shards
        return [shard for shard in self.shards if shard.saved and not shard.persistent]

    def resident(self) -> bool:
        """Whether all parameters stay whole anyway."""
        for shard in self.shards:
            if not shard.persistent or shard.full is None:
                return False
        return True

    # ------------------------------------------------------------------ forward

    def before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        """Forward pre-hook."""
        if self.offload is None:
            return
        coordinator = self.offload.coordinator
        grad = torch.is_grad_enabled()
        if grad:
            self.offload.check_still_frozen(self.shards)
        coordinator.begin_forward(inference=not grad)
        FWD_MODULE_STACK.append(module)
        frame = _Frame()
        self._frames.append(frame)
        if self.resident():
            return
        frame.fetched = list(self.shards)
        frame.place = coordinator.fetch_forward(module, frame.fetched)
        if grad:
            frame.hooked = self._watch_saved()
            if self.holds_in_backward:
                self._watch_inputs((args, kwargs), frame.token)

    def _watch_saved(self) -> bool:
        """Let graphs keep places of weights; True when this call has set the hooks."""
        if not autograd.saved_tensors_hooks_are_allowed():
            self._unhooked = True
            return False
        if autograd.top_saved_tensors_hooks() is not None:
            return False  # ours already, or a checkpoint's, which keeps what it needs itself
        _weights_by_place.__enter__()
        return True

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook, called also after an exception, with None for the output."""
        if self.offload is None or not FWD_MODULE_STACK or FWD_MODULE_STACK[-1] is not module:
            return
        FWD_MODULE_STACK.pop()
        frame = self._frames.pop()
        if frame.hooked:
            _weights_by_place.__exit__()
        if frame.fetched:
            self._watch_outputs(output, frame.token)
            if not self._frames:  # a module that calls itself is done with the outermost call
                self.offload.coordinator.release_forward(module, frame.fetched, frame.place)
        self.offload.coordinator.end_forward()

    def use_external(self, shard: ShardedParameter) -> None:
        """The running module uses a parameter of another one: gather it, and with this module from now on."""
        name_external(self.module, shard.parameter)
        if shard not in self.shards:
            self.shards.append(shard)
        frame = self._frames[-1]
        for running in self._frames:  # the outermost one lets go
            running.fetched.append(shard)
        self.offload.coordinator.fetch_external(self.module, shard)
        if torch.is_grad_enabled() and not frame.hooked:
            frame.hooked = self._watch_saved()

    # ------------------------------------------------------------------ backward

    def _watch_outputs(self, output: Any, token: int) -> None:
        grad = torch.is_grad_enabled()
        for tensor in tensors_in(output, dataclass_fields=True):
            if tensor.grad_fn is not None:
                if grad:
                    tensor.grad_fn.register_prehook(functools.partial(self.before_backward, token))
            elif shard_of(tensor) is not None and FWD_MODULE_STACK:
                # the module hands out a parameter itself: whoever called it uses it
                _user_of(shard_of(tensor)).use_external(shard_of(tensor))

    def before_backward(self, token: int, _: Any = None) -> None:
        """Prehook of the nodes that made this module's outputs in the call that ``token`` names."""
        if self.offload is None:
            return
        shards = self.needed_in_backward()
        coordinator = self.offload.coordinator
        coordinator.fetch_backward(self.module, shards)
        if self.holds_in_backward:
            coordinator.hold_in_backward(shards, token)

    def _watch_inputs(self, inputs: Any, token: int) -> None:
        """Notice when backward has left this call of the module. Another call of it may have been entered by then."""
        nodes = {tensor.grad_fn for tensor in tensors_in(inputs, dataclass_fields=True) if tensor.grad_fn is not None}
        left = [len(nodes)]

        def reached(_: Any) -> None:
            left[0] -= 1
            if left[0] == 0 and self.offload is not None:
                self.offload.coordinator.release_from_backward(self.shards, token)

        for node in nodes:
            node.register_prehook(reached)


class _InsideWhole:
    """Hook of a module below one that is gathered as a whole: alone it would run without its weights.

    Args:
        unit: of the module above.
        module: the one below.
    """

    def __init__(self, unit: ModuleUnit, module: torch.nn.Module) -> None:
        self._unit = unit
        self._shards = shards_of(module.parameters(recurse=False))

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        absent = [shard.name for shard in self._shards if shard.full is None]
        if absent and self._unit.offload is not None:
            above = type(self._unit.module).__name__
            raise RuntimeError(
                f"{type(module).__name__} was called alone while its parameters {', '.join(absent[:4])} are"
                f" partitioned: it is part of a {above}, which is gathered as a whole when called (a leaf module, or"
                " stage3_module_granularity_threshold). Call that module, or run this one under"
                " deepspeed.zero.GatheredParameters"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_InsideWhole":
        return _InsideWhole(_idle_unit(), torch.nn.Module())

    def __reduce__(self) -> Any:
        return (_InsideWhole, (_idle_unit(), torch.nn.Module()))


def _idle_unit() -> ModuleUnit:
    unit = object.__new__(ModuleUnit)
    unit.offload = None
    return unit


def name_external(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Note that ``module`` uses ``parameter`` of another module."""
    if EXTERNAL not in module.__dict__:
        set_on(module, EXTERNAL, {})
    getattr(module, EXTERNAL)[id(parameter)] = parameter


def external_parameters(module: torch.nn.Module) -> Iterable[tuple[int, torch.nn.Parameter]]:
    """Parameters of other modules that ``module`` uses, with keys."""
    return list(getattr(module, EXTERNAL, {}).items())


def own_and_external_parameters(module: torch.nn.Module) -> Iterable[tuple[Any, torch.nn.Parameter]]:
    """Named own parameters of ``module``, not those of its children, and ``external_parameters``."""
    return [*module.named_parameters(recurse=False), *external_parameters(module)]


class _GradientGuard:
    """Hooks of one parameter for the moments in which autograd adds to its gradient."""

    def __init__(self, shard: ShardedParameter) -> None:
        self._shard = shard
        parameter = shard.parameter
        self.handles = [
            parameter.register_hook(self.before),
            parameter.register_post_accumulate_grad_hook(self.after),
        ]

    def before(self, gradient: torch.Tensor | None) -> None:
        """autograd compares a gradient with the parameter, which may be hidden by now."""
        shard = self._shard
        if gradient is None:
            return  # a custom function had none for this input
        if gradient.shape != shard.shape:
            raise RuntimeError(
                f"parameter {shard.name} was used while it was partitioned (gradient of shape {tuple(gradient.shape)}"
                f" instead of {tuple(shard.shape)}), so the result is wrong. Use it inside the forward of a module, or"
                " under deepspeed.zero.GatheredParameters"
            )
        if shard.full is None:
            shard.coordinator.stand_in(shard)

    def after(self, parameter: torch.nn.Parameter) -> None:
        """Every node that used the parameter in this graph has run."""
        shard = self._shard
        if shard.full is None:
            shard.coordinator.end_stand_in(shard)
        elif not shard.persistent and shard.saved == 0 and shard.coordinator is not None:
            shard.coordinator.release_if_free(shard)


class DeepSpeedZeRoOffload:
    """Gathers the weights of a partitioned model around its modules. Also what stage 3 without an optimizer steps with.

    Args:
        module: all of whose parameters are partitioned over the same ranks; no other engine has it.
        prefetch_bucket_size, max_reuse_distance, max_live_parameters: see ``PartitionedParameterCoordinator``.
        param_persistence_threshold: parameters of at most so many elements stay whole once they were gathered,
        model_persistence_threshold: up to so many elements together.
        dp_process_group: ranks that the parameters are partitioned over.
        zero_hpz_partition_size: backward gathers among groups of so many consecutive ranks.
        zero_module_granularity_threshold: modules with fewer elements per descendant are gathered as a whole.
        use_all_reduce_for_fetch_params: gather by summing with zeros.
        allgather_sequential: one parameter after the other.
        offload_param_config: where shards rest. Those that are not there yet are moved.
        aio_config: section ``aio`` of the config, for shards in files; None: its defaults.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        timers: Any = None,
        ds_config: Any = None,
        zenflow: bool = False,
        overlap_comm: bool = True,
        prefetch_bucket_size: int = 50_000_000,
        max_reuse_distance: int = 1_000_000_000,
        max_live_parameters: int = 1_000_000_000,
        param_persistence_threshold: int = 100_000,
        model_persistence_threshold: int = 2**63 - 1,
        dp_process_group: Any = None,
        offload_param_config: Any = None,
        mpu: Any = None,
        zero_hpz_partition_size: int = 1,
        zero_module_granularity_threshold: int = 0,
        use_all_reduce_for_fetch_params: bool = False,
        allgather_sequential: bool = False,
        aio_config: Any = None,
    ) -> None:
        if zenflow:
            raise NotImplementedError("ZenFlow is not built")
        self.module = module
        self.granularity_threshold = zero_module_granularity_threshold
        secondary = 1 < zero_hpz_partition_size < dist.get_world_size()
        self.coordinator = PartitionedParameterCoordinator(
            prefetch_bucket_size, max_reuse_distance, max_live_parameters, secondary
        )
        self.shards = shards_of(module.parameters())
        self._refuse_two_engines()
        rest_shards(self.shards, shard_memory(offload_param_config))
        for name, parameter in module.named_parameters():
            shard_of(parameter).name = repr(name)
        self.store = shard_store(self.shards, offload_param_config, aio_config)
        self.coordinator.reads_ahead = self.store is not None
        for ranks in {shard.ranks: None for shard in self.shards}:
            ranks.by_all_reduce = use_all_reduce_for_fetch_params
            ranks.one_by_one = allgather_sequential
        if secondary:
            make_secondary(self.shards, _secondary_ranks(zero_hpz_partition_size))
        self.persistent_parameters = self.mark_persistent_parameters(
            param_persistence_threshold, model_persistence_threshold
        )
        self.forward_hooks: list[Any] = []
        self._inside_checks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._guards: list[_GradientGuard] = []
        self._guarded: set[ShardedParameter] = set()
        self.setup_zero_stage3_hooks()

    def _refuse_two_engines(self) -> None:
        taken = [name for name, p in self.module.named_parameters() if shard_of(p).coordinator is not None]
        if taken:
            raise RuntimeError(
                f"the model's parameters ({taken[0]!r} and others) belong to an engine already; call its destroy()"
                " before the model is given to another one"
            )

    @property
    def param_coordinator(self) -> PartitionedParameterCoordinator:
        return self.coordinator

    def get_param_coordinator(self) -> PartitionedParameterCoordinator:
        return self.coordinator

    def mark_persistent_parameters(self, param_threshold: int, model_threshold: int) -> list[torch.nn.Parameter]:
        """Choose the parameters that stay whole; returns them."""
        chosen = []
        total = 0
        for shard in self.shards:
            shard.persistent = shard.numel <= param_threshold and total + shard.numel <= model_threshold
            shard.parameter.ds_persist = shard.persistent
            if shard.persistent:
                total += shard.numel
                chosen.append(shard.parameter)
        return chosen

    # ------------------------------------------------------------------ hooks

    def setup_zero_stage3_hooks(self) -> None:
        """Put the hooks on every module and parameter."""
        for shard in self.shards:
            shard.coordinator = self.coordinator
            if shard.parameter.requires_grad:
                self._guards.append(_GradientGuard(shard))
                self._guarded.add(shard)
        for module in self.module.modules():
            ensure_zero_ordered_dict(module)
            set_on(module, "ds_external_parameters", functools.partial(external_parameters, module))
            set_on(module, "all_parameters", functools.partial(own_and_external_parameters, module))
        self._register_deepspeed_module(self.module)

    def _register_deepspeed_module(self, module: torch.nn.Module, count: Any = None) -> None:
        """Put the forward hooks on a module and its descendants."""
        seen: set[torch.nn.Module] = set()
        waiting = [module]
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            whole = is_leaf_unit(module, self.granularity_threshold)
            self._put_hooks(module, whole)
            if not whole:
                waiting.extend(module.children())
                continue
            for below in module.modules():
                if below is not module and below._parameters:
                    check = _InsideWhole(module._ds_unit, below)
                    self._inside_checks.append(below.register_forward_pre_hook(check))

    def let_units_be_compiled(self) -> int:
        """No hooks inside of modules that are gathered as a whole: each can be one graph. Calling a module below such a
        one alone, on partitioned weights, is then an error of the operator that meets them.

        Returns:
            how many modules are gathered as a whole.
        """
        for handle in self._inside_checks:
            handle.remove()
        self._inside_checks = []
        whole = [module for module in self.module.modules() if self._knows(module) and module.__dict__[UNIT].whole]
        for module in whole:
            for part in module.modules():
                set_on(part, "_parameters", dict(part._parameters.items()))
        return len(whole)

    def _knows(self, module: torch.nn.Module) -> bool:
        unit = module.__dict__.get(UNIT)
        return unit is not None and unit.offload is self

    def _put_hooks(self, module: torch.nn.Module, whole: bool) -> None:
        set_on(module, "ds_id", next(_module_ids))
        unit = ModuleUnit(self, module, whole)
        set_on(module, UNIT, unit)
        if unit.shards or module is self.module or runs_own_code(module):
            self.forward_hooks += [
                module.register_forward_pre_hook(unit.before_forward, with_kwargs=unit.holds_in_backward),
                module.register_forward_hook(unit.after_forward, always_call=True),
            ]

    def check_still_frozen(self, shards: list[ShardedParameter]) -> None:
        """RuntimeError for parameters that did not require grad when the hooks were made, and do now."""
        thawed = [shard.name for shard in shards if shard.parameter.requires_grad and shard not in self._guarded]
        if thawed:
            raise RuntimeError(
                f"parameters {', '.join(thawed[:4])} did not require grad when the engine was made and do now; nothing"
                " reduces or applies their gradients. Unfreeze before deepspeed.initialize, or make a new engine"
            )

    def parameters_of_whole_units(self) -> set[torch.nn.Parameter]:
        """Parameters of modules inside of which ranks may do different things."""
        units = [module._ds_unit for module in self.module.modules() if self._knows(module)]
        return {shard.parameter for unit in units if unit.whole for shard in unit.shards}

    # ------------------------------------------------------------------ whole weights

    def partition_all_parameters(self) -> None:
        """Let go of every whole weight, persistent ones too."""
        self.coordinator.release_and_reset_all(self.module)
        for shard in self.shards:
            if shard.full is not None and not shard.held:
                shard.hide()

    def weights_written(self, shards: list[ShardedParameter]) -> None:
        """``shards`` were updated: their whole values are stale. Collective."""
        self.coordinator.end_iteration()
        held = [shard.name for shard in self.shards if shard.held]
        if held:
            raise RuntimeError(
                f"the weights were updated inside GatheredParameters, which holds {held[:4]}; leave the context first"
            )
        stale = []
        all_written(shards)
        for shard in shards:
            if shard.full is not None and not shard.aliased:
                shard.hide()
                if shard.persistent:
                    stale.append(shard)
        for gather in start_gathers(stale):
            gather.wait()

    def end_window(self) -> None:
        """After a step: graphs of the window are of no use any more."""
        self.coordinator.end_iteration()
        for shard in self.shards:
            shard.forget_saved()

    def gathering_ranks(self) -> list[ShardRanks]:
        """Whom weights are gathered among; groups for secondary shards all gather the same, each among themselves."""
        groups_used = {shard.ranks: None for shard in self.shards}
        groups_used.update({shard.secondary.ranks: None for shard in self.shards if shard.secondary is not None})
        return list(groups_used)

    def release_backward_leftovers(self) -> None:
        """End the iteration: let go of what was gathered and not used."""
        self.coordinator.end_iteration()

    def empty_partition_cache(self) -> None:
        """Let go of every whole weight."""
        self.partition_all_parameters()

    def destroy(self) -> None:
        """Remove the hooks and let go of whole weights; the parameters stay partitioned."""
        self.coordinator.release_and_reset_all(self.module)
        for shard in self.shards:
            if shard.coordinator is self.coordinator and shard.full is not None and not shard.held:
                shard.hide()
        if self.store is not None:
            self.store.close()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        hooks = (self.forward_hooks, self._inside_checks)
        for handle in itertools.chain(*hooks, *(guard.handles for guard in self._guards)):
            handle.remove()
        self.forward_hooks, self._inside_checks, self._guards = [], [], []
        self._guarded.clear()
        for shard in self.shards:
            if shard.coordinator is self.coordinator:
                shard.coordinator = None
        for module in self.module.modules():
            if isinstance(module._parameters, ZeROOrderedDict) and (UNIT not in module.__dict__ or self._knows(module)):
                set_on(module, "_parameters", dict(module._parameters.items()))
            if self._knows(module):
                module._ds_unit.offload = None

    # ------------------------------------------------------------------ as an optimizer that has nothing to step

    def pre_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Gather what a module needs."""
        gather_now(sub_module._ds_unit.shards)

    def post_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Let go of what a module needed."""
        for shard in sub_module._ds_unit.shards:
            if shard.free and shard.full is not None:
                self.coordinator.forget(shard)
                shard.hide()

    pre_sub_module_backward_function = pre_sub_module_forward_function
    post_sub_module_backward_function = post_sub_module_forward_function


def _secondary_ranks(size: int) -> ShardRanks:
    groups._create_zero_param_parallel_group(size)
    return ranks_of(groups._get_zero_param_intra_parallel_group())


def is_leaf_unit(module: torch.nn.Module, granularity_threshold: int) -> bool:
    """Whether a module is gathered with everything below it: marked so, or finer than the threshold."""
    if getattr(module, "_z3_leaf", False):
        return True
    if granularity_threshold <= 0:
        return False
    descendants = sum(1 for _ in module.modules()) - 1
    numel = sum(shard.numel for shard in shards_of(module.parameters()))
    return descendants > 0 and numel > 0 and numel / (1 + descendants) < granularity_threshold


def runs_own_code(module: torch.nn.Module) -> bool:
    """Whether a module without parameters may use those of others in its forward."""
    return not type(module).__module__.startswith("torch.nn.")
