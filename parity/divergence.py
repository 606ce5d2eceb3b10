"""Where the port's greedy ids leave the reference's: a near-tie or a bug, and how the answer goes on behind it.

Behind the first id that differs the two sides read different texts, so one flip would hide the rest: the port is run
once more with the reference's ids forced upon it, and what it would have chosen at each step is compared.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from harness.records import Record

TIE = 2.0  # two logits that move by the noise each can close a gap of twice the noise


def explained(record: Record, subject: Any) -> Record:
    """The record of differing ids, its text with the kind of the first difference and the forced continuation."""
    if record.mismatch is None:
        return record
    forced = subject.generate(subject.case, subject.pictures, subject.dump.values["ids"])
    lines = [_kind(record.mismatch.index[0], forced, subject.dump), _forced(forced, subject.dump.values["ids"])]
    text, _, rerun = record.detail.rpartition("\n")
    return replace(record, detail="\n".join([text, *(f"  {line}" for line in lines), rerun]))


def _kind(place: int, forced: list[Any], dump: Any) -> str:
    if place >= len(dump.values["margins"]):
        return "the port goes on where the reference stopped"
    margin = dump.values["margins"][place]
    rows = dump.tensors["logits"]
    noise = max(float(np.abs(token.logits - row).max()) for token, row in zip(forced, rows, strict=False))
    kind = "a near-tie" if margin <= TIE * noise else "a bug, no near-tie"
    return f"step {place}: the reference's margin is {margin:.2g}, the logits differ by up to {noise:.2g}: {kind}"


def _forced(forced: list[Any], ids: list[int]) -> str:
    chosen = [int(token.logits.argmax()) for token in forced]
    other = [place for place, (ours, theirs) in enumerate(zip(chosen, ids, strict=True)) if ours != theirs]
    agree = f"with the reference's ids forced, {len(ids) - len(other)} of {len(ids)} agree"
    return agree + (f"; not at {', '.join(map(str, other[:8]))}{' ...' if len(other) > 8 else ''}" if other else "")
