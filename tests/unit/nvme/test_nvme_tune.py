# SPDX-License-Identifier: Apache-2.0
"""``ds_nvme_tune``: a sweep over few settings, and the choice from its results."""

import json

import pytest

from deepspeed.nvme import generate_main, sweep_main, tune
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

FLAGS = ["--io_size", "64K", "--log_dir"]


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"block_size": ["16K"], "queue_depth": [2, 4], "io_parallel": 1}))
    return ["--sweep_config", str(path)]


def test_sweep_notes_goes_on_and_generates(capsys, monkeypatch, tmp_path, sweep):
    disk, logs = tmp_path / "disk", str(tmp_path / "logs")
    disk.mkdir()
    args = ["--nvme_dir", str(disk), *FLAGS, logs, *sweep]
    found = sweep_main(args)
    assert [(one["direction"], one["settings"]["queue_depth"]) for one in found] == [
        ("read", 2), ("read", 4), ("write", 2), ("write", 4)
    ]  # fmt: skip
    assert all(one["gb_per_s"] > 0 for one in found) and list(disk.iterdir()) == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("[1/4] read block_size=16K queue_depth=2") and "left" in lines[0]
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("measured again"))
    assert sweep_main(args) == found
    capsys.readouterr()
    generate_main(["--log_dir", logs])
    rates, _, section = capsys.readouterr().out.partition("\n")
    parsed = json.loads(section)
    assert get_aio_config(parsed)["queue_depth"] in (2, 4) and parsed["aio"]["block_size"] == 16384
    assert "read" in rates and "write" in rates


def test_the_choice_is_good_in_both_directions():
    def result(direction, depth, rate):
        return {"direction": direction, "settings": {"queue_depth": depth}, "gb_per_s": rate}

    results = [result("read", 1, 10.0), result("read", 2, 8.0), result("read", 3, 1.0)]
    results += [result("write", 1, 1.0), result("write", 2, 3.5), result("write", 3, 4.0)]
    assert tune.best_section(results) == ({"queue_depth": 2, "overlap_events": True}, {"read": 8.0, "write": 3.5})
    assert tune.best_section(results[:3])[0]["queue_depth"] == 1


@pytest.mark.parametrize(
    "flags, message",
    [(["--gds"], "op gds"), (["--no_read", "--no_write"], "nothing"), (["--sweep_config", "{other}"], "unknown")],
)
def test_bad_command_lines(capsys, tmp_path, flags, message):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"colour": [1]}))
    with pytest.raises(SystemExit):
        sweep_main(["--nvme_dir", str(tmp_path), *FLAGS, str(tmp_path), *(flag.format(other=other) for flag in flags)])
    assert message in capsys.readouterr().err


def test_missing_folder_and_no_results(capsys, tmp_path):
    with pytest.raises(SystemExit):
        sweep_main(["--nvme_dir", "/nonexistent", *FLAGS, str(tmp_path)])
    assert "/nonexistent" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no results"):
        generate_main(["--log_dir", str(tmp_path)])
