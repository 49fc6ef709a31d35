# SPDX-License-Identifier: Apache-2.0
"""Marks and checks that tests use to say what they need from the machine."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from packaging.version import Version


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether the installed torch lies in the closed range ``min_version`` to ``max_version`` of releases.

    A bound holds to the depth it is given: 2.7.1 lies within ``max_version=2.7``. Give a minor version that ends in
    zero as a string ("2.10"), since the float 2.10 is 2.1. Local suffixes (``+cu128``) and pre-releases are ignored.
    """
    installed = Version(torch.__version__).release

    def bound(version: float | str) -> tuple[int, ...]:
        return Version(str(version)).release

    if min_version is not None and installed < bound(min_version):
        return False
    return max_version is None or installed[: len(bound(max_version))] <= bound(max_version)


def skip_on_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> pytest.MarkDecorator:
    """Mark that skips unless torch lies in the range (see ``required_torch_version``)."""
    reason = f"needs torch >= {min_version}, <= {max_version}; found {torch.__version__}"
    return pytest.mark.skipif(not required_torch_version(min_version, max_version), reason=reason)


def skip_on_no_cuda() -> None:
    """Skip the calling test where there is no CUDA device. As a mark: ``@pytest.mark.cuda``."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def skip_on_fewer_devices(count: int) -> None:
    """Skip the calling test where there are fewer than ``count`` CUDA devices."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, found {found}")


def skip_on_no_compiler() -> None:
    """Skip the calling test where no C++ compiler is found to build native ops with."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("needs a C++ compiler")


def bf16_is_supported() -> bool:
    """Whether the device that tests run on computes in bfloat16. CPUs all do, if slowly."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def skip_on_no_bf16() -> None:
    """Skip the calling test where the device does not compute in bfloat16."""
    if not bf16_is_supported():
        pytest.skip("needs a device that computes in bfloat16")


def local_device() -> torch.device:
    """Where a test puts its tensors: this rank's CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes of this process beyond ``nbytes`` of a file fail inside; with 0 every write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
