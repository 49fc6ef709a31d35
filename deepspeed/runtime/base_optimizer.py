# SPDX-License-Identifier: Apache-2.0
"""Base classes of the optimizers an engine steps with, and the tracking of backwards."""

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.gradients import autograd_internals as autograd
from deepspeed.runtime.gradients import collectives
from deepspeed.runtime.gradients.arithmetic import exact_sum_of_squares, sum_of_squares
from deepspeed.runtime.gradients.backward_scope import BackwardScope, watch_end
from deepspeed.runtime.gradients.gradient_shard import GradientShard, shard_values
from deepspeed.runtime.gradients.ledger import ParameterRecord
from deepspeed.runtime.gradients.reducer import GradientReducer
from deepspeed.runtime.gradients.self_check import GradientCheck
from deepspeed.runtime.gradients.self_check_calls import CALLS
from deepspeed.runtime.parameter_handover import logical_shape, refuse_shared_memory, refuse_used_optimizer
from deepspeed.runtime.torch_autocast import get_comm_dtype
from deepspeed.utils.logging import log_dist
from deepspeed.utils.nvtx import profiler_range

CLIP_EPSILON = 1e-6
LEAST_FP32_NORM = 1e-10  # of the gradient, below which the squares of its elements may be lost in fp32
NAMES_SHOWN = 5


class DeepSpeedOptimizer:
    """What ``isinstance`` tests for: an optimizer made by this package around a torch optimizer."""


