# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: keep the inputs of a part of the model, and run it again when its backward needs the rest.

``checkpoint`` is reentrant: its backward runs an autograd graph of its own. ``non_reentrant_checkpoint`` fills the
saved tensors of the outer graph. Both can keep the inputs divided over model-parallel ranks, in host memory, or in
contiguous buffers (:func:`configure`, or the config section ``activation_checkpointing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.activation_storage import (
    ContiguousBuffers,
    StorageSettings,
    StoredActivation,
    is_activation,
    must_store,
    store,
)
from deepspeed.runtime.activation_checkpointing.argument_structure import check_no_hidden_tensors, flatten
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    _ActivationOffloadEngine,
    mark_hidden_states,
)
from deepspeed.runtime.activation_checkpointing.random_states import (
    MODEL_PARALLEL_RNG,
    CudaRNGStatesTracker,
    RandomStates,
)
from deepspeed.runtime.config import DeepSpeedConfig, load_config
from deepspeed.runtime.config_utils import warn_once_on_rank_0
from deepspeed.runtime.gradients import autograd_internals
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from deepspeed.utils.timer import SynchronizedWallClockTimer

FORWARD_TIMER = "checkpoint_forward"
BACKWARD_TIMER = "checkpoint_backward"

# Distance between the seed of the default state and those of the model-parallel states, so that jobs that number
# their seeds 0, 1, 2, ... never share a state.
MODEL_PARALLEL_SEED_OFFSET = 1_000_003


@dataclass
class _Settings:
    """What :func:`configure` and its relatives set."""

    configured: bool = False
    mpu: Any = None
    storage: StorageSettings = field(default_factory=StorageSettings)
    synchronize: bool = False
    profile: bool = False
    timers: SynchronizedWallClockTimer | None = None
    timed: str | None = None  # the timer that runs; checkpoints nest
    recomputed_runs: int = 0  # functions under a checkpoint that is not reentrant, which run now


_settings = _Settings()
_buffers = ContiguousBuffers()
_tracker = CudaRNGStatesTracker()

_PUBLISHED: dict[str, Callable[[], Any]] = {
    "deepspeed_checkpointing_enabled": lambda: _settings.configured,
    "mpu": lambda: _settings.mpu,
    "mp_rank": lambda: _settings.storage.mp_rank,
    "mp_size": lambda: _settings.storage.mp_size,
    "mp_group": lambda: _settings.storage.mp_group,
    "num_layers": lambda: _settings.storage.slots,
    "PARTITION_ACTIVATIONS": lambda: _settings.storage.partition,
    "CPU_CHECKPOINT": lambda: _settings.storage.on_host,
    "CONTIGUOUS_CHECKPOINTING": lambda: _settings.storage.contiguous,
    "SYNCHRONIZE": lambda: _settings.synchronize,
    "PROFILE_TIME": lambda: _settings.profile,
    "timers": lambda: _settings.timers,
    "contiguous_data_buffers": lambda: [arena.buffer for arena in _buffers.arenas.values()],
    "data_offsets": lambda: [arena.count - len(arena.free) for arena in _buffers.arenas.values()],
    "contiguous_size_buffers": list,  # sizes travel with the activations
    "size_offsets": list,
}


