# SPDX-License-Identifier: Apache-2.0
"""The private torch calls this package uses, each with a fallback that stays right.

Nothing outside this file touches an underscored torch name of the autograd engine. What each fallback costs is said
beside
it: without these calls gradients still come out right, some collectives go out later or once more.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_queue_callback = getattr(_engine, "queue_callback", None)
_graph_task_id = getattr(torch._C, "_current_graph_task_id", None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_runs_whole_graph = getattr(_engine, "is_checkpoint_valid", None)
_foreach_copy = getattr(torch, "_foreach_copy_", None)
_profiler = torch.autograd.profiler
_foreach_add = getattr(torch, "_foreach_add_", None)
_chunk_cat = getattr(torch, "_chunk_cat", None)
_saved_hooks_allowed = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
_has_storage = getattr(torch._C, "_has_storage", None)
_top_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
try:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as _clear_transforms
except ImportError:  # another version of torch
    _clear_transforms = None
_transform_level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)
_make_subclass = getattr(torch.Tensor, "_make_subclass", None)
_function_apply = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

NO_GRAPH_TASK = -1


def current_graph_task_id() -> int:
    """Identifier of the run of the autograd engine this thread is in, ``NO_GRAPH_TASK`` outside of one.

    Fallback: always ``NO_GRAPH_TASK``; a backward that no engine call announced then ends at the next engine call.
    """
    return NO_GRAPH_TASK if _graph_task_id is None else _graph_task_id()


def can_queue_callbacks() -> bool:
    """Whether the end of a graph task can be observed."""
    return _queue_callback is not None and _graph_task_id is not None


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current graph task ends without an exception.

    The graph task owns ``callback``: when the task dies of an exception, the callback is released without having run,
    which a weak reference to it can observe.
    """
    _queue_callback(callback)


def enclosing_backward_node() -> BackwardCFunction | None:
    """The autograd node whose ``backward`` started the graph task we are in; None in an outermost graph task.

    A reentrant checkpoint calls the autograd engine from the ``backward`` of a custom function. That function's
    context is the node of the *outer* graph and stands on this thread's Python stack, in the frame just above the
    nested engine's call. The outermost node is returned when graph tasks nest several times.
    """
    node = None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                node = first
        frame = frame.f_back
    return node


def register_after_node(node: BackwardCFunction, callback: Callable[[], None]) -> list[Any]:
    """Call ``callback`` once, when something downstream of ``node`` runs: after ``node``, in the same graph task.

    A post hook added to a node that is already running is not seen by the engine, so hooks go to the nodes that receive
    its results: in front of them, and behind, since torch 2.4 passes over the former where a custom function saved its
    input under hooks for saved tensors (a reentrant checkpoint inside one that is not). Returns the handles that remove
    the hooks.
    """
    called = False

    def call_once(*_: Any) -> None:
        nonlocal called
        if not called:
            called = True
            callback()

    successors = [successor for successor, _ in node.next_functions if successor is not None]
    handles = [successor.register_prehook(call_once) for successor in successors]
    return handles + [successor.register_hook(call_once) for successor in successors]


def profiler_is_recording() -> bool:
    """Whether a torch profiler (or ``emit_nvtx``) records now. Fallback: always, at some microseconds per label."""
    return getattr(_profiler, "_is_profiler_enabled", True)


def can_check_reentrant_backward() -> bool:
    """Whether torch can tell a backward that a reentrant checkpoint cannot serve.

    Fallback: checkpoints that are not reentrant, which serve every backward.
    """
    return _runs_whole_graph is not None


def check_reentrant_backward() -> None:
    """Refuse a graph task that runs a part of the graph only, from inside of it.

    Raises:
        RuntimeError: ``torch.autograd.grad`` or ``backward(inputs=...)``: the nested graph task of a reentrant
            checkpoint would add to ``.grad`` of parameters that the caller did not ask for.
    """
    if not _runs_whole_graph():
        raise RuntimeError(
            "checkpoint(): a reentrant checkpoint cannot serve torch.autograd.grad() or backward(inputs=...), since its"
            " own backward runs the whole of its graph. Use non_reentrant_checkpoint(), or pass use_reentrant=False"
        )


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was changed in place. Fallback: 0, changes go unnoticed."""
    return getattr(tensor, "_version", 0)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """``version_of`` each, for many tensors."""
    return [getattr(tensor, "_version", 0) for tensor in tensors]


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Let graphs that saved one of ``tensors`` know that its values have changed. Fallback: one call per tensor, which
    costs more than the rest of what a step does for it."""
    if _VERSIONS_AT_ONCE:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def _takes_many_tensors(function: Callable[..., None]) -> bool:
    """Whether ``increment_version`` of this torch takes several tensors at once."""
    try:
        function([torch.empty(0)])
    except (TypeError, AttributeError, RuntimeError):  # RuntimeError: torch 2.4
        return False
    return True


_VERSIONS_AT_ONCE = _takes_many_tensors(torch.autograd.graph.increment_version)


def _public_stream_handle(device_index: int) -> int:
    return torch.cuda.current_stream(device_index).cuda_stream


