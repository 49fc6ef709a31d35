# SPDX-License-Identifier: Apache-2.0
"""One CSV file per event name: ``<output_path>/<job_name>/<name with _ for />.csv``."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from deepspeed import comm as dist  # noqa: F401 - a name of the interface
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.monitor import Event, Monitor, plain_number
from deepspeed.monitor.utils import log_directory, release_directory


class csvMonitor(Monitor):
    """Appends a row ``step,value`` per event, handed to the operating system at once, so that a crash of the job
    loses none. The header is ``step`` and the last part of the event's name.

    A file that an earlier run left is continued; a row that a crash cut short is removed from its end.

    Args:
        csv_config: the config's section ``csv_monitor``.
    """

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config)
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        self.log_dir = ""
        self._files: dict[str, TextIO] = {}
        self._name_of: dict[str, str] = {}
        if self.writes:
            self.setup_log_dir()

    def setup_log_dir(self, base: str = "~/csv_monitor") -> str:
        """Make the folder of this job's files and return it; ``base`` is for when the config has no ``output_path``."""
        self.log_dir = log_directory(self, base)
        return self.log_dir

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append a row to the file of each event.

        Raises:
            ValueError: two event names, or an event and an earlier run's file, would share a file.
            OSError: the file cannot be written.
        """
        if not self.writes:
            return
        for name, value, step in event_list:
            csv.writer(self._file(name), lineterminator="\n").writerow([step, plain_number(value)])
        for opened in self._files.values():
            opened.flush()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            file_name = name.replace("/", "_") + ".csv"
            other = self._name_of.setdefault(file_name, name)
            if other != name:
                raise ValueError(f"csv_monitor: events {other!r} and {name!r} would share {file_name}; rename one")
            self._files[name] = _open_to_append(Path(self.log_dir, file_name), name.rsplit("/", 1)[-1])
        return self._files[name]

    def close(self) -> None:
        for opened in self._files.values():
            opened.close()
        self._files.clear()
        release_directory(self)


def _open_to_append(path: Path, column: str) -> TextIO:
    """Open a file whose first line is the header ``step,column`` and whose last line is whole."""
    opened = open(path, "a+", newline="", encoding="utf-8")
    try:
        _drop_torn_row(opened)
        opened.seek(0)
        header = next(csv.reader(opened), None)
        opened.seek(0, os.SEEK_END)
        if header is None:
            csv.writer(opened, lineterminator="\n").writerow(["step", column])
        elif header != ["step", column]:
            raise ValueError(
                f"csv_monitor: {path} begins with {','.join(header)!r}, not 'step,{column}': it was not written for"
                " this event. Choose another csv_monitor.output_path or job_name, or move the file away"
            )
    except BaseException:
        opened.close()
        raise
    return opened


def _drop_torn_row(opened: TextIO) -> None:
    """Cut off what follows the last end of line: a number cut short would still be read as a number."""
    opened.seek(0)
    content = opened.buffer.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        opened.truncate(whole)
