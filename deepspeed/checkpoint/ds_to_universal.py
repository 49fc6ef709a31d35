# SPDX-License-Identifier: Apache-2.0
"""Make a universal checkpoint from one of stages 1 to 3::

    python -m deepspeed.checkpoint.ds_to_universal --input_folder CKPT/TAG --output_folder OUT/TAG_universal

Parameters are put together one at a time from mapped files, so memory holds as many whole entries as there are merge
workers. The output gets its name when everything is on the disk; ``OUT/latest_universal`` moves last.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.checkpoint import files, folders, storage
from deepspeed.checkpoint.host_copies import writable_state
from deepspeed.checkpoint.optimizer_state import MASTER, SavedParameter, SavedState, read_zero_files
from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.checkpoint.universal_state import (
    CAT_DIM,
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE,
    PARAM,
    UNIVERSAL_CHECKPOINT_INFO,
    ZERO_FOLDER,
    parameter_folder,
)
from deepspeed.utils.logging import logger

_OTHER_SPLITS = re.compile(r"^(?:layer_|expp_rank_|.*mp_rank_(?!00)\d\d_?(?:model|optim)_states\.pt$)")
# Entries of a rank's optimizer state that hold values of its part of the parameters (stages 1 and 2).
_PARTS = ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "flat_groups")


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.checkpoint.ds_to_universal", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint: CKPT/TAG")
    parser.add_argument("--output_folder", required=True, help="folder to make, such as OUT/TAG_universal")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="no effect: files are mapped, not extracted")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="parameters put together at the same time")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there are no temporary files")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="leave out entries that are not complete"
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="stages 1 and 2: go on without universal_checkpoint_info; also write buffers, frozen and tied weights",
    )
    return parser.parse_args(args)


def atoi(text: str) -> int | str:
    """A number where the text is one."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Key that sorts rank 10 after rank 9."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


@dataclass
class _Source:
    """The checkpoint that is converted."""

    folder: str
    model_files: list[str]
    model: dict[str, Any]
    optimizer: dict[str, Any]  # of the first rank
    state: SavedState

    @property
    def by_parameter(self) -> bool:
        """Whether it is of stage 3."""
        return "fp32_flat_groups" in self.optimizer


@dataclass
class _Progress:
    """What is told while it lasts: about once in ``every`` seconds, and at the end."""

    total: int
    every: float = 2.0
    done: int = 0
    nbytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def add(self, nbytes: int) -> None:
        self.done += 1
        self.nbytes += nbytes
        now = time.monotonic()
        if now - self.told >= self.every or self.done == self.total:
            self.told = now
            print(
                f"ds_to_universal: {self.done} of {self.total} parameters, {self.nbytes / 1e9:.2f} GB,"
                f" {now - self.begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def main(args: argparse.Namespace) -> None:
    """Convert ``args.input_folder`` to ``args.output_folder``; ``args`` as from ``parse_arguments``.

    Raises:
        FileNotFoundError: there is no checkpoint in the input folder.
        CheckpointError: it is not complete, or of an unknown arrangement.
        ValueError: it is of stage 0, which needs no conversion.
        AssertionError: stage 1 or 2 without ``universal_checkpoint_info``, and no ``--inject_missing_state``.
        NotImplementedError: tensor or pipeline parallelism, or experts.
    """
    source = _open(args.input_folder)
    if not source.by_parameter and not args.inject_missing_state:
        key = UNIVERSAL_CHECKPOINT_INFO
        assert key in source.model, (
            f"the model file of {source.folder} has no {key!r}. Convert with --inject_missing_state, or save with"
            f" client_state={{{key!r}: {{'universal_checkpoint_version': 0.4}}}}"
        )
    parent, tag = os.path.split(os.path.abspath(args.output_folder))
    os.makedirs(parent, exist_ok=True)
    folders.start(parent, tag)
    staging = folders.staging_folder(parent, tag)
    try:
        sizes = _write_all(source, staging, args)
        os.sync()  # thousands of small files: all at once instead of one after the other
        folders.finish(parent, tag, sizes)
    except BaseException:
        folders.abandon(parent, tag)
        raise
    storage.write_text(os.path.join(parent, LATEST_UNIVERSAL), tag)


def _open(folder: str) -> _Source:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}: give the folder of one checkpoint, CKPT/TAG")
    other = sorted(name for name in os.listdir(folder) if _OTHER_SPLITS.match(name))
    if other:
        raise NotImplementedError(
            f"{folder} holds {other[0]}: checkpoints of tensor or pipeline parallel models, or with experts, cannot be"
            " converted"
        )
    faults = storage.faults_of(folder)
    if faults:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(faults[:8])}")
    trust = storage.checkpoints_are_trusted()
    single = os.path.join(folder, files.model_file(0))
    model_files = [single] if os.path.isfile(single) else files.find_shard_model_files(folder)
    if not model_files:
        raise FileNotFoundError(
            f"there is no file *{files.MODEL_SUFFIX} in {folder}: give the folder of one checkpoint, CKPT/TAG"
        )
    model = storage.read_tensors(model_files[0], trust)
    optim_files = files.find_optim_files(folder)
    ranks = model.get("dp_world_size") or len(optim_files)
    if not optim_files and not model.get("param_shapes"):
        raise ValueError(f"checkpoint {folder} is of stage 0: it can be loaded at any stage, without conversion")
    if len(optim_files) < ranks:
        missing = list(range(len(optim_files), ranks))
        raise CheckpointError(f"checkpoint {folder}: the files of optimizer state of ranks {missing} are missing")
    contents = [storage.read_tensors(path, trust) for path in optim_files[:ranks]]
    state = read_zero_files(contents, model["param_shapes"])
    kept = model_files if len(model_files) == 1 else model_files[:ranks]
    return _Source(folder, kept, model, contents[0]["optimizer_state_dict"], state)