class BackwardHookStateManager:
    """Knows when a backward begins and ends, and counts the firings of AccumulateGrad in each graph task.

    It counts firings, not participating parameters: a parameter used under two reentrant checkpoints fires twice in one
    user-visible backward. Firings go to the reducer as they come; nothing here decides what is reduced.

    Args:
        reducer: told of each contribution, of the beginning and the end of each backward. Without one only counts are
            kept.
        retract: called before a backward adds to ``.grad``.
        needs_loss_scale: whether a backward without loss scaling is an error (fp16).
    """

    def __init__(
        self,
        reducer: GradientReducer | None = None,
        retract: Callable[[], None] | None = None,
        needs_loss_scale: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reducer = reducer
        self.scope: BackwardScope | None = None
        self.hooks_fired = 0  # in the graph task last seen
        self._retract = retract
        self._needs_loss_scale = needs_loss_scale
        self._task = autograd.NO_GRAPH_TASK
        self._expected_in_task: int | None = None
        self._post_backward_hooks: list[Callable[[], None]] = []
        if reducer is not None:
            for record in reducer.ledger.records:
                on_firing = reducer.firing_of(record, self._locate)
                record.handle = record.parameter.register_post_accumulate_grad_hook(on_firing)

    # -------------------------------------------------- announced backwards

    def enter_backward(self, loss_scale: float = 1.0, scale_wrt_gas: bool = True) -> BackwardScope:
        """Open the scope of a backward that every rank runs and that ends with ``exit_backward`` or
        ``abort_backward``.

        Raises:
            RuntimeError: another one is running, whose hook or custom function has called this.
        """
        if self.scope is not None and self.scope.announced:
            raise RuntimeError(
                "backward was called inside a backward of the same engine (from a hook or a custom autograd function)."
                " Start it after the first one has returned, or add the losses and call backward once"
            )
        self.close_unannounced()
        scope = BackwardScope(announced=True, loss_scale=loss_scale, scale_by_accumulation=scale_wrt_gas)
        self._begin(scope)
        BackwardScope.running.append(scope)
        return scope

    @contextmanager
    def announced(self, loss_scale: float, scale_wrt_gas: bool, caller: str) -> Iterator[None]:
        """An announced backward runs inside; it is aborted by an exception, and else ends with ``exit_backward``."""
        self.enter_backward(loss_scale, scale_wrt_gas)
        try:
            yield
        except BaseException as error:
            self.abort_backward(f"{type(error).__name__} in {caller}")
            raise

    def exit_backward(self) -> None:
        """The announced backward returned: sweep."""
        self._end(self.scope)

    def abort_backward(self, reason: str) -> None:
        """The backward raised: its contributions must not count."""
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.release()
            self.reducer.abort_backward(reason, scope.announced)

    # -------------------------------------------------- other backwards

    def enter_scaled_backward(self, loss_scale: float) -> None:
        """First event of the backward of a loss from ``engine.scale``; runs inside its graph task."""
        if self.scope is not None and self.scope.is_certainly_running():
            return
        self.close_unannounced(inside_backward=True)
        scope = BackwardScope(announced=False, loss_scale=loss_scale)
        self._begin(scope)
        BackwardScope.running.append(scope)
        watch_end(scope, self._end)

    def close_unannounced(self, inside_backward: bool = False) -> None:
        """Settle what became of a backward that nobody announced. Engine calls outside of any backward begin with
        this."""
        scope = self.scope
        if scope is None or scope.announced:
            return
        if not inside_backward and autograd.current_graph_task_id() != autograd.NO_GRAPH_TASK:
            return  # called from within a backward, by a recomputed forward
        if not autograd.can_queue_callbacks():
            self._end(scope)
        elif not scope.is_certainly_running():
            self.abort_backward("an exception in loss.backward()")

    def _locate(self, record: ParameterRecord) -> BackwardScope:
        """The scope that a firing outside of an announced backward belongs to; opens one when this is the first event
        of a backward."""
        scope = self.scope
        if scope is not None:
            if scope.is_certainly_running() or not autograd.can_queue_callbacks():
                return scope
            nested_or_older = (
                autograd.current_graph_task_id() < scope.first_task or autograd.enclosing_backward_node() is not None
            )
            if scope.awaits_outer_task and nested_or_older:
                return scope
            mixed = record.unmoved > 0
            self.abort_backward("an exception in loss.backward()")
            if mixed:
                raise RuntimeError(
                    f"parameter {record.name!r}: an earlier loss.backward() was aborted by an exception and this"
                    " backward has added to its partial gradient. Call engine.zero_grad() after the exception, then"
                    " run the backward again"
                )
        return self._open_unannounced(record)

    def _open_unannounced(self, record: ParameterRecord) -> BackwardScope:
        outer = BackwardScope.innermost_running()
        if outer is None and self._needs_loss_scale():
            record.parameter.grad = None  # nothing of the refused backward stays behind
            raise RuntimeError(
                "fp16 training needs the loss scale: call engine.backward(loss), or engine.scale(loss).backward(),"
                " not loss.backward()"
            )
        scope = BackwardScope(announced=False)
        if outer is not None:
            scope.loss_scale = outer.loss_scale
            scope.scale_by_accumulation = outer.scale_by_accumulation
            scope.within_another_engine = True
        self._begin(scope, record)
        watch_end(scope, self._end)
        return scope

    # -------------------------------------------------- events

    def before_accumulation(self, _: torch.Tensor) -> None:
        """Tensor hook of a leaf whose ``.grad`` may be published: take it back before autograd adds to it."""
        if self._retract is not None:
            self._retract()

    def _begin(self, scope: BackwardScope, fired: ParameterRecord | None = None) -> None:
        if self._retract is not None:
            self._retract()
        self.reducer.begin_backward(scope, fired)
        self.scope = scope

    def _end(self, scope: BackwardScope) -> None:
        if scope is not self.scope:
            return
        scope.release()
        self.scope = None
        self.reducer.end_backward(scope)
        self.run_grad_acc_post_hooks()

    # -------------------------------------------------- hooks after a backward, and counts per graph task

    def register_grad_acc_post_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after each backward's sweep."""
        self._post_backward_hooks.append(hook)

    def unregister_grad_acc_post_hooks(self) -> None:
        self._post_backward_hooks.clear()

    def run_grad_acc_post_hooks(self) -> None:
        for hook in self._post_backward_hooks:
            hook()

    def should_refresh_expected_hook_count(self) -> bool:
        """Whether the current graph task is one that no count has been made for; so a count is made once per graph
        task."""
        return autograd.current_graph_task_id() != self._task or self._expected_in_task is None

    def reenter_backward_if_needed(self) -> None:
        """Start the count of a graph task that has not been seen before."""
        task = autograd.current_graph_task_id()
        if task != self._task:
            self._task = task
            self.hooks_fired = 0
            self._expected_in_task = None

    def update_hook_state_and_maybe_run_epilogue(self, current_expected_count: int) -> bool:
        """Count one firing of the current graph task against how many torch expects; True with the last one.

        A hint only: that the task's firings are complete does not mean that the backward is.
        """
        self.reenter_backward_if_needed()
        self._expected_in_task = current_expected_count
        self.hooks_fired += 1
        return self.hooks_fired == current_expected_count

    def queue_post_backward_callback(self) -> bool:
        """Run the post-backward hooks when the current graph task ends; False where torch cannot tell."""
        inside = autograd.can_queue_callbacks() and autograd.current_graph_task_id() != autograd.NO_GRAPH_TASK
        if inside:
            autograd.queue_callback(self.run_grad_acc_post_hooks)
        return inside

    def reset_for_new_step(self) -> None:
        """Forget the counts of the last backward."""
        self.hooks_fired = 0
        self._task = autograd.NO_GRAPH_TASK
        self._expected_in_task = None


def make_records(
    param_groups: Sequence[dict[str, Any]], param_names: dict[torch.nn.Parameter, str]
) -> tuple[list[list[ParameterRecord]], list[torch.nn.Parameter]]:
    """One record per trainable parameter, grouped as in the optimizer and numbered in the order of the model.

    Args:
        param_groups: of the torch optimizer.
        param_names: name of each parameter of the model, in the model's order.

    Returns:
        the records of each group, and the parameters left out because they are frozen.

    Raises:
        ValueError: a parameter that the model does not have, one on the meta device, or two over the same memory.
        AssertionError: a parameter that occurs twice.
    """
    position = {parameter: i for i, parameter in enumerate(param_names)}
    seen = set()
    groups: list[list[ParameterRecord]] = []
    frozen: list[torch.nn.Parameter] = []
    for g, param_group in enumerate(param_groups):
        records: list[ParameterRecord] = []
        for i, parameter in enumerate(param_group["params"]):
            shape = logical_shape(parameter)
            where = f"parameter {i} of optimizer group {g} (shape {tuple(shape)})"
            if parameter not in position:
                raise ValueError(
                    f"{where} is not a parameter of the model given to deepspeed.initialize, so no gradient of the"
                    " model could reach it. Build the optimizer from the parameters of this very model"
                )
            if parameter in seen:
                raise AssertionError(f"{where}, named {param_names[parameter]!r}, occurs twice in the optimizer")
            seen.add(parameter)
            if parameter.is_meta:
                raise ValueError(f"{where}, named {param_names[parameter]!r}, is on the meta device and has no values")
            if not parameter.requires_grad:
                frozen.append(parameter)
            elif shape.numel():
                name, comm_dtype = param_names[parameter], get_comm_dtype(parameter)
                records.append(ParameterRecord(parameter, name, position[parameter], shape, comm_dtype))
        groups.append(records)
    refuse_shared_memory((record.name, record.parameter) for records in groups for record in records)
    in_model_order = sorted((r for records in groups for r in records), key=lambda r: r.index)
    for index, record in enumerate(in_model_order):
        record.index = index
        record.parameter.grad = None
    return groups, frozen


class GradientNorm:
    """A norm on the device, which the host waits for once at most.

    Args:
        tensor: 0-dim float64.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._read: float | None = None

    def read(self) -> float:
        """The value, on the host."""
        if self._read is None:
            self._read = self.tensor.item()
        return self._read


class ZeROOptimizer(DeepSpeedOptimizer):
    """A torch optimizer that steps with reduced gradients: the step that all stages share.

    Subclasses say how shards of gradient become an update of the weights (``_update``).

    Args:
        init_optimizer: the torch optimizer.
        reducer: delivers true gradients.
        param_names: name of each model parameter.
        frozen: parameters of the optimizer that did not require grad when the engine was made.
        loss_scaler: factor on the loss; 1 outside fp16.
        clip_grad: largest global L2 norm; 0 disables clipping.
        check_overflow: skip the step when the gradient is not finite.
        compute_grad_norm: False saves the norm when it is neither clipped by nor checked.
        mpu: model-parallel unit, whose group shares the norm.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        param_names: dict[torch.nn.Parameter, str],
        frozen: list[torch.nn.Parameter],
        loss_scaler: LossScalerBase,
        clip_grad: float = 0.0,
        check_overflow: bool = True,
        compute_grad_norm: bool = True,
        mpu: Any = None,
    ) -> None:
        refuse_used_optimizer(init_optimizer)
        self.optimizer = init_optimizer
        self.reducer = reducer
        self.param_names = param_names
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.check_overflow_enabled = check_overflow
        self.compute_grad_norm = compute_grad_norm
        self.mpu = mpu
        self.overflow = False
        self.stopped_at_floor = False  # the last step raised since no loss scale could have helped; its window is over
        self.custom_loss_scaler = False
        self.external_loss_scale: float | None = None
        self._frozen = frozen
        self._global_grad_norm: Any = None
        self._clipped_grad_norm: GradientNorm | None = None
        self.gradient_check: GradientCheck | None = None  # set by an engine whose config asks for it
        owner = weakref.ref(self)
        reducer.current_loss_scale = lambda: owner().factor_on_loss
        self.backward_state = BackwardHookStateManager(
            reducer,
            retract=(lambda: owner().retract_gradients()) if reducer.layout.replicated else None,
            needs_loss_scale=lambda: owner().needs_scaler(),
        )

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the weights with the gradients of this window, unless they overflowed. Collective.

        Raises:
            RuntimeError: no backward was run in this window, or a parameter was unfrozen after the engine was made.
            GradientAccountingError: the gradients of the window are incomplete or unusable.
            Exception: they overflowed at the smallest loss scale; they are dropped, and the window is over.
        """
        self.stopped_at_floor = False
        if closure is not None:
            raise NotImplementedError("step(closure): gradients come from backward before the step, not from a closure")
        self.backward_state.close_unannounced()
        self.retract_gradients()
        self._check_still_frozen()
        shards = self.reducer.synchronize()
        self._check_window()
        if not self.reducer.ledger.reduced:
            raise RuntimeError(
                "step() without backward: no rank has run a backward since the last step, so there is no gradient. Call"
                " engine.backward(loss) before engine.step()"
            )
        with profiler_range("deepspeed.norm"):
            norm = self._global_norm(shards)
            self.overflow = self._overflowed(norm, shards)
        self._global_grad_norm = self.public_norm(norm)
        self._clipped_grad_norm = None
        if self.gradient_check is not None:
            self.gradient_check.compare(shards, norm, self.overflow)
        culprits = ""
        if self.overflow:
            self._global_grad_norm = math.inf
            culprits = self._explain_overflow(shards)
        else:
            with profiler_range("deepspeed.update"):
                self._take_over_written()
                self._update(shards, self._clip_factor(norm))
            forget_autocast_copies()
        self.reducer.start_window()
        self._window_ended()
        if self.custom_loss_scaler:
            return
        if self.overflow and self.loss_scaler.is_exhausted():
            self.stopped_at_floor = True
            self.loss_scaler.update_scale(True, culprits)  # raises
        else:
            self.loss_scaler.update_scale(self.overflow)

    def _window_ended(self) -> None:
        """Gradients of the window were used or dropped."""

    def _check_window(self) -> None:
        """What else must hold before gradients are used. Every rank is here, and none still reduces. Collective."""

    def _take_over_written(self) -> None:
        """Weights that the program has written to are what the step begins at, where there are masters beside them."""

    def _update(self, shards: list[GradientShard], factor: float | torch.Tensor) -> None:
        """Step the inner optimizer with ``factor`` times ``shards`` as gradient and write the model's weights.
        ``shards`` may be overwritten."""
        raise NotImplementedError

    def require_states(self, what: str, needed: str) -> None:
        """RuntimeError where something that ``needed`` (forward, backward, step) uses was moved away for a while."""

    def resident(self, link: Any, write: bool = True) -> AbstractContextManager[None]:
        """Inside, the master and the state of a parameter are in memory, to be read or (``write``) changed."""
        return nullcontext()

    def refuse_strays(self) -> None:
        """GradientAccountingError if a ``.grad`` was set by hand: a backward would add to it."""
        self.reducer.ledger.refuse_strays()

    def settle_gradients(self) -> None:
        """Reduce everything pending, so that the shards hold the whole gradient of the window so far. Collective."""
        self.backward_state.close_unannounced()
        self.retract_gradients()
        self.reducer.settle()

    def write_weight(self, link: Any, value: torch.Tensor) -> None:
        """Give a parameter of the model the values that its master was given; the same on every rank."""
        parameter = link.record.parameter
        parameter.data.copy_(value)
        torch.autograd.graph.increment_version(parameter)
        forget_autocast_copies()

    def gradients_edited(self) -> None:
        """The shards were written by an accessor."""

    def gradient_edited(self, parameter: torch.nn.Parameter) -> None:
        """The caller wrote this parameter's gradient."""
        if self.gradient_check is not None:
            self.gradient_check.gradient_edited(parameter)

    def retract_gradients(self) -> None:
        """Take back gradients that were published in ``.grad``; stages that publish none have nothing to do."""

    def _check_still_frozen(self) -> None:
        thawed = [self.param_names[parameter] for parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise RuntimeError(
                f"parameters {thawed[:5]} did not require grad when the engine was made and do now; their gradients"
                " are neither reduced nor applied. Unfreeze before deepspeed.initialize, or make a new engine"
            )

    # ------------------------------------------------------------------ norm, overflow, clipping

    def _global_norm(self, shards: list[GradientShard]) -> GradientNorm | None:
        """L2 norm of the true gradient over all parameters of the world; read by the host where overflow is checked."""
        if not self.compute_grad_norm:
            return None
        norm = GradientNorm(self._reduce_sum_of_squares(shards, sum_of_squares).sqrt())
        if self.check_overflow_enabled and not LEAST_FP32_NORM < norm.read() < math.inf:
            # Either so, or squares have left the range of fp32; the answer is the same on all ranks.
            norm = GradientNorm(self._reduce_sum_of_squares(shards, exact_sum_of_squares).sqrt())
        return norm

    def _reduce_sum_of_squares(
        self, shards: list[GradientShard], square: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.reducer.device)
        for values in shard_values(shards):
            total += square(values).to(total.device)
        if not self.reducer.layout.replicated:
            collectives.sum_over_ranks(total, self.reducer.group)
        if self.mpu is not None and hasattr(self.mpu, "get_model_parallel_group"):
            collectives.sum_over_ranks(total, self.mpu.get_model_parallel_group())
        return total

    def _overflowed(self, norm: GradientNorm | None, shards: list[GradientShard]) -> bool:
        if not self.check_overflow_enabled:
            return False
        if norm is not None:
            return not math.isfinite(norm.read())
        bad = torch.zeros((), dtype=torch.float64, device=self.reducer.device)
        for values in shard_values(shards):
            bad += (~torch.isfinite(values)).any().to(bad.device)
        if not self.reducer.layout.replicated:
            collectives.sum_over_ranks(bad, self.reducer.group)
        return bad.item() > 0

    def _explain_overflow(self, shards: list[GradientShard]) -> str:
        """Log that the step is skipped. Where no loss scale adapts to it, also say whose gradients are not finite;
        collective then, and the answer is the same on every rank."""
        scale, scaler = self.loss_scale, self.loss_scaler
        adapts = self.custom_loss_scaler or (scaler.dynamic and not scaler.is_exhausted())
        culprits = "" if adapts else _listed(self._non_finite_parameters(shards))
        reason = culprits or "gradients overflowed"
        level = logging.WARNING if culprits else logging.INFO  # a loss scale finds its place by overflows
        note = f"; loss scale was {scale}" if self.needs_scaler() else ""
        log_dist(f"step skipped, {reason}{note}", ranks=[0], level=level)
        return culprits

    def _non_finite_parameters(self, shards: list[GradientShard]) -> list[str]:
        """Names, in the model's order, of parameters whose gradient is not finite on some rank. Collective."""
        records = self.reducer.ledger.records
        bad = torch.zeros(len(records), device=self.reducer.device)
        for group in self.reducer.layout.groups:
            for _, record, begin, end, start in group.local_ranges():
                values = shards[group.index].narrow(0, start, end - begin)
                bad[record.index] = (~torch.isfinite(values)).any()
        if not self.reducer.layout.replicated:
            collectives.sum_over_ranks(bad, self.reducer.group)
        return [record.name for record, count in zip(records, bad.tolist()) if count]

    def _clip_factor(self, norm: GradientNorm | None) -> float | torch.Tensor:
        """By what the gradient is multiplied so that its norm is at most ``clip_grad``: 0-dim where the host has not
        read the norm and need not."""
        self._clipped_grad_norm = norm
        if not self.clip_grad:
            return 1.0
        if self.check_overflow_enabled or self.reducer.rests_on_host:
            factor = 1.0 / max(1.0, (norm.read() + CLIP_EPSILON) / self.clip_grad)
            if factor == 1.0:
                return 1.0
        else:
            factor = 1.0 / ((norm.tensor + CLIP_EPSILON) / self.clip_grad).clamp(min=1.0)
        self._clipped_grad_norm = GradientNorm(norm.tensor * factor)
        return factor

    def public_norm(self, norm: GradientNorm | None) -> Any:
        """The norm as ``get_global_grad_norm`` returns it: 0-dim float32."""
        return None if norm is None else norm.tensor.float()

    # ------------------------------------------------------------------ loss scale

    @property
    def loss_scale(self) -> float:
        return self.external_loss_scale if self.custom_loss_scaler else self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use ``loss_scale`` from now on and stop adapting it."""
        self.custom_loss_scaler = True
        self.external_loss_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether a backward is wrong without the loss scale."""
        return self.custom_loss_scaler or self.loss_scaler.dynamic or self.loss_scaler.loss_scale != 1.0

    @property
    def factor_on_loss(self) -> float:
        """By what a loss is multiplied before its backward; 1 where none is needed."""
        return self.loss_scale if self.needs_scaler() else 1.0

    def scale_if_loss(self, value: Any) -> Any:
        """``value`` times the loss scale if it is a scalar with a gradient; anything else unchanged."""
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.grad_fn is not None
        return value.float() * self.loss_scale if is_loss and self.needs_scaler() else value

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """As ``engine.backward``, which also reports and measures. Every rank calls it."""
        with (
            self.backward_state.announced(self.factor_on_loss, scale_wrt_gas, "optimizer.backward"),
            CALLS.announced("optimizer.backward", loss, self.factor_on_loss, scale_wrt_gas),
        ):
            self.scale_if_loss(loss).backward(retain_graph=retain_graph)
        self.backward_state.exit_backward()

    # ------------------------------------------------------------------ torch optimizer surface

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Not built.

        Raises:
            NotImplementedError: always. Masters, state and the model's weights are loaded together.
        """
        raise NotImplementedError(
            "optimizer.load_state_dict is not built: the weights, their masters and the optimizer's state belong"
            " together. Load them with engine.load_checkpoint(folder, tag)"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the present window."""
        self.backward_state.close_unannounced()
        self.retract_gradients()
        self.reducer.drop_window()
        if self.gradient_check is not None:
            self.gradient_check.drop()

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        return self.param_groups[0]["lr"]

    def destroy(self) -> None:
        """Remove all hooks and free buffers; the model keeps its weights."""
        self.reducer.destroy()
        if self.gradient_check is not None:
            self.gradient_check.close()


def forget_autocast_copies() -> None:
    """A ``torch.autocast`` that is open around the step would go on with its copies of the former weights."""
    torch.clear_autocast_cache()


def _listed(names: list[str]) -> str:
    """What a message says about parameters whose gradients are not finite."""
    if not names:  # another model-parallel rank's
        return "gradients on another model-parallel rank are not finite"
    shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"the gradients of {shown}{more} are not finite"
