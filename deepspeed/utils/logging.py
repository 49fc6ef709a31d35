# SPDX-License-Identifier: Apache-2.0
"""The package logger and functions that log on chosen ranks only.

Each line says when, how bad, where in the code, and on which rank. The level is WARNING; the environment variable
``DS_LOG_LEVEL``, the config's ``log_level`` (once ``deepspeed.initialize`` has read it) and
:func:`set_log_level_from_string` change it, each later one over the earlier.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import torch
import torch.distributed

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

LOG_LEVEL_VARIABLE = "DS_LOG_LEVEL"
_ALL_RANKS = -1
_RANK_MARK = "[Rank "


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the time of the record, so that redirection after import works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class _RankFormatter(logging.Formatter):
    """Puts the rank in front of each message, once; nothing in a process that is no rank."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        rank = _known_rank()
        if rank is not None and not record.message.startswith(_RANK_MARK):
            record.message = _with_rank(rank, record.message)
        return super().formatMessage(record)


class LoggerFactory:
    """Creates loggers that write one line per record to stderr and never through the root logger."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger ``name`` with one stderr handler.

        Calling it again for the same name changes the level and adds no second handler.

        Raises:
            ValueError: ``name`` is None or empty (that would configure the root logger).
        """
        if not name:
            raise ValueError("create_logger needs a name: the root logger belongs to the application")
        new_logger = logging.getLogger(name)
        new_logger.setLevel(level)
        new_logger.propagate = False
        if not any(isinstance(handler, _StderrHandler) for handler in new_logger.handlers):
            handler = _StderrHandler()
            handler.setFormatter(
                _RankFormatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
            )
            new_logger.addHandler(handler)
        if os.environ.get("DISABLE_LOGS_WHILE_COMPILING", "0").lower() in ("1", "true"):
            _silence_while_compiling(new_logger)
        return new_logger


def _silence_while_compiling(target: logging.Logger) -> None:
    """Make the log methods return at once under torch.compile, where a log call would break the graph."""
    kept = os.environ.get("LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE", "")
    excluded = {method.strip() for method in kept.split(",")}

    def skip_when_compiling(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def log(*args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
                method(*args, **kwargs)

        return log

    for name in ("debug", "info", "warning", "error", "exception", "critical", "log"):
        if name not in excluded and name not in vars(target):
            setattr(target, name, skip_when_compiling(getattr(target, name)))


def _known_rank() -> int | None:
    """Global rank: of the process group, else of the launcher's environment, else None."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK"):
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return None


def _rank() -> int:
    """Global rank, 0 where there is none."""
    return _known_rank() or 0


def _with_rank(rank: int, message: str) -> str:
    return f"{_RANK_MARK}{rank}] {message}"


def _speaks(ranks: Iterable[int] | None) -> bool:
    """Whether this rank is among ``ranks`` (None: rank 0 only; -1 in the list: every rank)."""
    if ranks is None:
        return _rank() == 0
    wanted = set(ranks)
    return _ALL_RANKS in wanted or _rank() in wanted


_seen_warnings: set[str] = set()


def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning`` that is silent when called again with the same arguments."""
    key = repr((args, sorted(kwargs.items())))
    if key not in _seen_warnings:
        _seen_warnings.add(key)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        logger.warning(*args, **kwargs)


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of ``args``, one line each, sorted, under the title ``name`` (level INFO)."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * max(0, 29 - len(key)), getattr(args, key))


def get_dist_msg(message: str, ranks: Iterable[int] | None = None) -> str | None:
    """``message`` with this rank in front, or None where this rank should stay silent.

    Args:
        message: the text.
        ranks: ranks that speak; None means rank 0, a list holding -1 means every rank.
    """
    return _with_rank(_rank(), message) if _speaks(ranks) else None


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks only (see :func:`get_dist_msg`)."""
    if not logger.isEnabledFor(level):
        return
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, "%s", text, stacklevel=2)


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Print ``message`` to stdout on the given ranks only (see :func:`get_dist_msg`)."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text, flush=True)


_seen_dist_messages: set[str] = set()


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist` that logs each message once per process."""
    if message not in _seen_dist_messages and logger.isEnabledFor(level):
        _seen_dist_messages.add(message)
        log_dist(message, ranks=ranks, level=level)


def print_json_dist(message: dict[str, Any], ranks: Iterable[int] | None = None, path: str | None = None) -> None:
    """Write ``message`` with an added key ``rank`` as JSON to ``path`` on the given ranks.

    Raises:
        ValueError: ``path`` is None on a rank that should write.
    """
    if not _speaks(ranks):
        return
    if path is None:
        raise ValueError("print_json_dist needs the path of the file to write")
    with open(path, "w") as outfile:
        json.dump({**message, "rank": _rank()}, outfile)
        outfile.flush()
        os.fsync(outfile.fileno())


def get_log_level_from_string(log_level_str: str) -> int:
    """The logging level for ``debug``, ``info``, ``warning``, ``error`` or ``critical`` (any case).

    Raises:
        ValueError: unknown name.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not a log level; use one of {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``custom_logger`` (default: the package logger) from its name.

    Raises:
        ValueError: unknown name.
    """
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """Effective level of the package logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the package logger's level is at most the named one.

    Raises:
        ValueError: unknown name.
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _level_from_environment() -> int:
    """Level that ``DS_LOG_LEVEL`` names; WARNING where it is not set."""
    text = os.environ.get(LOG_LEVEL_VARIABLE, "")
    if not text:
        return logging.WARNING
    if text.lower() not in log_levels:
        raise ValueError(f"environment variable {LOG_LEVEL_VARIABLE}={text!r}: use one of {', '.join(log_levels)}")
    return get_log_level_from_string(text)


logger = LoggerFactory.create_logger(name="DeepSpeed", level=_level_from_environment())
