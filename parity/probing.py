"""Runs to the end, the port's results up to a seam: does the end match?"""

import importlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from harness.compare import compare_tensor
from harness.errors import UnjudgedError
from harness.records import Record
from parity.checks import LIMITS, Subject
from parity.divergence import TIE
from parity.hybrid import Floats, Hybrid, recorded
from parity.seams import Seam
from references.dumping import one_thread

STEPS = 2  # the logits of the prompt and of the first decode step


@dataclass(frozen=True)
class Probe:
    """One run to the end, the port's results up to `seam` ("" for none of them)."""

    seam: str
    matches: bool
    detail: str


class Prober:
    """Runs hybrids to the end and keeps what came of each."""

    def __init__(self, subject: Subject, reference: Any, seams: Sequence[Seam]) -> None:
        self.subject, self.reference, self.seams = subject, reference, seams
        self.port = recorded(subject)
        self.trace = importlib.import_module(f"references.{subject.model}.trace").trace
        self.case = replace(subject.case, new_tokens=min(STEPS, len(subject.dump.values["ids"])))
        self.probes: list[Probe] = []

    def matches(self, count: int) -> bool:
        """Whether the end matches when the first `count` seams are the port's."""
        taken = {name for seam in self.seams[:count] for name in seam.names}
        try:
            with one_thread():
                tensors, values = self.trace(Hybrid(self.subject, self.reference, self.port, taken), self.case)
            matches, detail = judged(self.subject, tensors["logits"].numpy(), values["ids"])
        except UnjudgedError:
            raise
        except Exception as error:
            matches, detail = False, f"the run breaks: {first_line(error)}"
        self.probes.append(Probe(self.seams[count - 1].id if count else "", matches, detail))
        return matches


def judged(subject: Subject, logits: Floats, ids: list[int]) -> tuple[bool, str]:
    """Whether logits (steps, vocab) and ids are the dump's, and the numbers."""
    rows, wanted = subject.dump.tensors["logits"][: len(ids)], subject.dump.values["ids"][: len(ids)]
    name = f"{subject.model}/decode.logits"
    record = compare_tensor(logits, rows, LIMITS.of(name, "chained"), where=subject.where(name, "logits", "chained"))
    if record.verdict != "equal":
        same = "the ids are the same" if ids == wanted else f"ids {ids}, but should be {wanted}"
        return False, f"logits {reason(record).partition('   (')[0]}; {same}"  # without the line of the limit
    numbers = f"logits rel_l2 {_rel_l2(record)}, ids {ids}"
    if ids == wanted:
        return True, numbers
    tie = _is_tie(subject, logits, rows, ids)
    return tie, f"{numbers}, but should be {wanted}{': a near-tie' if tie else ''}"


def _is_tie(subject: Subject, logits: Floats, rows: Floats, ids: list[int]) -> bool:
    """Whether the first other id is the largest logit, and noise enough to have made it so."""
    place = next(place for place, (row, i) in enumerate(zip(rows, ids, strict=True)) if int(row.argmax()) != i)
    noise = float(np.abs(logits - rows).max())
    return ids[place] == int(logits[place].argmax()) and subject.dump.values["margins"][place] <= TIE * noise


# ---- words


def reason(record: Record) -> str:
    """The record's first complaint, in short."""
    if record.mismatch is None:
        return record.detail.splitlines()[1].strip()
    differing, index, ours, theirs = astuple(record.mismatch)
    ours, theirs = (text.partition(" in ")[0] for text in (ours, theirs))  # without their neighbours
    return f"{differing} differ, the first at {', '.join(map(str, index))}: {ours}, but should be {theirs}"


def _rel_l2(record: Record) -> str:
    return f"{record.metrics.rel_l2:.1e}" if record.metrics else "-"


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
