# SPDX-License-Identifier: Apache-2.0
"""First program of a rank under another launcher than ours: sets RANK and LOCAL_RANK, then becomes the script.

Standard library only; torchrun's agent executes this file directly, which spares each rank an import of the package.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

if __package__:
    from . import constants, core_binding, launch
else:  # executed as a file: this folder is on sys.path, the package may not be
    import constants
    import core_binding
    import launch

# Variables in which each launcher tells a process its global and its local rank.
_RANK_NAMES = {
    constants.MPICH_LAUNCHER: (["PMIX_RANK", "PMI_RANK"], ["PALS_LOCAL_RANKID", "MPI_LOCALRANKID"]),
    constants.IMPI_LAUNCHER: (["PMIX_RANK", "PMI_RANK"], ["MPI_LOCALRANKID"]),
    constants.OPENMPI_LAUNCHER: (["OMPI_COMM_WORLD_RANK"], ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    constants.MVAPICH_LAUNCHER: (["MV2_COMM_WORLD_RANK"], ["MV2_COMM_WORLD_LOCAL_RANK"]),
    constants.SLURM_LAUNCHER: (["SLURM_PROCID"], ["SLURM_LOCALID"]),
    constants.TORCHRUN_LAUNCHER: (["RANK"], ["LOCAL_RANK"]),
}
# Other names of what a rank of the launch step finds; where a launcher does not know one of them it stays unset.
_FURTHER_NAMES = {
    constants.OPENMPI_LAUNCHER: {"OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_SIZE"},
    constants.TORCHRUN_LAUNCHER: {
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
        "GROUP_RANK": "CROSS_RANK",
        "GROUP_WORLD_SIZE": "CROSS_SIZE",
    },
}


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(
        description="starts one rank under an MPI launcher; normally called by `deepspeed`"
    )
    parser.add_argument("--launcher", type=str, default=constants.MPICH_LAUNCHER, choices=list(_RANK_NAMES))
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="bind the rank to its own cores")
    parser.add_argument(
        "--bind_core_list", type=str, default=None, help="cores to spread over the ranks, e.g. 0-3,8-11"
    )
    parser.add_argument("--enable_each_rank_log", type=str, default="None", help="folder for one log file per rank")
    parser.add_argument("--pass_local_rank", action="store_true", help="pass --local_rank to the script")
    parser.add_argument("user_script", type=str)
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args=args)


def _agreed(env: dict[str, str], names: Sequence[str], what: str) -> str:
    found = {name: env[name] for name in names if name in env}
    if not found:
        raise OSError(f"the launcher did not tell this process its {what}: none of {', '.join(names)} is set")
    if len(set(found.values())) > 1:
        raise OSError(f"the launcher's variables disagree about the {what} of this process: {found}")
    return next(iter(found.values()))


def env_mapping(
    env: dict[str, str],
    rank_name_list: Sequence[str] | None = None,
    local_rank_name_list: Sequence[str] | None = None,
) -> dict[str, str]:
    """``env`` with RANK and LOCAL_RANK taken from the launcher's variables.

    Args:
        env: environment to read and to add to.
        rank_name_list: variables that hold the global rank; None leaves RANK alone.
        local_rank_name_list: variables that hold the local rank; None leaves LOCAL_RANK alone.

    Raises:
        OSError: none of the variables is set, or they disagree.
    """
    if rank_name_list is not None:
        env["RANK"] = _agreed(env, rank_name_list, "rank")
    if local_rank_name_list is not None:
        env["LOCAL_RANK"] = _agreed(env, local_rank_name_list, "local rank")
    return env


def _redirect_output(folder: str, rank: int) -> None:
    log = launch.open_rank_log(folder, launch.log_timestamp(), rank)
    if log is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def main(args: list[str] | None = None) -> NoReturn:
    """Replaces this process by the user's script, so that signals and the exit status go straight to the launcher.

    Raises:
        ValueError: --module and --no_python together, or too few cores to bind to.
        OSError: the launcher did not say which rank this is, or the script cannot be executed.
    """
    parsed = parse_args(args)
    if parsed.module and parsed.no_python:
        raise ValueError("--module and --no_python cannot be given together")
    rank_names, local_rank_names = _RANK_NAMES[parsed.launcher]
    env = env_mapping(os.environ.copy(), rank_names, local_rank_names)
    for theirs, ours in _FURTHER_NAMES.get(parsed.launcher, {}).items():
        if theirs in env:
            env[ours] = env[theirs]
    own = [f"--local_rank={env['LOCAL_RANK']}"] if parsed.pass_local_rank else []
    command = launch.script_command(parsed.user_script, [*own, *parsed.user_args], parsed.module, parsed.no_python)
    if parsed.bind_cores_to_rank:
        cores = core_binding.cores_of_rank(parsed.bind_core_list, int(env["LOCAL_SIZE"]), int(env["LOCAL_RANK"]))
        env["OMP_NUM_THREADS"] = str(len(cores))
        command = core_binding.numactl_prefix(cores) + command
    _redirect_output(parsed.enable_each_rank_log, int(env["RANK"]))
    if parsed.launcher == constants.TORCHRUN_LAUNCHER:
        launch.die_with_parent()  # the agent starts each rank in a session of its own
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main()
