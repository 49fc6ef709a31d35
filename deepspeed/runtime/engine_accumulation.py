# SPDX-License-Identifier: Apache-2.0
"""The engine's methods that say where accumulation windows end, and how large a batch is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule


class EngineAccumulation:
    """Accumulation windows. What is known of them is kept in ``schedule``, which everyone else asks."""

    schedule: AccumulationSchedule
    dp_world_size: int
    zero_optimization_stage: Callable[[], int]
    train_batch_size: Callable[[], int]
    train_micro_batch_size_per_gpu: Callable[[], int]
    gradient_accumulation_steps: Callable[[], int]
    _config: DeepSpeedConfig
    _stepper: ZeROOptimizer | None
    _require_stepper: Callable[[str], ZeROOptimizer]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-step ends a window."""
        return self.schedule.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the present micro-step ends a window, from now on instead of counting.

        Raises:
            AssertionError: with ``managed_gradient_accumulation: false``, where every ``step()`` is a boundary.
        """
        if not self.schedule.managed:
            raise AssertionError(
                "set_gradient_accumulation_boundary: with managed_gradient_accumulation false every step() is a"
                " boundary"
            )
        self.schedule.boundary_override = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank: backwards inside communicate nothing. They are reduced with those that follow.

        Raises:
            AssertionError: at stage 2 and later, which partition gradients in each backward; or when nested.
        """
        stage = self.zero_optimization_stage()
        if stage >= 2:
            raise AssertionError(
                f"no_sync() is incompatible with gradient partitioning (ZeRO stage {stage}): each backward frees the"
                " gradients that other ranks own. Use gradient_accumulation_steps, or stage 0 or 1, or"
                " coalesce_grad_reduction()"
            )
        if self.schedule.deferred_by:
            raise AssertionError(f"no_sync() inside {self.schedule.deferred_by}")
        with self.schedule.deferring("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accumulate several backwards on this rank and reduce once, at the end. Every rank calls it.

        Raises:
            NotImplementedError: at stage 0.
            AssertionError: inside ``no_sync()``, or with ``managed_gradient_accumulation: false``.
        """
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError(
                "coalesce_grad_reduction() is for ZeRO stages 1 and later; use no_sync() at stage 0"
            )
        if not self.schedule.managed:
            raise AssertionError("coalesce_grad_reduction() is incompatible with managed_gradient_accumulation false")
        if self.schedule.deferred_by:
            raise AssertionError(f"coalesce_grad_reduction() inside {self.schedule.deferred_by}")
        with self.schedule.deferring("coalesce_grad_reduction()"):
            yield
        stepper = self._require_stepper("coalesce_grad_reduction")
        stepper.backward_state.close_unannounced()
        if stepper.reducer.reduces_now():
            stepper.reducer.reduce_pending()

    @property
    def micro_steps(self) -> int:
        return self.schedule.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.schedule.set_micro_steps(value)

    @property
    def _is_gradient_accumulation_boundary(self) -> bool | None:
        return self.schedule.boundary_override

    @_is_gradient_accumulation_boundary.setter
    def _is_gradient_accumulation_boundary(self, value: bool | None) -> None:
        self.schedule.boundary_override = value

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps so that a window has ``train_batch_size`` samples.

        Raises:
            ValueError: not a multiple of micro batch times data-parallel size, or in the middle of a window.
        """
        per_step = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % per_step:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of micro batch size"
                f" {self.train_micro_batch_size_per_gpu()} x data-parallel size {self.dp_world_size}"
            )
        if self._stepper is not None and not self._stepper.reducer.ledger.empty:
            raise ValueError(
                "the batch size cannot change within an accumulation window: call it right after a boundary step"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // per_step
        self.schedule.change_steps(self._config.gradient_accumulation_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-step, keeping the number of accumulation steps."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size

    def get_batch_info(self) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        """The methods that tell train batch size, micro batch size and accumulation steps."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
