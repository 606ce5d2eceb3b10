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
ANSWER = "decode"  # the tower of what the whole pipeline gives
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
    found: dict[str, Fate] = {}
    wrong: set[str] = set()  # cases in which something before was wrong
    for name, judged in _by_id(records, order).items():
        red = {(record.where.case, _chained(record)) for record in judged if record.verdict != "equal"}
        alone, chained = (any(mode is in_chain for _, mode in red) for in_chain in (False, True))
        far = name in gains and gains[name] > FAR * medians[_tower(name)]
        healed = any(record.where.case in wrong for record in judged if _chained(record))
        found[name] = Fate(_word(alone, chained, far, healed), gains.get(name))
        wrong |= {case for case, _ in red}
    return found


def _by_id(records: Sequence[Record], order: Sequence[str]) -> dict[str, list[Record]]:
    """The records of every recorded id, in pipeline order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.where.id, []).append(record)
    return {name: groups[name] for name in order if name in groups}


def _word(alone: bool, chained: bool, far: bool, healed: bool) -> Word:
    if alone:
        return "origin"
    if chained:
        return "amplifier" if far else "carrier"
    if far:
        return "amplifier"
    return "healed" if healed else "equal"


def _chained(record: Record) -> bool:
    """Whether what came before has a part in it: so it is with the answer, though its ids are compared exactly."""
    return record.where.mode == "chained" or GraphId.parse(record.where.id).tower == ANSWER


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
