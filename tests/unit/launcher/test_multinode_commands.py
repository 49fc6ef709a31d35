# SPDX-License-Identifier: Apache-2.0
"""Commands that the multi-node backends are started with."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from deepspeed.launcher import launch, launcher_helper, multinode_runner, runner, ssh_hosts
from deepspeed.launcher.launcher_helper import env_mapping

HOSTS = {"a": [0, 1], "b": [0, 1]}


def make(launcher, *flags, script=("train.py", "--lr", "0.1"), slots=None):
    args = runner.parse_args(["--launcher", launcher, "--master_addr", "10.0.0.1", *flags, *script])
    backend = runner.LAUNCHER_CLASSES[launcher]
    pool = [] if backend.starts_launch_step else [slots or {"a": 2, "b": 2}]
    return backend(args, runner.encode_world_info(HOSTS), *pool)


def contains(command, part):
    return any(command[i : i + len(part)] == part for i in range(len(command) - len(part) + 1))


def run_remote_part(command):
    """What the remote shell makes of a pdsh command: pdsh joins its words and replaces %% and %n."""
    remote = " ".join(command[6:]).replace("%%", "\0").replace("%n", "1").replace("\0", "%")
    return remote


@pytest.mark.parametrize("name", list(runner.LAUNCHER_CLASSES))
def test_name_is_the_flag(name):
    assert make(name).name == name


def test_pdsh():
    env = {}
    command = make("pdsh", "--ssh_port", "2222", "--no_local_rank").get_cmd(env, HOSTS)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 2222"}
    assert contains(command, [sys.executable, "-u", "-m", "deepspeed.launcher.launch"])
    for flag in ("--node_rank=%n", "--master_addr=10.0.0.1", "--master_port=29500", "--no_local_rank"):
        assert flag in command
    assert command[-3:] == ["train.py", "--lr", "0.1"]


def test_pdsh_flags_are_understood_by_the_launch_step():
    flags = ["--module", "--enable_each_rank_log", "/my logs", "--bind_cores_to_rank", "--bind_core_list", "0-3", "-q"]
    command = make("pdsh", *flags, "--save_pid").get_cmd({}, HOSTS)
    words = shlex.split(run_remote_part(command).split("deepspeed.launcher.launch")[1])
    args = launch.parse_args(words)
    assert args.node_rank == 1 and args.module and args.bind_cores_to_rank and args.quiet and args.save_pid > 0
    assert (args.enable_each_rank_log, args.bind_core_list) == ("/my logs", "0-3")
    assert launch.decode_world_info(args.world_info) == HOSTS
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "0.1"])


def test_pdsh_hands_values_and_arguments_through_the_remote_shell_unchanged(tmp_path):
    values = {
        "PLAIN": "a,b=c:1/2",
        "SPACE": "a b",
        "DOLLAR": "$HOME",
        "QUOTE": 'x"y',
        "TICK": "`id`",
        "PERCENT": "50%n",
    }
    arguments = ["it's", "$HOME", "a b", "100%n", "*"]
    show = tmp_path / "show.py"
    show.write_text("import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    backend = make("pdsh", script=(str(show), *arguments))
    for key, value in values.items():
        backend.add_export(key, value)
    command = backend.get_cmd({}, HOSTS)
    assert "export PLAIN=a,b=c:1/2;" in command and 'export SPACE="a b";' in command
    remote = run_remote_part(command)
    start, rest = remote.split(f"{sys.executable} -u -m deepspeed.launcher.launch")
    script = rest[rest.index(str(show)) :]
    done = subprocess.run(
        ["sh", "-c", f"{start} {sys.executable} {script}"], capture_output=True, text=True, check=True
    )
    got_arguments, got_env = json.loads(done.stdout)
    assert got_arguments == arguments
    assert {key: got_env[key] for key in values} == values


def test_pdsh_sources_the_venv_script_before_the_launch():
    command = make("pdsh", "--venv_script", "/env/activate").get_cmd({}, HOSTS)
    assert command.index(". /env/activate;") < command.index("deepspeed.launcher.launch")


def test_pdsh_kill_matches_the_launch_step_of_this_job_and_nothing_else():
    backend = make("pdsh")
    kill = backend.kill_command(HOSTS)
    assert kill[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    pattern = shlex.split(kill[6])[-1]
    command = backend.get_cmd({}, HOSTS)
    remote = run_remote_part(command)
    step = remote[remote.index(sys.executable) :]
    assert re.search(pattern, step)
    assert not re.search(pattern, step.replace("29500", "29501"))
    # The starting host is often one of the hosts: pdsh, the ssh clients and the shells have these words behind others.
    for other in (kill[6], remote, f"sh -c {remote}", f"ssh a {remote}", " ".join(command)):
        assert not re.search(pattern, other)


def test_ssh():
    backend = make(
        "ssh", "--ssh_port", "2222", "--launcher_args", "-o StrictHostKeyChecking=no", script=("t.py", "a%n b")
    )
    command = backend.get_cmd({}, HOSTS)
    assert command[:2] == [sys.executable, "-u"] and command[2] == ssh_hosts.__file__
    args = ssh_hosts.parse_args(command[3:])
    for index, host in enumerate("ab"):
        *ssh, remote = ssh_hosts.ssh_command(args, index, host)
        assert ssh[0] == "ssh" and ssh[-1] == host and "BatchMode=yes" in ssh
        assert contains(ssh, ["-p", "2222"]) and contains(ssh, ["-o", "StrictHostKeyChecking=no"])
        step = launch.parse_args(shlex.split(remote.split("deepspeed.launcher.launch")[1]))
        assert (step.node_rank, step.training_script, step.training_script_args) == (index, "t.py", ["a%n b"])


@pytest.mark.parametrize("launcher", ["pdsh", "ssh"])
def test_elastic_flags_reach_the_launch_step(launcher):
    flags = ["--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "4", "--max_restarts", "7"]
    command = make(launcher, *flags).get_cmd({}, HOSTS)
    words = " ".join(command).replace("%n", "0").split("deepspeed.launcher.launch")[1]
    args = launch.parse_args(shlex.split(words))
    assert args.enable_elastic_training
    assert (args.min_elastic_nodes, args.max_elastic_nodes, args.max_restarts) == (2, 4, 7)


def test_openmpi():
    backend = make("openmpi", "--hostfile", "/my/hosts", slots={"a": 2, "b": 3})
    backend.add_export("X", "a b")
    command = backend.get_cmd({}, HOSTS)
    assert command[:5] == ["mpirun", "-n", "5", "-hostfile", "/my/hosts"]
    assert contains(command, ["--mca", "btl", "^openib"])
    assert contains(command, ["--mca", "btl_tcp_if_include", "eth0"])
    assert contains(command, ["-x", "MASTER_ADDR=10.0.0.1"]) and contains(command, ["-x", "MASTER_PORT=29500"])
    assert contains(command, ["-x", "UCX_TLS=tcp"]) and contains(command, ["-x", "X=a b"])
    assert command[-5:] == [sys.executable, "-u", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_core_binding_and_logs_go_through_the_helper(launcher):
    flags = ["--bind_cores_to_rank", "--bind_core_list", "0-3", "--enable_each_rank_log", "/my logs"]
    command = make(launcher, *flags).get_cmd({}, HOSTS)
    first = command.index("deepspeed.launcher.launcher_helper") + 1
    args = launcher_helper.parse_args(command[first : first + 10])
    assert (args.launcher, args.bind_cores_to_rank, args.bind_core_list) == (launcher, True, "0-3")
    assert (args.enable_each_rank_log, args.user_script) == ("/my logs", "train.py")


def test_openmpi_interface_given_by_the_user():
    command = make("openmpi", "--launcher_args", "--mca btl_tcp_if_include ib0").get_cmd({}, HOSTS)
    assert contains(command, ["btl_tcp_if_include", "ib0"]) and "eth0" not in command


def test_mpich():
    command = make("mpich", "--module").get_cmd({}, HOSTS)
    assert command[:5] == ["mpirun", "-n", "4", "-ppn", "2"]
    for pair in (["MASTER_ADDR", "10.0.0.1"], ["MASTER_PORT", "29500"], ["WORLD_SIZE", "4"], ["LOCAL_SIZE", "2"]):
        assert contains(command, ["-genv", *pair])
    helper = ["-m", "deepspeed.launcher.launcher_helper", "--launcher", "mpich", "--module", "train.py", "--lr", "0.1"]
    assert command[-len(helper) :] == helper


def test_impi_gives_each_rank_its_place():
    command = make("impi").get_cmd({}, HOSTS)
    assert command[:3] == ["mpirun", "-ppn", "2"]
    assert contains(command, ["-genv", "I_MPI_PIN", "0"]) and contains(command, ["-genv", "WORLD_SIZE", "4"])
    script = [sys.executable, "-u", "train.py", "--lr", "0.1"]
    for rank in range(4):
        assert contains(command, ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(rank % 2), *script])
    assert command.count(":") == 3


def test_slurm():
    env = {}
    backend = make("slurm", "--launcher_args", "--partition gpu")
    backend.add_export("X", "1")
    backend.add_export("LIST", "a,b")
    command = backend.get_cmd(env, HOSTS)
    assert command[:3] == ["srun", "-n", "4"] and contains(command, ["--partition", "gpu"])
    (export,) = [word for word in command if word.startswith("--export=")]
    assert export.startswith("--export=ALL,") and "X=1" in export.split(",")
    assert env == {"LIST": "a,b"}  # srun splits --export at commas
    assert "--kill-on-bad-exit=1" in command
    assert {"--nodelist=a,b", "--nodes=2", "--gpus-per-node=2"} <= set(command)
    assert "--gpus-per-node=2" not in backend.get_cmd({"DS_ACCELERATOR": "cpu"}, HOSTS)


@pytest.mark.parametrize("hosts", [{"a": [1, 2]}, {"a": [0, 2]}, {"a": [0], "b": [0, 1]}])
def test_slurm_refuses_slots_it_cannot_choose(hosts):
    with pytest.raises(ValueError, match="slots"):
        multinode_runner.SlurmRunner.validate_active_resources(hosts)
    multinode_runner.SlurmRunner.validate_active_resources(HOSTS)


def test_mvapich(tmp_path, monkeypatch):
    hostfile, elsewhere = tmp_path / "hosts", tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    hostfile.symlink_to(elsewhere)
    monkeypatch.setattr(multinode_runner, "MVAPICH_TMP_HOSTFILE", str(hostfile))
    command = make("mvapich").get_cmd({}, HOSTS)
    assert command[:5] == ["mpirun", "-np", "4", "-ppn", "2"]
    assert contains(command, ["--hostfile", str(hostfile)]) and contains(command, ["-env", "MV2_USE_CUDA", "1"])
    assert contains(command, ["-env", "MASTER_ADDR", "10.0.0.1"]) and contains(command, ["-env", "WORLD_SIZE", "4"])
    assert hostfile.read_text() == "a\nb\n"
    assert elsewhere.read_text() == "precious"


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi", "mvapich"])
@pytest.mark.parametrize("flag", ["--include", "--exclude", "--num_nodes", "--num_gpus"])
def test_mpi_launchers_refuse_filters(launcher, flag):
    with pytest.raises(ValueError, match=launcher):
        make(launcher, flag, "1")


@pytest.mark.parametrize("launcher", ["mpich", "impi", "mvapich"])
def test_equal_slots_needed(launcher):
    with pytest.raises(ValueError, match="equally many"):
        make(launcher, slots={"a": 2, "b": 3})


def test_exported_variables(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    (home / ".env").write_text("# mine\n\nFIRST=home\nURL=a=b\n")
    (here / ".env").write_text("FIRST=here\n")
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(home), str(here)])
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_NAME", ".env")
    environment = {
        "PYTHONPATH": "/p",
        "UCX_A": "1",
        "MV2_A": "1",
        "MLFLOW_A": "1",
        "UCX_NET_DEVICES": "n",
        "MY_UCX": "1",
    }
    exported = runner.exported_variables(environment)
    assert exported["FIRST"] == "here" and exported["URL"] == "a=b"
    assert {"PYTHONPATH", "UCX_A", "MV2_A", "MLFLOW_A", "UCX_NET_DEVICES"} <= set(exported)
    assert "MY_UCX" not in exported
    assert "UCX_NET_DEVICES" not in runner.exported_variables({**environment, "AISC_JOB_NAME": "x"})
    (here / ".env").write_text("no equals sign\n")
    with pytest.raises(ValueError, match="line 1"):
        runner.exported_variables(environment)


def test_missing_launcher_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--hostfile", str(tmp_path / "hosts"), "--master_addr", "a", "--no_ssh_check", "--launcher", "PDSH"]
    with pytest.raises(RuntimeError, match="not installed"):
        runner.main([*flags, "script.py"])


def fake(folder, name, text):
    program = folder / name
    program.write_text("#!/bin/sh\n" + text)
    program.chmod(0o755)


def two_hosts(folder):
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    return ["--hostfile", str(folder / "hosts"), "--master_addr", "a", "--no_ssh_check"]


def test_multi_node_run_returns_the_launchers_status(tmp_path, monkeypatch, signals_restored):
    fake(tmp_path, "pdsh", f'/bin/echo "$PYTHONPATH" "$@" > {tmp_path}/seen\nexit 7\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runner.main([*two_hosts(tmp_path), "script.py"])
    assert stopped.value.code == 7
    here, *words = (tmp_path / "seen").read_text().split()
    assert here == runner.os.getcwd() and words[:5] == ["-S", "-f", "1024", "-w", "a,b"]


# As pdsh does: it stays until the remote side has ended, which the kill command, a second call, sees to.
STAYS = """case "$*" in *pkill*) echo "$*" >> {0}/killed; exit 0;; esac
{1}
echo up > {0}/up
turns=0
while [ ! -f {0}/killed ] && [ $turns -lt 400 ]; do sleep 0.05; turns=$((turns + 1)); done
echo ended > {0}/ended; exit 9
"""


def test_a_host_that_fails_ends_the_others_and_gives_its_status(tmp_path, monkeypatch, signals_restored, capfd):
    says = "echo 'pdsh@here: b: ssh exited with exit code 5' >&2"
    fake(tmp_path, "pdsh", STAYS.format(tmp_path, says))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit) as stopped:
        runner.main([*two_hosts(tmp_path), "script.py"])
    assert stopped.value.code == 5
    assert (tmp_path / "ended").exists() and "--world_info=" in (tmp_path / "killed").read_text()
    assert "b: ssh exited with exit code 5" in capfd.readouterr().err  # the launcher's own words are handed on


@pytest.mark.parametrize("elastic", [[], ["--elastic_training", "--min_elastic_nodes", "1"]])
def test_without_ssh_each_host_becomes_its_own_launch_step(tmp_path, monkeypatch, elastic):
    became = []

    def become(program, command, env):
        became.append(command)
        raise SystemExit  # execve does not return either

    monkeypatch.setattr(os, "execve", become)
    flags = [*two_hosts(tmp_path), "--no_ssh", "--node_rank", "1", "--master_port", "29511", *elastic]
    with pytest.raises(SystemExit):
        runner.main([*flags, "train.py", "--lr", "1"])
    ((python, unbuffered, step, *words),) = became
    assert (python, unbuffered, step) == (sys.executable, "-u", launch.__file__)
    args = launch.parse_args(words)
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "a", 29511)
    assert launch.decode_world_info(args.world_info) == {"a": [0], "b": [0]}
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])
    assert (args.enable_elastic_training, args.min_elastic_nodes) == (bool(elastic), 1 if elastic else -1)


def test_elastic_ranks_go_on_without_a_host_that_failed(tmp_path, monkeypatch, signals_restored):
    fake(tmp_path, "pdsh", "echo 'pdsh@here: b: ssh exited with exit code 5' >&2\nsleep 0.5\nexit 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runner.main([*two_hosts(tmp_path), "--elastic_training", "script.py"])
    assert not (tmp_path / "killed").exists()


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_launchers_that_cannot_start_ranks_anew_refuse_elastic_training(tmp_path, monkeypatch, launcher):
    for name in ("ompi_info", "mpirun", "sinfo"):
        fake(tmp_path, name, "exit 99\n")
    fake(tmp_path, "mpiname", "echo MVAPICH2-GDR 2.3\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match="pdsh or ssh"):
        runner.main([*two_hosts(tmp_path), "--launcher", launcher, "--elastic_training", "script.py"])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_remote_ranks_and_the_launcher(tmp_path, signum):
    fake(tmp_path, "pdsh", STAYS.format(tmp_path, ""))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *two_hosts(tmp_path), "script.py"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=env)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signum)
    assert process.wait(timeout=20) == 1
    assert "--world_info=" in (tmp_path / "killed").read_text()
    assert (tmp_path / "ended").exists()


def test_rank_from_the_launchers_variables():
    env = env_mapping({"PMI_RANK": "5", "L": "1"}, ["PMIX_RANK", "PMI_RANK"], ["L"])
    assert (env["RANK"], env["LOCAL_RANK"]) == ("5", "1")
    with pytest.raises(OSError, match="disagree"):
        env_mapping({"A": "1", "B": "2"}, ["A", "B"])
    with pytest.raises(OSError, match="none of"):
        env_mapping({}, ["A"])


def test_helper_becomes_the_script(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['LOCAL_RANK'], sys.argv[1:]); sys.exit(4)")
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.launcher_helper",
        "--launcher",
        "slurm",
        str(script),
        "--x",
        "1",
    ]
    env = {**runner.os.environ, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3 1 ['--x', '1']\n", 4)