def _write_all(source: _Source, staging: str, args: argparse.Namespace) -> dict[str, int]:
    """Write all files below ``staging``; their sizes by name."""
    writer = _EntryWriter(source, staging, args.strict)
    jobs: list[Callable[[], int]] = [
        (lambda name=name, parameter=parameter: writer.write_parameter(name, parameter))
        for name, parameter in source.state.parameters.items()
    ]
    if args.inject_missing_state and not source.by_parameter:
        jobs += [(lambda name=name: writer.write_other(name)) for name in _other_names(source)]
    progress = _Progress(len(jobs))
    with ThreadPoolExecutor(max(1, args.num_merge_workers)) as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            for job in running:
                progress.add(job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    writer.write(os.path.join(ZERO_FOLDER, OPTIMIZER_STATE), _common_state(source))
    for path in source.model_files:
        name = os.path.basename(path)
        shutil.copyfile(path, os.path.join(staging, name))
        writer.sizes[name] = os.path.getsize(path)
    return writer.sizes


def _other_names(source: _Source) -> Iterable[str]:
    """Buffers, parameters that nobody trains and further names of tied ones."""
    module = source.model.get("module") or {}
    return [name for name, value in module.items() if name not in source.state.parameters and _is_tensor(value)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _EntryWriter:
    """Writes entries as the stage of the source wants them.

    Attributes:
        sizes: bytes of what was written, by name.
    """

    def __init__(self, source: _Source, staging: str, strict: bool) -> None:
        self._source = source
        self._staging = staging
        self._strict = strict
        self.sizes: dict[str, int] = {}

    def write(self, name: str, content: Any) -> int:
        """One file; its size."""
        path = os.path.join(self._staging, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(writable_state(content), path)
        size = self.sizes[name] = os.path.getsize(path)
        return size

    def _write_entry(self, parameter: str, key: str, value: torch.Tensor) -> int:
        place = os.path.relpath(parameter_folder(self._staging, parameter), self._staging)
        content = value.reshape(-1) if self._source.by_parameter else {PARAM: value, CAT_DIM: 0}
        return self.write(os.path.join(place, f"{key}.pt"), content)

    def write_parameter(self, name: str, parameter: SavedParameter) -> int:
        """All entries of a trained parameter; bytes written."""
        written = 0
        # A parameter without elements lies in no file.
        for key in sorted(parameter.keys() | {MASTER}):
            try:
                value = parameter.whole(key) if parameter.shape.numel() else torch.empty(parameter.shape)
                written += self._write_entry(name, key, value)
            except CheckpointError as error:
                message = f"checkpoint {self._source.folder}: parameter {name!r}: {error}"
                if self._strict:
                    raise CheckpointError(f"{message}. With --no_strict it is left out") from error
                logger.warning(f"{message}; left out")
        if not self._source.by_parameter:
            place = os.path.relpath(parameter_folder(self._staging, name), self._staging)
            for key, value in parameter.scalars.items():
                written += self.write(os.path.join(place, f"{key}.pt"), value)
        return written

    def write_other(self, name: str) -> int:
        """A tensor of the model that the optimizer does not know; bytes written."""
        trained = self._source.state.parameters.get((self._source.model.get("shared_params") or {}).get(name))
        if trained is not None:
            return self._write_entry(name, MASTER, trained.whole(MASTER))
        value = self._source.model["module"][name]
        return self._write_entry(name, MASTER, value.float() if value.is_floating_point() else value)


def _common_state(source: _Source) -> dict[str, Any]:
    """What is left of the first rank's optimizer state without the parameters."""
    optimizer = source.optimizer
    if source.by_parameter:
        return optimizer | {"param_groups": optimizer["optimizer_state_dict"]["param_groups"]}
    kept = {key: value for key, value in optimizer.items() if key not in _PARTS}
    return kept | {"param_groups": optimizer["base_optimizer_state"]["param_groups"]}


if __name__ == "__main__":
    main(parse_arguments())
