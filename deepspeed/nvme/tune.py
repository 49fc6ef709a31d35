# SPDX-License-Identifier: Apache-2.0
"""``ds_nvme_tune``: which settings of the config section ``aio`` read and write a disk fastest.

``sweep_main`` measures combinations of settings with ``ds_io`` and notes each result in the log folder at once, so that
a sweep that was stopped goes on where it was; ``generate_main`` reads the notes and prints the best section.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from deepspeed.nvme.io_benchmark import measure_all, parse_args, size_of

RESULTS = "results.jsonl"
SWEEP: dict[str, list[Any]] = {
    "block_size": ["256K", "1M", "8M"],
    "queue_depth": [8, 32, 128],
    "io_parallel": [1, 2, 4],
    "single_submit": [False],
}
# Setting of the sweep -> key of the section.
AIO_KEYS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "io_parallel": "intra_op_parallelism",
    "single_submit": "single_submit",
}
DROP_CACHES = "/proc/sys/vm/drop_caches"


def _parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description="searches the fastest settings of section aio")
    add = parser.add_argument
    add("--nvme_dir", nargs="+", required=True, help="folder to measure; several are measured together")
    add("--sweep_config", default=None, help=f"JSON file with lists of values, of {', '.join(SWEEP)}")
    add("--no_read", action="store_true", help="do not measure reading")
    add("--no_write", action="store_true", help="do not measure writing")
    add("--io_size", type=size_of, default=size_of("400M"), help="bytes per folder")
    add("--gpu", action="store_true", help="the data starts and ends in device memory")
    add("--gds", action="store_true", help="not built")
    add("--flush_page_cache", action="store_true", help="drop the system's page cache before each (as root)")
    add("--log_dir", default="_aio_bench_logs", help="where results are noted")
    add("--loops", type=int, default=1, help="repetitions of each")
    add("--verbose", action="store_true", help="show each result in full")
    parsed = parser.parse_args(args)
    if parsed.gds:
        parser.error("--gds needs reads and writes straight to device memory (op gds), which are not built")
    if parsed.no_read and parsed.no_write:
        parser.error("--no_read and --no_write together leave nothing to measure")
    for folder in parsed.nvme_dir:
        if not os.path.isdir(folder):
            parser.error(f"folder {folder!r} does not exist")
    if parsed.flush_page_cache and not os.access(DROP_CACHES, os.W_OK):
        parser.error(f"--flush_page_cache needs the right to write {DROP_CACHES}")
    parsed.sweep = _sweep_of(parser, parsed.sweep_config)
    return parsed


def _sweep_of(parser: argparse.ArgumentParser, path: str | None) -> dict[str, list[Any]]:
    if path is None:
        return SWEEP
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    unknown = [name for name in given if name not in SWEEP]
    if unknown:
        parser.error(f"--sweep_config {path}: unknown settings {unknown}; there are {', '.join(SWEEP)}")
    return {name: values if isinstance(values, list) else [values] for name, values in {**SWEEP, **given}.items()}


def _combinations(sweep: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(sweep, values)) for values in itertools.product(*sweep.values())]


def _measure(args: argparse.Namespace, reads: bool, settings: dict[str, Any]) -> float:
    """GB/s over all folders, by the mean time of the repetitions."""
    mapping = [f"{folder}:{index}" for index, folder in enumerate(args.nvme_dir)]
    flags = ["--folder_to_device_mapping", *mapping, "--io_size", str(args.io_size), "--loops", str(args.loops)]
    flags += [f"--{name}={value}" for name, value in settings.items() if not isinstance(value, bool)]
    flags += [f"--{name}" for name, value in settings.items() if value is True]
    flags += ["--read"] * reads + ["--gpu"] * args.gpu
    if args.flush_page_cache:
        os.sync()
        Path(DROP_CACHES).write_text("3\n", encoding="ascii")
    seconds = [max(times) for times in zip(*measure_all(parse_args(flags)))]
    return args.io_size * len(args.nvme_dir) / (sum(seconds) / len(seconds)) / 1e9


def _results(log_dir: str) -> list[dict[str, Any]]:
    path = Path(log_dir, RESULTS)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _key(direction: str, settings: dict[str, Any], args: argparse.Namespace) -> str:
    return json.dumps([direction, settings, args.nvme_dir, args.io_size, args.gpu, args.loops], sort_keys=True)


def sweep_main(args: list[str] | None = None) -> list[dict[str, Any]]:
    """Measures each combination and shows how far it is. Results that the log folder has already are not measured
    again.

    Returns:
        the results: ``direction``, ``settings``, ``gb_per_s`` and ``key``.

    Raises:
        SystemExit: arguments that cannot be.
    """
    parsed = _parse(args)
    os.makedirs(parsed.log_dir, exist_ok=True)
    done = {result["key"]: result for result in _results(parsed.log_dir)}
    directions = [name for name, off in (("read", parsed.no_read), ("write", parsed.no_write)) if not off]
    plan = list(itertools.product(directions, _combinations(parsed.sweep)))
    found, begin = [], time.monotonic()
    for number, (direction, settings) in enumerate(plan, start=1):
        key = _key(direction, settings, parsed)
        if key not in done:
            rate = _measure(parsed, direction == "read", settings)
            done[key] = {"key": key, "direction": direction, "settings": settings, "gb_per_s": rate}
            with open(Path(parsed.log_dir, RESULTS), "a", encoding="utf-8") as file:
                file.write(json.dumps(done[key]) + "\n")
        found.append(done[key])
        left = (time.monotonic() - begin) / number * (len(plan) - number)
        best = max(one["gb_per_s"] for one in found if one["direction"] == direction)
        text = f"[{number}/{len(plan)}] {direction} {_described(settings)}: {done[key]['gb_per_s']:.3f} GB/s"
        print(f"{text} (best {best:.3f}), about {left:.0f} s left", flush=True)
        if parsed.verbose:
            print(json.dumps(done[key]), flush=True)
    return found


def _described(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def best_section(results: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """The section ``aio`` that loses least in the direction where it loses more, and its GB/s by direction.

    Raises:
        ValueError: no results.
    """
    if not results:
        raise ValueError("there are no results to choose from: run ds_nvme_tune with --nvme_dir first")
    best: dict[str, float] = {}
    rates: dict[str, dict[str, float]] = {}
    settings_of: dict[str, dict[str, Any]] = {}
    for result in results:
        name, direction = json.dumps(result["settings"], sort_keys=True), result["direction"]
        settings_of[name] = result["settings"]
        rates.setdefault(name, {})[direction] = result["gb_per_s"]
        best[direction] = max(best.get(direction, 0.0), result["gb_per_s"])
    whole = [name for name in rates if rates[name].keys() == best.keys()] or list(rates)
    chosen = max(whole, key=lambda name: min(rate / best[direction] for direction, rate in rates[name].items()))
    section = {}
    for name, value in settings_of[chosen].items():
        section[AIO_KEYS[name]] = size_of(str(value)) if name == "block_size" else value
    return section | {"overlap_events": True}, rates[chosen]


def generate_main(args: list[str] | None = None) -> None:
    """Prints the best section of the results in a log folder, as JSON for the config.

    Raises:
        SystemExit: arguments that cannot be, or no results.
    """
    parser = argparse.ArgumentParser(prog="ds_nvme_tune generate", description="prints the best settings of a sweep")
    parser.add_argument("--log_dir", default="_aio_bench_logs", help="of the sweep")
    parsed = parser.parse_args(args)
    try:
        section, rates = best_section(_results(parsed.log_dir))
    except ValueError as error:
        sys.exit(f"ds_nvme_tune: {parsed.log_dir}: {error}")
    print(", ".join(f"{direction} {rate:.3f} GB/s" for direction, rate in rates.items()) + " with")
    print(json.dumps({"aio": section}, indent=4))


def main() -> None:
    """Entry point of the ``ds_nvme_tune`` command: measures, then prints the best settings."""
    parsed = _parse(None)
    sweep_main()
    generate_main(["--log_dir", parsed.log_dir])
