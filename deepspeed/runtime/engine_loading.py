# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints; formats and files are in ``deepspeed.checkpoint``, saving in ``engine_checkpoint.py``."""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import files, folders, optimizer_transfer, storage, universal_state
from deepspeed.checkpoint.agreement import together
from deepspeed.checkpoint.optimizer_state import (
    MASTER,
    SavedParameter,
    SavedState,
    read_whole_state,
    read_zero_files,
    shared_out,
)
from deepspeed.checkpoint.sharing import FolderSharing, folder_per_node, one_folder
from deepspeed.checkpoint.storage import CheckpointError, DamagedFileError, MissingCheckpointError
from deepspeed.comm.control import ControlChannel
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import unfinished
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.whole_state import load_whole_weights
from deepspeed.utils.logging import logger

# Top-level keys of a model file that are the engine's and not handed to the caller.
_OWN_KEYS = {
    "module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd",
}  # fmt: skip


class EngineLoading:
    """Part of ``EngineCheckpoint``; the engine sets the attributes below."""

    _config: DeepSpeedConfig
    _stepper: ZeROOptimizer | None
    module: torch.nn.Module
    lr_scheduler: Any
    data_parallel_group: Any
    dp_world_size: int
    global_steps: int
    global_samples: int
    skipped_steps: int

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
        weights_only = not with_state and not self._shard_model_files(folder)
        sharing = self._folder_sharing(channel)
        self._check_one_save(channel, folder, load_dir)
        together(
            channel,
            lambda: folders.check_files(folder, load_dir, weights_only, sharing.position, len(sharing.ranks)),
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
        if named is None and self._config.use_node_local_storage:
            named = self._latest_of_first_node(channel, load_dir)
        folder = together(channel, lambda: _locate(load_dir, named), f"load from {load_dir!r}")
        found = channel.gather(folder is not None, "whether a checkpoint is there")
        latest = os.path.join(load_dir, files.LATEST)
        if any(found) and not all(found):
            raise CheckpointError(f"only ranks {[rank for rank, yes in enumerate(found) if yes]} see a file {latest}")
        if folder is None:
            logger.warning(f"no file {latest}: nothing is loaded. Tags there: {files.tags_in(load_dir) or 'none'}")
        return folder

    def _latest_of_first_node(self, channel: ControlChannel, load_dir: str) -> str | None:
        """Nodes with folders of their own may name different last checkpoints, if the job ended between: all have the
        files of both. Collective."""
        tags = channel.gather(files.read_latest(load_dir), "the last checkpoint")
        return files.check_tag(tags[0]) if all(tags) else None

    def _check_one_save(self, channel: ControlChannel, folder: str, load_dir: str) -> None:
        """Nodes with folders of their own may have come to different ends of a save over the same tag. Collective.

        Raises:
            CheckpointError: on every rank.
        """
        if not self._config.use_node_local_storage:
            return
        saves = channel.gather(together(channel, lambda: storage.save_of(folder), f"load {folder}"), "the save")
        if len(set(saves)) > 1:
            by_save = [[rank for rank, save in enumerate(saves) if save == one] for one in dict.fromkeys(saves)]
            raise CheckpointError(
                f"checkpoint {folder} is of different saves on different nodes, on ranks {by_save}: the job ended while"
                f" it was replaced. {folders.whole_tags(load_dir)}"
            )

    def _shard_model_files(self, folder: str) -> dict[int, str]:
        """Model files of stage 3, by rank; with folders per node those of this node."""
        mp_rank = self.get_model_parallel_rank()
        if self._config.use_node_local_storage:
            return files.shard_model_files_there(folder, mp_rank)
        return dict(enumerate(files.find_shard_model_files(folder, mp_rank)))

    def _optim_files(self, folder: str, ranks: int | None) -> list[str | None]:
        """Files of optimizer state, by rank; None for one that is on another node.

        Args:
            ranks: how many have saved, where that is known.
        """
        mp_rank, rank = self.get_model_parallel_rank(), dist.get_rank(self.data_parallel_group)
        if self._config.use_node_local_storage and (there := files.optim_files_there(folder, mp_rank)):
            ranks = ranks or self.dp_world_size
            if len(there) < ranks and (ranks != self.dp_world_size or rank not in there):
                raise MissingCheckpointError(
                    f"checkpoint {folder} is on node-local storage, with the files of ranks {sorted(there)} of {ranks},"
                    f" and this is rank {rank} of {self.dp_world_size}. Resume on the same ranks of the same nodes, or"
                    " copy the files of all nodes into one folder"
                )
            return [there.get(one) for one in range(ranks)]
        paths = files.find_optim_files(folder, mp_rank)
        ranks = ranks or len(paths)
        if len(paths) < ranks or not paths:
            raise MissingCheckpointError(
                f"checkpoint {folder} was saved by {ranks} ranks, and the files of optimizer state of ranks"
                f" {list(range(len(paths), ranks))} are missing"
            )
        return paths[:ranks]  # those of more ranks are of an older checkpoint, where DeepSpeed wrote into its folder

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
            shards = self._shard_model_files(folder)
            if not shards:
                raise MissingCheckpointError(f"{path} does not exist, nor does a file of weights of stage 3 beside it")
            path = shards.get(dist.get_rank(self.data_parallel_group)) or shards[min(shards)]
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
        paths = self._optim_files(folder, state.get("dp_world_size"))
        contents = (None if path is None else storage.read_tensors(path, trust) for path in paths)
        return read_zero_files(contents, state["param_shapes"])

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
        in_shards = state.get("param_shapes") and self._shard_model_files(folder)
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
        paths, trust = self._shard_model_files(folder), storage.checkpoints_are_trusted()
        shards = {rank: storage.read_tensors(path, trust)["frozen_param_fragments"] for rank, path in paths.items()}
        ranks = max(state.get("dp_world_size") or 0, *(rank + 1 for rank in shards))
        return {
            name: shared_out(torch.Size(shape), {rank: shard[name] for rank, shard in shards.items()}, ranks)
            for name, shape in shapes.items()
        }

    def _whole_weights(self, kept: SavedState, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Whole weights, on the host, under all their names."""
        whole = {name: parameter.whole(MASTER) for name, parameter in kept.parameters.items()}
        aliases = aliases_of(self.module) | (state.get("shared_params") or {})
        return whole | {alias: whole[name] for alias, name in aliases.items() if name in whole}

    def _load_counters(self, state: dict[str, Any], module_only: bool, schedule: bool) -> None:
        if module_only:
            return
        if schedule and self.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps = state["global_steps"]
        self.global_samples = state.get("global_samples", self.global_steps * self.train_batch_size())
        self.skipped_steps = state["skipped_steps"]

    # ------------------------------------------------------------------ for saving too

    def _folder_sharing(self, channel: ControlChannel) -> FolderSharing:
        """Which ranks share this rank's folders. Collective where nodes have folders of their own."""
        if self._config.use_node_local_storage:
            return folder_per_node(channel, dist.get_local_rank(), self.get_model_parallel_rank())
        return one_folder(channel, writes_weights=dist.get_rank(self.data_parallel_group) == 0)

    def _checkpoint_channel(self) -> ControlChannel:
        return ControlChannel(dist.get_world_group())

    def _frozen_parameters(self, stepper: ZeROOptimizer) -> "OrderedDict[str, torch.nn.Parameter]":
        """Parameters that no optimizer trains."""
        trained = {record.parameter for record in stepper.reducer.ledger.records}
        return OrderedDict((name, p) for name, p in self.module.named_parameters() if p not in trained)


def aliases_of(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters, and the first name of each."""
    first: dict[torch.nn.Parameter, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in names if first.setdefault(parameter, name) != name}


def _locate(load_dir: str, tag: str | None) -> str | None:
    """Folder of a tag, or of the one in ``latest``; None without that file."""
    if tag is None:
        tag = files.read_latest(load_dir)
    return None if tag is None else folders.find(load_dir, files.check_tag(tag))
