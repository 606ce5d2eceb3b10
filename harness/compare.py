"""Comparisons: (actual, expected) -> a Record whose detail says what differs, where, and what to type next.

Equal means: everything compared, something compared, every limit kept.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.limits import Limit, fixed
from harness.metrics import Metrics, NonFinite, Rows, Tensor, measure
from harness.records import Mismatch, Record, Where

_ALWAYS = fixed(nan_max=0, inf_max=0)  # whatever the file says or leaves out
_AROUND = 3  # neighbours shown on each side of a mismatch


def compare_tensor(
    actual: Tensor,
    expected: Tensor,
    limits: Mapping[str, Limit],
    *,
    where: Where,
    rows: Rows = None,
    floor: float | None = None,
    rerun: str = "",
) -> Record:
    """Compare two tensors of one shape and dtype within limits, on the real rows (see `measure`).

    floor: the noise floor, relative L2 of fp32 torch against float64 torch.
    """
    if _kind(actual) != _kind(expected):
        return _other_kind(actual, expected, where, rerun)
    limits = {**_ALWAYS, **limits} if limits else {}
    metrics = measure(actual, expected, rows=rows)
    broken = [limit for limit in limits.values() if not limit.keeps(metrics)]
    reason = _unjudged(metrics, limits)
    lines = [reason] if reason else _complaints(metrics, broken, floor) if broken else []
    return Record(
        where,
        "unjudged" if reason else "different" if broken else "equal",
        metrics=metrics,
        limits=tuple(limits.values()),
        failed=() if reason else tuple(limit.key for limit in broken),
        floor=floor,
        detail=_text(where, f" {expected.shape}", bool(reason), lines, rerun) if lines else "",
        rerun=rerun,
    )


def compare_exact(actual: object, expected: object, *, where: Where, rerun: str = "") -> Record:
    """Compare bit for bit: arrays of one shape and dtype, sequences of ids, texts, or single values."""
    if _kind(actual) != _kind(expected):
        return _other_kind(actual, expected, where, rerun)
    ours, theirs = _items(actual), _items(expected)
    if not len(ours) and not len(theirs):
        detail = _text(where, "", True, ["0 elements compared: both sides are empty"], rerun)
        return Record(where, "unjudged", detail=detail, rerun=rerun)
    places = _differing(ours, theirs)
    if not len(places) and len(ours) == len(theirs):
        return Record(where, "equal", rerun=rerun)
    shape = expected.shape if isinstance(expected, np.ndarray) else None
    mismatch = _mismatch(ours, theirs, places, shape)
    lines = _exact_complaints(mismatch, len(ours), len(theirs))
    detail = _text(where, f" {shape}" if shape else "", False, lines, rerun)
    return Record(where, "different", mismatch=mismatch, failed=("exact",), detail=detail, rerun=rerun)


def _text(where: Where, shape: str, unjudged: bool, lines: Sequence[str], rerun: str) -> str:
    outcome = "could not be judged" if unjudged else "differs from the reference"
    head = f"{where.id} {where.tensor}{shape} {outcome} {where.setting}"
    return "\n  ".join([head, *lines, *([f"rerun: {rerun}"] if rerun else [])])


def _other_kind(actual: object, expected: object, where: Where, rerun: str) -> Record:
    line = f"{_kind(actual)}, but should be {_kind(expected)}"
    detail = _text(where, "", False, [line], rerun)
    return Record(where, "different", failed=("shape",), detail=detail, rerun=rerun)


def _unjudged(metrics: Metrics, limits: Mapping[str, Limit]) -> str:
    """Why nothing can be said about these metrics; "" where something can."""
    if metrics.expected_bad.count:
        return f"the reference itself holds {_bad(metrics.expected_bad)}: dump it again"
    if not limits:
        return "no limit is given: a comparison without limits is always green"
    if not metrics.elements and not metrics.actual_bad.count:
        return f"0 elements compared of {metrics.shape}"
    return ""


def _complaints(metrics: Metrics, broken: Sequence[Limit], floor: float | None) -> list[str]:
    lines = []
    if metrics.actual_bad.count:
        lines.append(f"{_bad(metrics.actual_bad)}; the reference is finite")
    lines += [limit.complaint(metrics) for limit in broken]
    if metrics.elements:
        lines.append(_largest(metrics, any(limit.key == "worst_row_cosine_min" for limit in broken)))
    if floor and metrics.elements:
        lines.append(f"error is {metrics.rel_l2 / floor:.3g} x the noise floor (rel_l2 {floor:.1e})")
    return lines


def _largest(metrics: Metrics, with_rows: bool) -> str:
    """`max_abs 4.7e-01 at (0, 311, 1027): -0.113, but should be 0.357; worst rows 311-340`."""
    ours, theirs = _apart(metrics.actual_there, metrics.expected_there)
    text = f"max_abs {metrics.max_abs:.1e} at {metrics.max_abs_at}: {ours}, but should be {theirs}"
    return f"{text}; worst {_rows(metrics)}" if with_rows and metrics.worst_row else text


def _rows(metrics: Metrics) -> str:
    first, last = metrics.worst_rows
    rows = f"row {first}" if first == last else f"rows {first}-{last}"
    lead = metrics.worst_row[:-1]
    return f"{rows} of {lead}" if any(lead) else rows


def _apart(ours: float, theirs: float) -> tuple[str, str]:
    """Both values with as few digits as still show them to differ."""
    pairs = ((f"{ours:.{digits}g}", f"{theirs:.{digits}g}") for digits in range(3, 18))
    return next((pair for pair in pairs if pair[0] != pair[1]), (repr(ours), repr(theirs)))


def _bad(bad: NonFinite) -> str:
    counts = [f"{count} {name}" for count, name in ((bad.nan, "NaN"), (bad.inf, "Inf")) if count]
    return f"{' and '.join(counts)}, the first at {bad.first}"


def _kind(value: object) -> str:
    """What has to be the same before values can be compared: `float32 (1, 344, 2560)`, `list`, `str`."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, str | bytes):
        return type(value).__name__
    return "a sequence" if isinstance(value, Sequence) else "a single value"


