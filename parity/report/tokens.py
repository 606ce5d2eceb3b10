"""Strips of tokens: the greedy answers, their margins, and where the port chose differently."""

from collections.abc import Iterable, Iterator, Sequence

from harness.records import Record
from parity.divergence import TIE
from parity.report.parts import Content, attempt
from parity.report.rows import number
from parity.workspace import Workspace


def strips(workspace: Workspace, records: Sequence[Record]) -> Iterator[Content]:
    """The greedy answer of each case that has a record."""
    seen = {(record.where.id.partition("/")[0], record.where.case) for record in records}
    for case in workspace.cases:
        if (workspace.model, case) in seen:
            yield {"model": workspace.model, "case": case} | attempt(_strip, workspace, case, records)


def _strip(workspace: Workspace, case: str, records: Sequence[Record]) -> Content:
    values = workspace.dump(case).values
    ids = _record_of(records, f"{workspace.model}/decode.ids", case)
    logits = _record_of(records, f"{workspace.model}/decode.logits", case)
    noise = logits.metrics.max_abs if logits and logits.metrics else None
    mismatch = ids.mismatch if ids else None
    return {
        "verdict": ids.verdict if ids else "without a verdict",
        "ids": values["ids"],
        "margins": values["margins"],
        "text": values["text"],
        "noise": number(noise),
        "ties": [n for n, margin in enumerate(values["margins"]) if noise is not None and margin <= TIE * noise],
        "first_difference": mismatch.index[0] if mismatch else None,
        "port": mismatch.actual if mismatch else "",
        "reference": mismatch.expected if mismatch else "",
    }


def _record_of(records: Iterable[Record], name: str, case: str) -> Record | None:
    return next((r for r in records if r.where.id == name and r.where.case == case), None)
