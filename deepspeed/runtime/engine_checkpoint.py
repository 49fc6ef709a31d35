# SPDX-License-Identifier: Apache-2.0
"""Saving and loading checkpoints; formats and files are in ``deepspeed.checkpoint``."""

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import export, files, folders, optimizer_transfer, storage, universal_state
from deepspeed.checkpoint.agreement import together
from deepspeed.checkpoint.optimizer_state import (
    MASTER,
    SavedParameter,
    SavedState,
    read_whole_state,
    read_zero_files,
    shared_out,
)
from deepspeed.checkpoint.storage import CheckpointError, DamagedFileError, MissingCheckpointError
from deepspeed.comm.control import ControlChannel
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, unfinished
from deepspeed.runtime.checkpoint_engine.unfinished import UnfinishedSave
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.parameter_handover import logical_shape
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.runtime.zero.whole_state import load_whole_weights
from deepspeed.utils.logging import logger

# Top-level keys of a model file that are the engine's and not handed to the caller.
_OWN_KEYS = {
    "module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd",
}  # fmt: skip


def _nothing() -> None:
    """What ranks do that only take part in an agreement."""


class EngineCheckpoint:
    """Mixed into ``DeepSpeedEngine``, which sets the attributes below."""

    _config: DeepSpeedConfig
    config: Any
    _stepper: ZeROOptimizer | None
    module: torch.nn.Module
    lr_scheduler: Any
    data_parallel_group: Any
    dp_world_size: int
    mpu: Any
    checkpoint_engine: CheckpointEngine
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

        The files are written beside the checkpoints that exist; ``latest`` moves when all of them are on the disk. With
        ``checkpoint.writer.decoupled`` they are written while training goes on: values are those of this call, and
        the checkpoint appears at a boundary ``step()``, at the latest with the next save or load or the end of the
        engine or the program.

        Args:
            save_dir: folder of checkpoints.
            tag: name of this one, default ``global_step<n>``.
            client_state: further entries of the model file, given back by ``load_checkpoint``.
            save_latest: let a load without a tag find this one.
            exclude_frozen_parameters: leave weights out that do not require grad.

        Returns:
            True.

        Raises:
            ValueError: an empty ``save_dir``, a tag that leaves it, or the tag ``latest`` with ``save_latest``.
            KeyError: ``client_state`` has an entry ``checkpoint_parallel_dimensions``.
            AssertionError: tags differ between ranks, with ``checkpoint.tag_validation: FAIL``; or no optimizer.
            CheckpointError: on every rank, when some rank could not write this one, or the one before that was still
                being written; what existed is untouched.
        """
        if not save_dir:
            raise ValueError("save_checkpoint needs a folder, got an empty save_dir")
        stepper = self._require_stepper("save_checkpoint")
        tag = files.check_tag(str(tag) if tag is not None else f"global_step{self.global_steps}")
        if client_state and "checkpoint_parallel_dimensions" in client_state:
            raise KeyError("client_state must not have the entry 'checkpoint_parallel_dimensions'")
        if save_latest and tag.split("/")[0] == files.LATEST:
            raise ValueError(f"checkpoint tag {tag!r} is the name of the file that names the last checkpoint")
        channel = self._checkpoint_channel()
        unfinished.finish(channel)
        tag = self._agreed_tag(channel, tag)
        _warn_about_classes(client_state or {})
        # The folder must be the same one when the writer comes to it, wherever the program has gone by then.
        save = self._begin_save(channel, CheckpointCommitInfo(tag, os.path.abspath(save_dir), save_latest))
        self._hand_over(channel, save, lambda: self._contents(stepper, client_state or {}, exclude_frozen_parameters))
        if not save.writer.writes_files():
            save.writer.commit(save.info)
            logger.warning(f"checkpoint.writer.type MOCK: checkpoint {tag!r} is not there")
        elif save.writer.is_decoupled():
            unfinished.add(save)
        else:
            save.complete(channel)
        return True

    def _begin_save(self, channel: ControlChannel, info: CheckpointCommitInfo) -> UnfinishedSave:
        """Make the folder that is written into."""
        leads, writer = channel.rank == 0, self.checkpoint_engine
        if writer.writes_files():
            start = partial(self._start_folder, info)
            together(channel, start if leads else _nothing, f"save {info.tag!r}")
        return UnfinishedSave(
            info,
            writer,
            folders.staging_folder(info.save_dir, info.tag),
            rank=channel.rank,
            leads=leads,
            finish=partial(folders.finish, info.save_dir, info.tag),
            abandon=partial(folders.abandon, info.save_dir, info.tag),
            owner=id(self),
        )

    def _start_folder(self, info: CheckpointCommitInfo) -> None:
        folders.start(info.save_dir, info.tag)
        if self._config.zero_optimization_stage > 0:
            export.place_programs(info.save_dir)

    def _hand_over(
        self, channel: ControlChannel, save: UnfinishedSave, make_contents: Callable[[], dict[str, Any]]
    ) -> None:
        """Give the files to the checkpoint engine, which has written or copied them when this returns.

        Raises:
            CheckpointError: on every rank, when some rank could not.
        """

        def write() -> list[str]:
            save.writer.create(save.info)
            contents = make_contents()
            for name, content in contents.items():
                save.writer.save(content, os.path.join(save.staging, name))
            return list(contents)

        try:
            save.own = together(channel, write, f"save {save.info.tag!r}")
        except CheckpointError:
            if save.leads and save.writer.writes_files():
                save.abandon()
            raise
        save.by_rank = channel.gather(save.own, "what each rank writes")
        save.writer.begin_commit(save.info)

    def _complete_written_save(self) -> None:
        """At a boundary step: make a checkpoint appear that was written meanwhile, if all ranks have. Collective."""
        unfinished.poll(self._checkpoint_channel, id(self))

    def _end_saves(self) -> None:
        """Wait for a checkpoint that is being written. No rank is asked, for some may have gone."""
        unfinished.finish_alone(id(self))
        if (writer := self.__dict__.get("checkpoint_engine")) is not None:
            writer.cleanup()

    def _checkpoint_channel(self) -> ControlChannel:
        return ControlChannel(dist.get_world_group())

    def _agreed_tag(self, channel: ControlChannel, tag: str) -> str:
        """The first rank's tag, since a checkpoint has one folder; others are reported as the config says."""
        tags = channel.gather(tag, "the tag of the checkpoint")
        if len(set(tags)) > 1 and self._config.checkpoint_tag_validation_enabled:
            message = f"ranks save under different checkpoint tags, by rank: {tags}"
            if self._config.checkpoint_tag_validation_fail:
                raise AssertionError(message)
            logger.warning(f"{message}. All is saved under {tags[0]!r}")
        return tags[0]

    def _contents(
        self, stepper: ZeROOptimizer, client_state: dict[str, Any], exclude_frozen_parameters: bool
    ) -> dict[str, Any]:
        """The files that this rank writes, with the live tensors: the checkpoint engine copies what it must."""
        stage = int(self._config.zero_optimization_stage)
        rank, mp_rank = dist.get_rank(self.data_parallel_group), self.get_model_parallel_rank()
        contents: dict[str, Any] = {}
        if rank == 0 or stage == 3:
            state = self._model_state(stepper, stage, exclude_frozen_parameters)
            state |= self._universal_info() | client_state
            contents[files.model_file(mp_rank, rank if stage == 3 else None)] = state
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
        shapes = optimizer_transfer.trained_shapes(stepper)
        frozen = None if stage == 0 or exclude_frozen else self._frozen_parameters(stepper)
        mp_size = 1 if self.mpu is None else self.mpu.get_model_parallel_world_size()
        return {
            "module": self.module_state_dict(exclude_frozen_parameters=exclude_frozen and stage != 3),
            "buffer_names": _buffer_names(self.module),
            "optimizer": optimizer_transfer.replicated_state(stepper) if stage == 0 else None,
            "optimizer_param_names": [list(group) for group in shapes],
            "param_shapes": None if stage == 0 else shapes,
            "frozen_param_shapes": _of_each(frozen, logical_shape),
            "frozen_param_fragments": _of_each(frozen, _fragment),
            "shared_params": None if stage == 0 else self._shared_parameters(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": self.skipped_steps,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": mp_size,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": mp_size},
            "ds_config": self.config,
            "ds_version": version,
        }

    def _universal_info(self) -> dict[str, Any]:
        """What the model says about its parameters for universal checkpoints, in an attribute or a method."""
        info = getattr(self.module, universal_state.UNIVERSAL_CHECKPOINT_INFO, None)
        return {} if info is None else {universal_state.UNIVERSAL_CHECKPOINT_INFO: info() if callable(info) else info}

    def _frozen_parameters(self, stepper: ZeROOptimizer) -> "OrderedDict[str, torch.nn.Parameter]":
        """Parameters that no optimizer trains."""
        trained = {record.parameter for record in stepper.reducer.ledger.records}
        return OrderedDict((name, p) for name, p in self.module.named_parameters() if p not in trained)

    def _shared_parameters(self) -> dict[str, str]:
        """Further names of tied parameters, and the name under which each is kept; on rank 0."""
        return _aliases(self.module) if dist.get_rank() == 0 else {}

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
            tag: which one; default what ``latest`` names (with ``checkpoint.load_universal``, ``latest_universal``).
            load_module_strict: names must match exactly.
            load_optimizer_states: also masters, optimizer state and loss scale; otherwise masters follow the weights.
            load_lr_scheduler_states: also the learning-rate schedule.
            load_module_only: weights alone; counters stay.
            custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` in place of loading by name.

        Returns:
            path of the model file and the client state; ``(None, None)`` without ``latest``.

        Raises:
            AssertionError (MissingCheckpointError): no such tag; names those that are there.
            ValueError: with ``checkpoint.load_universal``, no tag and no file ``latest_universal``.
            CheckpointError: files are missing or damaged, or of another model.
        """
        stepper = self._require_stepper("load_checkpoint")
        channel = self._checkpoint_channel()
        unfinished.finish(channel)
        folder = self._find_folder(channel, load_dir, tag)
        if folder is None:
            return None, None
        with_state = load_optimizer_states and not load_module_only
        what = f"load checkpoint {folder}"
        weights_only = not with_state and not files.find_shard_model_files(folder, self.get_model_parallel_rank())
        together(
            channel,
            lambda: folders.check_files(folder, load_dir, weights_only, channel.rank, channel.world_size),
            what,
        )
        path, state, saved = together(
            channel, lambda: self._read(stepper, load_dir, folder, with_state, custom_load_fn is None), what
        )
        self.zero_grad()
        self.schedule.change_steps(self.schedule.steps)  # the next micro-step is the first of a window
        together(
            channel,
            lambda: self._load_weights(stepper, folder, state, saved, load_module_strict, custom_load_fn),
            what,
        )
        optimizer_transfer.weights_follow(stepper)
        self._load_counters(state, load_module_only, load_lr_scheduler_states)
        hidden = {"module"} if load_module_only else set(_OWN_KEYS)
        hidden |= {"optimizer"} if saved is not None else set()
        hidden |= {"lr_scheduler"} if load_lr_scheduler_states and not load_module_only else set()
        hidden.add("optimizer_param_names")
        return path, {key: value for key, value in state.items() if key not in hidden}

    def _find_folder(self, channel: ControlChannel, load_dir: str, tag: str | None) -> str | None:
        """Folder of a tag or of the last checkpoint; None, with a warning, where no file names the last one."""
        named = None if tag is None else files.check_tag(str(tag))
        if named is None and self._config.load_universal_checkpoint:
            named = files.check_tag(universal_state.read_latest_universal(load_dir))
        folder = together(channel, lambda: _locate(load_dir, named), f"load from {load_dir!r}")
        found = channel.gather(folder is not None, "whether a checkpoint is there")
        latest = os.path.join(load_dir, files.LATEST)
        if any(found) and not all(found):
            raise CheckpointError(f"only ranks {[rank for rank, yes in enumerate(found) if yes]} see a file {latest}")
        if folder is None:
            logger.warning(f"no file {latest}: nothing is loaded. Tags there: {files.tags_in(load_dir) or 'none'}")
        return folder

    def _read(
        self, stepper: ZeROOptimizer, load_dir: str, folder: str, with_state: bool, by_name: bool
    ) -> tuple[str, dict[str, Any], SavedState | None]:
        """Map the files and compare them with the model; nothing is changed yet.

        Returns:
            path of the model file, its contents, and the optimizer state if that is wanted.
        """
        try:
            path, state = self._read_model_file(folder)
            saved = self._read_optimizer(folder, state, by_name) if with_state else None
        except DamagedFileError as error:
            raise CheckpointError(f"{error}. {folders.whole_tags(load_dir)}") from error
        if saved is not None:
            optimizer_transfer.check_same_model(stepper, saved)
        return path, state, saved

    def _read_model_file(self, folder: str) -> tuple[str, dict[str, Any]]:
        mp_rank = self.get_model_parallel_rank()
        path = os.path.join(folder, files.model_file(mp_rank))
        if not os.path.isfile(path):
            shards = files.find_shard_model_files(folder, mp_rank)
            if not shards:
                raise MissingCheckpointError(f"{path} does not exist, nor does a file of weights of stage 3 beside it")
            rank = dist.get_rank(self.data_parallel_group)
            path = shards[rank if rank < len(shards) else 0]
        return path, storage.read_tensors(path, storage.checkpoints_are_trusted())

    def _read_optimizer(self, folder: str, state: dict[str, Any], by_name: bool = True) -> SavedState:
        trust = storage.checkpoints_are_trusted()
        if self._config.load_universal_checkpoint:
            return universal_state.read_universal(folder, state.get("param_shapes"))
        if state.get("optimizer") is not None:
            groups = optimizer_transfer.trained_shapes(self._stepper)
            names = state.get("optimizer_param_names") or [list(group) for group in groups]
            shapes = {name: shape for group in groups for name, shape in group.items()}
            return read_whole_state(state["optimizer"], names, shapes, state["module"] if by_name else None)
        paths = files.find_optim_files(folder, self.get_model_parallel_rank())
        ranks = state.get("dp_world_size") or len(paths)
        if len(paths) < ranks or not paths:
            raise MissingCheckpointError(
                f"checkpoint {folder} was saved by {ranks} ranks, and the files of optimizer state of ranks"
                f" {list(range(len(paths), ranks))} are missing"
            )
        paths = paths[:ranks]  # those of more ranks are of an older checkpoint, where DeepSpeed wrote into its folder
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
        in_shards = state.get("param_shapes") and files.find_shard_model_files(folder, self.get_model_parallel_rank())
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
                if saved is None:
                    optimizer_transfer.restore_masters(stepper, kept, strict)
        if saved is None:
            return
        has_masters = optimizer_transfer.restore(stepper, saved)
        # At stage 3 there are no other weights in the files than masters.
        from_masters = in_shards or self._config.zero_config.load_from_fp32_weights
        if not (has_masters and from_masters):
            stepper.refresh_fp32_params()

    def _load_shards(self, stepper: ZeROOptimizer, kept: SavedState, state: dict[str, Any], strict: bool) -> None:
        """Buffers, and of the parameters that nobody trains what each rank keeps."""
        here, there = set(self.module.state_dict()), set(state["module"])
        missing, unexpected = sorted(here - there), sorted(there - here)
        if strict and (missing or unexpected):
            raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        aliases = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        load_whole_weights(self.module, {name: value for name, value in state["module"].items() if name not in aliases})
        for name, parameter in self._frozen_parameters(stepper).items():
            if name in kept.parameters:
                optimizer_transfer.fill_parameter(parameter, kept.parameters[name])

    def _read_frozen(self, folder: str, state: dict[str, Any]) -> dict[str, SavedParameter]:
        """Parameters that nobody trained, from the shards of all ranks."""
        shapes = state.get("frozen_param_shapes") or {}
        if not shapes:
            return {}
        paths = files.find_shard_model_files(folder, self.get_model_parallel_rank())
        shards = [storage.read_tensors(path, storage.checkpoints_are_trusted()) for path in paths]
        return {
            name: shared_out(torch.Size(shape), [shard["frozen_param_fragments"][name] for shard in shards])
            for name, shape in shapes.items()
        }

    def _whole_weights(self, kept: SavedState, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Whole weights, on the host, under all their names."""
        whole = {name: parameter.whole(MASTER) for name, parameter in kept.parameters.items()}
        aliases = _aliases(self.module) | (state.get("shared_params") or {})
        return whole | {alias: whole[name] for alias, name in aliases.items() if name in whole}

    def _load_counters(self, state: dict[str, Any], module_only: bool, schedule: bool) -> None:
        if module_only:
            return
        if schedule and self.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps = state["global_steps"]
        self.global_samples = state.get("global_samples", self.global_steps * self.train_batch_size())
        self.skipped_steps = state["skipped_steps"]


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters, and the first name of each."""
    first: dict[torch.nn.Parameter, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in names if first.setdefault(parameter, name) != name}


def _buffer_names(module: torch.nn.Module) -> list[str]:
    persistent = set(module.state_dict())
    return [name for name, _ in module.named_buffers() if name in persistent]


def _of_each(
    parameters: "OrderedDict[str, torch.nn.Parameter] | None", fact: Callable[[torch.nn.Parameter], Any]
) -> "OrderedDict[str, Any] | None":
    """A fact of each parameter, by name; None where there are none to be kept."""
    return None if parameters is None else OrderedDict((name, fact(p)) for name, p in parameters.items())


def _fragment(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank has of a frozen parameter."""
    shard = shard_of(parameter)
    return (parameter.data if shard is None else shard.shard).detach()


def _locate(load_dir: str, tag: str | None) -> str | None:
    """Folder of a tag, or of the one in ``latest``; None without that file."""
    if tag is None:
        tag = files.read_latest(load_dir)
    return None if tag is None else folders.find(load_dir, files.check_tag(tag))


def _warn_about_classes(client_state: dict[str, Any]) -> None:
    """Say now, not when it is too late, that a file can only be loaded by those who trust it."""
    entries = {key: sorted(kinds) for key, value in client_state.items() if (kinds := storage.needs_trust(value))}
    if entries:
        logger.warning(
            f"client_state holds objects of other classes than plain data, {entries}: loading this checkpoint will need"
            " DS_TRUST_CHECKPOINTS=1 in the environment"
        )