# The driver's handle of the current CUDA stream of a device, by its index: tells streams of one device apart. Fallback:
# the public way, at a microsecond or two more.
current_stream_handle: Callable[[int], int] = _public_stream_handle if _stream_handle is None else _stream_handle


def accumulate_grad_nodes(parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
    """The AccumulateGrad node of each parameter, which must require grad."""
    nodes = []
    with torch.enable_grad():
        for parameter in parameters:
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
    return nodes


def can_count_nodes_to_run() -> bool:
    """Whether torch can tell which nodes the current graph task will run."""
    return _will_execute is not None and _graph_task_id is not None


def will_run_in_current_task(node: Any) -> bool:
    """Whether the current graph task runs ``node``. Only valid inside a graph task."""
    return bool(_will_execute(node))


def saved_tensors_hooks_are_allowed() -> bool:
    """Whether hooks for saved tensors may be set: not inside ``torch.func`` transforms, and not where torch cannot tell
    whether they would hide others' (2.4).

    Fallback: False; weights then stay in memory for as long as a graph needs them.
    """
    return _saved_hooks_allowed is not None and _top_saved_hooks is not None and _saved_hooks_allowed()


def outside_of_transforms() -> AbstractContextManager:
    """Context in which tensors are made and changed as if no ``torch.func`` transform was running.

    Fallback: none; what is gathered inside of a transform then belongs to it, and torch refuses to take its memory.
    """
    return nullcontext() if _clear_transforms is None else _clear_transforms()


def transform_is_running() -> bool:
    """Whether the caller may be inside of a ``torch.func`` transform. Fallback: True, it may."""
    return True if _transform_level is None else _transform_level() is not None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own kind to point to: not sparse, not a wrapper of a transform.

    Fallback: whether it is strided; torch refuses wrappers by an error then.
    """
    return tensor.layout is torch.strided if _has_storage is None else _has_storage(tensor)


def top_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The hooks that decide what graphs save at the moment, None when nobody set any. Only the top ones are asked, so
    setting others would hide those of a checkpoint. Call only where ``saved_tensors_hooks_are_allowed``."""
    return _top_saved_hooks(True)


def hook_is_called_by_custom_function() -> bool:
    """Whether a custom function saves the tensor that the hook which calls this was given; otherwise an operator does.

    Fallback: False; custom functions then find their saved weights without the attributes of the parameters.
    """
    caller = sys._getframe(1).f_back  # None on a thread of the autograd engine
    return caller is not None and caller.f_code is _function_apply


def as_detached_subclass(kind: type[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """A detached tensor over the memory of ``value``, of a class that dispatches in Python, which torch 2.4 makes in no
    other way. Fallback: an ordinary tensor."""
    return value.detach() if _make_subclass is None else _make_subclass(kind, value)


@torch.no_grad()
def copy_each(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``destination.copy_(source)`` for each pair, in as few launches as torch allows. Casts."""
    if not destinations:
        return
    if _foreach_copy is not None:
        _foreach_copy(destinations, sources)
        return
    for destination, source in zip(destinations, sources):
        destination.copy_(source)


def can_copy_into_rows(target: torch.Tensor, sources: list[torch.Tensor]) -> bool:
    """Whether torch can cut the sources into rows of the target at once, no slower than ``copy_each`` copies slices: on
    a device it would cast one tensor after the other. Fallback: slices are copied."""
    if _chunk_cat is None:
        return False
    dtypes = {source.dtype for source in sources}
    return dtypes == {target.dtype} or (len(dtypes) == 1 and target.device.type == "cpu")


@torch.no_grad()
def copy_into_rows(matrix: torch.Tensor, sources: list[torch.Tensor]) -> None:
    """Cut each source into equal slices of its first dimension, padded with zeros, one for each row of ``matrix``, and
    write the slices side by side. Casts. A call and a copy less per slice than ``copy_each``.

    Args:
        matrix: 2-D, contiguous, exactly as wide as all slices.
        sources: contiguous, at least 1-D, on its device, for which ``can_copy_into_rows``.
    """
    _chunk_cat(sources, 0, matrix.size(0), out=matrix)


@torch.no_grad()
def add_each(destinations: list[torch.Tensor], sources: list[torch.Tensor], scale: float) -> None:
    """``destination += scale * source`` for each pair, in as few launches as torch allows. Casts."""
    if not destinations:
        return
    if _foreach_add is not None:
        _foreach_add(destinations, sources, alpha=scale)
        return
    for destination, source in zip(destinations, sources):
        destination.add_(source, alpha=scale)


@torch.no_grad()
def add_number_to_each(tensors: list[torch.Tensor], number: float) -> None:
    """``tensor += number`` for each, in as few calls as torch allows."""
    if _foreach_add is not None:
        _foreach_add(tensors, number)
        return
    for tensor in tensors:
        tensor.add_(number)


def keep_out_of_compiled_graphs(packages: Sequence[str]) -> None:
    """Let torch.compile call functions of these packages and never trace them, if the compiler is loaded at all.

    Fallback: they are traced, which costs compilations and changes no number.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)
    for package in packages:
        if add is not None and package not in _kept_out:
            _kept_out.add(package)
            add(package)


_kept_out: set[str] = set()
