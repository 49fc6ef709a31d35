# SPDX-License-Identifier: Apache-2.0
"""A fault is found by random cases, and what shows it is small and runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unit.hypothesis_phases import PHASES
from unit.mutations import MUTATIONS, ROOT, copy_package
from unit.random_graphs.broken import FAULT, BrokenJob
from unit.random_graphs.searching import Ranks, search, write_script

pytestmark = pytest.mark.slow


@pytest.mark.skipif(len(PHASES) == 1, reason="nothing is to be made smaller (DS_TEST_SHRINK=0)")
def test_a_fault_is_found_made_small_and_shown_by_a_program(tmp_path: Path) -> None:
    with Ranks(BrokenJob) as ranks:
        finding = search(0, 40, ranks, [1], [1])
    assert finding is not None and not finding.flaky
    case = finding.case
    assert case.steps > 1, "it does not show without accumulation"
    assert len(case.blocks) == len(case.windows) == 1, case
    assert not (case.frozen_blocks or case.two_groups or case.delayed), case

    path = write_script(finding, tmp_path / "found", "Found by a test.")
    assert len(path.read_text().splitlines()) < 30
    broken = copy_package(tmp_path)
    next(mutation for mutation in MUTATIONS if mutation.name == FAULT).apply(broken)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "gradient of gain differs from" in done.stderr, done.stderr


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_follow_the_code(mutation: object, tmp_path: Path) -> None:
    """Each fault of ``mutation_check.py`` still has a place to go to, and leaves Python behind."""
    source = ROOT / "deepspeed" / mutation.file
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    mutation.apply(tmp_path)
    compile(copy.read_text(encoding="utf-8"), str(copy), "exec")
