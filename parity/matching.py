"""Which value an array holds, told by the numbers alone: axes in any order, neighbours merged; names play no part."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parity.recording import Floats, Value, shape_of

MATCHES = 1e-4  # relative L2 below which a blob holds a value
HUGE = 1e6  # masks: such numbers must stand at the same places, and would hide all others in a norm


@dataclass(frozen=True)
class Match:
    """A blob holds a value, its axes in the order `axes` of the value's own."""

    value: Value
    axes: tuple[int, ...]
    error: float  # relative L2

    @property
    def is_plain(self) -> bool:
        """Whether the axes stand in the value's own order."""
        return self.axes == tuple(sorted(self.axes))

    def __str__(self) -> str:
        return str(self.value) if self.is_plain else f"{self.value} with its axes as {self.axes}"


class Pool:
    """Values to match with, sorted by what no order of axes changes: their count and their norm."""

    def __init__(self, values: Sequence[Value], tolerance: float = MATCHES) -> None:
        self.tolerance = tolerance
        self._of_size: dict[int, list[tuple[float, Value]]] = {}
        for value in values:
            self._of_size.setdefault(value.array.size, []).append((_norm(value.array), value))

    def matches(self, blob: Floats) -> list[Match]:
        """Values that a blob holds; those with plain axes first, then those of its own shape."""
        norm = _norm(blob)
        near = [
            value
            for other, value in self._of_size.get(blob.size, ())
            if abs(norm - other) <= 2 * self.tolerance * max(norm, other)
        ]
        found = [
            Match(value, axes, distance(blob, arranged))
            for value in near
            for axes, arranged in arrangements(value.array, blob)
        ]
        held = [match for match in found if match.error <= self.tolerance]
        return sorted(held, key=lambda m: (not m.is_plain, shape_of(m.value.array) != shape_of(blob)))


def arrangements(array: Floats, blob: Floats) -> Iterator[tuple[tuple[int, ...], Floats]]:
    """An array in every order of axes that fits the blob's shape; axes of size 1 aside, neighbours may be merged."""
    wanted, squeezed = shape_of(blob), array.reshape(shape_of(array))
    for axes in itertools.permutations(range(squeezed.ndim)):
        shape = tuple(squeezed.shape[axis] for axis in axes)
        if _merges(shape, wanted) or _merges(wanted, shape):
            yield axes, squeezed.transpose(axes).reshape(blob.shape)


def distance(actual: Floats, expected: Floats) -> float:
    """Relative L2; infinite where numbers are not finite, or huge ones stand at other places."""
    huge = np.abs(expected) > HUGE
    if not np.array_equal(np.abs(actual) > HUGE, huge) or not np.isfinite(actual).all():
        return np.inf
    ours, theirs = (np.where(huge, 0, array).astype(np.float64) for array in (actual, expected))
    error, norm = float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs))
    return error / norm if norm else (0.0 if error == 0 else np.inf)


def without_mask(actual: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Both with 0 where both are huge."""
    huge = (np.abs(actual) > HUGE) & (np.abs(expected) > HUGE)
    return np.where(huge, 0, actual), np.where(huge, 0, expected)


def _norm(array: Floats) -> float:
    return float(np.linalg.norm(np.where(np.abs(array) > HUGE, 0, array).astype(np.float64)))


def _merges(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether merging neighbours of `fine` gives `coarse`."""
    left = list(fine)
    for size in coarse:
        product = 1
        while left and product < size:
            product *= left.pop(0)
        if product != size:
            return False
    return not left
