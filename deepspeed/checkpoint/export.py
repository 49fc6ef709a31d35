# SPDX-License-Identifier: Apache-2.0
"""Programs that turn a checkpoint into plain weights, placed beside it so that it can be read without this package."""

import os

from deepspeed.checkpoint import storage

# These modules are the programs: what runs alone in a folder of checkpoints is what the package itself runs.
PROGRAMS = ("zero_to_fp32.py", "zero_to_torch.py")
_SOURCES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "utils")


def place_programs(save_dir: str) -> None:
    """Copy the programs into a folder of checkpoints and make them executable; leaves those that are the same."""
    for name in PROGRAMS:
        with open(os.path.join(_SOURCES, name), encoding="utf-8") as stream:
            text = stream.read()
        path = os.path.join(save_dir, name)
        if not _holds(path, text):
            storage.write_text(path, text)
        mode = os.stat(path).st_mode
        executable = mode | (mode & 0o444) >> 2  # by those who may read it
        if executable != mode:
            os.chmod(path, executable)


def _holds(path: str, text: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read() == text