def _items(value: object) -> Sequence[object] | Tensor:
    """The value as one row of items."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1)
    return value if isinstance(value, Sequence) else [value]


def _differing(ours: Sequence[object] | Tensor, theirs: Sequence[object] | Tensor) -> NDArray[np.intp]:
    """Where items differ; arrays by their bits, so that -0.0 is not 0.0 and a NaN equals itself."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return np.flatnonzero((_bits(ours) != _bits(theirs)).any(axis=1))
    unequal = [one != other for one, other in zip(ours, theirs, strict=False)]
    return np.flatnonzero(np.array(unequal, np.bool_))


def _bits(values: Tensor) -> Tensor:
    """(N,) of any dtype -> its bytes (N, itemsize)."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize)


def _mismatch(
    ours: Sequence[object] | Tensor,
    theirs: Sequence[object] | Tensor,
    places: NDArray[np.intp],
    shape: tuple[int, ...] | None,
) -> Mismatch:
    place = int(places[0]) if len(places) else min(len(ours), len(theirs))
    index = (place,) if shape is None else tuple(int(i) for i in np.unravel_index(place, shape))
    differing = len(places) + abs(len(ours) - len(theirs))
    return Mismatch(differing, index, _shown(ours, place), _shown(theirs, place))


def _shown(items: Sequence[object] | Tensor, place: int) -> str:
    """`7 in [5, 6, 7, 8]`: the item and its neighbours."""
    around = items[max(0, place - _AROUND) : place + _AROUND + 1]
    around = around.tolist() if isinstance(around, np.ndarray) else around
    item = items[place : place + 1]
    if not len(item):
        return f"the end, after {around!r}"
    return f"{item[0].item() if isinstance(item, np.ndarray) else item[0]!r} in {around!r}"


def _exact_complaints(mismatch: Mismatch, ours: int, theirs: int) -> list[str]:
    place = mismatch.index[0] if len(mismatch.index) == 1 else mismatch.index
    line = f"{mismatch.differing} of {max(ours, theirs)} differ, the first at {place}: "
    line += f"{mismatch.actual}, but should be {mismatch.expected}"
    return [line, f"{ours} items, but should be {theirs}"] if ours != theirs else [line]
