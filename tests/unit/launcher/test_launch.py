# SPDX-License-Identifier: Apache-2.0
"""The per-node launch step with real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from deepspeed.launcher import core_binding, launch, runner

LAUNCH = launch.__file__
TIMEOUT_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launcher:
    """A launch step that runs a script given as text on two ranks."""

    def __init__(self, folder, text, *flags, world=None, user_args=(), interpreter=(), **popen):
        self.script = folder / "script.py"
        self.script.write_text(text)
        self.folder = folder
        world_info = runner.encode_world_info(world or {"localhost": [0, 1]})
        command = [*interpreter, sys.executable, LAUNCH, f"--world_info={world_info}", f"--master_port={free_port()}"]
        command += ["--visible_devices_env=", "--grace_period=10", *flags, str(self.script), *user_args]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen
        )

    def finish(self):
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def wait_for(self, *names):
        """Waits until the ranks have written these files; their contents."""
        deadline = time.monotonic() + TIMEOUT_S
        paths = [self.folder / name for name in names]
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < deadline, f"no {names}: {self.process.poll()}"
            time.sleep(0.02)
        return [path.read_text() for path in paths]


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if runs(pid)]}"
        time.sleep(0.02)


# Writes its id to pid<rank> in one move, so that a reader never sees half of it.
ANNOUNCE = """
import os, signal, sys, time
def say(name, text):
    with open(name + ".part", "w") as file:
        file.write(str(text))
    os.rename(name + ".part", name)
