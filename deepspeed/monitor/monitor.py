# SPDX-License-Identifier: Apache-2.0
"""What all monitors share, and the one that writes to every monitor the config enables.

An event is ``(name, value, step)``: a name with slashes, a number (or a tensor of one element), and the position on
the x axis. The engine uses the number of samples seen so far as step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.monitor.config import DeepSpeedMonitorConfig

Event = tuple[str, Any, int]


class Monitor(ABC):
    """Somewhere to write events.

    Args:
        monitor_config: the config section; its ``enabled`` says whether anything is written.

    Attributes:
        enabled: what the config says; the same on every rank.
        writes: whether this process writes: enabled, and global rank 0 (or no process group).
    """

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = bool(monitor_config.enabled)
        self.writes = self.enabled and (not dist.is_initialized() or dist.get_rank() == 0)

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events, on rank 0; on other ranks and when disabled nothing happens."""

    def close(self) -> None:
        """Close files. May be called more than once; a later event opens them again."""


class MonitorMaster(Monitor):
    """All monitors that the config enables, as one.

    Args:
        monitor_config: the config's monitor sections.

    Raises:
        ImportError: an enabled monitor needs a package that is not installed; on every rank that lacks it.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)
        self.monitors = _make_enabled(monitor_config)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events to each enabled monitor."""
        for monitor in self.monitors:
            monitor.write_events(event_list)

    def close(self) -> None:
        for monitor in self.monitors:
            monitor.close()


def _make_enabled(config: DeepSpeedMonitorConfig) -> list[Monitor]:
    # Here, since these modules import this one.
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.tensorboard import TensorBoardMonitor
    from deepspeed.monitor.wandb import WandbMonitor

    kinds = (
        (TensorBoardMonitor, config.tensorboard),
        (WandbMonitor, config.wandb),
        (csvMonitor, config.csv_monitor),
        (CometMonitor, config.comet),
    )
    return [kind(section) for kind, section in kinds if section.enabled]


def plain_number(value: Any) -> Any:
    """The number in a tensor of one element; anything else unchanged. Synchronises the tensor's device."""
    return value.item() if isinstance(value, torch.Tensor) else value
