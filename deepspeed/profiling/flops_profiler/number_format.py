# SPDX-License-Identifier: Apache-2.0
"""Counts and durations as short text."""

DEFAULT_PRECISION = 2

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """``num`` with a decimal prefix, e.g. ``1.5 M``.

    Args:
        num: what to show.
        units: prefix to use ("T", "G", "M", "K", "", "m", "u"); default: the largest that leaves at least 1.
        precision: digits after the point.

    Raises:
        ValueError: a prefix that is not one of these.
    """
    if units is None:
        units = next((prefix for prefix, size in _PREFIXES.items() if abs(num) >= size), "u") if num else ""
    if units not in _PREFIXES:
        raise ValueError(f"units={units!r} is not one of {list(_PREFIXES)}")
    value = round(num / _PREFIXES[units], precision)
    return f"{value:.12g} {units}".rstrip()


def _with_name(num: float, units: str | None, precision: int, name: str) -> str:
    text = number_to_string(num, units, precision)
    return f"{text}{name}" if text[-1].isalpha() else f"{text} {name}"


def flops_to_string(flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Floating-point operations, or operations per second, as text: ``2.5 GFLOPS``. Arguments: ``number_to_string``."""
    return _with_name(flops, _bare(units, "FLOPS"), precision, "FLOPS")


def macs_to_string(macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Multiply-accumulates as text: ``1.25 GMACs``. Arguments: ``number_to_string``."""
    return _with_name(macs, _bare(units, "MACs"), precision, "MACs")


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """A number of parameters as text: ``1.3 M``. Arguments: ``number_to_string``."""
    return number_to_string(params_num, units, precision)


def bytes_to_string(b: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Bytes as text with a decimal prefix: ``1.5 MB``. Arguments: ``number_to_string``."""
    return _with_name(b, _bare(units, "B"), precision, "B")


def duration_to_string(duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Seconds as text: ``1.5 ms``. ``units``: "s", "ms" or "us"; default: by size, never above seconds."""
    if units is None and duration >= 1.0:
        units = "s"
    return _with_name(duration, _bare(units, "s"), precision, "s")


def _bare(units: str | None, name: str) -> str | None:
    """The prefix, of units given with their name ("GFLOPS") or without ("G")."""
    return units if units is None else units.removesuffix(name)
