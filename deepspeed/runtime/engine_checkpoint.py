# SPDX-License-Identifier: Apache-2.0
"""Saving checkpoints; formats and files are in ``deepspeed.checkpoint``, loading in ``engine_loading.py``."""

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import export, files, folders, optimizer_transfer, storage, universal_state
from deepspeed.checkpoint.agreement import together
from deepspeed.checkpoint.sharing import FolderSharing
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.comm.control import ControlChannel
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, unfinished
from deepspeed.runtime.checkpoint_engine.unfinished import UnfinishedSave
from deepspeed.runtime.engine_loading import EngineLoading, aliases_of
from deepspeed.runtime.parameter_handover import logical_shape
from deepspeed.runtime.zero.partitioned_optimizer import PartitionedOptimizer
from deepspeed.runtime.zero.sharded_parameter import shard_of
from deepspeed.utils.logging import logger


def _nothing() -> None:
    """What ranks do that only take part in an agreement."""


class EngineCheckpoint(EngineLoading):
    """Mixed into ``DeepSpeedEngine``, which sets the attributes below."""

    config: Any
    mpu: Any
    checkpoint_engine: CheckpointEngine

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
        sharing = self._folder_sharing(channel)
        # The folder must be the same one when the writer comes to it, wherever the program has gone by then.
        save = self._begin_save(channel, sharing, CheckpointCommitInfo(tag, os.path.abspath(save_dir), save_latest))
        make_contents = partial(self._contents, stepper, sharing, client_state or {}, exclude_frozen_parameters)
        self._hand_over(channel, sharing, save, make_contents)
        if not save.writer.writes_files():
            save.writer.commit(save.info)
            logger.warning(f"checkpoint.writer.type MOCK: checkpoint {tag!r} is not there")
        elif save.writer.is_decoupled():
            unfinished.add(save)
        else:
            save.complete(channel)
        return True

    def _begin_save(
        self, channel: ControlChannel, sharing: FolderSharing, info: CheckpointCommitInfo
    ) -> UnfinishedSave:
        """Make the folder that is written into."""
        writer = self.checkpoint_engine
        if writer.writes_files():
            start = partial(self._start_folder, info)
            together(channel, start if sharing.leads else _nothing, f"save {info.tag!r}")
        return UnfinishedSave(
            info,
            writer,
            folders.staging_folder(info.save_dir, info.tag),
            rank=channel.rank,
            leads=sharing.leads,
            finish=partial(folders.finish, info.save_dir, info.tag, save=sharing.save),
            abandon=partial(folders.abandon, info.save_dir, info.tag),
            owner=id(self),
        )

    def _start_folder(self, info: CheckpointCommitInfo) -> None:
        folders.start(info.save_dir, info.tag)
        if self._config.zero_optimization_stage > 0:
            export.place_programs(info.save_dir)

    def _hand_over(
        self,
        channel: ControlChannel,
        sharing: FolderSharing,
        save: UnfinishedSave,
        make_contents: Callable[[], dict[str, Any]],
    ) -> None:
        """Give the files to the checkpoint engine, which has written or copied them when this returns.

        Raises:
            CheckpointError: on every rank, when some rank could not.
        """

        def write() -> list[str]:
            save.writer.create(save.info)
            contents = make_contents()
            for name, content in contents.items():
                self._save_file(save.writer, os.path.join(save.staging, name), content)
            return list(contents)

        try:
            save.own = together(channel, write, f"save {save.info.tag!r}")
        except CheckpointError:
            if save.leads and save.writer.writes_files():
                save.abandon()
            raise
        by_rank = channel.gather(save.own, "what each rank writes")
        save.by_rank = [names if rank in sharing.ranks else [] for rank, names in enumerate(by_rank)]
        save.writer.begin_commit(save.info)

    def _save_file(self, writer: CheckpointEngine, path: str, content: Any) -> None:
        stepper = self._stepper
        if not (files.is_optim_file(os.path.basename(path)) and isinstance(stepper, PartitionedOptimizer)):
            writer.save(content, path)
            return
        wait = writer.save_resting(content, path, optimizer_transfer.rests_until_written(stepper))
        if wait is not None:
            stepper.weights.read_beside(wait)

    def _complete_written_save(self) -> None:
        """At a boundary step: make a checkpoint appear that was written meanwhile, if all ranks have. Collective."""
        unfinished.poll(self._checkpoint_channel, id(self))

    def _end_saves(self) -> None:
        """Wait for a checkpoint that is being written. No rank is asked, for some may have gone."""
        unfinished.finish_alone(id(self))
        if (writer := self.__dict__.get("checkpoint_engine")) is not None:
            writer.cleanup()

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
        self,
        stepper: ZeROOptimizer,
        sharing: FolderSharing,
        client_state: dict[str, Any],
        exclude_frozen_parameters: bool,
    ) -> dict[str, Any]:
        """The files that this rank writes, with the live tensors: the checkpoint engine copies what it must."""
        stage = int(self._config.zero_optimization_stage)
        rank, mp_rank = dist.get_rank(self.data_parallel_group), self.get_model_parallel_rank()
        contents: dict[str, Any] = {}
        if sharing.writes_weights or stage == 3:
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

    def _shared_parameters(self) -> dict[str, str]:
        """Further names of tied parameters, and the name under which each is kept; on rank 0."""
        return aliases_of(self.module) if dist.get_rank() == 0 else {}

    def _get_zero_param_shapes(self) -> Any:
        return optimizer_transfer.trained_shapes(self._require_stepper("_get_zero_param_shapes"))

    def _get_shared_params(self) -> dict[str, str]:
        return self._shared_parameters()


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


def _warn_about_classes(client_state: dict[str, Any]) -> None:
    """Say now, not when it is too late, that a file can only be loaded by those who trust it."""
    entries = {key: sorted(kinds) for key, value in client_state.items() if (kinds := storage.needs_trust(value))}
    if entries:
        logger.warning(
            f"client_state holds objects of other classes than plain data, {entries}: loading this checkpoint will need"
            " DS_TRUST_CHECKPOINTS=1 in the environment"
        )
