# SPDX-License-Identifier: Apache-2.0
"""Streams that checkpoint files are written to, by ``checkpoint.writer.type``."""

from typing import Any

from deepspeed.checkpoint.block_stream import Blocks, BlockStream
from deepspeed.runtime.model_checkpointing import constants as const
from deepspeed.runtime.model_checkpointing.constants import CheckpointWriterType


class CheckpointWriterFactory:
    """Makes the streams of ``checkpoint.writer``.

    FAST fills one buffer while others are written (``io_buffer_double``), as many at once as ``io_multiplier`` says.
    PYTHON has one buffer, MOCK writes nothing.

    Args:
        writer_config: the section, parsed.
        aio_config: without meaning here.
        dp_writer_config: must be None: each rank writes its own files.

    Raises:
        NotImplementedError: an option that does not exist here.
        ValueError: a buffer without bytes, or no writer.
    """

    def __init__(self, writer_config: dict[str, Any], aio_config: Any = None, dp_writer_config: Any = None) -> None:
        where = f"{const.CHECKPOINT}.{const.CHECKPOINT_WRITER}"
        if dp_writer_config is not None or writer_config[const.CHECKPOINT_DATA_PARALLEL] is not None:
            raise NotImplementedError(
                f"'{where}.{const.CHECKPOINT_DATA_PARALLEL}' is not supported: each rank writes its"
                " own files. Take it out"
            )
        for key, unit in ((const.CHECKPOINT_IO_BUFFER_SIZE, " of bytes"), (const.CHECKPOINT_IO_MULTIPLIER, "")):
            if writer_config[key] <= 0:
                raise ValueError(f"'{where}.{key}' is {writer_config[key]}, must be a positive number{unit}")
        self._config = writer_config
        several = writer_config[const.CHECKPOINT_WRITER_TYPE] != CheckpointWriterType.PYTHON
        several = several and writer_config[const.CHECKPOINT_IO_BUFFER_DOUBLE]
        self._blocks = Blocks(
            writer_config[const.CHECKPOINT_IO_BUFFER_SIZE],
            writer_config[const.CHECKPOINT_IO_MULTIPLIER] if several else 0,
        )

    def create_writer(self, file_path: str, optimize_dp_state: bool = False) -> BlockStream:
        """A stream that writes to ``file_path``; its ``tell`` counts what was written so far."""
        mock = self._config[const.CHECKPOINT_WRITER_TYPE] == CheckpointWriterType.MOCK
        return BlockStream("" if mock else file_path, self._blocks, self._config[const.CHECKPOINT_IO_STATISTICS])

    def release_writer(self) -> None:
        """Give the memory of the buffers back."""
        self._blocks.clear()
