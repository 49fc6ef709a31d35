# SPDX-License-Identifier: Apache-2.0
"""The naive reducer: what the fast one must compute, in the plainest way. Tests and the audit compare with it.

No buckets, no overlap, no phases, no hints; it shares no code with the fast path. It works by itself on a plain model::

    reference = NaiveReducer(model.named_parameters(), accumulation_steps=2)
    for micro_batch in window:
        loss(model, micro_batch).backward()
    reference.write_gradients()
    optimizer.step()

and beside an engine on the same parameters, where ``average()`` is compared with what the engine says.
"""

from collections.abc import Iterable
from types import TracebackType

import torch

from deepspeed import comm as dist


class NaiveReducer:
    """Sums every contribution of a window on this rank, then averages each parameter by one all-reduce.

    It listens in front of each parameter's AccumulateGrad node, for these reasons:

    - a hook there runs once per contribution, with that contribution alone, after the user's hooks on the tensor may
      have changed it. It needs no ``.grad``, which an engine takes away and into which autograd has added more;
    - a hook by ``Tensor.register_hook`` runs in ``torch.autograd.grad`` as well, which accumulates nothing; a hook of
      the node does not, since there the node does not run;
    - ``register_post_accumulate_grad_hook`` sees the sum of everything that lies in ``.grad``.

    The node belongs to the parameter's storage type: attach after the model was moved and cast (after
    ``deepspeed.initialize``), and while it is whole.

    Args:
        named_parameters: those that require grad are kept. The same order on every rank.
        accumulation_steps: divisor of each contribution.
        group: process group to average over, None for the world.
        dtype: of the sums; float64 leaves the rounding of the contributions themselves as the only one.
        listen: False when contributions are given to ``contribute`` by hand.

    Attributes:
        weight: factor on contributions from now on: the inverse loss scale, or ``accumulation_steps`` where the caller
            has divided the loss already.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        accumulation_steps: int = 1,
        group: object = None,
        dtype: torch.dtype = torch.float32,
        listen: bool = True,
    ) -> None:
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.accumulation_steps = accumulation_steps
        self.group = group
        self.dtype = dtype
        self.weight = 1.0
        self._shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.contributions = dict.fromkeys(self.parameters, 0)  # how many arrived in this window
        self._sums: dict[str, torch.Tensor] = {}
        self._nodes: list[object] = []  # a parameter holds its node weakly, and a new node would not have the hook
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, parameter in self.parameters.items() if listen else ():
            with torch.enable_grad():
                node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._listener(name)))

    def _listener(self, name: str) -> object:
        def before_accumulation(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if gradients[0] is not None:  # None: a custom function had no gradient for its input
                self.contribute(name, gradients[0])

        return before_accumulation

    @torch.no_grad()
    def contribute(self, name: str, gradient: torch.Tensor) -> None:
        """Add one contribution of this rank, a tensor in the parameter's shape, any dtype, dense or sparse."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        value = dense.to(self.dtype) * self.weight
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self.contributions[name] += 1

    @torch.no_grad()
    def average(self) -> dict[str, torch.Tensor]:
        """Mean over ranks of this window's sums over the accumulation count; begins the next window. Collective.

        Returns:
            a tensor of ``dtype`` in the parameter's shape for every parameter; zeros where no rank used it.
        """
        world_size = dist.get_world_size(self.group) if dist.is_initialized() else 1
        result = {}
        for name, parameter in self.parameters.items():
            total = self._sums.get(name)
            if total is None:
                total = torch.zeros(self._shapes[name], dtype=self.dtype, device=parameter.device)
            total = total.contiguous()
            if world_size > 1:
                dist.all_reduce(total, group=self.group)
            result[name] = total / (self.accumulation_steps * world_size)
        self.drop()
        return result

    def write_gradients(self) -> None:
        """``average()`` into ``.grad``, for a plain optimizer to step with. Collective."""
        for name, gradient in self.average().items():
            self.parameters[name].grad = gradient.to(self.parameters[name].dtype)

    def drop(self) -> None:
        """Forget the contributions of this window."""
        self._sums.clear()
        self.contributions = dict.fromkeys(self.parameters, 0)

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def __enter__(self) -> "NaiveReducer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
