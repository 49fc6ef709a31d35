#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whole weights from a ZeRO checkpoint in a dtype of choice; otherwise as ``zero_to_fp32``, beside which it lies.

::

    python zero_to_torch.py . exported --dtype bf16
"""

from collections.abc import Sequence

if __package__:
    from deepspeed.utils import zero_to_fp32
else:  # in a folder of checkpoints
    import zero_to_fp32


def main(args: Sequence[str] | None = None) -> None:
    """The program."""
    parser = zero_to_fp32.argument_parser("Whole weights from a ZeRO checkpoint, in a dtype of choice.")
    names = zero_to_fp32.OUTPUT_DTYPE_NAMES
    parser.add_argument("--dtype", required=True, choices=sorted(names), help="of floating-point weights")
    arguments = parser.parse_args(args)
    zero_to_fp32.run(arguments, names[arguments.dtype])


if __name__ == "__main__":
    main()
