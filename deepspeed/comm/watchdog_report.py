# SPDX-License-Identifier: Apache-2.0
"""From the states of all ranks to one text: where the orders of operations part, who waits for what, who is where."""

from collections.abc import Iterable
from typing import Any

State = dict[str, Any]
"""See ``OperationLog.state``."""


def compose(states: dict[int, State | str]) -> str:
    """The report.

    Args:
        states: per global rank its state, or a sentence that says why there is none.
    """
    answered = {rank: state for rank, state in states.items() if not isinstance(state, str)}
    parts = order_faults(answered) or ["The ranks that answered issued their operations in the same order."]
    parts += _waits(states, answered)
    parts += _stacks(answered)
    return "\n".join(parts)


def names(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, or a shortened form for many."""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    shown = ", ".join(map(str, listed[:12]))
    return f"ranks {shown}" + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


# The order of operations


def order_faults(states: dict[int, State]) -> list[str]:
    """One paragraph per lane in which the ranks are not at the same point, those out of order first."""
    lanes = sorted({name for state in states.values() for name in state["lanes"]})
    wrong, behind = [], []
    for name in lanes:
        members = next(state["lanes"][name]["ranks"] for state in states.values() if name in state["lanes"])
        seen = {rank: states[rank]["lanes"].get(name, _NOTHING) for rank in members if rank in states}
        fault = _first_difference(name, seen)
        if fault:
            wrong.append(fault)
        elif len({lane["count"] for lane in seen.values()}) > 1:
            behind.append(_unequal_counts(name, seen))
    return wrong + behind


_NOTHING: dict[str, Any] = {"count": 0, "step_start": 0, "operations": []}


def _first_difference(name: str, seen: dict[int, dict[str, Any]]) -> str | None:
    tables = {rank: {op[0]: op for op in lane["operations"]} for rank, lane in seen.items()}
    numbers = sorted({number for table in tables.values() for number in table})
    for number in numbers:
        here = {rank: table[number] for rank, table in tables.items() if number in table}
        if len({op[4] for op in here.values()}) > 1:
            return (
                f"OUT OF ORDER in {name}: the ranks did different operations before operation {number + 1}, the first "
                f"that is remembered, so that the first difference is lost. Then: {_who_does(here, seen)}."
            )
        if len({(op[1], op[3]) for op in here.values()}) > 1:
            return f"OUT OF ORDER in {name}: {_who_does(here, seen)}."
    return None


def _who_does(here: dict[int, list[Any]], seen: dict[int, dict[str, Any]]) -> str:
    """Who does what as the operation of one number; the smallest camp, most likely the faulty one, first."""
    camps: dict[tuple[str, str], list[int]] = {}
    for rank, op in here.items():
        camps.setdefault((_text(op), _ordinal(op[0], seen[rank])), []).append(rank)
    told = [
        f"{names(ranks)} {'does' if len(ranks) == 1 else 'do'} '{what}' as {ordinal}"
        for (what, ordinal), ranks in sorted(camps.items(), key=lambda camp: len(camp[1]))
    ]
    return " where ".join(told)


def _text(op: list[Any]) -> str:
    return f"{op[1]} {op[2]}".strip()


def _ordinal(number: int, lane: dict[str, Any]) -> str:
    within = number - lane["step_start"]
    if lane["step_start"] and within >= 0:
        return f"operation {within + 1} of this step ({number + 1} in all)"
    return f"operation {number + 1}"


def _unequal_counts(name: str, seen: dict[int, dict[str, Any]]) -> str:
    most = max(lane["count"] for lane in seen.values())
    late = {rank: lane["count"] for rank, lane in seen.items() if lane["count"] < most}
    ahead = [rank for rank in seen if rank not in late]
    first_missing = min(late.values())
    table = {op[0]: op for op in seen[ahead[0]]["operations"]}
    missing = table.get(first_missing)
    what = f"'{_text(missing)}'" if missing else "an operation that is no longer remembered"
    counts = "; ".join(
        f"rank {rank}: {count or 'none, or the group is destroyed there'}" for rank, count in sorted(late.items())[:12]
    )
    behind = [rank for rank, count in late.items() if count == first_missing]
    return (
        f"NOT ARRIVED in {name}: {names(behind)} {'has' if len(behind) == 1 else 'have'} not come to operation"
        f" {first_missing + 1}, {what}. Operations so far: {names(ahead)}: {most}; {counts}."
    )


# Who waits, who does not, who is silent


def _waits(states: dict[int, State | str], answered: dict[int, State]) -> list[str]:
    lines = ["What each rank does:"]
    groups: dict[str, list[int]] = {}
    for rank, state in states.items():
        groups.setdefault(state if isinstance(state, str) else _doing(state), []).append(rank)
    for text, ranks in sorted(groups.items(), key=lambda group: group[1]):
        lines.append(f"  {names(ranks)}: {text}")
    return lines


def _doing(state: State) -> str:
    return "; ".join([_waiting(state), *state.get("device", [])])


def _waiting(state: State) -> str:
    if not state["waits"]:
        last = [(lane["operations"][-1], name) for name, lane in state["lanes"].items() if lane["operations"]]
        if not last:
            return "waits for no other rank; nothing issued yet"
        op, name = min(last, key=lambda entry: entry[0][5])
        return f"waits for no other rank; last operation '{_text(op)}' ({name}), {op[5]:.0f} s ago"
    return "; ".join(f"waits since {w['seconds']:.1f} s for '{w['what']}' ({w['lane']})" for w in state["waits"])


def _stacks(answered: dict[int, State]) -> list[str]:
    """Stacks of the main threads, and of other threads where a rank waits in none; equal ones once."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, state in answered.items():
        lines: list[str] = []
        for thread in state["threads"]:
            lines.append(f"    thread {thread['name']}:")
            shown = thread["stack"] if thread["main"] else thread["stack"][-4:]
            lines += [f"      {line}" for line in shown]
        groups.setdefault(tuple(lines), []).append(rank)
    result = ["Where each rank is (innermost frame last):"]
    for lines, ranks in sorted(groups.items(), key=lambda group: group[1]):
        result += [f"  {names(ranks)}:", *lines]
    return result
