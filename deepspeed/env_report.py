# SPDX-License-Identifier: Apache-2.0
"""``ds_report``: what runs here (versions, accelerator, memory) and which native ops can be used."""

import argparse
import os
import platform
import subprocess
import sys

import torch

from deepspeed import git_version_info
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder, cuda_home

GREEN = "\033[92m"
RED = "\033[91m"
YELLOW = "\033[93m"
END = "\033[0m"
SUCCESS = f"{GREEN} [SUCCESS] {END}"
OKAY = f"{GREEN}[OKAY]{END}"
WARNING = f"{YELLOW}[WARNING]{END}"
FAIL = f"{RED}[FAIL]{END}"
INFO = "[INFO]"

color_len = len(GREEN) + len(END)
okay = OKAY
warning = WARNING

_LINE = "-" * 50
_SHM = "/dev/shm"
# NCCL and torch's data loaders pass data through it; containers often give it 64 MB.
_SMALL_SHM = 512 << 20


def _plain(text: str) -> str:
    """``text`` without colours where nobody would see them (a pipe, a file)."""
    if sys.stdout.isatty():
        return text
    for code in (GREEN, RED, YELLOW, END):
        text = text.replace(code, "")
    return text


def op_report(verbose: bool = True) -> None:
    """Prints each native op with whether it is compiled already and whether it can be compiled here.

    Args:
        verbose: say why an op cannot be compiled.
    """
    width = max(len(name) for name in ALL_OPS) + 2
    print(_LINE)
    print("native ops: compiled when the package is installed (DS_BUILD_OPS) or on first use; where that is not")
    print("possible, torch does the work. cached: compiled on an earlier use")
    print(_LINE)
    print(f"{'op':<{width}}installed   compatible")
    for name, builder in ALL_OPS.items():
        installed, reason = _op_status(builder)
        compatible = OKAY if reason is None else f"{YELLOW}[NO]{END}"
        because = f"        {reason}" if verbose and reason else ""
        print(_plain(f"{name:<{width}}{installed:<{12 + color_len}}{compatible}{because}"))


def _op_status(builder: OpBuilder) -> tuple[str, str | None]:
    """Mark for the column "installed", and why the op cannot be compiled (None if it can)."""
    marks = {"installed": OKAY, "cached": f"{GREEN}[CACHED]{END}", "": f"{YELLOW}[NO]{END}"}
    try:
        return marks[builder.compiled()], builder.why_not()
    except (RuntimeError, ValueError, OSError) as error:
        return marks[""], str(error)


def nvcc_version() -> str:
    """Version of the CUDA compiler, or in brackets why there is none to report."""
    home = cuda_home()
    if home is None:
        return "[no CUDA toolkit found]"
    nvcc = os.path.join(home, "bin", "nvcc")
    try:
        done = subprocess.run([nvcc, "-V"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"[{nvcc} cannot be run: {error}]"
    return done.stdout.partition("release ")[2].partition(",")[0]


def installed_cann_path() -> str | None:
    """Folder of the Ascend toolkit as the environment names it; None if it names none."""
    return os.environ.get("ASCEND_HOME_PATH")


def installed_cann_version() -> str:
    """Not built.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("reporting the version of the Ascend toolkit is not built")


def get_shm_size() -> tuple[int | None, list[str]]:
    """Size of /dev/shm in bytes with warnings about it; (None, why) where it cannot be read."""
    try:
        info = os.statvfs(_SHM)
    except OSError as error:
        return None, [f"{WARNING} {_SHM} cannot be read: {error.strerror}"]
    size = info.f_frsize * info.f_blocks
    if size >= _SMALL_SHM:
        return size, []
    return size, [
        f"{WARNING} {_SHM} has only {human_readable_size(size)}: collectives and data loaders may fail. "
        "In a container enlarge it with --shm-size"
    ]


def human_readable_size(size: float) -> str:
    """``size`` bytes in the largest unit that keeps the number at 1 or more, two decimals."""
    units = ["B", "KB", "MB", "GB", "TB"]
    index = 0
    while size >= 1024 and index < len(units) - 1:
        size /= 1024
        index += 1
    return f"{size:.2f} {units[index]}"


def debug_report() -> None:
    """Prints versions of what is installed and what this host has."""
    accelerator = get_accelerator()
    shm_size, shm_warnings = get_shm_size()
    info = git_version_info.torch_info
    rows = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("torch", f"{torch.__version__} ({os.path.dirname(torch.__file__)})"),
        (
            "deepspeed",
            f"{git_version_info.version} (commit {git_version_info.git_hash}, branch {git_version_info.git_branch})",
        ),
        ("deepspeed folder", os.path.dirname(os.path.abspath(__file__))),
        ("accelerator", f"{accelerator.device_name()}, {accelerator.device_count()} device(s)"),
        ("communication backend", str(accelerator.communication_backend_name())),
        ("torch built for CUDA", info["cuda_version"]),
        ("NCCL", info["nccl_version"]),
        ("torch built for ROCm", info["hip_version"]),
        ("nvcc", nvcc_version()),
        ("shared memory", "unknown" if shm_size is None else human_readable_size(shm_size)),
    ]
    print(_LINE)
    print("environment")
    print(_LINE)
    for label, value in rows:
        print(f"{label:<24}{value}")
    for line in shm_warnings:
        print(_plain(line))


def parse_arguments() -> argparse.Namespace:
    """Parses the command line of ``ds_report``."""
    parser = argparse.ArgumentParser(prog="ds_report", description="reports what deepspeed finds on this host")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the table of native ops")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="do not say why a native op cannot be compiled"
    )
    return parser.parse_args()


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Prints the report.

    Args:
        hide_operator_status: leave out the table of native ops.
        hide_errors_and_warnings: do not say why a native op cannot be compiled.
    """
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main() -> None:
    """Entry point of the ``ds_report`` command."""
    args = parse_arguments()
    main(args.hide_operator_status, args.hide_errors_and_warnings)


if __name__ == "__main__":
    cli_main()
