# SPDX-License-Identifier: Apache-2.0
"""Random models, call sequences and configs by the thousand, each compared with plain autograd. See docs/testing.md.

    python tests/campaign.py --cases 20000 --ranks 1 2 3 4 --stages 0 1 2 3 --out campaign

Cases are drawn in rounds, each from a seed of its own, which is logged in ``OUT/log.jsonl``. A case that fails is
shrunk; a program that shows it is written to ``OUT/case_NNN.py`` and runs alone:

    PYTHONPATH=tests python campaign/case_000.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

if str(Path(__file__).resolve().parent.parent) not in sys.path:
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from unit.random_graphs import STAGES, WORLDS
from unit.random_graphs.searching import Ranks, search, write_script


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many in all")
    parser.add_argument("--round", type=int, default=200, help="cases drawn from one seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; later ones count up")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(WORLDS), help="world sizes; repeat for more of one"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), help="ZeRO stages, likewise")
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="folder of the log and of what failed")
    parser.add_argument("--stop-after", type=int, default=20, help="end after so many rounds with a failure")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the number of rounds in which a case failed."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    ran = failures = 0
    begin = time.monotonic()
    with Ranks() as ranks:
        for number in range(-(-options.cases // options.round)):
            seed, count = options.seed + number, min(options.round, options.cases - number * options.round)
            done = 0

            def progress(so_far: int, _: float) -> None:
                nonlocal done
                done = so_far

            started = time.monotonic()
            finding = search(seed, count, ranks, options.ranks, options.stages, progress)
            ran += done
            entry = {"seed": seed, "cases": count, "passed": done, "seconds": round(time.monotonic() - started, 1)}
            entry |= {"ranks": options.ranks, "stages": options.stages}
            if finding is not None:
                failures += 1
                origin = f"Found by tests/campaign.py, seed {seed}, {count} cases."
                path = write_script(finding, options.out, origin)
                entry |= {"script": path.name, "said": finding.told.splitlines()[0], "flaky": finding.flaky}
                print(f"seed {seed}: {finding.told.splitlines()[0]}\n  {path}", flush=True)
            with (options.out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
            rate = ran / (time.monotonic() - begin)
            print(f"round {number}, seed {seed}: {ran} cases right, {failures} rounds failed, {rate:.1f}/s", flush=True)
            if failures >= options.stop_after:
                break
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 1))
