# SPDX-License-Identifier: Apache-2.0
"""The training engine: forward, backward, step. What a gradient goes through stands in ``runtime.gradients``."""

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import watchdog
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling import engine_phases as phases
from deepspeed.profiling.engine_phases import EngineTimers
from deepspeed.runtime import optimizer_factory
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import create_checkpoint_engine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_checks import unsupported_features
from deepspeed.runtime.engine_accumulation import EngineAccumulation
from deepspeed.runtime.engine_checkpoint import EngineCheckpoint
from deepspeed.runtime.engine_compile import EngineCompile, keep_hooks_out_of_graphs
from deepspeed.runtime.engine_config import EngineConfigAccessors
from deepspeed.runtime.engine_monitor import StepEvents
from deepspeed.runtime.engine_surface import EngineSurface, throughput_timer
from deepspeed.runtime.gradients.accumulation import AccumulationSchedule
from deepspeed.runtime.gradients.self_check import OBSERVERS, GradientCheck
from deepspeed.runtime.gradients.self_check_calls import CALLS
from deepspeed.runtime.model_placement import cast_floating_inputs, partition_model, place_whole_model
from deepspeed.runtime.python_gc import python_gc_manager
from deepspeed.runtime.torch_autocast import autocast_dtype_of, autocast_if_enabled, init_autocast_params
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.state_dict_guard import refuse_distributed_checkpoints
from deepspeed.utils import groups
from deepspeed.utils.logging import log_dist, set_log_level_from_string

GONE = "destroy() was called on this engine; make another one with deepspeed.initialize"


