# SPDX-License-Identifier: Apache-2.0
"""Training over many ranks with sharded state, and the right gradient for every autograd graph."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm, unbuilt
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime import zero
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import init_patching
from deepspeed.unbuilt import UnbuiltFeatureError as UnbuiltFeatureError
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.logging import log_dist, logger

dist: Any = None  # deepspeed.comm once initialize() has run

unbuilt.name_features_of_missing_modules()


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, DeepSpeedDataLoader | None, Any]:
    """Make an engine for ``model``.

    Args:
        args: namespace that may hold ``deepspeed_config``, ``local_rank`` and ``device_rank``.
        model: moved and cast in place.
        optimizer: torch optimizer over parameters of ``model``, or a callable that makes one from parameters; it
            takes precedence over the config's.
        model_parameters: parameters or groups for an optimizer that is made here; default all that require grad.
        training_data: data set for a loader that shards it over the ranks.
        lr_scheduler: scheduler over ``optimizer``, or a callable that makes one from the torch optimizer.
        distributed_port: master port where the environment names none.
        mpu: model-parallel unit (``get_data_parallel_group()`` and the like).
        dist_init_required: see ``init_distributed``.
        collate_fn: for the loader.
        config: dict, path of a JSON or hjson file, or base64 of JSON. ``config_params`` is its older name.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``, None for what there is not.

    Raises:
        AssertionError: no model, no config, or two configs.
        NotImplementedError: the config, or ``mesh_param``, asks for a feature that is not built.
    """
    global dist
    if model is None:
        raise AssertionError("deepspeed.initialize requires a model")
    if mesh_param is not None:
        raise NotImplementedError("mesh_param: sequence parallelism over a device mesh is not built yet")
    chosen = _choose_config(args, config if config is not None else config_params)
    dist = comm
    with init_patching.all_lifted():  # what an engine makes inside a zero.Init context must be ordinary
        init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
        )
        engine = DeepSpeedEngine(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=chosen,
            config_class=DeepSpeedConfig(chosen, mpu),
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _choose_config(args: Any, config: Any) -> Any:
    """The one configuration that was given."""
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and in_args is not None:
        raise AssertionError(
            "a config was passed to deepspeed.initialize and another in args.deepspeed_config; give one"
        )
    if config is None and in_args is None:
        raise AssertionError("deepspeed.initialize requires a config: a dict or a path, or args.deepspeed_config")
    return in_args if config is None else config


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser, and their deprecated spellings."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    group.add_argument("--deepscale", default=False, action="store_true", help="deprecated, use --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="deprecated, use --deepspeed_config")
    return parser


def set_optimizer_flags(config_class: DeepSpeedConfig, model: torch.nn.Module) -> None:
    """Mark the parameters that the config's optimizer treats apart; ``initialize`` does so by itself.

    For Muon ``use_muon`` of each parameter that has no such attribute yet: whether it is a matrix of a hidden layer.
    """
    if (config_class.optimizer_name or "").lower() == "muon":
        from deepspeed.runtime.named_optimizers import mark_matrices

        mark_matrices(model)


def __getattr__(name: str) -> Any:
    unbuilt.refuse(__name__, name)


__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "set_optimizer_flags",
    "zero",
]