def __getattr__(name: str) -> Any:
    """The present settings under their published names. Read-only: they are set by functions."""
    if name in _PUBLISHED:
        return _PUBLISHED[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------------- configuration


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how ``checkpoint`` and ``non_reentrant_checkpoint`` keep activations from now on.

    Arguments that are None leave what is set; the others take precedence over ``deepspeed_config``.

    Args:
        mpu_: model-parallel unit, whose tensor-parallel group (Megatron's getters) shares activations.
        deepspeed_config: dict, path, base64 of JSON or a ``DeepSpeedConfig``, whose section
            ``activation_checkpointing`` counts.
        partition_activations: keep each activation divided over the model-parallel ranks, and gather it in backward.
        contiguous_checkpointing: keep activations in buffers that are made once.
        num_checkpoints: how many checkpoints one forward makes; needed by ``contiguous_checkpointing``.
        checkpoint_in_cpu: keep activations in host memory.
        synchronize: wait for the device before and after each checkpoint, forward and backward.
        profile: log the time of each checkpoint's forward and backward.

    Raises:
        TypeError, ValueError: a value of the wrong type, fewer than one checkpoint, or a model-parallel size that is
            not that of the group.
    """
    arguments = {
        "partition": partition_activations,
        "contiguous": contiguous_checkpointing,
        "slots": num_checkpoints,
        "on_host": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    given = {} if deepspeed_config is None else _values_of(_section_of(deepspeed_config))
    given |= {name: value for name, value in arguments.items() if value is not None}
    if "slots" in given:
        _check_count(given["slots"], "num_checkpoints")
    if mpu_ is not None:
        given.update(_model_parallel_figures(mpu_))
        _settings.mpu = mpu_
    _settings.synchronize = given.pop("synchronize", _settings.synchronize)
    _settings.profile = given.pop("profile", _settings.profile)
    _settings.storage = replace(_settings.storage, **given)
    if _settings.storage.partition and _settings.mpu is None:
        warn_once_on_rank_0(
            "partition_activations has no effect without a model-parallel unit: there are no ranks that share"
            " activations. Pass mpu to deepspeed.initialize or to deepspeed.checkpointing.configure"
        )
    _settings.configured = True


def _model_parallel_figures(unit: Any) -> dict[str, Any]:
    size, group = bwc_tensor_model_parallel_world_size(unit), bwc_tensor_model_parallel_group(unit)
    if size > 1 and dist.get_world_size(group) != size:
        raise ValueError(
            f"mpu says that {size} ranks share a model, but its tensor-parallel group has {dist.get_world_size(group)}"
            " (the world, where it has none): activations would be divided wrongly"
        )
    return {"mp_rank": bwc_tensor_model_parallel_rank(unit), "mp_size": size, "mp_group": group}


def _section_of(config: Any) -> DeepSpeedActivationCheckpointingConfig:
    if isinstance(config, DeepSpeedConfig):
        return config.activation_checkpointing_config
    return DeepSpeedActivationCheckpointingConfig(load_config(config))


def _values_of(section: DeepSpeedActivationCheckpointingConfig) -> dict[str, Any]:
    values = {
        "partition": section.partition_activations,
        "contiguous": section.contiguous_memory_optimization,
        "slots": section.number_checkpoints,
        "on_host": section.cpu_checkpointing,
        "synchronize": section.synchronize_checkpoint_boundary,
        "profile": section.profile,
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_count(count: Any, name: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an int, got {count!r} of type {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")


def is_configured() -> bool:
    """Whether :func:`configure` was called, by the user or by an engine whose config asks for it."""
    return _settings.configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Divide activations over the model-parallel ranks from now on, or stop doing so."""
    _settings.storage = replace(_settings.storage, partition=bool(partition_activation))


def set_num_layers(nlayers: int) -> None:
    """Say how many checkpoints one forward makes, for contiguous checkpointing.

    Raises:
        TypeError, ValueError: not an int of at least 1.
    """
    _check_count(nlayers, "nlayers")
    _settings.storage = replace(_settings.storage, slots=nlayers)


def reset() -> None:
    """Free the contiguous buffers. Activations that still wait for a backward keep theirs."""
    _buffers.reset()


def _forget_groups(group: Any = None) -> None:
    """The world ends, or the model-parallel group: its ranks share nothing any more."""
    if group is None or group is _settings.storage.mp_group:
        _settings.mpu = None
        _settings.storage = replace(_settings.storage, mp_rank=0, mp_size=1, mp_group=None)


dist.on_destroy(_forget_groups)


# --------------------------------------------------------------------------------------------------- random numbers


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The process's tracker. Checkpoints put its states back for the second run as well."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's default state alike on all ranks of the model-parallel group, and the tracker's state
    ``model-parallel-rng`` differently on each."""
    get_accelerator().manual_seed(seed)
    _tracker.reset()
    model_parallel_reconfigure_tp_seed(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the tracker's state ``model-parallel-rng`` afresh, differently on each rank of the group; leave all
    others."""
    _tracker.replace(MODEL_PARALLEL_RNG, seed + MODEL_PARALLEL_SEED_OFFSET + _settings.storage.mp_rank)


class _ExecutionState:
    """Random states and autocast of the moment in which it was made; :meth:`replaying` puts them in force again."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._random = RandomStates(values, _tracker)
        device = torch.device(get_accelerator().device_name()).type
        self._autocast = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in sorted({"cpu", device})
        ]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with self._random, ExitStack() as stack:
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


# ------------------------------------------------------------------------------------------------------ checkpoints


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` and keep only its arguments; its backward runs it once more.

    The backward is a graph task of its own (reentrant). Where that could not deliver gradients, because no tensor
    among the arguments requires one, it is :func:`non_reentrant_checkpoint` instead.

    Args:
        function: any callable; tensors that require a gradient must come in through the arguments, parameters of
            modules aside. It returns tensors and other values, nested in tuples, lists, dicts and dataclasses.
        args, kwargs: its arguments, tensors anywhere in tuples, lists, dicts and dataclasses. Two keyword arguments
            are options of ``torch.utils.checkpoint`` and not passed on: ``use_reentrant``, ``preserve_rng_state``.

    Returns:
        what ``function`` returns.

    Raises:
        TypeError: ``function`` returns an object that hides tensors in its attributes.
        RuntimeError: in backward: ``torch.autograd.grad`` or ``backward(inputs=...)``, which a reentrant checkpoint
            cannot serve; or ``function`` does not return the same number of values again.
    """
    reentrant = kwargs.pop("use_reentrant", True)
    kwargs.pop("preserve_rng_state", True)  # they are always preserved
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return non_reentrant_checkpoint(function, *args, **kwargs)
    leaves, rebuild = flatten((args, kwargs))
    differentiable = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    if not (reentrant and differentiable and autograd_internals.can_check_reentrant_backward()):
        return non_reentrant_checkpoint(function, *args, **kwargs)
    mark_hidden_states(leaves)
    call = _FlatCall(function, (args, kwargs), rebuild)
    outputs: list[Any] = []
    with _boundary(FORWARD_TIMER):
        tensors = iter(CheckpointFunction.apply(call, outputs, *leaves))
    return call.rebuild_result([next(tensors) if isinstance(value, Tensor) else value for value in outputs])


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` and keep only its arguments; it is run once more when the first of its saved tensors is needed.

    Unlike :func:`checkpoint` it serves ``torch.autograd.grad``, gradients to tensors that ``function`` did not get as
    arguments, and results of any type.

    Args:
        function: any callable that does the same again when it is called again.
        args, kwargs: its arguments.

    Returns:
        what ``function`` returns.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler knows torch's own function
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    leaves, rebuild = flatten((args, kwargs))
    random_states = RandomStates(leaves, _tracker)
    first: list[Any] | None = [args, kwargs]

    def run(*kept: Any) -> Any:
        nonlocal first
        if first is not None:
            (positional, named), first = first, None
            with _everything_is_recomputed():
                return function(*positional, **named)
        with _boundary(BACKWARD_TIMER):
            positional, named = rebuild([k.restore() if isinstance(k, StoredActivation) else k for k in kept])
            with _everything_is_recomputed():
                return function(*positional, **named)

    mark_hidden_states(leaves)
    kept = [_store_if_wanted(leaf, position) for position, leaf in enumerate(leaves)]
    with _boundary(FORWARD_TIMER):
        return torch_checkpoint(
            run,
            *kept,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), random_states),
        )


def _store_if_wanted(value: Any, position: int) -> Any:
    storage = _settings.storage
    wanted = must_store(value, storage) and not _settings.recomputed_runs
    return store(value, position, storage, _buffers) if wanted else value


@contextmanager
def _everything_is_recomputed() -> Iterator[None]:
    """A function that runs under a checkpoint that is not reentrant: autograd keeps nothing that is saved in here.
    What checkpoints within stored in their own way would be kept beside it."""
    _settings.recomputed_runs += 1
    try:
        yield
    finally:
        _settings.recomputed_runs -= 1


class _FlatCall:
    """``function`` with leaves in place of nested arguments and results.

    The first call gets the caller's own containers, so that it sees what the function changes in them; later calls get
    fresh ones, as they were before the first call.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, Any], rebuild: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._function = function
        self._first: tuple[Any, Any] | None = arguments
        self._rebuild_arguments = rebuild
        self.rebuild_result: Callable[[Sequence[Any]], Any] = tuple

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        first, self._first = self._first, None
        args, kwargs = self._rebuild_arguments(leaves) if first is None else first
        results, self.rebuild_result = flatten(self._function(*args, **kwargs))
        check_no_hidden_tensors(results)
        return tuple(results)


class CheckpointFunction(torch.autograd.Function):
    """The autograd node of :func:`checkpoint`, which takes and returns flat lists of values."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> tuple[Tensor, ...]:
        """Run ``run_function(*args)`` without a graph.

        Args:
            run_function: returns a tensor or a tuple of tensors and other values.
            all_outputs: extended by all values that ``run_function`` returned.
            args: tensors and other values.

        Returns:
            the tensors among the values, in their order.
        """
        ctx.run_function = run_function
        ctx.state = _ExecutionState(args)
        ctx.set_materialize_grads(False)
        ctx.arguments = _SavedArguments(ctx, args)
        with torch.no_grad():
            results = run_function(*args)
        results = results if isinstance(results, tuple) else (results,)
        all_outputs.extend(results)
        ctx.num_results = len(results)
        return tuple(_without_history(value, args) for value in results if isinstance(value, Tensor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the function again, now with a graph, and send ``grads`` through it.

        Parameters get their gradients in here; the arguments' gradients are returned.
        """
        autograd_internals.check_reentrant_backward()
        with _boundary(BACKWARD_TIMER):
            inputs = detach_variable(ctx.arguments.restore(ctx))
            with ctx.state.replaying(), torch.enable_grad():
                results = ctx.run_function(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            tensors = [value for value in results if isinstance(value, Tensor)]
            if len(results) != ctx.num_results or len(tensors) != len(grads):
                raise RuntimeError(
                    f"checkpoint(): the function returned {ctx.num_results} values, {len(grads)} of them tensors, in"
                    f" forward, and {len(results)}, {len(tensors)} of them tensors, when it was run again in backward."
                    " It must do the same again, given the same arguments and random numbers"
                )
            roots = [(t, grad) for t, grad in zip(tensors, grads) if grad is not None and t.requires_grad]
            if roots:
                torch.autograd.backward([t for t, _ in roots], [grad for _, grad in roots])
        return None, None, *(value.grad if isinstance(value, Tensor) else None for value in inputs)


def _without_history(result: Tensor, args: Sequence[Any]) -> Tensor:
    """A tensor that autograd may give a history: not somebody's parameter that the function returned."""
    mine = not result.requires_grad or any(result is value for value in args)
    return result if mine else result.detach()


class _SavedArguments:
    """The arguments of a checkpoint: what autograd saves, what waits in another form, and the rest.

    Both of the first two are released by autograd together with the saved tensors of the node, and not before.
    """

    def __init__(self, ctx: Any, args: Sequence[Any]) -> None:
        # Before the function runs: it may change its arguments in place.
        stored = {i: _store_if_wanted(value, i) for i, value in enumerate(args)}
        self._stored = [i for i, value in stored.items() if isinstance(value, StoredActivation)]
        self._saved = [i for i, value in stored.items() if isinstance(value, Tensor)]
        self._others = [None if isinstance(value, (Tensor, StoredActivation)) else value for value in stored.values()]
        token = [_token_that_keeps([stored[i] for i in self._stored])] if self._stored else []
        ctx.save_for_backward(*(args[i] for i in self._saved), *token)

    def restore(self, ctx: Any) -> tuple[Any, ...]:
        """All arguments again. Once released, torch raises its error about a second backward."""
        saved = ctx.saved_tensors
        values = list(self._others)
        for i, tensor in zip(self._saved, saved):
            values[i] = tensor
        if self._stored:
            for i, activation in zip(self._stored, saved[-1].grad_fn.kept):
                values[i] = activation.restore()
        return tuple(values)


class _Keeper(torch.autograd.Function):
    """A node that owns objects. Whoever saves its result for backward holds them exactly as long as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: list[Any]) -> Tensor:
        ctx.kept = kept
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _token_that_keeps(objects: list[Any]) -> Tensor:
    with torch.enable_grad():
        return _Keeper.apply(torch.empty(0, requires_grad=True), objects)


@contextmanager
def _boundary(timer: str) -> Iterator[None]:
    """Waiting for the device, and timing, around the forward or the backward of a checkpoint."""
    if not (_settings.synchronize or _settings.profile):
        yield
        return
    if _settings.synchronize:
        get_accelerator().synchronize()
    outermost = _settings.profile and _settings.timed is None
    if outermost:
        _settings.timed = timer
        _settings.timers = _settings.timers or SynchronizedWallClockTimer()
        _settings.timers(timer).start()
    try:
        yield
        if _settings.synchronize:
            get_accelerator().synchronize()
    finally:
        if outermost:
            _settings.timed = None
            _settings.timers(timer).stop()
            _settings.timers.log([timer])


# ------------------------------------------------------------------------------------------------- published pieces


def detach_variable(inputs: Sequence[Any], device: Any = None) -> tuple[Any, ...]:
    """The values, tensors without their history but with their ``requires_grad``, on ``device`` if given."""
    detached = []
    for value in inputs:
        if isinstance(value, Tensor):
            required = value.requires_grad
            value = (value if device is None else value.to(device)).detach()
            value.requires_grad = required
        detached.append(value)
    return tuple(detached)


def is_activation_to_checkpoint(item: Any) -> bool:
    """Whether ``item`` is a tensor that can be partitioned, moved to the host or kept in a contiguous buffer."""
    return is_activation(item, _settings.storage)


def get_partition_size(item: Tensor) -> int:
    """Elements of ``item`` that each model-parallel rank keeps."""
    return _settings.storage.partition_size(item)


def get_partition_start(item: Tensor) -> int:
    """First element of ``item``, counted in row-major order, that this rank keeps."""
    return _settings.storage.mp_rank * get_partition_size(item)


def partition_activations(args: Sequence[Any], cpu_checkpoint: bool, contiguous_checkpoint: bool) -> list[Any]:
    """``args`` with this rank's part in place of each activation that requires a gradient."""
    storage = replace(_settings.storage, partition=True, on_host=cpu_checkpoint, contiguous=contiguous_checkpoint)
    return [store(value, i, storage, _buffers) if must_store(value, storage) else value for i, value in enumerate(args)]


def gather_partitioned_activations(tensors: Sequence[Any], device: Any = None) -> tuple[Any, ...]:
    """What :func:`partition_activations` was given. Collective over the model-parallel group.

    Args:
        tensors: as :func:`partition_activations` returned them.
        device: where tensors go; by default where they came from.
    """
    restored = [value.restore() if isinstance(value, StoredActivation) else value for value in tensors]
    return tuple(restored) if device is None else detach_variable(restored, device)


def get_partitioned_activations_for_backward(
    args: Sequence[Any], inputs: Sequence[Any], contiguous_checkpoint: bool
) -> list[Any]:
    """What to keep of ``args`` until backward, ``inputs`` being their parts: a part travels with what restores it."""
    return list(inputs)


def get_cpu_activations_for_backward(args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """What to keep of ``args`` until backward, ``inputs`` being their host copies."""
    return list(inputs)


def get_offloaded_activations_for_backward(args: Sequence[Any], engine: _ActivationOffloadEngine) -> list[Any]:
    """``args`` with what ``engine`` keeps in place of each tensor that requires a gradient."""
    kept = []
    for value in args:
        if isinstance(value, Tensor) and value.requires_grad:
            engine.mark(value)
            value = engine.pack(value)
        kept.append(value)
    return kept


def restore_offloaded_activations(tensors: Sequence[Any], engine: _ActivationOffloadEngine) -> tuple[Any, ...]:
    """What :func:`get_offloaded_activations_for_backward` was given."""
    return tuple(engine.unpack(value) for value in tensors)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Any, Any, tuple[bool, ...]]:
    """Tensors, other objects, and for each object whether it is a tensor. Keeps the kind of sequence, list or tuple."""
    kind = type(all_objects)
    flags = tuple(isinstance(value, Tensor) for value in all_objects)
    tensors = kind([value for value, flag in zip(all_objects, flags) if flag])
    return tensors, kind([value for value, flag in zip(all_objects, flags) if not flag]), flags


def merge_tensors(
    tensor_objects: Sequence[Any], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple[Any, ...]:
    """Undo :func:`extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors if flag else others) for flag in tensor_flags)
