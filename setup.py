# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: where the op sources live, and the commit that a wheel was built from."""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
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


def packages() -> list[str]:
    """Every package below deepspeed/, with the linked ones from where they really are."""
    linked = tuple(LINKED_PACKAGES)
    below = ["deepspeed", *(f"deepspeed.{name}" for name in find_packages(str(ROOT / "deepspeed")))]
    found = [name for name in below if not name.startswith(linked)]
    for name, folder in LINKED_PACKAGES.items():
        found += [name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    return found


setup(
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=packages(),
    package_dir=LINKED_PACKAGES,
    package_data={"deepspeed.ops.csrc": ["**/*"]},
    cmdclass={"build_py": BuildPyWithCommit},
)
