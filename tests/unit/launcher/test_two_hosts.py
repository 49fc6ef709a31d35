# SPDX-License-Identifier: Apache-2.0
"""Jobs on two "hosts" that really start: every launcher through a stand-in, ssh also between two networks.

A stand-in starts the ranks of both hosts on this one, with a bare environment, so that only what the launcher is told
to hand over arrives. In network namespaces each host has an address of its own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import runner
from unit.launcher import fake_launchers
from unit.launcher.test_launch import TIMEOUT_S, free_port, runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]

# What a rank finds, without the seconds that training takes.
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MARK")
found = {name: os.environ.get(name) for name in names}
with open(os.path.join(os.path.dirname(__file__), f"rank{os.environ['RANK']}.json"), "w") as file:
    json.dump([STEP, found, sys.argv[1:]], file)
"""
# Weights start at 0, rank r sees 1 + r: the mean gradient of two ranks is 1.5, and the step is -1.5.
TRAIN = """
import torch, deepspeed
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
engine.backward(engine(torch.full((1, 2), 1.0 + deepspeed.comm.get_rank())).sum())
engine.step()
STEP = engine.module.weight.flatten().tolist()
"""
STEP = [-1.5, -1.5]


def job(folder, text, monkeypatch, environment="MARK=a b\nDS_ACCELERATOR=cpu\n"):
    """Files of a job in ``folder``; the flags that every run of it needs."""
    (folder / "script.py").write_text(text)
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    (folder / ".deepspeed_env").write_text(environment)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(folder)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return ["--hostfile", str(folder / "hosts"), "--master_port", str(free_port()), "--log_level", "error"]


def results(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


# What the last call of the launcher must hold, besides the script.
TOLD = {
    "pdsh": ("pdsh", ["-S", "-f", "1024", "-w", "a,b"]),
    "ssh": ("ssh", ["-T", "-o", "BatchMode=yes"]),
    "openmpi": ("mpirun", ["-n", "2", "-hostfile"]),
    "mpich": ("mpirun", ["-n", "2", "-ppn", "1", "-hosts", "a,b"]),
    "impi": ("mpirun", ["-ppn", "1", "-hosts", "a,b"]),
    "mvapich": ("mpirun", ["-np", "2", "-ppn", "1", "--hostfile"]),
    "slurm": ("srun", ["-n", "2", "--kill-on-bad-exit=1"]),
}


# Training where ranks come to their environment in different ways; ssh trains below, between two networks.
@pytest.mark.parametrize("launcher", list(runner.LAUNCHER_CLASSES))
def test_a_job_on_two_hosts(tmp_path, monkeypatch, signals_restored, launcher):
    trains = launcher in ("pdsh", "openmpi")
    fake_launchers.install(tmp_path, mpi=launcher if launcher in fake_launchers._RANK_VARIABLES else "")
    monkeypatch.setattr("deepspeed.launcher.multinode_runner.MVAPICH_TMP_HOSTFILE", str(tmp_path / "mvapich"))
    # Open MPI tells its ranks in variables of its own, which the engine understands.
    start = TRAIN if trains else "STEP = None\n"
    flags = job(tmp_path, start + SHOW, monkeypatch)
    runner.main([*flags, "--launcher", launcher, str(tmp_path / "script.py"), "--lr", "it's 50%n"])
    for rank, (weights, env, arguments) in enumerate(results(tmp_path)):
        assert weights == (STEP if trains else None)
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "2", "0")
        assert (env["MASTER_ADDR"], env["MARK"]) == ("127.0.0.1", "a b")
        assert arguments[-2:] == ["--lr", "it's 50%n"]
        assert arguments[:-2] == (["--local_rank=0"] if launcher in ("pdsh", "ssh") else [])
    program, words = TOLD[launcher]
    assert fake_launchers.calls(tmp_path, program)[-1][: len(words)] == words
    # The address of the first host was asked for, after a test that it can be reached.
    assert [call[-2:] for call in fake_launchers.calls(tmp_path, "ssh")[:2]] == [["a", "hostname"], ["hostname", "-I"]]


FAILS = """
import os, sys, time
with open(os.path.join(os.path.dirname(__file__), "pid" + os.environ["RANK"]), "w") as file:
    file.write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not os.path.exists("pid0"): time.sleep(0.01)
    sys.exit(7)
time.sleep(60)
"""


def test_a_rank_that_fails_ends_the_ranks_on_the_other_host(tmp_path, monkeypatch, signals_restored):
    fake_launchers.install(tmp_path)
    flags = job(tmp_path, FAILS, monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        runner.main([*flags, "--launcher", "ssh", str(tmp_path / "script.py")])
    assert stopped.value.code == 7
    assert not any(runs(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


# Two hosts with a network of their own each, joined by a bridge; then what follows.
NAMESPACES = """
set -e
mount -t tmpfs none /run
mkdir -p /run/netns
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
number=1
for host in a b; do
    ip netns add $host
    ip link add to-$host type veth peer name eth0 netns $host
    ip link set to-$host master bridge0 up
    ip -n $host addr add 10.77.0.$number/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
    number=$((number + 1))
done
exec "$@"
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", NAMESPACES, "sh"]


def namespaces_work():
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("hostname") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="this system lends no network namespaces to ordinary processes")
def test_two_hosts_with_networks_of_their_own(tmp_path, monkeypatch):
    fake_launchers.install(tmp_path, enter='ip netns exec "$host"')
    # There gloo finds no address by the name of the host: it is told the interface through the environment file.
    flags = job(tmp_path, TRAIN + SHOW, monkeypatch, "MARK=a b\nDS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\n")
    command = [*UNSHARE, sys.executable, "-m", "deepspeed.launcher.runner", *flags, "--launcher", "ssh"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    for rank, (weights, env, _) in enumerate(results(tmp_path)):
        assert weights == STEP
        assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(rank), "2", "10.77.0.1")
