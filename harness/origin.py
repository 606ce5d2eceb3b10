"""What became of an error at each graph: isolated and chained records fused into one word per id.

A graph alone on the reference's input tells whether it is wrong itself; in the chain it also gets what came before it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.ids import GraphId
from harness.records import Record

Word = Literal["equal", "origin", "carrier", "amplifier", "healed"]
FAR = 10.0  # times the median gain of the tower

MEANINGS: Mapping[Word, str] = {
    "equal": "right alone and in the chain",
    "origin": "wrong on the reference's own input: here is a fault",
    "carrier": "right alone, wrong in the chain: it hands on what came before it",
    "amplifier": f"right alone, but its error in the chain grows {FAR:g} times as much as in its tower's other graphs",
    "healed": "right in the chain although something before it was wrong",
}


@dataclass(frozen=True)
class Fate:
    """One id's word, and its gain: chained error over that of the graph before it in its tower, worst over cases."""

    word: Word
    gain: float | None = None


def fates(records: Sequence[Record], order: Sequence[str]) -> dict[str, Fate]:
    """The fate of every recorded id, in pipeline order. An id that could not be judged counts as red."""
    gains = _gains(records, order)
    medians = _medians(gains)
    chained = {record.where.id for record in records if _chained(record)}
    red = {(record.where.id, _chained(record)) for record in records if record.verdict != "equal"}
    seen = {record.where.id for record in records}
    found: dict[str, Fate] = {}
    wrong_before = False
    for name in (name for name in order if name in seen):
        far = name in gains and gains[name] > FAR * medians[_tower(name)]
        healed = wrong_before and name in chained
        found[name] = Fate(_word((name, False) in red, (name, True) in red, far, healed), gains.get(name))
        wrong_before = wrong_before or (name, False) in red or (name, True) in red
    return found


def _word(alone: bool, chained: bool, far: bool, healed: bool) -> Word:
    if alone:
        return "origin"
    if chained:
        return "amplifier" if far else "carrier"
    if far:
        return "amplifier"
    return "healed" if healed else "equal"


def _chained(record: Record) -> bool:
    return record.where.mode == "chained"


def _tower(name: str) -> tuple[str, str, str | None]:
    """Graphs of one tower and part are comparable: what they do to an error is much the same."""
    found = GraphId.parse(name)
    return found.model, found.tower, found.part


def _gains(records: Sequence[Record], order: Sequence[str]) -> dict[str, float]:
    errors: dict[tuple[str, str], float] = {}
    for record in records:
        if _chained(record) and record.metrics:
            key = record.where.id, record.where.case
            errors[key] = max(errors.get(key, 0.0), record.metrics.rel_l2)
    gains: dict[str, float] = {}
    before: dict[tuple[tuple[str, str, str | None], str], float] = {}
    for name in order:
        for (other, case), error in errors.items():
            if other == name:
                last = before.get((_tower(name), case))
                if last:
                    gains[name] = max(gains.get(name, 0.0), error / last)
                before[_tower(name), case] = error
    return gains


def _medians(gains: Mapping[str, float]) -> dict[tuple[str, str, str | None], float]:
    towers: dict[tuple[str, str, str | None], list[float]] = {}
    for name, gain in gains.items():
        towers.setdefault(_tower(name), []).append(gain)
    return {tower: statistics.median(values) for tower, values in towers.items()}
