"""Diagnosis: what kind of mistake an error looks like, told from nothing but the two tensors.

A kind that can be undone (a scale, an order, a shift) is only named where undoing it leaves noise. A kind that says
where (rows, heads, channels) is only named where the rest is equal. Whatever remains has no name: the list is empty.
But: no tensor is blamed here for what another one did; that is for the isolated run to tell.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from harness.diagnosis import factors, orders, places, rotary, trends, values
from harness.diagnosis.kinds import KINDS, Hint
from harness.diagnosis.numbers import Tensor
from harness.diagnosis.pair import Detector, Pair, paired
from harness.diagnosis.shapes import non_finite, shape_relation

__all__ = ["KINDS", "Hint", "Tensor", "diagnose"]


def diagnose(
    actual: Tensor,
    expected: Tensor,
    *,
    floor: float | None = None,
    spans: Mapping[str, slice] | None = None,
    heads: int | None = None,
) -> list[Hint]:
    """What the difference looks like, most likely first; empty where nothing simple explains it, or nothing differs.

    actual, expected: one output of a graph, rank 0 to 4, rows on axis -2. floor: its noise floor, relative L2.
    spans: names of row ranges. heads: how many stand side by side in the last axis of a (T, C) tensor.
    """
    with np.errstate(all="ignore"):  # what overflows ends as NaN, and NaN undoes nothing
        if actual.shape != expected.shape:
            return _other_shape(actual, expected, floor, spans or {}, heads or 1)
        bad = non_finite(actual, expected)
        if bad or not actual.size:
            return bad
        pair = paired(actual, expected, floor or 0.0, spans or {}, heads or 1)
        return _findings(pair) if pair.before > pair.noise else []


def _other_shape(
    actual: Tensor, expected: Tensor, floor: float | None, spans: Mapping[str, slice], heads: int
) -> list[Hint]:
    ours, theirs = actual.shape, expected.shape
    said = f"the shape is {ours}, but should be {theirs}"
    if [n for n in ours if n > 1] == [n for n in theirs if n > 1] and actual.size == expected.size:
        rest = diagnose(actual.reshape(theirs), expected, floor=floor, spans=spans, heads=heads)
        equal = "; apart from that the values differ" if rest else "; the values are equal"
        return [Hint("shape", f"{said}: only axes of length 1 differ{equal}"), *rest]
    return [Hint("shape", f"{said}{shape_relation(actual, expected)}")]


def _findings(pair: Pair) -> list[Hint]:
    cause = _first(_UNDOABLE, pair)
    if cause:
        return [cause, *(hint for hint in [places.span(pair)] if hint)]
    found = [hint for detector in _PLACES if (hint := detector(pair))]
    return found + _inside(pair) if found else [hint for hint in [_first(_EVERYWHERE, pair)] if hint]


def _first(detectors: Sequence[Detector], pair: Pair) -> Hint | None:
    return next((hint for detector in detectors if (hint := detector(pair))), None)


def _inside(pair: Pair) -> list[Hint]:
    """What is wrong with the rows, heads or channels that alone are wrong."""
    for axis in (pair.heads, pair.rows, pair.channels):
        if axis.localised:
            part = paired(axis.actual[axis.wrong], axis.expected[axis.wrong], pair.floor, {}, 1)
            hint = _first(_SIMPLE, part)
            return [Hint(hint.kind, f"in {axis.named(axis.wrong)}: {hint.evidence}")] if hint else []
    return []


def _gated(detector: Detector) -> Detector:
    """Look at the whole only where some of its rows look like it."""
    return lambda pair: detector(pair) if pair.part is pair or detector(pair.part) else None


_SIMPLE: tuple[Detector, ...] = (values.sign, values.scale, values.offset, values.affine)
_UNDOABLE: tuple[Detector, ...] = (
    *(_gated(detector) for detector in _SIMPLE),
    places.zero,
    values.rounding,
    orders.inverse_order,
    orders.axes,
    orders.head_order,
    orders.row_shift,
    orders.row_order,
    orders.channel_order,
    orders.value_order,
    _gated(factors.by_channel),
    _gated(factors.by_row),
    values.steps,
    trends.activation,
)
_PLACES: tuple[Detector, ...] = (
    rotary.waves,
    rotary.rotary,
    trends.growth,
    places.span,
    places.few_values,
    places.head_place,
    places.row_place,
    places.channel_place,
)
_EVERYWHERE: tuple[Detector, ...] = (factors.low_energy, trends.small)
