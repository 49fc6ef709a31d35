# SPDX-License-Identifier: Apache-2.0
"""What gets packed: every module, the op builders and sources behind their links, one version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.git_version_info import version
from deepspeed.ops.op_builder import CPUAdamBuilder

ROOT = Path(__file__).resolve().parents[3]


def test_every_folder_with_modules_is_a_package():
    # setup.py packs packages only: a folder without __init__.py works in the checkout and is missing in a wheel.
    folders = {path.parent for path in (ROOT / "deepspeed").rglob("*.py")} - {ROOT / "deepspeed"}
    assert len(folders) > 5
    assert [str(path.relative_to(ROOT)) for path in sorted(folders) if not (path / "__init__.py").exists()] == []


def test_sources_are_found_from_the_package():
    assert os.path.isfile(CPUAdamBuilder().deepspeed_src_path("csrc/README.md"))
    assert CPUAdamBuilder().deepspeed_src_path("/abs/x.cpp") == "/abs/x.cpp"


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
def test_setup_packs_the_linked_folders_once_under_their_import_names():
    code = "import setuptools, json\n"
    code += "setuptools.setup = lambda **kw: print(json.dumps([kw['packages'], kw['package_dir']]))\n"
    code += "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': 'x'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    packages, folders = json.loads(done.stdout)
    assert len(packages) == len(set(packages))
    assert {"deepspeed", "deepspeed.launcher", "deepspeed.ops", "deepspeed.ops.op_builder"} <= set(packages)
    assert folders["deepspeed.ops.op_builder"] == "op_builder" and folders["deepspeed.ops.csrc"] == "csrc"


def test_version_is_readable_without_importing_the_package():
    from setuptools.config.expand import read_attr

    assert read_attr("deepspeed.git_version_info.version", root_dir=ROOT) == version == "0.20.0"
