# SPDX-License-Identifier: Apache-2.0
"""``engine.compile``: the wrapped model under ``torch.compile``. What holds for it stands in docs/torch_features.md."""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.runtime.gradients import autograd_internals
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils.logging import logger

_CALLED_BY_HOOKS = (
    "deepspeed.runtime.zero",
    "deepspeed.runtime.gradients",
    "deepspeed.runtime.swap_tensor",
    "deepspeed.runtime.utils",
    "deepspeed.comm",
)


def keep_hooks_out_of_graphs() -> None:
    """At stage 3 hooks of modules do collectives and swap the memory of weights: torch.compile must call them, not look
    inside. Does nothing while the process has not loaded the compiler."""
    autograd_internals.keep_out_of_compiled_graphs(_CALLED_BY_HOOKS)


class EngineCompile:
    """The engine's methods that have to do with ``torch.compile``."""

    module: torch.nn.Module
    zero_optimization_stage: Callable[[], int]
    optimizer: Any
    _is_compiled: bool = False

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Run the wrapped model under ``torch.compile`` from the next forward on; gradients stay what they are.

        At stage 3 the hooks that gather weights end graphs. Modules that are gathered as a whole
        (``set_z3_leaf_modules`` before ``initialize``) become a graph each; other modules with partitioned parameters
        run as they are, and if there are no whole ones, a warning says so.

        Args:
            backend: name or function, as for ``torch.compile``.
            compile_kwargs: further arguments of ``torch.compile`` (``dynamic``, ``mode``, ``options``, ...).

        Raises:
            NotImplementedError: ``schedule`` (DeepCompile), or ``compiled_autograd_enabled``.
            ValueError: ``fullgraph`` at stage 3.
        """
        if schedule is not None:
            raise NotImplementedError("engine.compile(schedule=...): DeepCompile is not built; leave schedule out")
        if compiled_autograd_enabled:
            raise NotImplementedError(
                "engine.compile(compiled_autograd_enabled=True): gradients are taken over by hooks in an ordinary"
                " backward, which compiled autograd would trace; leave it out, forward and backward are compiled all"
                " the same"
            )
        options = dict(compile_kwargs or {})
        if self.zero_optimization_stage() == 3:
            if options.get("fullgraph"):
                raise ValueError(
                    "engine.compile(compile_kwargs={'fullgraph': True}) at ZeRO stage 3: weights are gathered between"
                    " modules, which ends a graph; leave fullgraph out, or train at stage 2"
                )
            if not self._offload().let_units_be_compiled():
                logger.warning(
                    "engine.compile at ZeRO stage 3: modules whose parameters are partitioned run uncompiled, since"
                    " their weights are gathered around each call. Name the blocks of the model with"
                    " deepspeed.utils.set_z3_leaf_modules before deepspeed.initialize: each is then gathered as a whole"
                    " and compiled"
                )
        self.module.compile(backend=backend, **options)  # which loads the compiler, and compiles with the first call
        if self.zero_optimization_stage() == 3:
            keep_hooks_out_of_graphs()
        self._is_compiled = True

    def _offload(self) -> DeepSpeedZeRoOffload:
        """Who gathers the weights at stage 3."""
        optimizer = self.optimizer
        return optimizer if isinstance(optimizer, DeepSpeedZeRoOffload) else optimizer.parameter_offload

    @property
    def is_compiled(self) -> bool:
        """Whether ``engine.compile`` was called."""
        return self._is_compiled
