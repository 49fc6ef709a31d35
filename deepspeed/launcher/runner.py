# SPDX-License-Identifier: Apache-2.0
"""The ``deepspeed`` command: chooses hosts and slots, then starts the ranks here or through a multi-node launcher."""

import argparse
import base64
import collections
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from typing import NoReturn

from deepspeed.accelerator import get_accelerator

from . import launch
from .constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    SLURM_LAUNCHER,
    SSH_LAUNCHER,
)
from .constants import PDSH_MAX_FAN_OUT as PDSH_MAX_FAN_OUT  # part of this module's interface
from .launch import MAX_RESTARTS, per_node_flags, set_log_level
from .multinode_runner import (
    IMPIRunner,
    MPICHRunner,
    MultiNodeRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
    SSHRunner,
)
from .remote_job import RemoteJob

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
# Variables that stay on this host when the key is set in the environment.
EXCLUDE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}

LAUNCHER_CLASSES: dict[str, type[MultiNodeRunner]] = {
    PDSH_LAUNCHER: PDSHRunner,
    OPENMPI_LAUNCHER: OpenMPIRunner,
    MPICH_LAUNCHER: MPICHRunner,
    IMPI_LAUNCHER: IMPIRunner,
    MVAPICH_LAUNCHER: MVAPICHRunner,
    SLURM_LAUNCHER: SlurmRunner,
    SSH_LAUNCHER: SSHRunner,
}

_SSH_TIMEOUT_S = 60

logger = logging.getLogger("DeepSpeed")

Resources = dict[str, list[int]]


def _add_resource_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-H",
        "--hostfile",
        type=str,
        default=DLTS_HOSTFILE,
        help="file with lines `HOST slots=N` (default: %(default)s)",
    )
    parser.add_argument(
        "-i", "--include", type=str, default="", help="hosts and slots to use: HOST[:SLOT[,SLOT...]][@HOST...]"
    )
    parser.add_argument("-e", "--exclude", type=str, default="", help="hosts and slots to leave out, same form")
    parser.add_argument("--num_nodes", type=int, default=-1, help="use the first N hosts of the hostfile")
    parser.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="use slots 0..N-1 of each host; N ranks on CPU"
    )
    parser.add_argument(
        "--master_port", type=int, default=29500, help="free port on rank 0's host (default: %(default)s)"
    )
    parser.add_argument("--master_addr", type=str, default="", help="address of rank 0's host")
    parser.add_argument("--node_rank", type=int, default=-1, help="index of this host, with --no_ssh")


def _add_launcher_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher", type=str, default=PDSH_LAUNCHER, help=f"multi-node launcher: {', '.join(LAUNCHER_CLASSES)}"
    )
    parser.add_argument(
        "--launcher_args", type=str, default="", help="further arguments for the launcher, as one string"
    )
    parser.add_argument("--no_ssh", action="store_true", help="start only this host's ranks; needs --node_rank")
    parser.add_argument("--no_ssh_check", action="store_true", help="do not test first whether hosts can be reached")
    parser.add_argument("--force_multi", action="store_true", help="use the multi-node launcher for one host too")
    parser.add_argument("--ssh_port", type=int, default=None, help="port for ssh")
    parser.add_argument("--venv_script", type=str, default=None, help="script sourced first on remote hosts")


