# SPDX-License-Identifier: Apache-2.0
"""The package logger: quiet, one line per record, on the ranks that were asked for."""

import json
import logging
import os
import subprocess
import sys

import pytest

from deepspeed.utils import logging as ds_logging
from deepspeed.utils.logging import LoggerFactory, log_dist, logger, print_json_dist, should_log_le
from unit.common import DistributedTest


@pytest.fixture
def restored_level():
    level = logger.level
    yield
    logger.setLevel(level)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_default_is_warning_with_one_handler():
    assert logger.name == "DeepSpeed" and logger.level == logging.WARNING and not logger.propagate
    assert LoggerFactory.create_logger("DeepSpeed") is logger
    assert sum(isinstance(handler, ds_logging._StderrHandler) for handler in logger.handlers) == 1


def test_root_handlers_do_not_repeat_lines(capsys):
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)
    try:
        logger.warning("once %d", 1)
    finally:
        logging.getLogger().removeHandler(root)
    (line,) = lines(capsys)
    assert line.endswith("once 1") and "[WARNING] [test_logging.py:" in line


def test_root_logger_is_not_configured():
    with pytest.raises(ValueError, match="name"):
        LoggerFactory.create_logger()


def test_warning_once(capsys):
    for _ in range(3):
        ds_logging.warning_once("beware of %s", ["the list"])
    ds_logging.warning_once("beware of %s", ["another list"])
    assert [line.split("] ")[-1] for line in lines(capsys)] == ["beware of ['the list']", "beware of ['another list']"]


def test_levels(restored_level):
    ds_logging.set_log_level_from_string("ERROR")
    assert ds_logging.get_current_level() == logging.ERROR
    assert should_log_le("critical") and should_log_le("error") and not should_log_le("warning")
    with pytest.raises(ValueError, match="loud"):
        ds_logging.set_log_level_from_string("loud")


@pytest.mark.parametrize(
    "rank, ranks, speaks",
    [(0, None, True), (1, None, False), (1, [1], True), (1, [0], False), (1, [-1], True), (0, [], False)],
)
def test_ranks_from_the_launcher(monkeypatch, capsys, restored_level, rank, ranks, speaks):
    monkeypatch.setenv("RANK", str(rank))
    logger.setLevel(logging.INFO)
    log_dist("hello", ranks=ranks)
    said = lines(capsys)
    assert len(said) == speaks
    if speaks:
        assert said[0].endswith(f"[Rank {rank}] hello") and "test_logging.py" in said[0]


def test_below_the_level_nothing_is_logged(capsys):
    log_dist("quiet", ranks=[-1])
    assert lines(capsys) == []


def test_log_dist_once(capsys, restored_level):
    logger.setLevel(logging.INFO)
    for _ in range(2):
        ds_logging.log_dist_once("said once", ranks=[-1])
    assert len(lines(capsys)) == 1


def test_json(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    message = {"a": 1}
    print_json_dist(message, ranks=[2], path=str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1, "rank": 2} and message == {"a": 1}
    print_json_dist(message, ranks=[0], path=str(tmp_path / "not.json"))
    assert not (tmp_path / "not.json").exists()


@pytest.mark.parametrize("excluded, expected", [("", ["outside"]), ("warning", ["inside", "outside"])])
def test_silence_while_compiling(excluded, expected):
    script = (
        "import torch\n"
        "from deepspeed.utils.logging import logger\n"
        "compiling = True\n"
        "torch.compiler.is_compiling = lambda: compiling\n"
        "logger.warning('inside')\n"
        "compiling = False\n"
        "logger.warning('outside')\n"
    )
    env = {**os.environ, "DISABLE_LOGS_WHILE_COMPILING": "1", "LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE": excluded}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert [line.split("] ")[-1] for line in done.stderr.splitlines()] == expected


def said_by_a_process(script, **variables):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "DS_LOG_LEVEL")}
    script = f"from deepspeed.utils.logging import *\n{script}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**env, **variables}, check=False
    )


def test_the_rank_stands_in_every_line_once(monkeypatch, capsys, restored_level):
    logger.setLevel(logging.INFO)
    monkeypatch.setenv("RANK", "3")
    logger.warning("%d of a kind", 2)
    log_dist("chosen", ranks=[3])
    ds_logging.warning_once("rank 3 warns once")
    assert [line.split("] ", 3)[-1] for line in lines(capsys)] == [
        "[Rank 3] 2 of a kind",
        "[Rank 3] chosen",
        "[Rank 3] rank 3 warns once",
    ]


def test_a_process_that_is_no_rank_names_none(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    logger.warning("launching")
    (line,) = lines(capsys)
    assert line.endswith("] launching") and "Rank" not in line


@pytest.mark.parametrize(
    "variable, called, said",
    [
        ("", "", ["warning"]),
        ("INFO", "", ["info", "warning"]),
        ("error", "", []),
        ("error", "info", ["info", "warning"]),  # the config's log_level sets it so
    ],
)
def test_level_from_the_environment(variable, called, said):
    script = "logger.info('info'); logger.warning('warning')"
    if called:
        script = f"set_log_level_from_string({called!r}); {script}"
    done = said_by_a_process(script, DS_LOG_LEVEL=variable)
    assert done.returncode == 0 and done.stdout == ""
    assert [line.rsplit("] ", 1)[-1] for line in done.stderr.splitlines()] == said


def test_a_bad_level_in_the_environment_is_named():
    done = said_by_a_process("", DS_LOG_LEVEL="loud")
    assert done.returncode != 0
    assert "ValueError: environment variable DS_LOG_LEVEL='loud': use one of debug, info" in done.stderr


class TestRanks(DistributedTest):
    world_size = 2

    def test_rank_of_the_process_group(self):
        rank = int(os.environ.pop("RANK"))
        assert ds_logging.get_dist_msg("m", [1]) == ("[Rank 1] m" if rank == 1 else None)
