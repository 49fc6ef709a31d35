# SPDX-License-Identifier: Apache-2.0
"""Stands in for ssh, pdsh, mpirun and srun: notes its arguments and starts the ranks of all "hosts" on this one.

``install`` puts it on a path under those names. Like the real ones it hands the environment of the caller to a remote
process only where it is told to. Standard library only.
"""

import json
import os
import shlex
import subprocess
import sys

_ARITY = {"-n": 1, "-np": 1, "-ppn": 1, "-hosts": 1, "-hostfile": 1, "--hostfile": 1, "--mca": 2, "-x": 1}
_ARITY |= {"-genv": 2, "-env": 2}
_RANK_VARIABLES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    "impi": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
}


def install(folder, mpi="", enter=""):
    """Writes the programs into ``folder``; ``folder/calls`` will hold one JSON list per call: name, arguments.

    Args:
        mpi: whose mpirun it is.
        enter: shell words that run what follows them on ``$host``; empty: on this host.
    """
    names = {"ssh", "pdsh", "sinfo", "srun"} | ({"mpirun"} if mpi else set())
    names |= {"openmpi": {"ompi_info"}, "mvapich": {"mpiname"}}.get(mpi, set())
    for name in names:
        words = [sys.executable, "-S", os.path.abspath(__file__), name, mpi, str(folder / "calls"), enter]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)


def calls(folder, name):
    """Arguments of each call of a program."""
    lines = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return [args for called, args in lines if called == name]


def _bare_environment(**more):
    """What a process finds on a host that nobody has prepared."""
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **more}


def _start_on(host, command, enter):
    if command == "hostname -I" and not enter:
        return subprocess.Popen(["echo", "127.0.0.1 10.0.0.1"])
    remote = f"{enter} sh -c {shlex.quote(command)}" if enter else command
    return subprocess.Popen(["sh", "-c", remote], env=_bare_environment(host=host), stdin=subprocess.DEVNULL)


def ssh(args, enter):
    while args[0].startswith("-"):
        args = args[2:] if args[0] in ("-o", "-p") else args[1:]
    return _start_on(args[0], " ".join(args[1:]), enter).wait()


def pdsh(args, enter):
    hosts, words = args[args.index("-w") + 1].split(","), args[args.index("-w") + 2 :]
    running = {}
    for index, host in enumerate(hosts):
        command = " ".join(words).replace("%%", "\0").replace("%n", str(index)).replace("\0", "%")
        running[host] = _start_on(host, command, enter)
    statuses = [0]
    for host in _as_they_end(running):
        statuses.append(running[host].returncode)
        if statuses[-1]:
            print(f"pdsh@here: {host}: ssh exited with exit code {statuses[-1]}", file=sys.stderr, flush=True)
    return max(statuses)


def _as_they_end(running):
    waiting = {process.pid: host for host, process in running.items()}
    while waiting:
        pid, status = os.wait()
        host = waiting.pop(pid)
        running[host].returncode = os.waitstatus_to_exitcode(status)
        yield host


def _parse_mpirun(args):
    """(options, environment, command) of each set of arguments."""
    shared = {}
    for part in " ".join(map(shlex.quote, args)).split(" : "):
        words, options, env = shlex.split(part), {}, {}
        while words[0].startswith("-"):
            flag, values = words[0], words[1 : 1 + _ARITY[words[0]]]
            words = words[1 + _ARITY[flag] :]
            if flag == "-x":
                env.update([values[0].split("=", 1)])
            elif flag in ("-genv", "-env"):
                (shared if flag == "-genv" else env)[values[0]] = values[1]
            else:
                options[flag] = values[0]
        yield options, {**shared, **env}, words


def mpirun(args, mpi):
    parts = list(_parse_mpirun(args))
    ranks = [part for part in parts for _ in range(int(part[0].get("-n", part[0].get("-np", 1))))]
    per_host = int(parts[0][0].get("-ppn", 1))
    running = []
    for rank, (_, env, command) in enumerate(ranks):
        values = (str(rank), str(rank % per_host), str(len(ranks)))
        own = dict(zip(_RANK_VARIABLES[mpi], values))
        running.append(subprocess.Popen(command, env=_bare_environment(**own, **env)))
    return max(process.wait() for process in running)


def srun(args):
    options = dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    ranks, words = int(args[args.index("-n") + 1]), list(args)
    while words[0].startswith("-"):
        words = words[2:] if words[0] == "-n" else words[1:]
    everything, *exports = options["--export"].split(",")
    assert everything == "ALL"
    env = {**os.environ, **dict(export.split("=", 1) for export in exports)}
    per_host = int(options["--ntasks-per-node"])
    running = [
        subprocess.Popen(words, env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_host)})
        for rank in range(ranks)
    ]
    return max(process.wait() for process in running)


def main(name, mpi, log, enter, *args):
    with open(log, "a") as file:
        file.write(json.dumps([name, args]) + "\n")
    if name == "mpiname":
        print("MVAPICH2-GDR 2.3.7")
        return 0
    programs = {
        "ssh": lambda: ssh(list(args), enter),
        "pdsh": lambda: pdsh(list(args), enter),
        "mpirun": lambda: mpirun(list(args), mpi),
        "srun": lambda: srun(list(args)),
    }
    return programs[name]() if name in programs else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
