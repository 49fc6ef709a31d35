# SPDX-License-Identifier: Apache-2.0
"""Binding of ranks to processor cores with numactl."""

import os
import shutil
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def get_numa_cores() -> list[list[int]]:
    """Cores of each NUMA node, in node order, without nodes that have none. Empty where the system does not tell."""
    nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    lists = [(node / "cpulist").read_text().strip() for node in nodes]
    return [parse_range_list(text) for text in lists if text]


def check_for_numactl_pkg() -> bool:
    """Whether the program numactl is installed."""
    return shutil.which("numactl") is not None


def parse_range(rng: str) -> list[int]:
    """``"3"`` is [3] and ``"3-5"`` is [3, 4, 5].

    Raises:
        ValueError: not of this form, or the end comes before the start.
    """
    first, dash, last = rng.strip().partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ValueError(f"core range {rng!r} must look like 3 or 3-5")
    start, end = int(first), int(last) if dash else int(first)
    if end < start:
        raise ValueError(f"core range {rng!r} ends before it starts")
    return list(range(start, end + 1))


def parse_range_list(range_str: str) -> list[int]:
    """``"0-2,8"`` is [0, 1, 2, 8].

    Raises:
        ValueError: a part is no range, or parts do not ascend without overlap.
    """
    cores: list[int] = []
    for part in range_str.split(","):
        more = parse_range(part)
        if cores and more[0] <= cores[-1]:
            raise ValueError(f"core list {range_str!r} must ascend and must not name a core twice")
        cores += more
    return cores


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Command prefix that binds one local rank to its share of the cores.

    Args:
        bind_core_list: cores to share out, e.g. ``0-3,8-11``; None: all that this process may use.
        num_local_procs: ranks on this node.
        local_rank: the rank to bind.

    Returns:
        (number of cores of the rank, arguments that go before the program's).

    Raises:
        RuntimeError: numactl is not installed.
        ValueError: fewer cores than ranks, or KMP_AFFINITY is set, which would fight with the binding.
    """
    if not check_for_numactl_pkg():
        raise RuntimeError("binding cores to ranks needs the program numactl: install it or leave the option off")
    if "KMP_AFFINITY" in os.environ:
        raise ValueError("KMP_AFFINITY conflicts with binding cores to ranks: unset it or leave the option off")
    cores = sorted(os.sched_getaffinity(0)) if bind_core_list is None else parse_range_list(bind_core_list)
    per_rank = len(cores) // num_local_procs
    if per_rank < 1:
        raise ValueError(f"{len(cores)} cores are not enough for {num_local_procs} ranks on this node")
    own = cores[local_rank * per_rank : (local_rank + 1) * per_rank]
    command = ["numactl", "-C", ",".join(map(str, own))]
    homes = [node for node, node_cores in enumerate(get_numa_cores()) if set(own) & set(node_cores)]
    if len(homes) == 1:  # one node holds all of the rank's cores: its memory is the near one
        command.append("--localalloc")
    return per_rank, command
