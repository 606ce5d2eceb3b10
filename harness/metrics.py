"""Metrics of one comparison, in float64 whatever the tensors hold, in blocks of bounded memory.

A row is one vector along the last axis: of a (heads, T, d) tensor, one head's vector of one token.
A value that is NaN or Inf on either side is counted, and its place left out of all other metrics.
But: nothing is judged here, nothing is reshaped to fit, and no metric alone proves equality: cosine is
blind to scale, and one large activation hides a broken row from every whole-tensor number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UnjudgedError

Tensor = NDArray[Any]
Rows = slice | NDArray[np.bool_] | None
_Floats = NDArray[np.float64]
_Index = tuple[int, ...]

_BLOCK = 1 << 20  # elements read at once: 8 MB for each float64 temporary
_CONSTANT = 1e-26  # variance over mean square below this is rounding: distinct fp32 values are further apart


@dataclass(frozen=True)
class NonFinite:
    """How many values are NaN and Inf, and where the first of them is."""

    nan: int = 0
    inf: int = 0
    first: _Index | None = None

    @property
    def count(self) -> int:
        """NaN and Inf together."""
        return self.nan + self.inf


@dataclass(frozen=True)
class Metrics:
    """The outcome of `measure`; all indices are those of the whole tensor, padding included.

    With no element compared (other shapes, no row left, nothing finite) the numbers stay NaN.
    """

    shape: _Index
    expected_shape: _Index
    elements: int = 0
    differing: int = 0
    cosine: float = math.nan
    worst_row_cosine: float = math.nan
    worst_row: _Index = ()
    worst_rows: tuple[int, int] = (0, 0)  # first and last row of the broken run around worst_row
    rel_l2: float = math.nan
    scale: float = math.nan  # actual ~ scale * expected + offset
    offset: float = math.nan
    rms: float = math.nan  # of expected
    max_abs: float = math.nan
    max_abs_at: _Index = ()
    actual_there: float = math.nan
    expected_there: float = math.nan
    actual_bad: NonFinite = NonFinite()
    expected_bad: NonFinite = NonFinite()

    @property
    def offset_over_rms(self) -> float:
        """The best-fit offset in units of the reference's root mean square."""
        return _ratio(abs(self.offset), self.rms)

    @property
    def max_abs_over_rms(self) -> float:
        """The largest difference in units of the reference's root mean square."""
        return _ratio(self.max_abs, self.rms)


def measure(actual: Tensor, expected: Tensor, *, rows: Rows = None) -> Metrics:
    """Compare actual with expected on the real rows; both (..., rows, d), real or integer.

    rows: which rows are real. A slice or a (T,) mask selects along the axis before the last,
    a mask of shape[:-1] selects single rows; None takes all.
    """
    if actual.shape != expected.shape:
        return Metrics(actual.shape, expected.shape)
    pair = _Pair(actual, expected, _kept(expected.shape, rows))
    with np.errstate(over="ignore", invalid="ignore"):  # overflow ends as NaN, which keeps no limit
        return _measured(pair, expected.shape)


@dataclass(frozen=True)
class _Block:
    rows: NDArray[np.intp]  # row numbers in the whole tensor
    left: int  # first column
    actual: _Floats  # (rows, columns)
    expected: _Floats

    def good(self) -> NDArray[np.bool_]:
        return np.isfinite(self.actual) & np.isfinite(self.expected)

    def finite(self) -> tuple[NDArray[np.bool_], _Floats, _Floats]:
        """Where both are finite, and both with zeros elsewhere: a zero adds nothing to any sum."""
        good = self.good()
        if good.all():
            return good, self.actual, self.expected
        return good, np.where(good, self.actual, 0.0), np.where(good, self.expected, 0.0)