rank = int(os.environ["RANK"])
"""


def test_environment_and_order_of_arguments(tmp_path):
    text = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('out' + os.environ['RANK'], 'w'))"
    world = {"other": [0, 1, 2], "localhost": [4, 6]}
    flags = ["--node_rank=1", "--master_addr=10.1.2.3", "--visible_devices_env=A_VISIBLE,B_VISIBLE"]
    status, _, err = Launcher(tmp_path, text, *flags, world=world, user_args=["--lr", "1"]).finish()
    assert status == 0, err
    for local_rank in range(2):
        arguments, env = json.loads((tmp_path / f"out{3 + local_rank}").read_text())
        assert arguments == [f"--local_rank={local_rank}", "--lr", "1"]
        expected = {
            "RANK": str(3 + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "5",
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "2",
            "MASTER_ADDR": "10.1.2.3",
            "A_VISIBLE": "4,6",
            "B_VISIBLE": "4,6",
        }
        assert {key: env[key] for key in expected} == expected
        assert env["MASTER_PORT"].isdigit()


def test_no_local_rank_and_module(tmp_path):
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    args = launch.parse_args(["--module", "--no_local_rank", "mod", "x"])
    command = launch.rank_command(args, 0)
    assert command == [sys.executable, "-u", "-m", "mod", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['x']\n"


def test_no_python_executes_directly(tmp_path):
    args = launch.parse_args(["--no_python", "./prog", "x"])
    assert launch.rank_command(args, 1) == ["./prog", "--local_rank=1", "x"]


def test_failing_rank_ends_the_others_and_gives_its_status(tmp_path):
    text = ANNOUNCE + (
        "def on_signal(signum, frame):\n"
        "    say(f'got{rank}', signum)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, on_signal)\n"
        "say(f'pid{rank}', os.getpid())\n"
        "while not os.path.exists('pid0') or not os.path.exists('pid1'): time.sleep(0.01)\n"
        "sys.exit(13) if rank == 1 else time.sleep(600)\n"
    )
    started = time.monotonic()
    launcher = Launcher(tmp_path, text)
    pids = [int(pid) for pid in launcher.wait_for("pid0", "pid1")]
    status, _, err = launcher.finish()
    assert status == 13
    assert "rank 1 (local rank 1" in err and "exited with status 13" in err
    assert (tmp_path / "got0").read_text() == str(int(signal.SIGTERM))  # asked first, not killed
    assert not any(runs(pid) for pid in pids)
    assert time.monotonic() - started < 9  # well before the grace period ends


def test_death_by_signal_is_128_plus_its_number(tmp_path):
    status, _, err = Launcher(tmp_path, ANNOUNCE + "os.kill(os.getpid(), signal.SIGSEGV)").finish()
    assert status == 128 + signal.SIGSEGV
    assert "SIGSEGV" in err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    text = ANNOUNCE + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "say(f'pid{rank}', os.getpid())\n"
        "while not os.path.exists('pid0'): time.sleep(0.01)\n"
        "sys.exit(5) if rank == 1 else time.sleep(600)\n"
    )
    launcher = Launcher(tmp_path, text, "--grace_period=0.5")
    status, _, _ = launcher.finish()
    assert status == 5
    assert not runs(int((tmp_path / "pid0").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_whole_process_trees(tmp_path, signum):
    # Each rank has a worker in its process group and one in a session of its own.
    text = ANNOUNCE + (
        "import subprocess\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "workers = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]\n"
        "def on_signal(signum, frame):\n"
        "    say(f'got{rank}', signum)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, on_signal)\n"
        "signal.signal(signal.SIGINT, on_signal)\n"
        "say(f'pid{rank}', ' '.join(str(pid) for pid in [os.getpid(), *(w.pid for w in workers)]))\n"
        "time.sleep(600)\n"
    )
    launcher = Launcher(tmp_path, text)
    pids = [int(pid) for line in launcher.wait_for("pid0", "pid1") for pid in line.split()]
    assert len(pids) == 6
    launcher.process.send_signal(signum)
    status, _, err = launcher.finish()
    assert status == 1
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == [str(int(signum))] * 2
    assert signum.name in err
    assert not any(runs(pid) for pid in pids)


def test_a_second_signal_does_not_wait_for_the_grace_period(tmp_path):
    text = ANNOUNCE + (
        "def on_signal(signum, frame): say(f'got{rank}', signum)\n"
        "signal.signal(signal.SIGTERM, on_signal)\n"
        "say(f'pid{rank}', os.getpid())\n"
        "while True: time.sleep(600)\n"
    )
    launcher = Launcher(tmp_path, text, "--grace_period=600")
    pids = [int(pid) for pid in launcher.wait_for("pid0", "pid1")]
    launcher.process.terminate()
    launcher.wait_for("got0", "got1")
    assert launcher.process.poll() is None
    launcher.process.terminate()
    assert launcher.finish()[0] == 1
    assert not any(runs(pid) for pid in pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    launcher = Launcher(tmp_path, ANNOUNCE + "say(f'pid{rank}', os.getpid()); time.sleep(600)")
    pids = [int(pid) for pid in launcher.wait_for("pid0", "pid1")]
    launcher.process.kill()
    launcher.finish()
    wait_until_gone(pids)


def test_workers_left_behind_by_a_rank_that_ended_well_are_ended(tmp_path):
    text = ANNOUNCE + (
        "import subprocess\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL,\n"
        "                          stderr=subprocess.DEVNULL)\n"
        "say(f'pid{rank}', worker.pid)\n"
    )
    launcher = Launcher(tmp_path, text)
    status, _, err = launcher.finish()
    assert status == 0, err
    wait_until_gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])


def test_a_log_for_each_rank(tmp_path):
    text = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    status, out, _ = Launcher(tmp_path, text, f"--enable_each_rank_log={tmp_path}/logs/deep").finish()
    assert (status, out) == (0, "")
    names = sorted(os.listdir(tmp_path / "logs" / "deep"))
    assert [re.fullmatch(r"\d{14}_rank(\d)\.log", name).group(1) for name in names] == ["0", "1"]
    assert sorted((tmp_path / "logs" / "deep" / names[1]).read_text().splitlines()) == ["err 1", "out 1"]


def test_taken_port_is_a_clear_error_and_starts_nothing(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        status, _, err = Launcher(tmp_path, "open('started', 'w')", f"--master_port={port}").finish()
    assert status == 1
    assert f"port {port}" in err and "--master_port" in err and "Traceback" not in err
    assert not (tmp_path / "started").exists()


def test_program_that_cannot_be_executed(tmp_path):
    status, _, err = Launcher(tmp_path, "not executable", "--no_python").finish()
    assert status == 1
    assert "cannot execute" in err and "script.py" in err and "Traceback" not in err


@pytest.mark.parametrize("encoded", ["None", "###", "bm90IGpzb24=", "e30="])
def test_bad_world_info(encoded):
    with pytest.raises(ValueError, match="world_info"):
        launch.decode_world_info(encoded)


def test_node_rank_outside_of_the_world():
    args = launch.parse_args(["--node_rank", "2", "--visible_devices_env=", "x.py"])
    with pytest.raises(ValueError, match="node_rank 2"):
        launch.node_environment(args, {"a": [0], "b": [0]})


def test_pid_file_is_there_while_ranks_run(tmp_path):
    launcher = Launcher(tmp_path, ANNOUNCE + "say(f'pid{rank}', os.getpid()); sys.stdin.read()",
                        f"--save_pid={os.getpid()}", stdin=subprocess.PIPE)  # fmt: skip
    launcher.wait_for("pid0", "pid1")
    path = f"{launch.PID_FILE_BASEPATH}/{os.getpid()}.deepspeed"
    with open(path) as file:
        assert file.read() == str(launcher.process.pid)
    assert launcher.finish()[0] == 0
    assert not os.path.exists(path)


def test_terminate_process_tree(tmp_path):
    text = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '600'], start_new_session=True); print(c.pid, flush=True); time.sleep(600)"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        launch.terminate_process_tree(parent.pid)
        parent.wait(timeout=TIMEOUT_S)
        wait_until_gone([child])
        launch.terminate_process_tree(child)  # gone: no error
    assert parent.returncode == -signal.SIGTERM


def test_the_launch_step_needs_neither_torch_nor_the_package(tmp_path):
    launcher = Launcher(tmp_path, "pass", interpreter=("env", "PYTHONPATH=", "PYTHONPROFILEIMPORTTIME=1"))
    status, _, err = launcher.finish()
    assert status == 0
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in err.splitlines() if "import time" in line}
    assert "subprocess" in imported
    assert not imported & {"torch", "deepspeed", "numpy"}


def test_elastic_ranks_start_anew_with_the_rank_environment_and_local_rank(tmp_path):
    text = ANNOUNCE + (
        "import json\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "names = ['WORLD_SIZE', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'A_VISIBLE']\n"
        "say(f'seen{rank}.{attempt}', json.dumps([sys.argv[1:], *(os.environ[name] for name in names)]))\n"
        "while not all(os.path.exists(f'seen{other}.{attempt}') for other in range(2)): time.sleep(0.01)\n"
        "if attempt == 0: sys.exit(3) if rank == 1 else time.sleep(600)\n"
        "print('end', rank)\n"
    )
    flags = ["--enable_elastic_training", "--max_restarts=1", "--visible_devices_env=A_VISIBLE"]
    flags += [f"--enable_each_rank_log={tmp_path}/logs"]
    status, _, err = Launcher(tmp_path, text, *flags, user_args=["--lr", "1"]).finish()
    assert status == 0, err
    for rank in range(2):
        for attempt in range(2):
            seen = json.loads((tmp_path / f"seen{rank}.{attempt}").read_text())
            assert seen == [[f"--local_rank={rank}", "--lr", "1"], "2", "2", "0", "1", "0,1"]
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert sorted(logs.splitlines()) == ["end 0", "end 1"]


def test_elastic_ranks_that_fail_too_often_are_an_error(tmp_path):
    launcher = Launcher(tmp_path, "import sys; sys.exit(3)", "--enable_elastic_training", "--max_restarts=0")
    status, _, err = launcher.finish()
    assert status == 1
    assert "elastic agent of node 0" in err and "exitcode  : 3" in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_elastic_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    text = ANNOUNCE + "say(f'pid{rank}', os.getpid()); time.sleep(600)"
    launcher = Launcher(tmp_path, text, "--enable_elastic_training")
    pids = [int(pid) for pid in launcher.wait_for("pid0", "pid1")]
    launcher.process.kill()
    launcher.finish()
    wait_until_gone(pids)


def test_core_lists():
    assert core_binding.parse_core_list("8-9,0-2") == [0, 1, 2, 8, 9]
    for text in ("", "a", "3-1", "0-2,2", "1-"):
        with pytest.raises(ValueError, match="core"):
            core_binding.parse_core_list(text)


def test_cores_are_spread_evenly():
    assert [core_binding.cores_of_rank("0-3,8-10", 3, rank) for rank in range(3)] == [[0, 1], [2, 3], [8, 9]]
    with pytest.raises(ValueError, match="fewer ranks"):
        core_binding.cores_of_rank("0", 2, 0)


def test_core_binding_goes_through_numactl(tmp_path):
    fake = tmp_path / "bin" / "numactl"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do echo "$1 $2"; shift 2; done\nexec "$@"\n')
    fake.chmod(0o755)
    text = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    path = f"PATH={fake.parent}:{os.environ['PATH']}"
    flags = ["--bind_cores_to_rank", "--bind_core_list=0-3"]
    status, out, err = Launcher(tmp_path, text, *flags, interpreter=("env", path)).finish()
    assert status == 0, err
    lines = out.splitlines()
    assert "-C 0,1" in lines and "-C 2,3" in lines and lines.count("threads 2") == 2
