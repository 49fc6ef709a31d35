# SPDX-License-Identifier: Apache-2.0
"""Per-node launch step: starts this node's ranks, waits for them and ends them together.

The runner executes this file directly, not as ``-m deepspeed.launcher.launch``: with the standard library alone it is
up in a fraction of the time that importing torch takes, and stays small in memory beside the ranks.
"""

import argparse
import base64
import binascii
import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import IO, NoReturn

if __package__:
    from .constants import TORCHRUN_LAUNCHER
    from .core_binding import cores_of_rank, numactl_prefix
else:  # executed as a file: this folder is on sys.path, the package may not be
    from constants import TORCHRUN_LAUNCHER
    from core_binding import cores_of_rank, numactl_prefix

PID_FILE_BASEPATH = "/tmp"

# Time that ranks have between the request to end and SIGKILL.
GRACE_PERIOD_S = 30.0
# How often the ranks of an elastic job start anew after one of them failed.
MAX_RESTARTS = 3
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("DeepSpeed")


@dataclass
class Child:
    """One process started here: a rank, or the agent that runs this node's elastic ranks."""

    name: str
    process: subprocess.Popen[bytes]


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parses the per-node command line (``sys.argv`` when ``args`` is None)."""
    parser = argparse.ArgumentParser(description="starts the ranks of one node; normally called by `deepspeed`")
    parser.add_argument("--node_rank", type=int, default=0, help="index of this node in the world info")
    parser.add_argument("--master_addr", type=str, default="127.0.0.1", help="address of rank 0's node")
    parser.add_argument("--master_port", type=int, default=29500, help="free port on rank 0's node for rendezvous")
    parser.add_argument("--world_info", type=str, default="None", help="urlsafe base64 of JSON {host: [slot, ...]}")
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="execute the script directly")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--save_pid", type=int, default=0, help="write this process's id to /tmp/<SAVE_PID>.deepspeed")
    parser.add_argument("--enable_each_rank_log", type=str, default="None", help="folder for one log file per rank")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores")
    parser.add_argument(
        "--bind_core_list", type=str, default=None, help="cores to spread over the ranks, e.g. 0-3,8-11"
    )
    parser.add_argument("--log_level", type=str, default="info", choices=list(_LOG_LEVELS), help="of the launcher")
    parser.add_argument("-q", "--quiet", action="store_true", help="the same as --log_level error")
    parser.add_argument("--enable_elastic_training", action="store_true", help="run the ranks under torchrun's agent")
    parser.add_argument("--min_elastic_nodes", type=int, default=-1, help="go on with no fewer nodes (1)")
    parser.add_argument("--max_elastic_nodes", type=int, default=-1, help="take no more nodes (those there are)")
    parser.add_argument("--max_restarts", type=int, default=MAX_RESTARTS, help="of all ranks after one has failed")
    parser.add_argument(
        "--visible_devices_env",
        type=str,
        default=None,
        help="comma-separated variables that select devices; empty: set none; left out: ask the accelerator",
    )
    parser.add_argument(
        "--grace_period", type=float, default=GRACE_PERIOD_S, help="seconds between the request to end and SIGKILL"
    )
    parser.add_argument("training_script", type=str, help="program that every rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


_LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def set_log_level(level: str, quiet: bool) -> None:
    """Applies --log_level and --quiet to the launcher's logger, which writes to stderr if nobody configured it."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] [launcher] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.ERROR if quiet else _LOG_LEVELS[level])


def _given(args: argparse.Namespace, *switches: str) -> list[str]:
    return [f"--{name}" for name in switches if getattr(args, name)]


def _log_and_core_flags(args: argparse.Namespace) -> list[str]:
    flags = []
    if args.enable_each_rank_log != "None":
        flags.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
    if args.bind_core_list is not None:
        flags.append(f"--bind_core_list={args.bind_core_list}")
    return flags


def per_node_flags(args: argparse.Namespace) -> list[str]:
    """Flags that the per-node launch step takes over from the parsed command line of the runner."""
    flags = _given(args, "module", "no_python", "no_local_rank", "bind_cores_to_rank", "quiet")
    flags += _log_and_core_flags(args)
    if args.elastic_training:
        flags += ["--enable_elastic_training", f"--min_elastic_nodes={args.min_elastic_nodes}"]
        flags += [f"--max_elastic_nodes={args.max_elastic_nodes}", f"--max_restarts={args.max_restarts}"]
    return [*flags, f"--log_level={args.log_level}"]


def helper_flags(args: argparse.Namespace) -> list[str]:
    """Flags that launcher_helper takes over from the runner or from the launch step."""
    return _given(args, "module", "no_python", "bind_cores_to_rank") + _log_and_core_flags(args)


