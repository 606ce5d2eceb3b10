"""Other shapes, NaN and Inf: what keeps two tensors from being compared value by value."""

from itertools import permutations

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import Mask, Tensor
from harness.diagnosis.pair import UNDONE, paired
from harness.diagnosis.words import listed


def shape_relation(actual: Tensor, expected: Tensor) -> str:
    """What two different shapes, and the values in them, have to do with one another; "" where nothing is seen."""
    ours, theirs = actual.shape, expected.shape
    if sorted(ours) == sorted(theirs):
        orders = [order for order in permutations(range(len(ours))) if tuple(ours[i] for i in order) == theirs]
        fits = next((order for order in orders if _alike(actual.transpose(order), expected)), None)
        if fits:
            return f": the values are equal when the axes are permuted by {fits}"
        if not _alike(actual.reshape(theirs), expected):
            return f": the axes are permuted by {orders[0]}, but the values differ then too"
    if len(ours) == len(theirs) and sum(n != m for n, m in zip(ours, theirs, strict=True)) == 1:
        return _length_relation(actual, expected)
    if actual.size == expected.size:
        equal = "equal" if _alike(actual.reshape(theirs), expected) else "different"
        return f": the number of values is the same, and in memory order they are {equal}"
    return ""


def _length_relation(actual: Tensor, expected: Tensor) -> str:
    axis = next(i for i, (n, m) in enumerate(zip(actual.shape, expected.shape, strict=True)) if n != m)
    n, m = actual.shape[axis], expected.shape[axis]
    common = min(n, m)
    said = f": axis {axis} is {abs(n - m)} too {'long' if n > m else 'short'}"
    ours, theirs = np.moveaxis(actual, axis, 0), np.moveaxis(expected, axis, 0)
    if common and _alike(ours[:common], theirs[:common]):
        return f"{said}, and the first {common} are equal"
    if common and _alike(ours[n - common :], theirs[m - common :]):
        return f"{said}, and the last {common} are equal"
    return said


def _alike(actual: Tensor, expected: Tensor) -> bool:
    """Whether equal up to what may be left after undoing."""
    both = np.isfinite(actual) & np.isfinite(expected)
    if not both.all():
        return False
    pair = paired(actual, expected, 0.0, {}, 1) if actual.size else None
    return pair is None or pair.before <= UNDONE


def non_finite(actual: Tensor, expected: Tensor) -> list[Hint]:
    """NaN and Inf that do not stand on both sides."""
    ours, theirs = ~np.isfinite(actual), ~np.isfinite(expected)
    if not ours.any() and not theirs.any():
        return []
    odd = (ours | theirs) & ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if not odd.any():
        return []
    whose, mask = ("the reference itself", odd & theirs) if (odd & theirs).any() else ("the output", odd)
    return [Hint("non-finite", f"{whose} holds {_bad_values(actual if whose == 'the output' else expected, mask)}")]


def _bad_values(values: Tensor, mask: Mask) -> str:
    nan = int((np.isnan(values) & mask).sum())
    counts = [f"{n} {name}" for n, name in ((nan, "NaN"), (int(mask.sum()) - nan, "Inf")) if n]
    first = tuple(int(i) for i in np.argwhere(mask)[0])
    said = f"{' and '.join(counts)} of {mask.size} values, the first at {first}"
    if mask.ndim < 2:
        return said
    by_row = np.moveaxis(mask, -2, 0).reshape(mask.shape[-2], -1)
    rows = np.flatnonzero(by_row.any(axis=1))
    whole = " whole" if by_row[rows].all() else ""
    return f"{said}, in{whole} row{'s' if len(rows) > 1 else ''} {listed(rows)} of {len(by_row)}"
