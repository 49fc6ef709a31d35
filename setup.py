# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: where the op sources live, the commit that a wheel was built from, and native ops.

Those are compiled ahead of time if asked for: all that can be with DS_BUILD_OPS=1, single ones with DS_BUILD_<OP>=1 (0
leaves one out).
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# In the checkout deepspeed/ops/op_builder and deepspeed/ops/csrc are links to these folders. They are named here
# so that wheels and source distributions hold each file once and need no links.
LINKED_PACKAGES = {"deepspeed.ops.op_builder": "op_builder", "deepspeed.ops.csrc": "csrc"}


def _git(*args: str) -> str:
    """Output of a git command in this checkout, "unknown" outside of one (a source distribution) or without git."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


class BuildPyWithCommit(build_py):
    """Adds deepspeed/_build_info.py to what is built; the source tree is not written to."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        lines = [
            "# SPDX-License-Identifier: Apache-2.0",
            "# Written when the package was built.",
            f"git_hash = {_git('rev-parse', '--short', 'HEAD')!r}",
            f"git_branch = {_git('rev-parse', '--abbrev-ref', 'HEAD')!r}",
        ]
        Path(self.build_lib, "deepspeed", "_build_info.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


class BuildOps(build_ext):
    """Compiles the chosen ops with the builders of ``op_builder``, to where their modules are imported from."""

    def run(self) -> None:
        for name, op in OPS.items():
            print(f"compiling op {op.name}", flush=True)
            op.compile_ahead(self._folder(name))

    def _folder(self, name: str) -> Path:
        return Path(ROOT if self.inplace else self.build_lib, *name.split(".")[:-1])

    def get_outputs(self) -> list[str]:
        return [str(path) for name in OPS for path in self._folder(name).glob(f"{name.rpartition('.')[2]}.*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def chosen_ops() -> dict[str, Any]:
    """Builders of the ops that the environment asks for, by import path of the op.

    Raises:
        SystemExit: torch is missing, or an op that is asked for by name cannot be compiled here.
    """
    if not any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items()):
        return {}
    sys.path.insert(0, str(ROOT))
    try:
        from op_builder.all_ops import ALL_OPS
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"DS_BUILD_...=1 compiles native ops, for which {error.name} must be importable: install it first, then "
            "this package with `pip install --no-build-isolation`"
        ) from error
    chosen = {}
    for op in ALL_OPS.values():
        by_name = os.environ.get(op.BUILD_VAR) if op.BUILD_VAR else None
        if (by_name or os.environ.get("DS_BUILD_OPS", "0")) != "1" or not op.BUILD_VAR:
            continue
        reason = op.why_not()
        if reason is None:
            chosen[op.absolute_name()] = op
        elif by_name:
            raise SystemExit(f"{op.BUILD_VAR}=1, but op {op.name} cannot be compiled here: {reason}")
        else:
            print(f"op {op.name} is left out: {reason}", flush=True)
    return chosen


def packages() -> list[str]:
    """Every package below deepspeed/, with the linked ones from where they really are."""
    linked = tuple(LINKED_PACKAGES)
    below = ["deepspeed", *(f"deepspeed.{name}" for name in find_packages(str(ROOT / "deepspeed")))]
    found = [name for name in below if not name.startswith(linked)]
    for name, folder in LINKED_PACKAGES.items():
        found += [name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    return found


OPS = chosen_ops()

setup(
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=packages(),
    package_dir=LINKED_PACKAGES,
    package_data={"deepspeed.ops.csrc": ["**/*"]},
    ext_modules=[op.builder() for op in OPS.values()],
    cmdclass={"build_py": BuildPyWithCommit, "build_ext": BuildOps},
)