def exit_status(return_code: int) -> int:
    """Shell status of a ``Popen.returncode``: death by signal n, which Popen gives as -n, is 128 + n."""
    return 128 - return_code if return_code < 0 else return_code


def decode_world_info(encoded: str) -> dict[str, list[int]]:
    """Slots of each host, in rank order.

    Raises:
        ValueError: ``encoded`` is missing or is not urlsafe base64 of a JSON object.
    """
    if encoded == "None":
        raise ValueError(
            "--world_info is missing: urlsafe base64 of JSON {host: [slot, ...]}, as `deepspeed` passes it"
        )
    try:
        info = json.loads(base64.urlsafe_b64decode(encoded))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"--world_info {encoded!r} is not urlsafe base64 of JSON {{host: [slot, ...]}}") from error
    if not isinstance(info, dict) or not info:
        raise ValueError(f"--world_info names no host: {info!r}")
    return info


def check_port_is_free(address: str, port: int) -> None:
    """Ends the launcher with a clear message if ``port`` is taken; only called on the node that serves it.

    Raises:
        SystemExit: another process listens on the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the rendezvous server does: connections of a finished job that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use by another process" if error.errno == errno.EADDRINUSE else "may not be used"
            raise SystemExit(
                f"deepspeed launcher: port {port} of {address} {why} ({error.strerror}), so the ranks could not meet "
                "there. Choose a free one with --master_port."
            ) from error


def _device_variables(args: argparse.Namespace) -> list[str]:
    if args.visible_devices_env is not None:
        return [name for name in args.visible_devices_env.split(",") if name]
    # Started by hand: only the accelerator knows. The runner passes the names so that this import is not needed.
    from deepspeed.accelerator import get_accelerator

    return list(get_accelerator().visible_devices_envs())


def node_environment(args: argparse.Namespace, world_info: dict[str, list[int]]) -> dict[str, str]:
    """What all ranks of this node have in common in their environment.

    Raises:
        ValueError: ``args.node_rank`` is not an index into ``world_info``.
    """
    hosts = list(world_info)
    if not 0 <= args.node_rank < len(hosts):
        raise ValueError(
            f"--node_rank {args.node_rank} is not in 0..{len(hosts) - 1}: the hosts are {', '.join(hosts)}"
        )
    slots = world_info[hosts[args.node_rank]]
    env = os.environ.copy()
    for name in _device_variables(args):
        env[name] = ",".join(str(slot) for slot in slots)
    env["MASTER_ADDR"] = args.master_addr
    env["MASTER_PORT"] = str(args.master_port)
    env["WORLD_SIZE"] = str(sum(len(ids) for ids in world_info.values()))
    env["CROSS_RANK"] = str(args.node_rank)
    env["CROSS_SIZE"] = str(len(hosts))
    env["LOCAL_SIZE"] = str(len(slots))
    return env


def rank_command(args: argparse.Namespace, local_rank: int) -> list[str]:
    """The command of one rank, without core binding. ``--local_rank`` stands before the user's arguments."""
    own = [] if args.no_local_rank else [f"--local_rank={local_rank}"]
    return script_command(args.training_script, [*own, *args.training_script_args], args.module, args.no_python)


def script_command(script: str, arguments: list[str], module: bool, no_python: bool) -> list[str]:
    """How ``script`` is run: by this interpreter, as a module, or as a program of its own."""
    return [*([] if no_python else [sys.executable, "-u"]), *(["-m"] if module else []), script, *arguments]


def die_with_parent() -> None:
    """Has this process killed when its parent dies, so that no rank outlives a launcher that was killed; Linux only.

    It holds for the program that this process becomes, too.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _before_exec() -> Callable[[], None] | None:
    """What a child runs between fork and exec; the library is loaded here, before there are two processes."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    launcher = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died in between
            os._exit(1)

    return before_exec


