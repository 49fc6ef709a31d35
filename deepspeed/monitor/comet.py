# SPDX-License-Identifier: Apache-2.0
"""Comet."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist  # noqa: F401 - a name of the interface
from deepspeed.monitor.config import CometConfig
from deepspeed.monitor.monitor import Event, Monitor, plain_number
from deepspeed.monitor.utils import check_comet_availability


class EventsLogScheduler:
    """Says which events are due: of each name the first, then one at least ``samples_log_interval`` samples after
    the last that was due (or before it: a job resumed from an earlier checkpoint)."""

    def __init__(self, samples_log_interval: int) -> None:
        self._samples_log_interval = samples_log_interval
        self._last_logged: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """Whether the event is due; if so it counts as logged."""
        last = self._last_logged.get(name)
        if last is not None and last <= current_sample < last + self._samples_log_interval:
            return False
        self._last_logged[name] = current_sample
        return True


class CometMonitor(Monitor):
    """Logs to a Comet experiment, which is started here; Comet ends it with the process.

    Args:
        comet_config: the config's section ``comet``. What is None there is left to Comet's own configuration.

    Raises:
        ImportError: comet_ml is not installed, or too old.
    """

    def __init__(self, comet_config: CometConfig) -> None:
        super().__init__(comet_config)
        self._samples_log_interval = comet_config.samples_log_interval
        self._scheduler = EventsLogScheduler(self._samples_log_interval)
        self._experiment: Any = None
        if self.enabled:
            check_comet_availability()
        if self.writes:
            self._experiment = _start_experiment(comet_config)

    @property
    def experiment(self) -> Any:
        """The ``comet_ml`` experiment; None where this process does not write."""
        return self._experiment

    @property
    def samples_log_interval(self) -> int:
        return self._samples_log_interval

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log the events that are due, see :class:`EventsLogScheduler`."""
        if self._experiment is None:
            return
        for name, value, step in event_list:
            if self._scheduler.needs_logging(name, step):
                self._experiment.log_metric(name, plain_number(value), step=step)


def _start_experiment(config: CometConfig) -> Any:
    import comet_ml

    if not hasattr(comet_ml, "start"):
        raise ImportError("the config enables Comet, whose package is too old: pip install --upgrade comet_ml")
    # Older versions call it project; newer ones take that too, with a warning.
    project = "project_name" if "project_name" in inspect.signature(comet_ml.start).parameters else "project"
    arguments = {
        "api_key": config.api_key,
        "workspace": config.workspace,
        project: config.project,
        "experiment_key": config.experiment_key,
        "mode": config.mode,
        "online": config.online,
    }
    experiment = comet_ml.start(**{key: value for key, value in arguments.items() if value is not None})
    if config.experiment_name is not None:
        experiment.set_name(config.experiment_name)
    return experiment
