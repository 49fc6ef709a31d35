# SPDX-License-Identifier: Apache-2.0
"""What outside code reads from an engine, and the wrapped model's own surface; the training loop is in ``engine``."""

import gc
import logging
import math
import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import storage
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime import constants as const
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.optimizer_factory import accumulation_dtype
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partitioned_optimizer import PartitionedOptimizer
from deepspeed.runtime.zero.whole_state import load_whole_weights, whole_state_dict
from deepspeed.utils import groups
from deepspeed.utils.logging import log_dist
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER, FORWARD_MICRO_TIMER, STEP_MICRO_TIMER, ThroughputTimer

ROUTES = (const.ROUTE_TRAIN, const.ROUTE_EVAL, const.ROUTE_PREDICT, const.ROUTE_ENCODE)
MICRO_STEP_TIMERS = (FORWARD_MICRO_TIMER, BACKWARD_MICRO_TIMER, STEP_MICRO_TIMER)


def throughput_timer(config: DeepSpeedConfig) -> ThroughputTimer:
    """The timer of ``timers.throughput``. Where ``steps_per_print`` never reports, it does not measure either, since
    a measurement waits for the device."""
    every = config.steps_per_print
    section = config.timers_config
    if not every or math.isinf(every):
        section = section.model_copy(update={"enabled": False})
    return ThroughputTimer(
        section, config.train_batch_size, steps_per_output=every, logging_fn=lambda text: log_dist(text, [0])
    )