class RankGroup:
    """The ranks of this node: all of them run, or all of them end.

    Each rank leads a session and process group of its own, so that a signal reaches what it started, and so that
    Ctrl-C in a terminal arrives once (through the launcher) and not twice.
    """

    def __init__(self, grace_period_s: float) -> None:
        self._grace_period_s = grace_period_s
        self._before_exec = _before_exec()
        self._ranks: list[Child] = []
        self._signal: int | None = None
        self._signals_seen = 0

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Notes a request to end; ``wait`` acts on it. A second one means: at once."""
        self._signal = signum
        self._signals_seen += 1

    def start(self, name: str, command: list[str], env: dict[str, str], log: IO[bytes] | None = None) -> None:
        """Starts a rank, or an agent that starts ranks.

        Args:
            name: what messages call it.
            command: program and arguments.
            env: its whole environment.
            log: file for what it prints; None leaves it with the launcher's output.

        Raises:
            SystemExit: the program cannot be executed.
        """
        logger.debug(f"{name}: {command}")
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )
        except OSError as error:
            self.end(signal.SIGTERM)
            raise SystemExit(f"deepspeed launcher: cannot execute {command[0]!r}: {error.strerror}") from error
        self._ranks.append(Child(name, process))

    def interrupted(self) -> bool:
        """Whether a request to end has come."""
        return self._signal is not None

    def wait(self) -> int:
        """Waits until all ranks have ended; the exit status for the launcher.

        The status is 0 if all ended well, 1 if the launcher was told to end, else that of the first rank that failed.
        """
        running = list(self._ranks)
        while running:
            if self._signal is not None:
                logger.info(f"received {signal.Signals(self._signal).name}: ending {len(running)} ranks")
                self.end(self._signal)
                return 1
            for rank in list(running):
                code = rank.process.poll()
                if code is None:
                    continue
                running.remove(rank)
                if not _group_exists(rank.process.pid):
                    self._ranks.remove(rank)  # its id may be given to somebody else from now on
                if code != 0:
                    self._report_failure(rank, code, others=len(running))
                    self.end(signal.SIGTERM)
                    return exit_status(code)
            time.sleep(_POLL_S)
        self._end_left_behind()
        return 0

    def end(self, signum: int) -> None:
        """Sends ``signum`` to the process tree of every rank, and SIGKILL to what is left after the grace period."""
        trees = {rank.process.pid: _process_tree(rank.process.pid) for rank in self._ranks}
        for pid, tree in trees.items():
            _send(pid, tree, signum)
        deadline = time.monotonic() + self._grace_period_s
        asked_before = self._signals_seen
        while time.monotonic() < deadline and self._signals_seen == asked_before and self._any_alive(trees):
            time.sleep(_POLL_S)
        for pid, tree in trees.items():
            _send(pid, tree | _process_tree(pid), signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()

    def _any_alive(self, trees: dict[int, set[int]]) -> bool:
        for rank in self._ranks:
            rank.process.poll()  # reaps it, so that a zombie does not look like a group that lives
        return any(_group_exists(pid) or any(_runs(child) for child in tree) for pid, tree in trees.items())

    def _end_left_behind(self) -> None:
        """Ranks that ended well may have left workers in their groups: nothing outlives the launcher."""
        if any(_group_exists(rank.process.pid) for rank in self._ranks):
            self.end(signal.SIGTERM)

    def _report_failure(self, rank: Child, code: int, others: int) -> None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        then = f"; ending the {others} others" if others else ""
        logger.error(f"{rank.name}, pid {rank.process.pid}, {how}{then}")


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as somebody else
        return True
    return True


def _children() -> dict[int, list[int]]:
    """Children of every process, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    if not os.path.isdir("/proc/self"):
        return children
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # The name in parentheses may hold spaces and parentheses; the parent is the second field after it.
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended in between
            continue
        children.setdefault(parent, []).append(int(name))
    return children


def _process_tree(pid: int) -> set[int]:
    """``pid`` and what descends from it, also what moved to process groups of its own."""
    children = _children()
    tree, todo = set(), [pid]
    while todo:
        process = todo.pop()
        tree.add(process)
        todo += children.get(process, [])
    return tree


def _send(group: int, tree: set[int], signum: int) -> None:
    """Signals a process group, then those of ``tree`` that are not in it."""
    if _group_exists(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signum)
    for pid in tree - {group}:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != group:
                os.kill(pid, signum)


def terminate_process_tree(pid: int) -> None:
    """Ends ``pid`` and its descendants: SIGTERM, then SIGKILL for what is left after the grace period.

    Ids of processes that have ended already are ignored.
    """
    tree = _process_tree(pid)
    for process in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_PERIOD_S
    while tree and time.monotonic() < deadline:
        tree = {process for process in tree if _runs(process)}
        time.sleep(_POLL_S)
    for process in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether ``pid`` exists and, where /proc can tell, is no zombie."""
    try:
        os.kill(pid, 0)
        if not os.path.isdir("/proc/self"):
            return True
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def _pid_file(save_pid: int) -> Iterator[None]:
    """Holds this process's id in /tmp/<save_pid>.deepspeed for as long as the ranks run; nothing for 0."""
    if not save_pid:
        yield
        return
    path = os.path.join(PID_FILE_BASEPATH, f"{save_pid}.deepspeed")
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def log_timestamp() -> str:
    """Local time as it stands in the names of log files."""
    return datetime.now().strftime("%Y%m%d%H%M%S")