def _add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--elastic_training",
        action="store_true",
        help="run the ranks under torchrun: they start anew when one fails or hosts come and go",
    )
    parser.add_argument("--min_elastic_nodes", type=int, default=-1, help="go on with no fewer hosts (1)")
    parser.add_argument("--max_elastic_nodes", type=int, default=-1, help="take no more hosts (those chosen here)")
    parser.add_argument(
        "--max_restarts", type=int, default=MAX_RESTARTS, help="of elastic ranks after failures (default: %(default)s)"
    )


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--save_pid", action="store_true", help="write the launcher's id to /tmp/<parent id>.deepspeed")
    parser.add_argument("--enable_each_rank_log", type=str, default="None", help="folder for one log file per rank")
    parser.add_argument("--autotuning", type=str, default="", choices=["tune", "run"], help="not built")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores (numactl)")
    parser.add_argument(
        "--bind_core_list", type=str, default=None, help="cores to spread over the ranks, e.g. 0-3,8-11"
    )
    parser.add_argument(
        "--log_level",
        type=str,
        default="info",
        choices=["debug", "info", "warning", "error", "critical"],
        help="log level of the launcher (default: %(default)s)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="the same as --log_level error")


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line of ``deepspeed`` (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Starts a training script on every slot (device) of this host or of a group of hosts.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="deepspeed [options] user_script [user_args...]",
    )
    add_arguments(parser)
    return parser.parse_args(args=args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of the launcher, the script and its arguments."""
    _add_resource_arguments(parser)
    _add_launcher_arguments(parser)
    _add_rank_arguments(parser)
    _add_elastic_arguments(parser)
    parser.add_argument("user_script", type=str, help="script to run, followed by its arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Slots of each host, in the order of the file; None if there is no such file.

    Raises:
        ValueError: a line is not ``HOST slots=N``, a host stands there twice, or there is no host at all.
    """
    if not os.path.isfile(hostfile_path):
        # Few machines have the default one, so only a file that somebody asked for is worth a warning.
        level = logging.DEBUG if hostfile_path == DLTS_HOSTFILE else logging.WARNING
        logger.log(level, f"no hostfile at {hostfile_path}: using this host only")
        return None
    pool: dict[str, int] = collections.OrderedDict()
    with open(hostfile_path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
            if match is None:
                raise ValueError(f"hostfile {hostfile_path} line {number}: {text!r} is not of the form `HOST slots=N`")
            host, slots = match.group(1), int(match.group(2))
            if host in pool:
                raise ValueError(f"hostfile {hostfile_path} line {number}: host {host!r} stands there twice")
            pool[host] = slots
    if not pool:
        raise ValueError(f"hostfile {hostfile_path} names no host: write lines `HOST slots=N`")
    return pool


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Host and slots of one ``HOST[:SLOT[,SLOT...]]``; no slots means all of them.

    Raises:
        ValueError: the host is missing or a slot is no number.
    """
    host, colon, slots = node_config.strip().partition(":")
    if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", slots)):
        raise ValueError(f"{node_config!r} is not of the form HOST[:SLOT[,SLOT...]]")
    return host, sorted({int(slot) for slot in slots.split(",")}) if colon else []


def parse_node_config_list(node_config_list: list[str]) -> dict[str, list[int]]:
    """Slots of each host of several node specifications; a repeated host gets the slots of all of them."""
    merged: dict[str, list[int]] = collections.OrderedDict()
    for node_config in node_config_list:
        host, slots = parse_node_config(node_config)
        if host not in merged:
            merged[host] = slots
        elif not merged[host] or not slots:
            merged[host] = []  # one of the two said: all slots
        else:
            merged[host] = sorted({*merged[host], *slots})
    return merged


def parse_resource_filter(host_info: Resources, include_str: str = "", exclude_str: str = "") -> Resources:
    """Hosts and slots that an include or an exclude string leaves of ``host_info``, in the order of ``host_info``.

    Args:
        host_info: slots of each host.
        include_str: what to keep, ``HOST[:SLOT[,SLOT...]][@HOST...]``; everything if empty.
        exclude_str: what to leave out, same form.

    Raises:
        ValueError: both strings are given, or one of them names an unknown host or slot.
    """
    if include_str and exclude_str:
        raise ValueError(f"--include {include_str!r} and --exclude {exclude_str!r} cannot be given together")
    if not include_str and not exclude_str:
        return host_info
    flag, text = ("--include", include_str) if include_str else ("--exclude", exclude_str)
    named = parse_node_config_list(text.split("@"))
    for host, slots in named.items():
        if host not in host_info:
            raise ValueError(f"{flag} names host {host!r}, which is not among {', '.join(host_info)}")
        unknown = sorted(set(slots) - set(host_info[host]))
        if unknown:
            raise ValueError(f"{flag} names slots {unknown} of host {host!r}, which has {list(host_info[host])}")
    filtered: Resources = collections.OrderedDict()
    for host, available in host_info.items():
        if host not in named:
            kept = [] if include_str else list(available)
        else:
            chosen = set(named[host] or available)
            kept = sorted(slot for slot in available if (slot in chosen) == bool(include_str))
        if kept:
            filtered[host] = kept
    return filtered


def parse_inclusion_exclusion(resource_pool: dict[str, int], inclusion: str, exclusion: str) -> Resources:
    """As ``parse_resource_filter``, for a pool that says how many slots each host has."""
    active = collections.OrderedDict((host, list(range(slots))) for host, slots in resource_pool.items())
    return parse_resource_filter(active, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(active_resources: Resources, num_nodes: int, num_gpus: int) -> Resources:
    """The first ``num_nodes`` hosts with slots 0..``num_gpus``-1 each; -1 (or 0) means no limit.

    Raises:
        ValueError: there are fewer hosts, or a host has fewer slots, than asked for.
    """
    hosts = list(active_resources)
    if num_nodes > 0:
        if num_nodes > len(hosts):
            raise ValueError(f"--num_nodes {num_nodes}: there are only {len(hosts)} hosts: {', '.join(hosts)}")
        hosts = hosts[:num_nodes]
    updated: Resources = collections.OrderedDict()
    for host in hosts:
        slots = active_resources[host]
        if num_gpus > len(slots):
            raise ValueError(f"--num_gpus {num_gpus}: host {host!r} has only {len(slots)} slots")
        updated[host] = list(range(num_gpus)) if num_gpus > 0 else list(slots)
    return updated


def encode_world_info(world_info: Resources) -> str:
    """Urlsafe base64 of the JSON of ``world_info``, as the per-node launch step takes it."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("utf-8")


def run_autotuning(args: argparse.Namespace, active_resources: Resources) -> NoReturn:
    """Not built.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("--autotuning: automatic tuning of the configuration is not built")


def _check_arguments(args: argparse.Namespace) -> None:
    args.launcher = args.launcher.lower()
    if args.module and args.no_python:
        raise ValueError("--module and --no_python cannot be given together")
    if args.include and args.exclude:
        raise ValueError("--include and --exclude cannot be given together")
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise ValueError("--num_nodes and --num_gpus cannot be given together with --include or --exclude")
    if args.num_gpus == 0 or args.num_nodes == 0:
        raise ValueError("--num_nodes and --num_gpus must be at least 1")
    if args.bind_core_list is not None and not args.bind_cores_to_rank:
        raise ValueError("--bind_core_list needs --bind_cores_to_rank")
    _check_elastic_arguments(args)
    if args.no_ssh and args.node_rank < 0:
        raise AssertionError("--no_ssh starts this host's ranks only: say which host it is with --node_rank N")


def _check_elastic_arguments(args: argparse.Namespace) -> None:
    limits = {"--min_elastic_nodes": args.min_elastic_nodes, "--max_elastic_nodes": args.max_elastic_nodes}
    given = {flag: value for flag, value in limits.items() if value != -1}
    if given and not args.elastic_training:
        raise ValueError(f"{' and '.join(given)} need --elastic_training")
    for flag, value in given.items():
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if len(given) == 2 and args.min_elastic_nodes > args.max_elastic_nodes:
        raise ValueError(f"--min_elastic_nodes {args.min_elastic_nodes} is above {args.max_elastic_nodes}, the maximum")


def _use_visible_devices(args: argparse.Namespace, variable: str) -> None:
    """Turns the variable that selects devices into --include; slots chosen on the command line win over it."""
    slots = os.environ.pop(variable)
    if args.include or args.exclude or args.num_gpus > 0 or args.num_nodes > 0:
        logger.warning(f"{variable}={slots} is ignored, as slots are chosen on the command line")
    else:
        args.include = f"localhost:{slots}"


def _local_resources(args: argparse.Namespace) -> tuple[Resources, list[str]]:
    """Slots of this host when there is no hostfile, and the variables with which each rank is shown its devices.

    On an accelerator without a fixed number of devices (cpu) slots are plain ranks: as many as asked for,
    and no variable.
    """
    accelerator = get_accelerator()
    variables = list(accelerator.visible_devices_envs())
    visible = next((name for name in variables if os.environ.get(name)), None)
    if visible is not None and not re.fullmatch(r"\d+(,\d+)*", os.environ[visible]):
        variables = []  # devices named by UUID: slots count those, and the variable goes on to the ranks as it is
    elif visible is not None:
        _use_visible_devices(args, visible)
    count = accelerator.device_count()
    if accelerator.device_name() == "cpu":
        count = max(count, args.num_gpus)
    if count <= 0:
        raise RuntimeError("no hostfile and no accelerator found on this host: nothing to start ranks on")
    return {"localhost": list(range(count))}, variables


def _choose_resources(args: argparse.Namespace) -> tuple[Resources, list[str], bool]:
    """Active slots of each host, variables that select devices, and whether a hostfile named the hosts."""
    pool = fetch_hostfile(args.hostfile)
    if pool is None:
        if args.num_nodes > 1:
            raise ValueError(f"--num_nodes {args.num_nodes} needs a hostfile, and there is none at {args.hostfile}")
        available, variables = _local_resources(args)
    else:
        available = parse_inclusion_exclusion(pool, "", "")
        variables = list(get_accelerator().visible_devices_envs())
    active = parse_resource_filter(available, include_str=args.include, exclude_str=args.exclude)
    active = apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    if not active:
        raise ValueError("no slot is left after --include and --exclude")
    return active, variables, pool is not None


def _ssh(args: argparse.Namespace, host: str, *command: str) -> str:
    port = [] if args.ssh_port is None else ["-p", str(args.ssh_port)]
    full = ["ssh", "-o", "PasswordAuthentication=no", *port, host, *command]
    try:
        done = subprocess.run(full, capture_output=True, text=True, check=True, timeout=_SSH_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"host {host!r} cannot be reached with {shlex.join(full)!r}: {error}. Set up ssh without a password, "
            "or skip this test with --no_ssh_check"
        ) from error
    return done.stdout


def _choose_master(args: argparse.Namespace, first_host: str, multi_node: bool) -> None:
    if args.no_ssh:
        if not args.master_addr and multi_node:
            raise ValueError("--no_ssh on several hosts: give rank 0's host with --master_addr")
    elif multi_node and not args.no_ssh_check:
        _ssh(args, first_host, "hostname")
    if args.master_addr:
        return
    if not multi_node:
        args.master_addr = "127.0.0.1"
        return
    addresses = _ssh(args, first_host, "hostname", "-I").split()
    if not addresses:
        raise RuntimeError(f"host {first_host!r} reports no address: give one with --master_addr")
    args.master_addr = addresses[0]


def _launch_here(args: argparse.Namespace, world_info: str, variables: list[str]) -> NoReturn:
    """Becomes the per-node launch step.

    This process is replaced and not kept as a parent: signals and the exit status need no forwarding, and the memory of
    the imported package is given back.
    """
    command = [sys.executable, "-u", os.path.abspath(launch.__file__), f"--world_info={world_info}"]
    command += [f"--master_addr={args.master_addr}", f"--master_port={args.master_port}"]
    command += [f"--node_rank={max(args.node_rank, 0)}", f"--visible_devices_env={','.join(variables)}"]
    command += per_node_flags(args)
    if args.save_pid:
        command.append(f"--save_pid={os.getpid()}")
    command += [args.user_script, *args.user_args]
    logger.debug(f"command: {shlex.join(command)}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, os.environ.copy())


def exported_variables(environment: dict[str, str]) -> dict[str, str]:
    """Variables that remote hosts get: by the start of their name from ``environment``, then from environment files.

    Raises:
        ValueError: a line of an environment file is not ``KEY=VALUE``.
    """
    starts = tuple(EXPORT_ENVS + list(get_accelerator().export_envs()))
    excluded = {name for flag, names in EXCLUDE_ENVS.items() if flag in environment for name in names}
    exported = {key: value for key, value in environment.items() if key.startswith(starts) and key not in excluded}
    for folder in DEEPSPEED_ENVIRONMENT_PATHS:
        path = os.path.join(folder, DEEPSPEED_ENVIRONMENT_NAME)
        if not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                text = line.strip()
                if not text or text.startswith("#"):
                    continue
                key, equals, value = text.partition("=")
                if not equals or not key:
                    raise ValueError(f"{path} line {number}: {text!r} is not of the form KEY=VALUE")
                exported[key] = value
    return exported


def _check_backend_takes(args: argparse.Namespace, runner: MultiNodeRunner) -> None:
    """Refuses, or warns about, what only a per-node launch step can do."""
    if runner.starts_launch_step:
        return
    if args.elastic_training:
        raise ValueError(
            f"--elastic_training needs --launcher pdsh or ssh, or --no_ssh on each host; {runner.name} cannot start "
            "ranks anew"
        )
    for flag, value in (("--venv_script", args.venv_script), ("--save_pid", args.save_pid)):
        if value:
            logger.warning(f"{flag} has no effect with launcher {runner.name}")


def _run_multi_node(args: argparse.Namespace, world_info: str, active: Resources) -> int:
    """Runs the multi-node launcher to its end; its exit status.

    Raises:
        RuntimeError: the launcher is not installed.
    """
    backend = LAUNCHER_CLASSES[args.launcher]
    slots = [] if backend.starts_launch_step else [{host: len(ids) for host, ids in active.items()}]
    runner = backend(args, world_info, *slots)
    if not runner.backend_exists():
        raise RuntimeError(f"launcher {args.launcher!r} is not installed on this host")
    runner.validate_active_resources(active)
    _check_backend_takes(args, runner)
    environment = os.environ.copy()
    here = os.path.abspath(".")
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (here, environment.get("PYTHONPATH")) if part)
    for key, value in exported_variables(environment).items():
        runner.add_export(key, value)
    command = runner.get_cmd(environment, active)
    logger.info(f"command: {shlex.join(command)}")
    # Elastic ranks are there to go on without a host that failed.
    end_on_failure = runner.starts_launch_step and not args.elastic_training
    return RemoteJob(command, environment, runner.kill_command(active), end_on_failure).run()


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``deepspeed`` command.

    A run on this host replaces the calling process and never returns. A run through a multi-node launcher returns when
    all is well and otherwise exits with the launcher's status.

    Raises:
        ValueError: arguments contradict each other, or name unknown hosts or slots.
        RuntimeError: nothing to run on, a host cannot be reached, or the launcher is not installed.
        NotImplementedError: unknown launcher, or --autotuning.
        AssertionError: --no_ssh without --node_rank.
    """
    parsed = parse_args(args)
    set_log_level(parsed.log_level, parsed.quiet)
    _check_arguments(parsed)
    if parsed.launcher not in LAUNCHER_CLASSES:
        raise NotImplementedError(f"unknown launcher {parsed.launcher!r}: choose one of {', '.join(LAUNCHER_CLASSES)}")
    active, variables, from_hostfile = _choose_resources(parsed)
    if parsed.autotuning:
        run_autotuning(parsed, active)
    multi_node = parsed.force_multi or len(active) > 1
    if multi_node and not from_hostfile:
        raise ValueError(f"--force_multi needs a hostfile, and there is none at {parsed.hostfile}")
    world_info = encode_world_info(active)
    _choose_master(parsed, next(iter(active)), multi_node)
    if parsed.no_ssh or not multi_node:
        _launch_here(parsed, world_info, variables)
    status = _run_multi_node(parsed, world_info, active)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
