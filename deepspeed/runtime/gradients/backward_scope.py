# SPDX-License-Identifier: Apache-2.0
"""One user-visible backward: where it begins, where it ends, and whether it was aborted.

``engine.backward`` opens and closes its scope itself. For any other backward the scope opens at the first event seen
(a loss from
``engine.scale``, else a parameter's firing) and closes with the outermost graph task:

- The first event is in an outermost graph task: a callback queued there runs at its end.
- The first event is in a nested one (reentrant checkpoint): a hook in front of what follows the checkpoint in the
  outer graph runs later in the outer task, and queues the callback there.
- The task dies of an exception: its callback is released without having run, which a weak reference shows.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deepspeed.runtime.gradients import autograd_internals as autograd


@dataclass(eq=False)
class BackwardScope:
    """A backward that is running.

    Args:
        announced: True for ``engine.backward``: its end is known exactly and every rank takes part.
        scale_by_accumulation: False when the caller said ``scale_wrt_gas=False``.
        loss_scale: factor by which the loss of this graph was multiplied.
        within_another_engine: the backward is another engine's, which ranks may reach this engine's parameters from or
            not. Asking the other ranks in the middle of it could wait for one that waits for the other engine, so
            contributions stay on this rank until ``step()``.
    """

    announced: bool
    scale_by_accumulation: bool = True
    loss_scale: float = 1.0
    within_another_engine: bool = False
    first_task: int = autograd.NO_GRAPH_TASK
    end_notice: weakref.ref | None = None  # the callback that the running graph task holds
    awaits_outer_task: bool = False
    handles: list[Any] = field(default_factory=list)

    running: ClassVar[list["BackwardScope"]] = []  # announced or scaled backwards of any engine, innermost last

    def is_certainly_running(self) -> bool:
        """Whether the graph task that will end this scope is alive."""
        return self.announced or (self.end_notice is not None and self.end_notice() is not None)

    @classmethod
    def innermost_running(cls) -> "BackwardScope | None":
        """The announced or scaled backward that is going on now; one that an exception ended does not count."""
        return next((scope for scope in reversed(cls.running) if scope.is_certainly_running()), None)

    def release(self) -> None:
        """Remove hooks and leave the list of running backwards."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self in BackwardScope.running:
            BackwardScope.running.remove(self)


class _EndNotice:
    """Owned by one graph task alone: called at its end, or released unheard when the task fails."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def watch_end(scope: BackwardScope, on_end: Callable[[BackwardScope], None]) -> None:
    """Arrange for ``on_end(scope)`` when the outermost graph task around the present event ends. Call from inside
    one."""
    scope.first_task = autograd.current_graph_task_id()
    if autograd.can_queue_callbacks():
        _watch_from_here(scope, on_end)


def _watch_from_here(scope: BackwardScope, on_end: Callable[[BackwardScope], None]) -> None:
    node = autograd.enclosing_backward_node()
    if node is None:
        scope.awaits_outer_task = False
        notice = _EndNotice(lambda: on_end(scope))
        scope.end_notice = weakref.ref(notice)
        autograd.queue_callback(notice)
        return

    def outer_task_reached() -> None:
        if scope.awaits_outer_task:
            scope.awaits_outer_task = False
            _watch_from_here(scope, on_end)

    scope.awaits_outer_task = True
    scope.handles += autograd.register_after_node(node, outer_task_reached)
