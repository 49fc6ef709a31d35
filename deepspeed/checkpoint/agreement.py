# SPDX-License-Identifier: Apache-2.0
"""Ranks that save or load fail together."""

from collections.abc import Callable
from typing import TypeVar

from deepspeed.checkpoint.storage import CheckpointError, MissingCheckpointError
from deepspeed.comm.control import ControlChannel

_Result = TypeVar("_Result")


def together(channel: ControlChannel, work: Callable[[], _Result], what: str) -> _Result:
    """Do ``work`` on every rank of ``channel``; what it returned here. Collective.

    Args:
        what: "save ..." or the like, for the message.

    Raises:
        CheckpointError: on every rank, when ``work`` failed on some; MissingCheckpointError when that was all.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - reported by every rank, raised below
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = channel.gather((told, isinstance(failure, MissingCheckpointError)), what)
    faults: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            faults.setdefault(text, []).append(rank)
    if faults:
        missing = all(is_missing for text, is_missing in answers if text is not None)
        listed = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in faults.items())
        raise (MissingCheckpointError if missing else CheckpointError)(f"could not {what}; {listed}") from failure
    return result
