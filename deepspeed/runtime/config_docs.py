# SPDX-License-Identifier: Apache-2.0
"""``docs/config.md``, written from the types of the config."""

from __future__ import annotations

import json
import sys
from typing import Any

from deepspeed.runtime.config_checks import REMOVED_TOP_LEVEL_KEYS
from deepspeed.runtime.config_schema import SECTION, Key, all_keys, missing_feature, no_effect
from deepspeed.runtime.zero.config import REMOVED_ZERO_KEYS

_HEAD = """\
<!-- Written by `python -m deepspeed.runtime.config_report --docs`. Change types and descriptions, not this file. -->

# Configuration

The config is a dict, the path of a JSON or hjson file (comments and unquoted keys pass), or a urlsafe base64 JSON
string. A dict is kept as it is: `engine.config` is the user's own, unchanged.

    python -m deepspeed.runtime.config_report FILE       # effective values and where each comes from
    python -m deepspeed.runtime.config_report --schema   # JSON schema, with which editors complete and check
    python -m deepspeed.runtime.config_report --docs     # this page

An editor finds the schema by a first entry `"$schema": "path/of/the/schema.json"` in the config file.
`python -m deepspeed.runtime.config` does the same. `engine.print_config()` and `"dump_state": true` print the effective
values of a running engine. Origins are `file` (`dict`, `base64`: what the config was given as), `auto`, `default` and
`derived`.

## Rules

- A key that is **misspelt** is an error that names the right one. Any other unknown top-level key gets one warning on
  rank 0, since client libraries keep settings of their own there; keys that begin with `$` are for editors. Sections
  with a fixed set of keys refuse every unknown key.
- **`"auto"`** means the default; for the three batch sizes, which have none, it is an error.
- **`null`** is allowed where the default is null, and for a whole section.
- Integers may be written as integral floats (`5e8`). A boolean is no number.
- Errors are `DeepSpeedConfigError` as well as TypeError or ValueError; in sections with a fixed set of keys
  `pydantic.ValidationError`; AssertionError for batch sizes that disagree and for keys that exclude each other.
- A feature that is not built is a NotImplementedError of `deepspeed.initialize` when the config switches it on. Its
  other keys are checked and say nothing.
- Keys that are given and change nothing are named in one line of the debug log, and by the report.

## Batch arithmetic

    train_batch_size == train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel world size

| given | result |
|---|---|
| all three | checked |
| train, micro | accumulation = train // micro // world |
| train, accumulation | micro = train // world // accumulation |
| micro, accumulation | train = micro * accumulation * world |
| train | accumulation = 1, micro = train // world |
| micro | accumulation = 1, train = micro * world |
| accumulation, or nothing | error |
| section `elasticity` | all three are chosen, so that many numbers of GPUs fit: [launching.md](launching.md) |

The data-parallel world size is what `mpu.get_data_parallel_world_size()` says, else the world size of the process
group, divided by the ranks that share a sequence; 1 before the process group exists. A contradiction is an
AssertionError that shows the equation with its numbers and where each of them came from.

## Data

`training_data` of `deepspeed.initialize`, and `engine.deepspeed_io(dataset)`, give a loader with batches of
`train_micro_batch_size_per_gpu` samples, sampled so that the data-parallel ranks share out the data set, in a new order
on each pass. A window of accumulation does not end with the pass: where the number of batches is no multiple of
`gradient_accumulation_steps`, the last, partial window goes on with the next pass (`RepeatingLoader` starts it), or is
dropped by `engine.zero_grad()`, which does not move the count of micro-steps. Every micro-step counts the same, also
one with fewer samples; `dataloader_drop_last` leaves those out. An `IterableDataset` is read as it is on every rank and
has to share itself out.
"""


def render() -> str:
    """The page as markdown."""
    parts = [_HEAD]
    sections: dict[str, list[Key]] = {}
    for key in all_keys():
        sections.setdefault(key.section, []).append(key)
    for path, keys in sections.items():
        parts.append(_section(path, keys))
    parts.append(_removed())
    return "\n".join(parts)


def _section(path: str, keys: list[Key]) -> str:
    features = {missing_feature(key.path) for key in keys}
    whole = features.pop() if path and len(features) == 1 else None
    lines = [f"## {path or 'Top level'}", ""]
    if whole is not None:
        lines += [f"Not built: {whole}.", ""]
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    lines += [_row(key, whole) for key in keys]
    return "\n".join(lines) + "\n"


def _row(key: Key, said_above: str | None) -> str:
    names = " ".join([f"`{key.name}`", *(f"(or `{alias}`)" for alias in key.aliases)])
    text = key.description
    missing, idle = missing_feature(key.path), no_effect(key.path)
    if idle is not None:
        text += f" No effect: {idle}."
    elif missing is not None and missing != said_above:
        text += f" Not built: {missing}."
    return f"| {names} | {_type(key)} | {_default(key)} | {text} |"


def _type(key: Key) -> str:
    if key.kind == SECTION:
        return "section"
    text = " or ".join(f"`{_json(choice)}`" for choice in key.choices) if key.choices is not None else key.kind
    limits = [
        f"{sign} {_json(limit)}"
        for sign, limit in ((">=", key.minimum), (">", key.above), ("<=", key.maximum))
        if limit is not None
    ]
    return " ".join([text, *limits]) + (" or null" if key.nullable and key.default is not None else "")


def _default(key: Key) -> str:
    if key.kind == SECTION:
        return "null" if key.nullable else "see below"
    if isinstance(key.default, list) and len(key.default) > 1:
        return "<br>".join(f"`{item}`" for item in key.default)
    return f"`{_json(key.default)}`"


def _json(value: Any) -> str:
    return "sys.maxsize" if value == sys.maxsize else json.dumps(value)


def _removed() -> str:
    rows = [f"| `{key}` | {advice or 'take it out'} |" for key, advice in REMOVED_TOP_LEVEL_KEYS.items()]
    rows += [f"| `zero_optimization.{key}` | take it out |" for key in REMOVED_ZERO_KEYS]
    head = ["## Removed keys", "", "Their presence is an error, whatever their value.", "", "| key | instead |"]
    return "\n".join([*head, "|---|---|", *rows]) + "\n"
