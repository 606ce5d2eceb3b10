"""Self-comparison: a port judged by its own output, because that was saved over the reference or both are one file.

fp32 sums depend on their order, so a port of graphs that have a noise floor at all is somewhere off by a last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.ids import GraphId
from harness.records import Record

ENOUGH = 8  # graphs of one case; fewer may be equal by chance


@dataclass(frozen=True)
class SelfComparison:
    """A case of a model whose graphs alone show no error at all."""

    model: str
    case: str
    comparisons: int

    def __str__(self) -> str:
        return (
            f"{self.model} [{self.case}]: {self.comparisons} of {self.comparisons} isolated comparisons are equal to "
            "the last bit: the port was most likely compared with its own output"
        )


def self_compared(records: Sequence[Record]) -> list[SelfComparison]:
    """Every (model, case) whose isolated comparisons all have an error of exactly zero, where they are of 8 graphs."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in filter(_has_noise, records):
        cases.setdefault((GraphId.parse(record.where.id).model, record.where.case), []).append(record)
    return [SelfComparison(*case, len(inside)) for case, inside in cases.items() if _all_zero(inside)]


def _has_noise(record: Record) -> bool:
    """Stages have no floor: a table may well be equal to the last bit."""
    return record.where.mode == "isolated" and bool(record.floor) and record.metrics is not None


def _all_zero(records: Sequence[Record]) -> bool:
    errors = {record.metrics.max_abs for record in records if record.metrics}
    return errors == {0.0} and len({record.where.id for record in records}) >= ENOUGH
