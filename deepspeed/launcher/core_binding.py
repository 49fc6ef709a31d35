# SPDX-License-Identifier: Apache-2.0
"""Which CPU cores each local rank is bound to (``--bind_cores_to_rank``). Standard library only."""

import os
import shutil
from pathlib import Path

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NODE_FOLDER = Path("/sys/devices/system/node")


def parse_core_list(text: str) -> list[int]:
    """Cores named by a list such as ``0-3,8-11``, sorted.

    Raises:
        ValueError: an entry is no number or range, a range is reversed, or a core is named twice.
    """
    cores: list[int] = []
    for entry in text.strip().split(","):
        first, dash, last = entry.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError as error:
            raise ValueError(f"core list {text!r}: {entry!r} is neither a core nor a range such as 0-3") from error
        if low > high:
            raise ValueError(f"core list {text!r}: range {entry!r} ends before it starts")
        cores.extend(range(low, high + 1))
    if len(set(cores)) != len(cores):
        raise ValueError(f"core list {text!r} names a core twice")
    return sorted(cores)


def physical_cores() -> list[int]:
    """Cores this process may run on, one hardware thread of each, sorted."""
    allowed = sorted(os.sched_getaffinity(0))
    seen: set[int] = set()
    cores = []
    for core in allowed:
        siblings = _CPU_FOLDER / f"cpu{core}" / "topology" / "thread_siblings_list"
        if core not in seen:
            cores.append(core)
            seen.update(parse_core_list(siblings.read_text()) if siblings.exists() else [core])
    return cores


def cores_of_rank(core_list: str | None, num_local_ranks: int, local_rank: int) -> list[int]:
    """The contiguous block of cores for ``local_rank``; all ranks get equally many, a remainder stays unused.

    Raises:
        ValueError: there are fewer cores than ranks.
    """
    cores = parse_core_list(core_list) if core_list else physical_cores()
    per_rank = len(cores) // num_local_ranks
    if per_rank == 0:
        raise ValueError(
            f"cannot bind {num_local_ranks} local ranks to {len(cores)} cores: start fewer ranks, "
            "name more cores with --bind_core_list or leave --bind_cores_to_rank out"
        )
    return cores[local_rank * per_rank : (local_rank + 1) * per_rank]


def _memory_node(cores: list[int]) -> int | None:
    """The NUMA node that holds all ``cores``; None where they spread over several or the system does not say."""
    for node in _NODE_FOLDER.glob("node[0-9]*"):
        text = (node / "cpulist").read_text().strip()
        if text and set(cores) <= set(parse_core_list(text)):
            return int(node.name.removeprefix("node"))
    return None


def numactl_prefix(cores: list[int]) -> list[str]:
    """Command prefix that binds a process to ``cores``, and to their memory where they share one NUMA node.

    Raises:
        RuntimeError: numactl is not installed.
    """
    if shutil.which("numactl") is None:
        raise RuntimeError(
            "--bind_cores_to_rank needs numactl, which is not installed: install it or leave the flag out"
        )
    prefix = ["numactl", "-C", ",".join(str(core) for core in cores)]
    node = _memory_node(cores)
    return prefix if node is None else [*prefix, "-m", str(node)]
