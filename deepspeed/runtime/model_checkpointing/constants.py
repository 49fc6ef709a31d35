# SPDX-License-Identifier: Apache-2.0
"""Keys, defaults and allowed values of the checkpoint section."""

CHECKPOINT = "checkpoint"
CHECKPOINT_TAG_VALIDATION = "tag_validation"
CHECKPOINT_TAG_VALIDATION_DEFAULT = "WARN"
CHECKPOINT_TAG_VALIDATION_MODES = ["WARN", "IGNORE", "FAIL"]
CHECKPOINT_SERIALIZATION = "checkpoint_serialization"
CHECKPOINT_SERIALIZATION_DEFAULT = True
CHECKPOINT_WRITER = "writer"
CHECKPOINT_WRITER_DEFAULT = None
CHECKPOINT_WRITER_TYPE = "type"
CHECKPOINT_WRITER_TYPE_DEFAULT = "FAST"
CHECKPOINT_WRITER_TYPES = ["MOCK", "PYTHON", "FAST"]
CHECKPOINT_IO_BUFFER_SIZE = "io_buffer_size"
CHECKPOINT_IO_BUFFER_SIZE_DEFAULT = 67108864
CHECKPOINT_IO_BUFFER_DOUBLE = "io_buffer_double"
CHECKPOINT_IO_BUFFER_DOUBLE_DEFAULT = True
CHECKPOINT_IO_MULTIPLIER = "io_multiplier"
CHECKPOINT_IO_MULTIPLIER_DEFAULT = 1
CHECKPOINT_IO_STATISTICS = "show_statistics"
CHECKPOINT_IO_STATISTICS_DEFAULT = False
CHECKPOINT_DATA_PARALLEL = "data_parallel"
CHECKPOINT_DATA_PARALLEL_DEFAULT = None
CHECKPOINT_DATA_PARALLEL_UNITS = ["REPLICA", "SOCKET", "MACHINE"]
CHECKPOINT_WRITER_DECOUPLED = "decoupled"
CHECKPOINT_WRITER_DECOUPLED_DEFAULT = False


class ValidationMode:
    """What to do when ranks disagree about the checkpoint tag."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class CheckpointWriterType:
    """Implementations of the checkpoint file writer."""

    MOCK = "MOCK"
    PYTHON = "PYTHON"
    FAST = "FAST"


class CheckpointDataParallel:
    """Unit over which data-parallel checkpoint writing is spread."""

    REPLICA = "REPLICA"
    SOCKET = "SOCKET"
    MACHINE = "MACHINE"