def open_rank_log(folder: str, started: str, global_rank: int) -> IO[bytes] | None:
    """Log file of a rank, in a folder that is made if need be; None where the folder is "None"."""
    if folder == "None":
        return None
    os.makedirs(folder, exist_ok=True)
    return open(os.path.join(folder, f"{started}_rank{global_rank}.log"), "ab")


def start_ranks(args: argparse.Namespace, world_info: dict[str, list[int]], group: RankGroup) -> None:
    """Starts the ranks of node ``args.node_rank`` into ``group``; stops early if a request to end comes.

    Raises:
        SystemExit: the program cannot be executed.
    """
    node_env = node_environment(args, world_info)
    sizes = [len(slots) for slots in world_info.values()]
    first_rank = sum(sizes[: args.node_rank])
    started = log_timestamp()
    for local_rank in range(sizes[args.node_rank]):
        if group.interrupted():
            return
        rank = first_rank + local_rank
        env = {**node_env, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        command = rank_command(args, local_rank)
        if args.bind_cores_to_rank:
            cores = cores_of_rank(args.bind_core_list, sizes[args.node_rank], local_rank)
            env["OMP_NUM_THREADS"] = str(len(cores))
            command = numactl_prefix(cores) + command
        log = open_rank_log(args.enable_each_rank_log, started, rank)
        try:
            group.start(f"rank {rank} (local rank {local_rank})", command, env, log)
        finally:
            if log is not None:
                log.close()


def start_elastic_agent(args: argparse.Namespace, world_info: dict[str, list[int]], group: RankGroup) -> None:
    """Starts torchrun's agent, which starts this node's ranks, and starts them anew when one fails or nodes change.

    The nodes meet at the master address and port. World size and ranks are torchrun's to give, so the environment holds
    only what does not depend on them. The hosts' ranks meet at the node that torchrun makes the first, by the name that
    the hostfile gives it; where that is no name of the network, torchrun takes the host's own.

    Raises:
        SystemExit: the limits on the number of nodes contradict each other.
    """
    env = node_environment(args, world_info)
    slots = int(env["LOCAL_SIZE"])
    for name in ("WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del env[name]
    least = max(args.min_elastic_nodes, 1)
    most = args.max_elastic_nodes if args.max_elastic_nodes > 0 else max(len(world_info), least)
    if least > most:
        raise SystemExit(f"deepspeed launcher: --min_elastic_nodes {least} is above --max_elastic_nodes {most}")
    command = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nnodes={least}:{most}"]
    command += [f"--nproc_per_node={slots}", f"--max_restarts={args.max_restarts}", "--rdzv_backend=c10d"]
    command += [f"--rdzv_endpoint={args.master_addr}:{args.master_port}", f"--rdzv_id=deepspeed-{args.master_port}"]
    # Said outright, since the address may be one that no lookup of this host's names gives.
    command += [f"--rdzv_conf=is_host={int(args.node_rank == 0)}"]
    own_name = args.master_addr if args.node_rank == 0 else list(world_info)[args.node_rank]
    command += [f"--local_addr={own_name}"] if _is_known(own_name) else []
    command += ["--no_python", sys.executable, "-u", launcher_helper_file(), f"--launcher={TORCHRUN_LAUNCHER}"]
    command += helper_flags(args) + ([] if args.no_local_rank else ["--pass_local_rank"])
    command += [args.training_script, *args.training_script_args]
    group.start(f"elastic agent of node {args.node_rank}", command, env)


def _is_known(host: str) -> bool:
    """Whether ``host`` is an address or has one; a name that only ssh's configuration knows has none."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return False
    return host != "localhost"


def launcher_helper_file() -> str:
    """launcher_helper, to be executed as a file: importing the whole package would cost every rank seconds."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher_helper.py")


def main() -> NoReturn:
    """Starts this node's ranks and exits with their status.

    Raises:
        SystemExit: always; 0 if all ranks ended well, 1 if the launcher was told to end, else the status of the rank
            that failed first (128 + n if signal n ended it).
        ValueError: --world_info is missing or malformed, or --node_rank is not in it.
    """
    args = parse_args()
    set_log_level(args.log_level, args.quiet)
    world_info = decode_world_info(args.world_info)
    if args.node_rank == 0:
        check_port_is_free(args.master_addr, args.master_port)
    group = RankGroup(args.grace_period)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(signum, group.on_signal)
    with _pid_file(args.save_pid):
        start = start_elastic_agent if args.enable_elastic_training else start_ranks
        start(args, world_info, group)
        sys.exit(group.wait())


if __name__ == "__main__":
    main()
