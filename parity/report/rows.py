"""Rows of the report: what the records of one id come to, each metric beside its limit."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.limits import METRICS, TARGETS, Limit
from harness.metrics import Metrics
from harness.origin import fates
from harness.records import Record
from parity.report.parts import Content

MEASURED = ("isolated", "chained")  # modes with metrics
BADNESS = ("equal", "different", "unjudged")


def rows_of(records: Sequence[Record], order: Sequence[str]) -> list[Content]:
    """One row per id: its worst errors, and under `lines` the worst case of each tensor and mode in full."""
    words = fates(records, order)
    return [_row(name, same, words.get(name)) for name, same in grouped(records, lambda r: r.where.id).items()]


def _row(name: str, records: Sequence[Record], fate: Any) -> Content:
    lines = grouped(records, lambda record: f"{record.where.tensor} {record.where.mode}")
    worst = max(records, key=badness)
    by_mode = {mode: [r for r in records if r.where.mode == mode and r.metrics] for mode in MEASURED}
    multiples = [record.floor_multiple for record in records if record.floor_multiple is not None]
    bounds = {mode: _bound(same) for mode, same in by_mode.items()}
    return {
        "id": name,
        "word": fate.word if fate else worst.verdict,
        "gain": number(fate.gain) if fate else None,
        "verdict": worst.verdict,
        **{mode: number(max(map(error_of, same), default=None)) for mode, same in by_mode.items()},
        "floor": max((record.floor for record in records if record.floor), default=None),
        "multiple": number(max(multiples, default=None)),
        "bounds": bounds,
        "comparisons": len(records),
        "cases": len({record.where.case for record in records}),
        "red": [record.detail for record in records if record.verdict != "equal"],
        "lines": [_line(max(same, key=badness), len(same)) for same in lines.values()],
    }


def _line(record: Record, count: int) -> Content:
    where, metrics = record.where, record.metrics
    limits = {limit.key: limit for limit in record.limits}
    return {
        "tensor": where.tensor,
        "mode": where.mode,
        "case": where.case,
        "cases": count,
        "verdict": record.verdict,
        "failed": list(record.failed),
        "floor": number(record.floor),
        "multiple": number(record.floor_multiple),
        "rerun": record.rerun,
        "metrics": {key: _cell(key, metrics, limits.get(key)) for key in METRICS} if metrics else {},
    }


def _cell(key: str, metrics: Metrics, limit: Limit | None) -> Content:
    value = number(METRICS[key](metrics))
    if limit is None:
        return {"value": value, "limit": "", "line": "", "kept": True}
    return {"value": value, "limit": limit_text(limit), "line": limit.line, "kept": limit.keeps(metrics)}


def limit_text(limit: Limit) -> str:
    """`>= 0.9999`, `<= 0.0001`, `1 ± 0.0001`."""
    if limit.key in TARGETS:
        return f"{TARGETS[limit.key]:g} ± {limit.bound:g}"
    return f"{'≥' if limit.key.endswith('_min') else '≤'} {limit.bound:g}"


def _bound(records: Iterable[Record]) -> float | None:
    bounds = [limit.bound for record in records for limit in record.limits if limit.key == "rel_l2_max"]
    return min(bounds, default=None)


# ---- the worst of some records


def grouped(records: Iterable[Record], name: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Records by what name says of them, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(name(record), []).append(record)
    return groups


def badness(record: Record) -> tuple[int, float]:
    """Sorts by verdict, then by error."""
    return BADNESS.index(record.verdict), error_of(record)


def error_of(record: Record) -> float:
    """Relative L2; infinite where it could not be computed, so that it is the worst of all."""
    error = record.metrics.rel_l2 if record.metrics else 0.0
    return math.inf if math.isnan(error) else error


def number(value: float | None) -> float | str | None:
    """A number for strict JSON: NaN and the infinities as words."""
    return repr(float(value)) if value is not None and not math.isfinite(value) else value
