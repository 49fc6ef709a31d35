# SPDX-License-Identifier: Apache-2.0
"""Checksums and copies of checkpoints."""

from .builder import OpBuilder


class CheckpointBuilder(OpBuilder):
    """CRC-32 with the processor's instructions for it, and copies that compute it meanwhile.

    Compiled for several kinds of processor, among which it chooses when it runs. Needs Python's headers, none of torch.
    """

    BUILD_VAR = "DS_BUILD_CHECKPOINT"
    NAME = "checkpoint"

    def absolute_name(self) -> str:
        return "deepspeed.checkpoint.checkpoint_op"

    def sources(self) -> list[str]:
        return [f"csrc/checkpoint/{name}.cpp" for name in ("bindings", "copying", "crc32")]

    def include_paths(self) -> list[str]:
        return ["csrc/checkpoint", "csrc/includes"]

    def cxx_args(self) -> list[str]:
        return ["-O3", "-std=c++17", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]

    def extra_ldflags(self) -> list[str]:
        return ["-pthread"]

    def uses_torch(self) -> bool:
        return False