class EngineSurface:
    """Mixed into ``DeepSpeedEngine``, which sets the attributes below and trains."""

    _config: DeepSpeedConfig
    _stepper: ZeROOptimizer | None
    _step_applied: bool
    _global_grad_norm: Any
    basic_optimizer: torch.optim.Optimizer | None
    module: torch.nn.Module
    mpu: Any
    data_parallel_group: Any
    dp_world_size: int
    local_rank: int
    collate_fn: Callable[[list[Any]], Any] | None
    timers: Any
    tput_timer: ThroughputTimer

    # ------------------------------------------------------------------ states on the host for a while

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move what the engine holds on the device to the host. Until ``reload_states``, what needs it raises.

        Args:
            include: optimizer state, masters, weights, gradients, communication buffers; None: all.
            pin_memory: into page-locked memory, which is kept for the next time.
            non_blocking: do not wait for the copies; the device must be synchronised before the host reads them.

        Raises:
            AttributeError: stage 0, or an engine without optimizer.
            ValueError: another device than "cpu".
        """
        self._zero_optimizer("offload_states").offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` moved."""
        self._zero_optimizer("reload_states").reload_states(non_blocking)

    def _zero_optimizer(self, what: str) -> Any:
        if not isinstance(self._stepper, PartitionedOptimizer):
            raise AttributeError(f"engine.{what}() needs the optimizer of ZeRO stage 1, 2 or 3")
        return self._stepper

    # ------------------------------------------------------------------ facts about the last step

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the weights: at a boundary, without overflow."""
        return self._step_applied

    def get_global_grad_norm(self) -> Any:
        """Global L2 norm of the last step's true gradient before clipping: 0-dim fp32 tensor at stages 1 and 2, float
        at stage 0 and on overflow (inf), None before the first step or without ``compute_grad_norm``."""
        return self._global_grad_norm

    def get_clipped_grad_norm(self) -> Any:
        """The same norm after clipping: of the gradient that the last step used. None also when it was skipped."""
        stepper = self._stepper
        return None if stepper is None else stepper.public_norm(stepper._clipped_grad_norm)

    def _get_optimizer_param(self, name: str) -> list[Any]:
        if self.basic_optimizer is None:
            return []
        return [group.get(name, 0.0) for group in self.basic_optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Learning rate of each parameter group."""
        return self._get_optimizer_param("lr")

    def get_type(self) -> list[Any]:
        """``type`` of each parameter group, 0.0 where it has none."""
        return self._get_optimizer_param("type")

    def get_mom(self) -> list[Any]:
        """``betas`` of each parameter group, ``momentum`` for SGD and RMSprop."""
        momentum = isinstance(self.basic_optimizer, (torch.optim.SGD, torch.optim.RMSprop))
        return self._get_optimizer_param("momentum" if momentum else "betas")

    # ------------------------------------------------------------------ ranks, dtypes, memory

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data_parallel_group)

    def get_model_parallel_rank(self) -> int:
        return 0 if self.mpu is None else self.mpu.get_model_parallel_rank()

    def get_tensor_parallel_rank(self) -> int:
        return self.get_model_parallel_rank()

    def get_sequence_parallel_group(self) -> Any:
        """Process group that shares a sequence; None without sequence parallelism."""
        return groups._get_sequence_parallel_group() if groups._get_sequence_parallel_world_size() > 1 else None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype of the model's weights and dtype in which gradients are accumulated."""
        model = torch.float32
        if self.fp16_enabled():
            model = torch.float16
        elif self.bfloat16_enabled():
            model = torch.bfloat16
        return model, accumulation_dtype(self._config)

    @property
    def communication_data_type(self) -> torch.dtype:
        """dtype of gradient collectives. Set it in the config: the buckets are laid out for it."""
        return self._config.communication_data_type or self.get_data_types()[0]

    def is_deepcompile_enabled(self) -> bool:
        return False

    def is_deepcompile_active(self) -> bool:
        return False

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Mean milliseconds per micro-step of forward, backward and step since the last report, with
        ``wall_clock_breakdown``."""
        return self.timers.get_mean(MICRO_STEP_TIMERS, reset=False)

    def print_config(self) -> None:
        """Print each effective value of the config and where it comes from, on rank 0."""
        self._config.print("DeepSpeedEngine configuration")

    def collect_python_gc(self) -> None:
        """Run Python's cyclic garbage collector now."""
        gc.collect()

    # ------------------------------------------------------------------ module surface

    def train(self, mode: bool = True) -> None:
        """Training mode for the wrapped model. Returns nothing."""
        self.training = mode
        self.module.train(mode)

    def eval(self) -> None:
        """Evaluation mode for the wrapped model. Returns nothing."""
        self.train(False)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """``state_dict`` of the wrapped model, names without ``module.``."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    @torch.no_grad()
    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Iterable[torch.nn.Parameter] | None = None,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Load weights from ``checkpoint["module"]``; the master weights follow.

        At stage 3 every rank has all of ``checkpoint["module"]`` and takes its shards of it.

        Raises:
            RuntimeError: missing or unexpected keys, with ``strict``.
        """
        weights = checkpoint["module"]
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            missing, unexpected = load_whole_weights(self.module, weights)
            missing = [key for key in missing if key not in set(allowed_missing_keys or ())]
        if self._stepper is not None:
            self._stepper.refresh_fp32_params()  # also where keys are refused below: what fits is loaded, as in torch
        if custom_load_fn is None and strict and (missing or unexpected):
            raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")

    def empty_partition_cache(self) -> None:
        """At stage 3 let go of every weight that is whole at the moment; at other stages there is nothing to do."""
        if self._config.zero_optimization_stage == 3:
            offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
            offload.empty_partition_cache()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's ``state_dict`` in its own dtype from rank 0. Every rank calls it.

        Returns:
            True when written; at stage 3 False, and nothing is written, without
            ``stage3_gather_16bit_weights_on_model_save``.
        """
        partitioned = self._config.zero_optimization_stage == 3
        if partitioned and not self._config.zero_config.gather_16bit_weights_on_model_save:
            log_dist(
                "save_16bit_model wrote nothing: at stage 3 the weights are partitioned. Set"
                " zero_optimization.stage3_gather_16bit_weights_on_model_save to gather them",
                ranks=[0],
                level=logging.WARNING,
            )
            return False
        whole = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters) if partitioned else None
        if dist.get_rank() == 0:
            os.makedirs(save_dir, exist_ok=True)
            state = whole if partitioned else self.module_state_dict(None, "", False, exclude_frozen_parameters)
            storage.write_tensors(os.path.join(save_dir, save_filename), clone_tensors_for_torch_save(dict(state)))
        dist.barrier()
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model's ``state_dict`` on the CPU of rank 0, None elsewhere. Collective.

        Raises:
            ValueError: the weights are not partitioned (stages 0 to 2).
        """
        if self._config.zero_optimization_stage != 3:
            raise ValueError(
                "_zero3_consolidated_16bit_state_dict needs ZeRO stage 3; use module_state_dict() at stage"
                f" {int(self._config.zero_optimization_stage)}"
            )
        return whole_state_dict(self.module, dist.get_rank() == 0, exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """As ``_zero3_consolidated_16bit_state_dict``."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Old name of ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader that gives each data-parallel rank its own part of ``dataset``.

        Args:
            dataset: map-style or iterable data set.
            batch_size: samples per batch on this rank; default the micro-batch size of the config.
            route: what the batches are for: ``train``, ``eval``, ``predict`` or ``encode``. Loading time counts for
                the throughput of training in ``train`` only.
            pin_memory: copy batches into page-locked memory, where there is a CUDA device.
            data_sampler: default one that shuffles and gives each data-parallel rank its share.
            collate_fn: default that of ``deepspeed.initialize``, else torch's.
            num_local_io_workers: worker processes; default 2, none for an iterable data set.

        Whether an incomplete last batch is dropped says ``dataloader_drop_last`` in the config.

        Raises:
            ValueError: ``dataset`` is not a torch data set, or ``route`` is none of the four.
        """
        if route not in ROUTES:
            raise ValueError(f"route must be one of {ROUTES}, got {route!r}")
        if not isinstance(dataset, torch.utils.data.Dataset) and not self.is_map_style_dataset(dataset):
            raise ValueError(f"training_data must be a torch data set, not {type(dataset).__name__}")
        return DeepSpeedDataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory,
            local_rank=self.local_rank,
            tput_timer=self.tput_timer if route == const.ROUTE_TRAIN else None,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.dp_world_size,
            data_parallel_rank=dist.get_rank(self.data_parallel_group),
            dataloader_drop_last=self.dataloader_drop_last(),
        )

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)
