"""Claims that cannot be computed are records too: what went wrong, where, and how to try again."""

import traceback
from collections.abc import Callable, Sequence

from harness.errors import UnjudgedError
from harness.isolation import CrashedError
from harness.records import Record, Where
from runtime.errors import InputError

SHOWN_FRAMES = 3
RED = (UnjudgedError, InputError, CrashedError)  # they say all by their message


def attempted(claim: Callable[[], Sequence[Record]], where: Where, rerun: str) -> list[Record]:
    """The records of a claim; a record that says why, where it cannot be computed.

    A port that is being written fails in any way, so that every exception is told, with its place.
    """
    try:
        return list(claim())
    except Exception as error:
        detail = f"{where.id} could not be judged {where.setting}: {told(error)}\n  rerun: {rerun}"
        return [Record(where, "unjudged", detail=detail, rerun=rerun)]


def told(error: Exception) -> str:
    """The message of an error that says all by it; any other one with its type and its place."""
    if isinstance(error, RED):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-SHOWN_FRAMES:]
    places = "".join(f"\n    at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {error}{places}"
