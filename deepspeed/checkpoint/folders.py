# SPDX-License-Identifier: Apache-2.0
"""The folder of one checkpoint from its first file to its replacement, so that at any moment a whole one is there.

A checkpoint is written into ``.saving-<tag>`` and renamed when it is whole. One that it replaces waits meanwhile as
``.replaced-<tag>``. Whatever moment a job dies at, one of the three is whole and is found under the tag.
"""

import os
import shutil

from deepspeed.checkpoint import files, storage
from deepspeed.checkpoint.storage import CheckpointError, MissingCheckpointError

STAGING = ".saving-"
REPLACED = ".replaced-"


def staging_folder(save_dir: str, tag: str) -> str:
    """Where the checkpoint of a tag is written."""
    return _beside(save_dir, tag, STAGING)


def _beside(save_dir: str, tag: str, front: str) -> str:
    # One name per tag: "a/b" must not meet "a_b".
    return os.path.join(save_dir, front + tag.replace("%", "%25").replace("/", "%2F"))


def start(save_dir: str, tag: str) -> None:
    """Make the empty folder to write into. What a job that died in between has left whole gets its name back first."""
    staging, replaced, target = staging_folder(save_dir, tag), _beside(save_dir, tag, REPLACED), _target(save_dir, tag)
    below = files.tags_in(target)
    if below:
        raise CheckpointError(f"tag {tag!r} cannot be saved: it is the folder of the checkpoints {below}")
    if not holds_model(target):
        for candidate in (staging, replaced):
            if is_whole(candidate) and not os.path.isdir(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(candidate, target)
                _sync_parents(save_dir, target)
    abandon(save_dir, tag)
    os.makedirs(staging)


def abandon(save_dir: str, tag: str) -> None:
    """Free the disk of a save that did not come to its end."""
    staging = staging_folder(save_dir, tag)
    if os.path.isdir(staging):
        shutil.rmtree(staging)


def finish(save_dir: str, tag: str, sizes: dict[str, int], save: str = "") -> None:
    """All files are written: give their folder its name.

    Args:
        sizes: bytes of each file.
        save: which save this is part of, where nodes have folders of their own.
    """
    staging, replaced, target = staging_folder(save_dir, tag), _beside(save_dir, tag, REPLACED), _target(save_dir, tag)
    storage.write_manifest(staging, sizes, save)  # brings all names in the folder to the disk
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(target):
        if os.path.isdir(replaced):
            _retire(replaced, target)
        os.rename(target, replaced)
    os.rename(staging, target)
    _sync_parents(save_dir, target)
    if os.path.isdir(replaced):
        _retire(replaced, target)


def _target(save_dir: str, tag: str) -> str:
    return os.path.abspath(os.path.join(save_dir, tag))


def _sync_parents(save_dir: str, target: str) -> None:
    """Bring the names of a folder and of those above it, up to the folder of checkpoints, to the disk."""
    top = os.path.abspath(save_dir)
    folder = os.path.dirname(target)
    while folder != top and folder.startswith(top):
        storage.sync_folder(folder)
        folder = os.path.dirname(folder)
    storage.sync_folder(top)


def _retire(replaced: str, target: str) -> None:
    """Delete a checkpoint that has been replaced. Other files in its folder move on."""
    sizes = storage.read_manifest(replaced)
    for name in os.listdir(replaced):
        written_by_us = files.is_checkpoint_file(name) if sizes is None else name in sizes or name == files.MANIFEST
        if not written_by_us and not os.path.exists(os.path.join(target, name)):
            os.rename(os.path.join(replaced, name), os.path.join(target, name))
    shutil.rmtree(replaced)


# ---------------------------------------------------------------------------------------------------- finding


def find(load_dir: str, tag: str) -> str:
    """The folder of a tag; while it was being replaced when the job died, the whole one of the two beside it.

    Raises:
        MissingCheckpointError: there is none.
    """
    folder = os.path.join(load_dir, tag)
    if holds_model(folder):
        return folder
    for front in (STAGING, REPLACED):
        candidate = _beside(load_dir, tag, front)
        if is_whole(candidate):
            return candidate
    there = files.tags_in(load_dir)
    if not os.path.isdir(load_dir):
        rest = "that folder does not exist"
    else:
        rest = f"the tags there are {there}" if there else "there is none at all"
    raise MissingCheckpointError(f"there is no checkpoint {tag!r} in {load_dir!r}; {rest}")


def holds_model(folder: str) -> bool:
    """Whether some file of weights is there, or a manifest, which says what should be."""
    return os.path.isdir(folder) and any(
        name.endswith(files.MODEL_SUFFIX) or name == files.MANIFEST for name in os.listdir(folder)
    )


def check_files(folder: str, load_dir: str, weights_only: bool = False, rank: int = 0, world_size: int = 1) -> None:
    """Compare names and sizes of files with the manifest, and their contents with their checksums.

    Args:
        weights_only: files of optimizer state do not matter.
        rank, world_size: ranks share the checksums among them, so that all together read each file once.

    Raises:
        CheckpointError: names missing and damaged files, and tags that are whole.
    """

    def matters(name: str) -> bool:
        return not (weights_only and files.is_optim_file(name))

    faults = storage.faults_of(folder, only=matters)
    if not faults and storage.sums_are_checked():
        names = sorted(filter(matters, storage.read_manifest(folder) or ()))
        for name in names[rank::world_size]:
            faults += storage.wrong_sums(os.path.join(folder, name))
    if faults:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(faults[:8])}. {whole_tags(load_dir)}")


def whole_tags(load_dir: str) -> str:
    """What a message says about the checkpoints that could be loaded instead."""
    whole = [tag for tag in files.tags_in(load_dir) if is_whole(os.path.join(load_dir, tag))]
    return f"Checkpoints in {load_dir} whose files are all there, oldest first: {whole or 'none'}"


def is_whole(folder: str) -> bool:
    """Whether a manifest is there and every file of it, of the right size."""
    return os.path.isfile(os.path.join(folder, files.MANIFEST)) and not storage.faults_of(folder)
