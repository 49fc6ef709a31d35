# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist  # noqa: F401 - a name of the interface
from deepspeed.monitor.config import WandbConfig
from deepspeed.monitor.monitor import Event, Monitor, plain_number
from deepspeed.monitor.utils import check_wandb_availability


class WandbMonitor(Monitor):
    """Logs to the run of this process, which is started here unless there is one. wandb ends it with the process,
    since other code may log to it too.

    Args:
        wandb_config: the config's section ``wandb``; ``team`` is what wandb calls entity.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config)
        self.group = wandb_config.group
        self.team = wandb_config.team
        self.project = wandb_config.project
        self._run: Any = None
        if self.enabled:
            check_wandb_availability()
        if self.writes:
            import wandb

            self._run = wandb.run or wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """``wandb.log`` on rank 0."""
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log the events, those of one step together."""
        if self._run is None:
            return
        by_step: dict[int, dict[str, Any]] = {}
        for name, value, step in event_list:
            by_step.setdefault(step, {})[name] = plain_number(value)
        for step in sorted(by_step):  # wandb drops what goes back in steps
            self.log(by_step[step], step=step)
