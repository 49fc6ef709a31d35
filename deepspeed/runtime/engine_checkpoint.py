# SPDX-License-Identifier: Apache-2.0
"""Saving and loading checkpoints; formats and files are in ``deepspeed.checkpoint``."""

import os
import shutil
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import files, optimizer_transfer, storage
from deepspeed.checkpoint.optimizer_state import (
    MASTER,
    SavedParameter,
    SavedState,
    read_whole_state,
    read_zero_files,
    shared_out,
)
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.comm.control import ControlChannel
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.runtime.zero.whole_state import load_whole_weights
from deepspeed.utils.logging import log_dist, logger

STAGING = ".saving-"
REPLACED = ".replaced-"
# Top-level keys of a model file that are the engine's and not handed to the caller.
_OWN_KEYS = {
    "module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd",
}  # fmt: skip


class MissingCheckpointError(CheckpointError, AssertionError):
    """There is no such checkpoint."""


class EngineCheckpoint:
    """Mixed into ``DeepSpeedEngine``, which sets the attributes below."""

    _config: DeepSpeedConfig
    config: Any
    _stepper: ZeROOptimizer | None
    module: torch.nn.Module
    lr_scheduler: Any
    data_parallel_group: Any
    dp_world_size: int
    local_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    # ------------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that a later run needs to go on. Every rank calls it.

        The files are written beside the checkpoints that exist; ``latest`` moves when all of them are on the disk.

        Args:
            save_dir: folder of checkpoints.
            tag: name of this one, default ``global_step<n>``.
            client_state: further entries of the model file, given back by ``load_checkpoint``.
            save_latest: let a load without a tag find this one.
            exclude_frozen_parameters: leave weights out that do not require grad.

        Returns:
            True.

        Raises:
            ValueError: an empty ``save_dir``, or a tag that leaves it.
            KeyError: ``client_state`` has an entry ``checkpoint_parallel_dimensions``.
            AssertionError: tags differ between ranks, with ``checkpoint.tag_validation: FAIL``; or no optimizer.
            CheckpointError: on every rank, when some rank could not write; what existed is untouched.
        """
        if not save_dir:
            raise ValueError("save_checkpoint needs a folder, got an empty save_dir")
        stepper = self._require_stepper("save_checkpoint")
        tag = files.check_tag(str(tag) if tag is not None else f"global_step{self.global_steps}")
        if client_state and "checkpoint_parallel_dimensions" in client_state:
            raise KeyError("client_state must not have the entry 'checkpoint_parallel_dimensions'")
        channel = self._checkpoint_channel()
        self._check_tags(channel, tag)
        staging = os.path.join(save_dir, STAGING + tag.replace("/", "_"))
        leader = self._leads_storage()
        self._everywhere(channel, lambda: _make_empty(staging) if leader else None, f"make {staging}")
        contents = self._contents(stepper, client_state or {}, exclude_frozen_parameters)
        sizes = self._everywhere(
            channel,
            lambda: {name: storage.write_tensors(os.path.join(staging, name), item) for name, item in contents.items()},
            f"write into {staging}",
        )
        nodes = channel.gather(self._storage_node(), "where each rank writes")
        here = {
            name: size for node, own in zip(nodes, sizes) if node == self._storage_node() for name, size in own.items()
        }
        target = os.path.join(save_dir, tag)
        self._everywhere(channel, lambda: _finish(staging, target, here) if leader else None, f"finish {target}")
        if save_latest:
            latest = os.path.join(save_dir, files.LATEST)
            self._everywhere(channel, lambda: storage.write_text(latest, tag) if leader else None, f"write {latest}")
        log_dist(f"saved checkpoint {target}", ranks=[0])
        return True

    def _checkpoint_channel(self) -> ControlChannel:
        return ControlChannel(dist.get_world_group())

    def _leads_storage(self) -> bool:
        """Whether this rank makes and renames folders: one rank, or one per node with node-local storage."""
        return (self.local_rank if self._config.use_node_local_storage else dist.get_rank()) == 0

    def _storage_node(self) -> str:
        return socket.gethostname() if self._config.use_node_local_storage else ""

    def _check_tags(self, channel: ControlChannel, tag: str) -> None:
        if not self._config.checkpoint_tag_validation_enabled:
            return
        tags = channel.gather(tag, "the tag of the checkpoint")
        if len(set(tags)) > 1:
            message = f"ranks save under different checkpoint tags, by rank: {tags}"
            if self._config.checkpoint_tag_validation_fail:
                raise AssertionError(message)
            logger.warning(message)

    def _everywhere(self, channel: ControlChannel, work: Callable[[], Any], what: str) -> list[Any]:
        """Do ``work`` on every rank; what each returned. If it fails on one, every rank raises."""
        fault, result = "", None
        try:
            result = work()
        except (OSError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
        answers = channel.gather((fault, result), what)
        faults = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if faults:
            raise CheckpointError(f"could not {what}; {'; '.join(faults)}. Checkpoints that existed are untouched")
        return [value for _, value in answers]

    def _contents(
        self, stepper: ZeROOptimizer, client_state: dict[str, Any], exclude_frozen_parameters: bool
    ) -> dict[str, Any]:
        """The files that this rank writes."""
        stage = int(self._config.zero_optimization_stage)
        rank, mp_rank = dist.get_rank(self.data_parallel_group), self.get_model_parallel_rank()
        contents: dict[str, Any] = {}
        if rank == 0 or stage == 3:
            state = self._model_state(stepper, stage, exclude_frozen_parameters)
            contents[files.model_file(mp_rank, rank if stage == 3 else None)] = state | client_state
        if stage > 0:
            name = files.optim_file(rank, mp_rank, self._config.bfloat16_config.enabled)
            contents[name] = {
                "optimizer_state_dict": optimizer_transfer.partitioned_state(stepper, stage),
                "ds_config": self.config,
                "ds_version": version,
            }
        return contents

    def _model_state(self, stepper: ZeROOptimizer, stage: int, exclude_frozen: bool) -> dict[str, Any]:
        scheduler = self.lr_scheduler
        frozen = OrderedDict() if stage == 0 or exclude_frozen else self._frozen_parameters(stepper)
        shapes = None if stage == 0 else optimizer_transfer.trained_shapes(stepper)
        keeps_frozen = stage > 0 and not exclude_frozen
        return {
            "module": optimizer_transfer.host_state(
                self.module_state_dict(exclude_frozen_parameters=exclude_frozen and stage != 3)
            ),
            "buffer_names": _buffer_names(self.module),
            "optimizer": optimizer_transfer.replicated_state(stepper) if stage == 0 else None,
            "optimizer_param_names": [[r.name for r in group] for group in _record_groups(stepper)],
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((n, _shape(p)) for n, p in frozen.items()) if keeps_frozen else None,
            "frozen_param_fragments": OrderedDict((n, _fragment(p)) for n, p in frozen.items())
            if keeps_frozen
            else None,
            "shared_params": None if stage == 0 else self._shared_parameters(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": self.skipped_steps,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": 1 if self.mpu is None else self.mpu.get_model_parallel_world_size(),
            "checkpoint_parallel_dimensions": {
                "pp_degree": 1,
                "tp_degree": 1 if self.mpu is None else self.mpu.get_model_parallel_world_size(),
            },
            "ds_config": self.config,
            "ds_version": version,
        }

    def _frozen_parameters(self, stepper: ZeROOptimizer) -> "OrderedDict[str, torch.nn.Parameter]":
        """Parameters that no optimizer trains."""
        trained = {record.parameter for record in stepper.reducer.ledger.records}
        return OrderedDict((name, p) for name, p in self.module.named_parameters() if p not in trained)

    def _shared_parameters(self) -> dict[str, str]:
        """Further names of tied parameters, and the name under which each is kept; on rank 0."""
        if dist.get_rank() != 0:
            return {}
        first: dict[torch.nn.Parameter, str] = {}
        shared = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                shared[name] = first[parameter]
        return shared

    def _get_zero_param_shapes(self) -> Any:
        return optimizer_transfer.trained_shapes(self._require_stepper("_get_zero_param_shapes"))

    def _get_shared_params(self) -> dict[str, str]:
        return self._shared_parameters()

    # ------------------------------------------------------------------ loading

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, of any stage and any number of ranks. Every rank calls it.

        Args:
            load_dir: folder of checkpoints.
            tag: which one; default what ``latest`` names.
            load_module_strict: names must match exactly.
            load_optimizer_states: also masters, optimizer state and loss scale; otherwise masters follow the weights.
            load_lr_scheduler_states: also the learning-rate schedule.
            load_module_only: weights alone; counters stay.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` in place of loading by name.

        Returns:
            path of the model file and the client state; ``(None, None)`` without ``latest``.

        Raises:
            AssertionError (MissingCheckpointError): no such tag; names those that are there.
            CheckpointError: files are missing or damaged, or of another model.
        """
        if self._config.load_universal_checkpoint:
            raise NotImplementedError("checkpoint.load_universal: universal checkpoints are not built yet")
        stepper = self._require_stepper("load_checkpoint")
        if tag is None:
            tag = files.read_latest(load_dir)
            if tag is None:
                logger.warning(f"no file {os.path.join(load_dir, files.LATEST)}: nothing is loaded")
                return None, None
        folder = _find_folder(load_dir, files.check_tag(str(tag)))
        channel = self._checkpoint_channel()
        self._everywhere(channel, lambda: _check_whole(folder, load_dir), f"read checkpoint {folder}")
        path, state = self._read_model_file(folder)
        stepper.zero_grad()
        saved = None
        if load_optimizer_states and not load_module_only:
            saved = self._read_optimizer(folder, state)
        self._load_weights(stepper, folder, state, saved, load_module_strict, custom_load_fn)
        self._load_counters(state, load_module_only, load_lr_scheduler_states)
        hidden = set(_OWN_KEYS)
        if load_module_only:
            hidden = {"module"}
        hidden |= {"optimizer"} if saved is not None else set()
        hidden |= {"lr_scheduler"} if load_lr_scheduler_states and not load_module_only else set()
        hidden.add("optimizer_param_names")
        return path, {key: value for key, value in state.items() if key not in hidden}

    def _mp_rank(self) -> int:
        return self.get_model_parallel_rank()

    def _read_model_file(self, folder: str) -> tuple[str, dict[str, Any]]:
        mp_rank = self._mp_rank()
        path = os.path.join(folder, files.model_file(mp_rank))
        if not os.path.isfile(path):
            shards = files.find_shard_model_files(folder, mp_rank)
            rank = dist.get_rank(self.data_parallel_group)
            path = shards[rank if rank < len(shards) else 0]
        return path, storage.read_tensors(path, storage.checkpoints_are_trusted())

    def _read_optimizer(self, folder: str, state: dict[str, Any]) -> SavedState:
        trust = storage.checkpoints_are_trusted()
        if state.get("optimizer") is not None:
            records = [record for group in _record_groups(self._stepper) for record in group]
            shapes = {record.name: record.shape for record in records}
            names = state.get("optimizer_param_names") or [
                [record.name for record in group] for group in _record_groups(self._stepper)
            ]
            return read_whole_state(state["optimizer"], names, shapes)
        paths = files.find_optim_files(folder, self._mp_rank())
        return read_zero_files((storage.read_tensors(path, trust) for path in paths), state["param_shapes"])

    def _load_weights(
        self,
        stepper: ZeROOptimizer,
        folder: str,
        state: dict[str, Any],
        saved: SavedState | None,
        strict: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        """Weights from the model file; where they stand there by name alone (stage 3), from masters and fragments."""
        in_shards = bool(state.get("param_shapes")) and len(files.find_shard_model_files(folder, self._mp_rank())) > 0
        if not in_shards:
            self.load_module_state_dict({"module": state["module"]}, strict, custom_load_fn)
        else:
            source = saved or self._read_optimizer(folder, state)
            kept = SavedState(source.parameters | self._read_frozen(folder, state), source.param_groups)
            if custom_load_fn is not None:
                weights = state["module"] | self._whole_weights(kept, state)
                self.load_module_state_dict({"module": weights}, strict, custom_load_fn)
            else:
                self._load_shards(stepper, kept, state, strict)
        if saved is not None and optimizer_transfer.restore(stepper, saved):
            optimizer_transfer.weights_follow(stepper)
        elif saved is not None:
            stepper.refresh_fp32_params()

    def _load_shards(self, stepper: ZeROOptimizer, kept: SavedState, state: dict[str, Any], strict: bool) -> None:
        """Each rank reads the ranges it keeps: masters, from which weights follow, and parameters nobody trains."""
        here, there = set(self.module.state_dict()), set(state["module"])
        missing, unexpected = sorted(here - there), sorted(there - here)
        if strict and (missing or unexpected):
            raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        aliases = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        load_whole_weights(self.module, {name: value for name, value in state["module"].items() if name not in aliases})
        for name, parameter in self._frozen_parameters(stepper).items():
            if name in kept.parameters:
                optimizer_transfer.fill_parameter(parameter, kept.parameters[name])
        optimizer_transfer.restore_masters(stepper, kept)
        optimizer_transfer.weights_follow(stepper)

    def _read_frozen(self, folder: str, state: dict[str, Any]) -> dict[str, SavedParameter]:
        """Parameters that nobody trained, from the shards of all ranks."""
        shapes = state.get("frozen_param_shapes") or {}
        if not shapes:
            return {}
        paths = files.find_shard_model_files(folder, self._mp_rank())
        shards = [storage.read_tensors(path, storage.checkpoints_are_trusted()) for path in paths]
        return {
            name: shared_out(torch.Size(shape), [shard["frozen_param_fragments"][name] for shard in shards])
            for name, shape in shapes.items()
        }

    @staticmethod
    def _whole_weights(kept: SavedState, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Whole weights, on the host."""
        whole = {name: parameter.whole(MASTER) for name, parameter in kept.parameters.items()}
        aliases = {alias: name for alias, name in (state.get("shared_params") or {}).items() if name in whole}
        return whole | {alias: whole[name] for alias, name in aliases.items()}

    def _load_counters(self, state: dict[str, Any], module_only: bool, schedule: bool) -> None:
        if module_only:
            return
        if schedule and self.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps = state["global_steps"]
        self.global_samples = state.get("global_samples", self.global_steps * self.train_batch_size())
        self.skipped_steps = state["skipped_steps"]


def _record_groups(stepper: ZeROOptimizer) -> list[list[Any]]:
    """Records of each parameter group."""
    groups: list[list[Any]] = [[] for _ in stepper.param_groups]
    for group in stepper.reducer.layout.groups:
        groups[group.param_group] += group.records
    return groups


def _buffer_names(module: torch.nn.Module) -> list[str]:
    persistent = set(module.state_dict())
    return [name for name, _ in module.named_buffers() if name in persistent]


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    return parameter.ds_shape if is_zero_param(parameter) else parameter.shape


def _fragment(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank has of a frozen parameter."""
    shard = shard_of(parameter)
    return optimizer_transfer.host_copy(parameter.data if shard is None else shard.shard)


# ---------------------------------------------------------------------------------------------------- folders


def _make_empty(folder: str) -> None:
    """A new folder; what an interrupted save has left there goes away."""
    if os.path.isdir(folder):
        shutil.rmtree(folder)
    os.makedirs(folder)


def _finish(staging: str, target: str, sizes: dict[str, int]) -> None:
    """All files are there: give the folder its name."""
    storage.write_manifest(staging, sizes)
    storage.sync_folder(staging)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    replaced = os.path.join(os.path.dirname(staging), REPLACED + os.path.basename(staging).removeprefix(STAGING))
    if os.path.isdir(target):
        if os.path.isdir(replaced):
            shutil.rmtree(replaced)
        os.rename(target, replaced)
    os.rename(staging, target)
    storage.sync_folder(os.path.dirname(target) or ".")
    if os.path.isdir(replaced):
        shutil.rmtree(replaced)


def _find_folder(load_dir: str, tag: str) -> str:
    """The folder of a tag; while it was being replaced when the job died, the whole one of the two beside it.

    Raises:
        MissingCheckpointError: there is none.
    """
    folder = os.path.join(load_dir, tag)
    flat = tag.replace("/", "_")
    beside = [os.path.join(load_dir, front + flat) for front in (STAGING, REPLACED)]
    if _holds_model(folder):
        return folder
    for candidate in beside:
        if _is_whole(candidate):
            return candidate
    there = files.tags_in(load_dir)
    raise MissingCheckpointError(
        f"there is no checkpoint {tag!r} in {load_dir!r}; "
        + (f"the tags there are {there}" if there else "there is none at all")
    )


def _holds_model(folder: str) -> bool:
    return os.path.isdir(folder) and any(name.endswith(files.MODEL_SUFFIX) for name in os.listdir(folder))


def _check_whole(folder: str, load_dir: str) -> None:
    """CheckpointError that names missing and damaged files, and tags that are whole."""
    faults = storage.faults_of(folder)
    if faults:
        whole = [tag for tag in files.tags_in(load_dir) if _is_whole(os.path.join(load_dir, tag))]
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {'; '.join(faults[:8])}. Whole checkpoints there: {whole or 'none'}"
        )


def _is_whole(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, files.MANIFEST)) and not storage.faults_of(folder)