class DeepSpeedEngine(
    EngineConfigAccessors, EngineAccumulation, EngineSurface, EngineCheckpoint, EngineCompile, torch.nn.Module
):
    """Wraps a model for data-parallel training. Made by ``deepspeed.initialize``.

    ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()`` once per micro-batch; the engine knows which
    micro-step ends an accumulation window and updates the weights there. ``loss.backward()`` in place of
    ``engine.backward(loss)`` is equivalent.

    Args:
        args: namespace that may hold ``local_rank`` and ``device_rank``.
        model: moved to the accelerator and cast as the config says, in place.
        optimizer: torch optimizer, callable that makes one from parameters, or None for the one of the config.
        model_parameters: parameters or groups for an optimizer made here; default all that require grad.
        training_data: data set for ``training_dataloader``.
        lr_scheduler: scheduler, or callable that makes one from the torch optimizer.
        mpu: model-parallel unit that names the data-parallel group.
        collate_fn: for the data loader.
        config: what ``config_class`` was parsed from.
        config_class: the parsed configuration.
        dont_change_device: leave the model where it is.

    Raises:
        NotImplementedError: the config asks for a feature that is not built.
        AssertionError, ValueError: see ``deepspeed.runtime.optimizer_factory``.
    """

    def __init__(
        self,
        args: Any,
        model: torch.nn.Module,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        config: Any = None,
        config_class: DeepSpeedConfig | None = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None:
        super().__init__()
        self._config = config_class or DeepSpeedConfig(config, mpu)
        self.config = self._config._param_dict
        missing = unsupported_features(self._config)
        if missing:
            raise NotImplementedError("the config asks for features that are not built yet: " + "; ".join(missing))
        if self._config.log_level is not None:
            set_log_level_from_string(self._config.log_level)
        if self._config.comms_config.comms_logger_enabled:
            dist.configure(deepspeed_config=self._config)
        self.monitor = MonitorMaster(self._config.monitor_config)
        self._gc_hold = python_gc_manager.acquire() if self._config.disable_python_gc else None
        self.mpu = mpu
        self.collate_fn = collate_fn
        groups.mpu = mpu
        if self._config.activation_checkpointing_config.asks_for_anything():
            checkpointing.configure(mpu, deepspeed_config=self._config)
        self.data_parallel_group = groups._get_data_parallel_group()
        self.global_rank = dist.get_rank()
        self.local_rank = _local_rank(args)
        self.world_size = dist.get_world_size()
        self.dp_world_size = dist.get_world_size(self.data_parallel_group)
        self.device = torch.device(get_accelerator().device_name(_device_index(args, self.local_rank)))
        self.schedule = AccumulationSchedule(
            self._config.gradient_accumulation_steps, self._config.managed_gradient_accumulation
        )
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.phases = phases.EnginePhases(self._config, self.global_rank)
        self.timers = self.phases.timers
        self.tput_timer = throughput_timer(self._config)
        self._step_applied = False
        self._step_events = StepEvents(self.monitor, self.device, self.data_parallel_group)
        self._global_grad_norm: Any = None
        self._stepper: ZeROOptimizer | None = None
        self._destroyed = False

        place = partition_model if self._config.zero_optimization_stage == 3 else place_whole_model
        place(model, self._config, None if dont_change_device else self.device, self.data_parallel_group)
        self.module = model
        if self._config.torch_autocast_enabled:
            safe_modules = self._config.torch_autocast_lower_precision_safe_modules
            init_autocast_params(self, autocast_dtype_of(self._config), safe_modules)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        self.basic_optimizer = optimizer_factory.basic_optimizer(optimizer, model_parameters, model, self._config)
        self.optimizer = self._configure_optimizer()
        if self._config.zero_optimization_stage == 3:
            keep_hooks_out_of_graphs()
            refuse_distributed_checkpoints(model)
        managed = set() if self._stepper is None else {r.parameter for r in self._stepper.reducer.ledger.records}
        self._unmanaged_parameters = [p for p in model.parameters() if p not in managed]
        self._start_gradient_check()
        try:
            self.lr_scheduler = optimizer_factory.lr_scheduler(
                lr_scheduler, self.basic_optimizer, self.optimizer, self._config
            )
        except BaseException:
            self.destroy()  # an engine that never came to be must not leave its hooks on the model
            raise
        self.checkpoint_engine = create_checkpoint_engine(self._config, groups, self._config.zero_optimization_stage)
        if self._config.dump_state:
            self._config.print("DeepSpeedEngine configuration")

    def _configure_optimizer(self) -> Any:
        """The optimizer of the stage; the basic one itself is shown where it steps on the parameters themselves."""
        if self.basic_optimizer is None:
            if self._config.zero_optimization_stage in (1, 2):
                raise AssertionError(
                    f"ZeRO stage {self._config.zero_optimization_stage} partitions optimizer state and needs an"
                    " optimizer: pass one to deepspeed.initialize or name one in the config section 'optimizer'"
                )
            if self._config.zero_optimization_stage == 3:
                return optimizer_factory.parameter_offload(self.module, self._config, self.data_parallel_group)
            return None
        self._stepper = optimizer_factory.stage_optimizer(
            self.basic_optimizer, self.module, self._config, self.schedule, self.data_parallel_group, self.mpu
        )
        plain = self._config.zero_optimization_stage == 0 and not (self.fp16_enabled() or self.bfloat16_enabled())
        return self.basic_optimizer if plain else self._stepper

    def _start_gradient_check(self) -> None:
        """With ``gradient_check`` in the config: compare gradients with an independent record before updates."""
        config = self._config.gradient_check_config
        if not config.enabled or self._stepper is None:
            return
        mean = self._config.gradient_allreduce_op == "mean"
        engine = weakref.ref(self)
        check = GradientCheck(
            config,
            self._stepper,
            self.data_parallel_group,
            mean,
            lambda: engine().gradient_accumulation_steps(),
            lambda: engine().micro_steps,
        )
        self._stepper.gradient_check = check
        for observer in OBSERVERS:
            observer.on_engine(self, check)
        check.begin_window(self.global_steps)

    # ------------------------------------------------------------------ forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model.

        Raises:
            RuntimeError: at stage 3, after ``destroy()``: nobody gathers the weights any more.
            GradientAccountingError: a ``.grad`` was set by hand.
        """
        if self._destroyed and self.zero_optimization_stage() == 3:
            raise RuntimeError(f"engine.forward(): {GONE}")
        if self._stepper is not None:
            self._stepper.require_states("engine.forward()", "forward")
            self._stepper.backward_state.close_unannounced()
            if self.training and torch.is_grad_enabled():
                self._stepper.refuse_strays()
        if self.training:
            self._step_events.saw_inputs(args, kwargs)
        if self._config.float16_config.enabled and self._config.float16_config.auto_cast:
            args, kwargs = cast_floating_inputs((args, kwargs), torch.float16)
        if self.training and not self.tput_timer.started:  # else the data loader has started it
            self.tput_timer.start()
        with self.phases.phase(phases.FORWARD, self), autocast_if_enabled(self):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of ``loss`` and reduce them as the stage wants. Every rank calls it.

        Args:
            loss: scalar with a graph; it may pass through the engine, around it, or through several engines.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: False when the caller has divided by the accumulation count already.

        Returns:
            the loss divided by the accumulation count (unless ``scale_wrt_gas=False``), detached, without loss scale.

        Raises:
            AssertionError: there is no optimizer, or ``loss`` is not a scalar with a graph.
        """
        stepper = self._require_stepper("backward")
        stepper.require_states("engine.backward()", "backward")
        _require_loss(loss, "backward")
        state = stepper.backward_state
        with self.phases.phase(phases.BACKWARD, self):
            with (
                state.announced(stepper.factor_on_loss, scale_wrt_gas, "engine.backward"),
                self.phases.phase(phases.AUTOGRAD, self),
                CALLS.announced("engine.backward", loss, stepper.factor_on_loss, scale_wrt_gas),
            ):
                stepper.scale_if_loss(loss).backward(retain_graph=retain_graph)
            with self.phases.phase(phases.SWEEP, self):
                state.exit_backward()
        loss = loss.detach()
        self._step_events.saw_loss(loss, 1.0 / self.schedule.steps if scale_wrt_gas else 1.0)
        return loss / self.schedule.steps if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, for ``engine.scale(loss).backward()``.

        Raises:
            AssertionError: there is no optimizer, or ``loss`` is not a scalar with a graph.
        """
        stepper = self._require_stepper("scale")
        _require_loss(loss, "scale")
        scale = stepper.factor_on_loss
        scaled = loss.float() * scale if scale != 1.0 else loss * 1.0
        state, events = stepper.backward_state, self._step_events
        value, share = loss.detach(), 1.0 / self.schedule.steps

        def begin_backward(_: torch.Tensor) -> None:
            state.enter_scaled_backward(scale)
            CALLS.scaled(scale)
            events.saw_loss(value, share)

        scaled.register_hook(begin_backward)
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; at the boundary of a window update the weights and the learning rate. Every rank calls it.

        Raises:
            RuntimeError: at a boundary without a backward since the last one.
            AssertionError: inside ``no_sync()`` or without an optimizer.
            Exception: gradients overflowed at the smallest loss scale. The window is over and counts as skipped;
                training can go on, if what made the gradients infinite has gone.
        """
        stepper = self._require_stepper("step")
        stepper.require_states("engine.step()", "step")
        if self.schedule.deferred_by:
            raise AssertionError(
                f"engine.step() inside {self.schedule.deferred_by}: the gradients are not reduced there"
            )
        with self.phases.phase(phases.STEP, self), self.schedule.stepping():
            self._step_applied = False
            stepper.backward_state.close_unannounced()
            is_boundary = self.schedule.is_boundary()
            if is_boundary:
                self._take_step(stepper, lr_kwargs or {})
            self.schedule.micro_steps += 1
        if is_boundary and stepper.gradient_check is not None:
            stepper.gradient_check.begin_window(self.global_steps)
        watchdog.new_step()
        self.tput_timer.stop(global_step=is_boundary)

    def _take_step(self, stepper: ZeROOptimizer, lr_kwargs: dict[str, Any]) -> None:
        backwards = stepper.reducer.ledger.backwards
        try:
            stepper.step()
        except Exception:
            if stepper.stopped_at_floor:
                # The window is over and its step skipped: who goes on after this begins with a window of its own.
                self._count_step(stepper, backwards)
                self.schedule.micro_steps += 1
            raise
        samples = self._count_step(stepper, backwards)
        if not stepper.overflow:
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self._step_events.write(self, samples, backwards)
        self._report_progress()
        self._complete_written_save()

    def _count_step(self, stepper: ZeROOptimizer, backwards: int) -> int:
        """A window of so many backwards is over; its samples on all ranks."""
        self._global_grad_norm = stepper._global_grad_norm
        self._forget_unmanaged_gradients()
        self.skipped_steps += stepper.overflow
        self.global_steps += 1
        per_backward = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        samples = self.train_batch_size() if self.schedule.managed else per_backward * backwards
        self.global_samples += samples
        self.tput_timer.batch_size = samples
        return samples

    def _forget_unmanaged_gradients(self) -> None:
        """Gradients of parameters that no optimizer updates must not pile up."""
        for parameter in self._unmanaged_parameters:
            if parameter.grad is not None:
                parameter.grad = None

    def _report_progress(self) -> None:
        every = self.steps_per_print()
        if every and self.global_steps % every == 0:
            log_dist(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}", [0]
            )

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce now whatever is pending. ``step()`` does the same; for callers who want to look at gradients before
        it."""
        self._require_stepper("allreduce_gradients").settle_gradients()

    def zero_grad(self) -> None:
        """Drop all gradients of the present window and start a new one."""
        if self._stepper is not None:
            self._stepper.zero_grad()
        self._step_events.start_window()
        self._forget_unmanaged_gradients()

    def _require_stepper(self, what: str) -> ZeROOptimizer:
        if self._destroyed:
            raise AssertionError(f"engine.{what}(): {GONE}")
        if self._stepper is None:
            raise AssertionError(f"engine.{what}() needs an optimizer, and deepspeed.initialize was given none")
        return self._stepper

    # ------------------------------------------------------------------ module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the engine lacks are those of the wrapped model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise

    def destroy(self) -> None:
        """Remove hooks from the model and free gradients, masters and buffers. May be called more than once.

        Raises:
            CheckpointError: a checkpoint that was being written could not be completed; all else was done.
        """
        try:
            self._release()
        finally:
            self._end_saves()

    def _release(self) -> None:
        self._destroyed = True
        if self._stepper is not None:
            self._stepper.destroy()
            self._stepper = None
        elif isinstance(offload := self.__dict__.get("optimizer"), DeepSpeedZeRoOffload):
            offload.destroy()
        self.monitor.close()
        self.phases.close()
        python_gc_manager.release(self._gc_hold)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the program's end torch and this module may be taken apart already, hence the default argument. What could
        # not be released then goes with the process.
        if "_stepper" not in self.__dict__:
            return
        try:
            self._release()  # a save that is being written is completed by the next one, or when the program ends
        except Exception:
            if not is_finalizing():
                raise


def _require_loss(loss: Any, what: str) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise AssertionError(
            f"engine.{what}() needs a scalar loss, got {found}. For other tensors call output.backward(gradient)"
        )
    if loss.grad_fn is None:
        raise AssertionError(
            f"engine.{what}(): the loss has no graph (grad_fn is None); was it computed under no_grad or detached?"
        )


def _local_rank(args: Any) -> int:
    """LOCAL_RANK, which ``args.local_rank`` must agree with when it is set."""
    if "LOCAL_RANK" not in os.environ:
        raise AssertionError("LOCAL_RANK is not set: start the script with torchrun or the deepspeed launcher")
    local_rank = int(os.environ["LOCAL_RANK"])
    given = getattr(args, "local_rank", None)
    if isinstance(given, int) and given >= 0 and given != local_rank:
        raise AssertionError(f"args.local_rank is {given} but the environment says LOCAL_RANK={local_rank}")
    return local_rank


def _device_index(args: Any, local_rank: int) -> int:
    device_rank = getattr(args, "device_rank", None)
    return local_rank if device_rank is None else int(device_rank)


__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "EngineTimers"]
