# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed at points spread over a save: afterwards a load without a tag finds a whole checkpoint, the former
or the new one. ``tests/kill_campaign.py`` does it at many more."""

from __future__ import annotations

from unit.checkpoint.killing import Case, Kill, kill_within, resume

FIRST, SECOND, BOTH = (0,), (1,), (0, 1)
# Who dies, at which call or before it, over a save that replaces a tag or makes a new one; the checkpoint found after.
POINTS = [
    (Kill(FIRST, "write", 1, False), True, 1),
    (Kill(BOTH, "write", 2, True), False, 1),
    (Kill(SECOND, "write", 1, True), True, 1),
    (Kill(SECOND, "pwrite", 1, False), False, 1),
    (Kill(BOTH, "fsync", 3, True), True, 1),
    (Kill(SECOND, "replace", 1, True), True, 1),
    (Kill(FIRST, "replace", 3, False), False, 1),
    (Kill(BOTH, "rename", 1, True), True, None),
    (Kill(FIRST, "rename", 2, True), True, 2),
    (Kill(FIRST, "rename", 1, True), False, 1),
    (Kill(FIRST, "remove", 1, False), True, 2),
]


def test_a_whole_checkpoint_is_always_there(tmp_path):
    cases, expected = [], []
    for index, (kill, replacing, found) in enumerate(POINTS):
        stage, decoupled = 1 + 2 * (index % 2), index % 3 == 2
        cases.append(Case(str(tmp_path / str(index)), stage, kill, replacing, decoupled))
        assert kill_within(cases[-1]), f"{kill} must lie inside the save"
        expected.append(found)
    found = resume(cases, str(tmp_path / "found"))
    assert [one if one is None else real for one, real in zip(expected, found)] == expected, list(zip(POINTS, found))