class _Pair:
    """Both tensors as (rows, columns) of the kept rows, read block by block."""

    def __init__(self, actual: Tensor, expected: Tensor, kept: NDArray[np.bool_]) -> None:
        self.shape = expected.shape
        self.columns = expected.shape[-1] if expected.ndim else 1
        self.rows = np.flatnonzero(kept) if self.columns else np.zeros(0, np.intp)
        self._actual = actual.reshape(kept.size, self.columns)
        self._expected = expected.reshape(kept.size, self.columns)

    def blocks(self) -> Iterator[_Block]:
        height = max(1, _BLOCK // max(1, self.columns))
        for top in range(0, len(self.rows), height):
            rows = self.rows[top : top + height]
            for left in range(0, self.columns, _BLOCK):
                part = np.s_[rows, left : left + _BLOCK]
                actual, expected = self._actual[part], self._expected[part]
                yield _Block(rows, left, actual.astype(np.float64), expected.astype(np.float64))

    def index(self, row: int, column: int) -> _Index:
        return _unravel(row * self.columns + column, self.shape)


def _kept(shape: _Index, rows: Rows) -> NDArray[np.bool_]:
    """Which rows are compared: (...) -> bool of shape[:-1]."""
    lead = shape[:-1]
    if rows is None:
        return np.ones(lead, np.bool_)
    if isinstance(rows, slice) and lead:
        mask = np.zeros(lead[-1], np.bool_)  # (T,)
        mask[rows] = True
        return np.broadcast_to(mask, lead)
    if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.shape in (lead, lead[-1:]):
        return np.broadcast_to(rows, lead)
    given = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else repr(rows)
    raise UnjudgedError(f"rows={given}, but should be a slice or a bool mask over the rows of {shape}")


@dataclass
class _Sums:
    """First pass: what the second needs to centre, and what is not finite."""

    elements: int = 0
    actual: float = 0.0
    expected: float = 0.0
    actual_bad: NonFinite = NonFinite()
    expected_bad: NonFinite = NonFinite()

    def means(self) -> tuple[float, float]:
        return self.actual / self.elements, self.expected / self.elements


def _sums(pair: _Pair) -> _Sums:
    sums = _Sums()
    for block in pair.blocks():
        good, actual, expected = block.finite()
        sums.elements += int(good.sum())
        sums.actual += float(actual.sum())
        sums.expected += float(expected.sum())
        sums.actual_bad = _count_bad(sums.actual_bad, block.actual, block, pair)
        sums.expected_bad = _count_bad(sums.expected_bad, block.expected, block, pair)
    return sums


def _count_bad(so_far: NonFinite, values: _Floats, block: _Block, pair: _Pair) -> NonFinite:
    bad = ~np.isfinite(values)
    if not bad.any():
        return so_far
    nan = int(np.isnan(values).sum())
    row, column = _unravel(int(bad.argmax()), bad.shape)
    first = so_far.first or pair.index(int(block.rows[row]), block.left + column)
    return NonFinite(so_far.nan + nan, so_far.inf + int(bad.sum()) - nan, first)


class _Products:
    """Second pass: products by row, centred products, and the largest difference."""

    def __init__(self, pair: _Pair, means: tuple[float, float]) -> None:
        count = math.prod(pair.shape[:-1])
        self.both, self.actual, self.expected = np.zeros((3, count))  # by row
        self.centred_both = self.centred_expected = self.squared_difference = 0.0
        self.differing = 0
        self.max_abs, self.max_abs_at = -1.0, (0, 0)
        self.there = (math.nan, math.nan)
        for block in pair.blocks():
            self._add(block, means)

    def _add(self, block: _Block, means: tuple[float, float]) -> None:
        good, actual, expected = block.finite()
        self.both[block.rows] += np.einsum("rc,rc->r", actual, expected)
        self.actual[block.rows] += np.einsum("rc,rc->r", actual, actual)
        self.expected[block.rows] += np.einsum("rc,rc->r", expected, expected)
        difference = actual - expected
        self.squared_difference += float(np.einsum("rc,rc->", difference, difference))
        self.differing += int(np.count_nonzero(difference))
        self._largest(np.where(good, np.abs(difference), -1.0), block)
        centred = (expected - means[1]) * good
        self.centred_both += float(np.einsum("rc,rc->", (actual - means[0]) * good, centred))
        self.centred_expected += float(np.einsum("rc,rc->", centred, centred))

    def _largest(self, difference: _Floats, block: _Block) -> None:
        row, column = _unravel(int(difference.argmax()), difference.shape)
        if difference[row, column] > self.max_abs:
            self.max_abs = float(difference[row, column])
            self.max_abs_at = (int(block.rows[row]), block.left + column)
            self.there = float(block.actual[row, column]), float(block.expected[row, column])


def _measured(pair: _Pair, shape: _Index) -> Metrics:
    sums = _sums(pair)
    if not sums.elements:
        return Metrics(shape, shape, actual_bad=sums.actual_bad, expected_bad=sums.expected_bad)
    products = _Products(pair, sums.means())
    both, actual, expected = products.both.sum(), products.actual.sum(), products.expected.sum()
    cosines = _cosines(products.both, products.actual, products.expected)  # (R,)
    worst = int(pair.rows[cosines[pair.rows].argmin()])
    scale, offset = _fit(products, sums)
    return Metrics(
        shape,
        shape,
        elements=sums.elements,
        differing=products.differing,
        cosine=float(_cosines(both, actual, expected)),
        worst_row_cosine=float(cosines[worst]),
        worst_row=_unravel(worst, shape[:-1]),
        worst_rows=_run_around(worst, cosines, pair.rows, shape),
        rel_l2=_ratio(math.sqrt(products.squared_difference), math.sqrt(expected)),
        scale=scale,
        offset=offset,
        rms=math.sqrt(expected / sums.elements),
        max_abs=products.max_abs,
        max_abs_at=pair.index(*products.max_abs_at),
        actual_there=products.there[0],
        expected_there=products.there[1],
        actual_bad=sums.actual_bad,
        expected_bad=sums.expected_bad,
    )


def _cosines(both: _Floats, actual: _Floats, expected: _Floats) -> _Floats:
    """Cosine from the three products; a zero vector is like a zero vector (1) and like nothing else (0)."""
    norm = np.sqrt(actual * expected)
    cosine = np.divide(both, norm, out=np.zeros_like(norm), where=norm != 0.0)
    return np.clip(np.where((actual == 0.0) & (expected == 0.0), 1.0, cosine), -1.0, 1.0)


def _fit(products: _Products, sums: _Sums) -> tuple[float, float]:
    """Least squares of actual on expected; through the origin where expected is constant, 1 where it is 0."""
    square = float(products.expected.sum())
    if products.centred_expected > _CONSTANT * square:
        scale = products.centred_both / products.centred_expected
    else:
        scale = float(products.both.sum()) / square if square else 1.0
    actual_mean, expected_mean = sums.means()
    return scale, actual_mean - scale * expected_mean


def _run_around(worst: int, cosines: _Floats, rows: NDArray[np.intp], shape: _Index) -> tuple[int, int]:
    """First and last row, within worst's own (T, d), of the run at least a tenth as far from 1 as worst."""
    count = shape[-2] if len(shape) > 1 else 1
    start = worst - worst % count
    broken = np.zeros(len(cosines), np.bool_)
    broken[rows] = 1.0 - cosines[rows] >= (1.0 - cosines[worst]) / 10
    sound = np.flatnonzero(~broken[start : start + count])
    place = worst - start
    return int(max(sound[sound < place], default=-1)) + 1, int(min(sound[sound > place], default=count)) - 1


def _ratio(part: float, whole: float) -> float:
    """Divide; nothing over nothing is 0, something over nothing is infinite."""
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / whole


def _unravel(flat: int, shape: _Index) -> _Index:
    return tuple(int(i) for i in np.unravel_index(flat, shape))
