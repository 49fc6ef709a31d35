# SPDX-License-Identifier: Apache-2.0
"""The ``ds_grad_check`` command: run a training script's first steps under the gradient check and print a table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.launcher import runner
from deepspeed.runtime.gradients.self_check_config import ENVIRONMENT

RANK_MODULE = "deepspeed.launcher.grad_check_rank"


def own_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that are not the launcher's."""
    parser.add_argument("--steps", type=int, default=3, help="updates to check (default: %(default)s)")
    parser.add_argument(
        "--against",
        choices=["ddp"],
        default=None,
        help="also do each step again in plain torch, on the same batches, and average over ranks",
    )
    parser.add_argument(
        "--parameters", default=None, help="names of the parameters to check: shell patterns, '|' between"
    )
    parser.add_argument("--tolerance", type=float, default=None, help="instead of what rounding allows")
    return parser


def environment_value(options: argparse.Namespace) -> str:
    """What DS_GRADIENT_CHECK has to say for these options."""
    parts = [f"steps={options.steps}", "every=1", "on_mismatch=warn"]
    if options.parameters is not None:
        parts.append(f"parameters={options.parameters}")
    if options.tolerance is not None:
        parts.append(f"tolerance={options.tolerance!r}")
    return ",".join(parts)


def split_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Own options, those of the launcher, and the script with its arguments.

    Raises:
        SystemExit: there is no script, or an option is neither's.
    """
    parser = own_parser(
        argparse.ArgumentParser(
            prog="ds_grad_check",
            description="Runs the first updates of a training script under the gradient check, prints a table per"
            " parameter group, and exits with 0 (right), 1 (wrong) or 2 (nothing was checked).",
            epilog="ds_grad_check [options] [options of the launcher, such as --num_gpus N] script.py [arguments]",
            allow_abbrev=False,
        )
    )
    # The launcher's parser says where its options end and the script begins.
    whole = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own_parser(whole)
    runner.add_arguments(whole)
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0 if arguments else 2)
    parsed = whole.parse_args(list(arguments))
    script = [parsed.user_script, *parsed.user_args]
    own, launcher = parser.parse_known_args(list(arguments[: len(arguments) - len(script)]))
    if own.steps < 1:
        parser.error(f"--steps must be at least 1, got {own.steps}")
    if parsed.no_python or parsed.elastic_training:
        parser.error("--no_python and --elastic_training cannot be checked")
    return own, launcher, script


def rank_arguments(own: argparse.Namespace, as_module: bool, script: Sequence[str]) -> list[str]:
    """Arguments of the program that each rank runs in place of the script."""
    against = [] if own.against is None else [f"--against={own.against}"]
    return [f"--steps={own.steps}", *against, *["--as_module"] * as_module, "--", *script]


def inside_a_launcher(environment: Mapping[str, str]) -> bool:
    """Whether another launcher has made this process a rank."""
    return all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``ds_grad_check`` command.

    Under a launcher (``torchrun ... ds_grad_check``) this process is a rank already; otherwise ours starts the ranks.

    Raises:
        SystemExit: 0: all gradients are right; 1: some are wrong; 2: the script ended before an update was checked.
    """
    own, launcher, script = split_arguments(sys.argv[1:] if arguments is None else arguments)
    os.environ[ENVIRONMENT] = environment_value(own)
    as_module = "--module" in launcher
    program = rank_arguments(own, as_module, script)
    if inside_a_launcher(os.environ):
        from deepspeed.launcher import grad_check_rank

        raise SystemExit(grad_check_rank.main(program))
    runner.main([*(flag for flag in launcher if flag != "--module"), "--module", RANK_MODULE, *program])


if __name__ == "__main__":
    main()
