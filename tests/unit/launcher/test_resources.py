# SPDX-License-Identifier: Apache-2.0
"""Which hosts and slots a command line, a hostfile and the environment choose."""

import base64
import json
import logging

import pytest

from deepspeed.launcher import runner

POOL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def write(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    return str(path)


def test_hostfile_keeps_order_and_skips_comments_and_blank_lines(tmp_path):
    path = write(tmp_path, "# mine\n\nworker-1 slots=2\n  worker-0   slots=16  \n")
    assert list(runner.fetch_hostfile(path).items()) == [("worker-1", 2), ("worker-0", 16)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "worker-0 slots=2\nworker-0 slots=3\n",
        "worker-0\n",
        "worker-0 slots=x\n",
        "a b slots=1\n",
    ],
)
def test_bad_hostfile_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="hostfile"):
        runner.fetch_hostfile(write(tmp_path, text))


def test_missing_hostfile_means_this_host_with_a_warning_if_somebody_named_it(tmp_path, monkeypatch):
    levels = []
    monkeypatch.setattr(runner.logger, "log", lambda level, message: levels.append(level))
    assert runner.fetch_hostfile(str(tmp_path / "nowhere")) is None
    monkeypatch.setattr(runner, "DLTS_HOSTFILE", str(tmp_path / "default"))
    assert runner.fetch_hostfile(str(tmp_path / "default")) is None
    assert levels == [logging.WARNING, logging.DEBUG]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("worker-0", ("worker-0", [])),
        ("worker-0:3,1,1", ("worker-0", [1, 3])),
        ("10.0.0.1:0", ("10.0.0.1", [0])),
    ],
)
def test_node_config(text, expected):
    assert runner.parse_node_config(text) == expected


@pytest.mark.parametrize("text", ["", ":0", "worker-0:", "worker-0:a", "worker-0:1,", "worker-0:0:1", "worker-0:-1"])
def test_bad_node_config_is_refused(text):
    with pytest.raises(ValueError, match="HOST"):
        runner.parse_node_config(text)


def test_repeated_hosts_are_merged():
    merged = runner.parse_node_config_list(["b:1", "a:2", "b:3,0", "a"])
    assert list(merged.items()) == [("b", [0, 1, 3]), ("a", [])]


@pytest.mark.parametrize(
    "include, exclude, expected",
    [
        ("", "", POOL),
        ("worker-1:2,0", "", {"worker-1": [0, 2]}),
        ("worker-1@worker-0:1", "", {"worker-0": [1], "worker-1": [0, 1, 2, 3]}),
        ("worker-0:1@worker-0:3", "", {"worker-0": [1, 3]}),
        ("", "worker-0:0,3", {"worker-0": [1, 2], "worker-1": [0, 1, 2, 3]}),
        ("", "worker-0", {"worker-1": [0, 1, 2, 3]}),
        ("", "worker-1:0,1@worker-1:2,3", {"worker-0": [0, 1, 2, 3]}),
    ],
)
def test_resource_filter(include, exclude, expected):
    filtered = runner.parse_resource_filter(POOL, include_str=include, exclude_str=exclude)
    assert list(filtered.items()) == list(expected.items())


@pytest.mark.parametrize(
    "include, exclude, message",
    [
        ("worker-0", "worker-1", "together"),
        ("worker-9", "", "worker-9"),
        ("", "worker-9", "worker-9"),
        ("worker-0:4", "", "4"),
        ("", "worker-0:4", "4"),
    ],
)
def test_resource_filter_refuses(include, exclude, message):
    with pytest.raises(ValueError, match=message):
        runner.parse_resource_filter(POOL, include_str=include, exclude_str=exclude)


def test_inclusion_starts_from_numbers_of_slots():
    assert runner.parse_inclusion_exclusion({"a": 2, "b": 3}, "", "b:1") == {"a": [0, 1], "b": [0, 2]}


def test_num_nodes_and_gpus_take_the_first_ones():
    assert runner.apply_num_nodes_and_gpus(POOL, -1, -1) == POOL
    assert runner.apply_num_nodes_and_gpus(POOL, 1, 2) == {"worker-0": [0, 1]}
    for nodes, gpus in ((3, -1), (-1, 5)):
        with pytest.raises(ValueError, match="only"):
            runner.apply_num_nodes_and_gpus(POOL, nodes, gpus)


