# SPDX-License-Identifier: Apache-2.0
"""What programs keep in a client state is read back without running code, or is named when it is saved."""

import argparse
import collections
import datetime
import pathlib
import random
from typing import Any

import numpy
import pytest
import torch

from deepspeed.checkpoint import storage

READ = {
    "random state": random.getstate(),
    "numpy's random state": numpy.random.RandomState(1).get_state(),
    "arguments": argparse.Namespace(lr=0.1, out=pathlib.Path("x")),
    "array": numpy.arange(4.0),
    "number": numpy.float32(2.5),
    "flag": numpy.bool_(True),
    "path": pathlib.Path("x"),
    "time": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    "ordered": collections.OrderedDict(a=1),
    "set": {1, 2},
    "frozen set": frozenset([1]),
    "slice": slice(1, 2),
    "complex": 1j,
    "size": torch.Size([1, 2]),
}
NAMED = {"queue": collections.deque([1]), "counts": collections.defaultdict(int, a=1)}


@pytest.mark.parametrize("kind", list(READ))
def test_it_is_read(kind: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "file")
    value: Any = READ[kind]
    assert not storage.needs_trust({"x": [value]})
    storage.write_tensors(path, {"x": [value]})
    (found,) = storage.read_tensors(path)["x"]
    assert type(found) is type(value)
    pairs = zip(found, value, strict=True) if isinstance(value, tuple) else [(found, value)]
    assert all(
        numpy.array_equal(one, other) if isinstance(one, numpy.ndarray) else one == other for one, other in pairs
    )


@pytest.mark.parametrize("kind", list(NAMED))
def test_it_is_named(kind: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "file")
    assert storage.needs_trust({"x": [NAMED[kind]]})
    storage.write_tensors(path, {"x": NAMED[kind]})
    with pytest.raises(storage.CheckpointError, match="DS_TRUST_CHECKPOINTS"):
        storage.read_tensors(path)
    assert storage.read_tensors(path, trust=True)["x"] == NAMED[kind]
