# SPDX-License-Identifier: Apache-2.0
"""Counts, bytes and latencies of collectives, per operation and message size."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed

from deepspeed.utils.logging import logger

SYNCHRONISES = (
    "comms_logger: the host waits for the device before and after each logged collective, and asynchronous ones are"
    " waited for at once, so that latencies are whole. Nothing overlaps then: do not compare times of training steps"
    " with those of a run without it."
)

_GATHERING = ("all_gather",)
_N_MINUS_1_OVER_N = ("all_gather", "reduce_scatter", "all_to_all")


def get_caller_func(frame: int = 3) -> str:
    """Name of the function ``frame`` levels up the call stack (0: this function)."""
    return sys._getframe(frame).f_code.co_name


def print_rank_0(message: str) -> None:
    """Print on global rank 0."""
    if _rank() == 0:
        print(message, flush=True)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def convert_size(size_bytes: int) -> str:
    """Bytes as text with a binary unit, e.g. ``1.5 KB``."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
    power = min(int(math.log(size_bytes, 1024)), len(units) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {units[power]}"


def calc_bw_log(comm_op: str, size: int, duration: float, world_size: int | None = None) -> tuple[float, float]:
    """Algorithm and bus bandwidth of one collective, by the definitions of nccl-tests.

    Args:
        comm_op: name of the façade's function.
        size: bytes that this rank put in.
        duration: milliseconds.
        world_size: ranks of the group; default: of the world.

    Returns:
        (algorithm bandwidth, bus bandwidth) in Gbit/s; (0, 0) for a duration of 0.
    """
    if duration <= 0:
        return 0.0, 0.0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if comm_op.startswith(_GATHERING):
        size *= world_size
    gbit_per_s = size * 8 / duration / 1e6
    if comm_op.startswith(_N_MINUS_1_OVER_N):
        return gbit_per_s, gbit_per_s * (world_size - 1) / world_size
    if "all_reduce" in comm_op:
        return gbit_per_s, gbit_per_s * 2 * (world_size - 1) / world_size
    return gbit_per_s, gbit_per_s


class CommsLogger:
    """Record of collectives. Off until :meth:`configure` or :meth:`start_profiling_comms`.

    ``comms_dict[record name][bytes]`` is ``[count, latencies in ms, algorithm Gbit/s, bus Gbit/s]``, three lists of
    ``count`` entries. While it is on, each logged collective begins and ends with a device synchronisation, which it
    says once.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self._enabled = False
        self._said = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False

    @property
    def enabled(self) -> bool:
        """Whether collectives are logged at all; which of them, ``prof_all`` and ``prof_ops`` say."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
        if value and not self._said and _rank() == 0:
            self._said = True
            logger.warning(SYNCHRONISES)

    def configure(self, comms_config: Any) -> None:
        """Take the ``comms_logger`` section of a :class:`deepspeed.comm.config.DeepSpeedCommsConfig`, if it has one."""
        if comms_config.comms_logger_enabled:  # the section is there
            section = comms_config.comms_logger
            self.enabled = section.enabled
            self.prof_all = section.prof_all
            self.prof_ops = list(section.prof_ops)
            self.verbose = section.verbose
            self.debug = section.debug

    def start_profiling_comms(self) -> None:
        """Log every operation."""
        self.enabled = True
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only the operations that were chosen by name (or by ``prof=True`` of a call)."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Add operations to those that are logged by name."""
        self.enabled = True
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Take operations out of those that are logged by name."""
        self.prof_ops = sorted(set(self.prof_ops) - set(op_name_list))

    def selects(self, log_name: str) -> bool:
        """Whether an operation of this name is to be logged."""
        return self.prof_all or log_name in self.prof_ops

    def append(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, world_size: int | None = None
    ) -> None:
        """Add one operation.

        Args:
            raw_name: the façade's function (decides the bandwidth formula).
            record_name: the name it is filed under.
            latency: milliseconds.
            msg_size: bytes that this rank put in.
            world_size: ranks of the group; default: of the world.
        """
        algorithm, bus = calc_bw_log(raw_name, msg_size, latency, world_size)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        entry[1].append(latency)
        entry[2].append(algorithm)
        entry[3].append(bus)
        if self.verbose:
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                *(record_name, latency, convert_size(msg_size), algorithm, bus),
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """A copy of the record, in the form of ``comms_dict``."""
        return {
            name: {size: [entry[0], *(list(values) for values in entry[1:])] for size, entry in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }

    def has_data(self) -> bool:
        """Whether anything was logged."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget what was logged; the settings stay."""
        self.comms_dict = {}

    def get_operation_names(self) -> list[str]:
        """Record names seen so far."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Number of operations logged."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, float]]:
        """Figures per message size (bytes) of one record name; empty for a name that was never logged.

        Keys: ``count``, ``total_latency_ms``, ``avg_latency_ms``, ``min_latency_ms``, ``max_latency_ms``,
        ``algbw_gbps``, ``busbw_gbps``.
        """
        return {size: _figures(entry) for size, entry in sorted(self.comms_dict.get(operation_name, {}).items())}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, dict[int, dict[str, float]]] | None:
        """Summarise the record.

        Args:
            print_log: print a table on rank 0.
            show_straggler: add ``straggler_ms``: this rank's total latency less the sum, over the operations, of the
                smallest latency on any rank. This is a collective of the world group. It is left out for entries that
                some rank logged another number of times (operations of a subgroup).
            return_dict: return ``{record name: {bytes: figures}}``, with the keys of :meth:`get_operation_summary`.
        """
        summary = {name: self.get_operation_summary(name) for name in self.comms_dict}
        if show_straggler:
            self._add_straggler(summary)
        if print_log:
            print_rank_0(f"{_table(summary, show_straggler)}\n{_TABLE_NOTE}")
        return summary if return_dict else None

    def _add_straggler(self, summary: dict[str, dict[int, dict[str, float]]]) -> None:
        own = {(name, size): entry[1] for name, sizes in self.comms_dict.items() for size, entry in sizes.items()}
        everyone = [own]
        if torch.distributed.is_initialized():
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, own)
        for (name, size), latencies in own.items():
            columns = [ranks_own.get((name, size), []) for ranks_own in everyone]
            if all(len(column) == len(latencies) for column in columns):
                fastest = sum(min(at_same_call) for at_same_call in zip(*columns, strict=True))
                summary[name][size]["straggler_ms"] = sum(latencies) - fastest


_TABLE_NOTE = (
    "Sizes are what one rank puts in. Bandwidths in Gbit/s: algbw is the operation's size over its latency, busbw what"
    " a link carries (nccl-tests). Latencies were taken with the device synchronised before and after each operation."
)


def _figures(entry: list[Any]) -> dict[str, float]:
    count, latencies, algorithm, bus = entry
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": sum(latencies) / count,
        "min_latency_ms": min(latencies),
        "max_latency_ms": max(latencies),
        "algbw_gbps": sum(algorithm) / count,
        "busbw_gbps": sum(bus) / count,
    }


def _table(summary: dict[str, dict[int, dict[str, float]]], show_straggler: bool) -> str:
    titles = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "algbw(Gbps)", "busbw(Gbps)"]
    keys = ["total_latency_ms", "avg_latency_ms", "algbw_gbps", "busbw_gbps"]
    if show_straggler:
        titles.append("Straggler Effect(ms)")
        keys.append("straggler_ms")
    rows = [titles]
    for name, sizes in summary.items():
        for size, figures in sizes.items():
            numbers = [f"{figures[key]:.2f}" if key in figures else "-" for key in keys]
            rows.append([name, convert_size(size), str(figures["count"]), *numbers])
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(titles))]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