def test_world_info_is_urlsafe_base64_of_json():
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info(POOL))) == POOL


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (["--include", "a", "--exclude", "b"], ValueError, "together"),
        (["--include", "a", "--num_gpus", "2"], ValueError, "together"),
        (["--exclude", "a", "--num_nodes", "2"], ValueError, "together"),
        (["--module", "--no_python"], ValueError, "together"),
        (["--num_gpus", "0"], ValueError, "at least 1"),
        (["--no_ssh"], AssertionError, "node_rank"),
        (["--bind_core_list", "0-3"], ValueError, "bind_cores_to_rank"),
        (["--min_elastic_nodes", "2"], ValueError, "elastic_training"),
        (["--elastic_training", "--max_elastic_nodes", "0"], ValueError, "at least 1"),
        (["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2"], ValueError, "above 2"),
        (["--launcher", "pigeon"], NotImplementedError, "pigeon"),
        (["--num_nodes", "2"], ValueError, "hostfile"),
        (["--force_multi"], ValueError, "hostfile"),
        (["--autotuning", "run"], NotImplementedError, "autotuning"),
        (["--include", "localhost:7"], ValueError, "7"),
    ],
)
def test_contradicting_command_lines_are_refused(tmp_path, flags, error, message):
    with pytest.raises(error, match=message):
        runner.main(["--hostfile", str(tmp_path / "none"), *flags, "script.py"])


def test_defaults_and_everything_after_the_script_is_the_scripts():
    args = runner.parse_args(["--num_accelerators", "3", "train.py", "--num_gpus", "9", "-q"])
    assert (args.num_gpus, args.user_script, args.user_args) == (3, "train.py", ["--num_gpus", "9", "-q"])
    assert (args.hostfile, args.master_port, args.master_addr) == ("/job/hostfile", 29500, "")
    assert (args.launcher, args.num_nodes, args.node_rank) == ("pdsh", -1, -1)
    assert not args.quiet


class TwoDevices:
    """An accelerator that counts its devices through the variable, as real ones do."""

    def __init__(self, environ, devices=4):
        self.environ, self.devices = environ, devices

    def device_name(self):
        return "cuda"

    def visible_devices_envs(self):
        return ["SOME_VISIBLE_DEVICES"]

    def export_envs(self):
        return ["NCCL"]

    def device_count(self):
        visible = self.environ.get("SOME_VISIBLE_DEVICES")
        return self.devices if visible is None else len(visible.split(","))


def choose(monkeypatch, tmp_path, flags, visible=None, devices=4):
    if visible is not None:
        monkeypatch.setenv("SOME_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(runner, "get_accelerator", lambda: TwoDevices(runner.os.environ, devices))
    args = runner.parse_args(["--hostfile", str(tmp_path / "none"), *flags, "script.py"])
    active, variables, from_hostfile = runner._choose_resources(args)
    assert not from_hostfile
    return active["localhost"], variables


def test_devices_of_this_host(monkeypatch, tmp_path):
    assert choose(monkeypatch, tmp_path, []) == ([0, 1, 2, 3], ["SOME_VISIBLE_DEVICES"])
    assert choose(monkeypatch, tmp_path, ["--num_gpus", "2"])[0] == [0, 1]
    with pytest.raises(ValueError, match="only 4"):
        choose(monkeypatch, tmp_path, ["--num_gpus", "5"])


def test_no_device_at_all_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="no accelerator"):
        choose(monkeypatch, tmp_path, [], devices=0)


def test_visible_devices_become_the_slots_and_leave_the_environment(monkeypatch, tmp_path):
    assert choose(monkeypatch, tmp_path, [], visible="3,1")[0] == [1, 3]
    assert "SOME_VISIBLE_DEVICES" not in runner.os.environ


def test_slots_on_the_command_line_win_over_visible_devices(monkeypatch, tmp_path):
    warnings = []
    monkeypatch.setattr(runner.logger, "warning", warnings.append)
    assert choose(monkeypatch, tmp_path, ["--num_gpus", "2"], visible="3,1")[0] == [0, 1]
    assert "SOME_VISIBLE_DEVICES" not in runner.os.environ
    assert len(warnings) == 1 and "SOME_VISIBLE_DEVICES=3,1" in warnings[0]


def test_devices_named_by_uuid_are_counted_and_stay_in_the_environment(monkeypatch, tmp_path):
    assert choose(monkeypatch, tmp_path, [], visible="GPU-aa,GPU-bb") == ([0, 1], [])
    assert runner.os.environ["SOME_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"
