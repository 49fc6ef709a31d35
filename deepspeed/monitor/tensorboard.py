# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files in ``<output_path>/<job_name>``, by torch's writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist  # noqa: F401 - a name of the interface
from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.monitor.monitor import Event, Monitor, plain_number
from deepspeed.monitor.utils import check_tb_availability, log_directory, release_directory


class TensorBoardMonitor(Monitor):
    """Scalars for TensorBoard. A resumed job adds a file to the same folder, and TensorBoard joins them.

    Args:
        tensorboard_config: the config's section ``tensorboard``.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config)
        self.output_path = tensorboard_config.output_path
        self.job_name = tensorboard_config.job_name
        self.summary_writer: Any = None
        if self.enabled:
            check_tb_availability()
        if self.writes:
            self.get_summary_writer()

    def get_summary_writer(self, base: str = "~/tensorboard") -> Any:
        """The ``SummaryWriter``, made by the first call, None where this process does not write; ``base`` is for when
        the config has no ``output_path``."""
        if self.writes and self.summary_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.summary_writer = SummaryWriter(log_dir=log_directory(self, base))
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write scalars; with ``flush`` they are in the file on return, so that a crash of the job loses none."""
        writer = self.get_summary_writer()
        if writer is None:
            return
        for name, value, step in event_list:
            writer.add_scalar(name, plain_number(value), step)
        if flush:
            writer.flush()

    def flush(self) -> None:
        """Write out what ``write_events(..., flush=False)`` kept back."""
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()
            self.summary_writer = None
            release_directory(self)
