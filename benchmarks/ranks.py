# SPDX-License-Identifier: Apache-2.0
"""Start one process per rank on this machine, wait for all of them, and collect what they wrote."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOG_TAIL = 4000
TIMEOUT_SECONDS = 1800


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_paths() -> list[str]:
    """Python's path that leads to this package first, and then where this process was told to look."""
    return [str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def rank_environment(
    rank: int, ranks: int, port: int, device: str, threads: int, paths: Sequence[str]
) -> dict[str, str]:
    """The environment of one rank.

    Args:
        device: "cpu" hides GPUs: without that the package would choose one, whatever the benchmark asks for.
        threads: of OpenMP.
        paths: Python's path. That of this process is not inherited: it may lead to another ``deepspeed``.
    """
    hide_gpus = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    return (
        os.environ
        | hide_gpus
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(paths),
            # torch renames its collectives from release to release and warns of it on every rank.
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
    )


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended; return the first rank that failed, None if none did.

    A rank whose peer has died waits for it in a collective, so the others are ended as soon as one fails.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    return rank
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > deadline:
                return codes.index(None)
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def run_ranks(
    script: Path,
    task: dict[str, Any],
    ranks: int,
    *,
    device: str = "cpu",
    threads: int = 1,
    what: str = "",
    python: str = sys.executable,
    paths: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Run ``script`` once per rank and return what the ranks wrote, in rank order.

    The script gets ``task`` as JSON in its only argument, with ``output`` set to a folder, in which it must write
    ``rank<N>.json``. ``paths`` is Python's path; None: ``own_paths()``.

    Raises:
        RuntimeError: a rank failed; carries ``what`` and the end of its output.
    """
    port = free_port()
    paths = own_paths() if paths is None else paths
    with tempfile.TemporaryDirectory() as folder:
        argument = json.dumps(task | {"output": folder})
        logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            environment = rank_environment(rank, ranks, port, device, threads, paths)
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen([python, str(script), argument], env=environment, stdout=stream, stderr=stream)
                )
        failed = wait_for_all(processes)
        if failed is not None:
            code = processes[failed].returncode
            tail = logs[failed].read_text(errors="replace")[-LOG_TAIL:]
            raise RuntimeError(f"{what or script.name}: rank {failed} ended with {code}:\n{tail}")
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
