"""Diagnosis: what kind of mistake an error looks like, told from nothing but the two tensors.

A kind that can be undone (a scale, an order, a shift) is only named where undoing it leaves noise. A kind that says
where (rows, heads, channels) is only named where the rest is equal. Whatever remains has no name: the list is empty.
But: no tensor is blamed here for what another one did; that is for the isolated run to tell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[Any]
_Floats = NDArray[np.float64]
_Indices = NDArray[np.intp]
_Mask = NDArray[np.bool_]

KINDS = (
    "shape",  # other axes or lengths
    "another tensor",  # of the same shape: told by whoever holds them all, not here
    "non-finite",  # NaN or Inf
    "sign",
    "scale",
    "offset",
    "affine",  # scale and offset
    "rounding",  # values of fp16 or bf16
    "steps",  # all differences are multiples of one step
    "inverse order",  # of indices: the inverse permutation
    "axes",  # transposed or permuted
    "head order",  # whole heads permuted (GQA)
    "row shift",
    "row order",
    "halves",  # swapped halves of the channels, or of each block of them
    "interleave",  # (n, m) channels read as (m, n)
    "channel order",  # any other permutation of channels
    "value order",  # the same values in an order without a name
    "channel scale",  # one factor per channel (norm weight)
    "channel offset",  # one summand per channel (bias)
    "channel affine",
    "row scale",  # one factor per row
    "norm epsilon",
    "zero",  # rows, heads or channels that are zero
    "rotary",  # pairs of channels are turned by a wrong angle
    "growth",  # with the row index
    "image span",
    "outside image",
    "all but last row",
    "all but first row",
    "first rows",
    "last rows",
    "border rows",
    "row block",
    "scattered rows",
    "heads",
    "channel block",
    "periodic channels",
    "scattered channels",
    "few values",
    "activation",  # the error is a function of the value
    "small everywhere",
)

_NOISE = 1e-6  # relative L2 that no finding is based on; fp32 noise is 1e-7..1e-6
_FLOORS = 8.0  # as many noise floors are noise
_UNDONE = 1e-4  # of the rms: what may be left when a mistake is undone
_FAR = 20.0  # undoing must make the error this much smaller
_SAMPLE = 1 << 14  # values looked at where a sample is enough
_SHIFTS = 64  # tried at most, either way


@dataclass(frozen=True)
class Hint:
    """A kind of mistake, one of KINDS, and what was seen, in one sentence with numbers."""

    kind: str
    evidence: str


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
        bad = _non_finite(actual, expected)
        if bad or not actual.size:
            return bad
        pair = _paired(actual, expected, floor or 0.0, spans or {}, heads or 1)
        return _findings(pair) if pair.before > pair.noise else []


@dataclass(frozen=True)
class _Axis:
    """The error along one axis: of rows, heads or channels, each flattened."""

    name: str
    actual: _Floats  # (n, k)
    expected: _Floats  # (n, k)
    error: _Floats  # (n,) over its own size, or the median size where that is larger
    absolute: _Floats  # (n,) over the median size
    noise: float

    @cached_property
    def wrong(self) -> _Mask:
        """Which differ; a ten-thousandth of a large error counts as equal."""
        return self.error > max(self.noise, 1e-4 * min(1.0, float(self.error.max())))

    @property
    def localised(self) -> bool:
        """Whether some are equal, and a gap parts them from those that are not."""
        equal = 1 - float(self.wrong.mean())
        if equal in (0.0, 1.0) or (self.actual.shape[1] < 4 and equal < 0.05):  # single values are equal by chance
            return False
        both = (self.error, self.absolute)
        return all(error[self.wrong].min() > 5 * error[~self.wrong].max() for error in both)

    def named(self, mask: _Mask) -> str:
        """`rows 3-11 of 20`."""
        plural = "s" if mask.sum() > 1 else ""
        return f"{self.name}{plural} {_listed(np.flatnonzero(mask))} of {len(mask)}"


@dataclass(frozen=True)
class _Pair:
    """Both tensors as (heads, T, C), divided by one power of two so that no square overflows."""

    actual: _Floats
    expected: _Floats
    unit: float  # that power
    shape: tuple[int, ...]
    floor: float
    spans: Mapping[str, slice] = field(default_factory=dict)
    side: int = 1  # heads side by side in the last axis

    @cached_property
    def error(self) -> _Floats:
        return self.actual - self.expected

    @cached_property
    def each(self) -> tuple[float, float]:
        return _rms(self.actual), _rms(self.expected)

    @cached_property
    def size(self) -> float:
        """The smaller rms of the two, so that a tensor near zero does not look explained by a scale of zero."""
        return min(self.each) or max(self.each) or 1.0

    @cached_property
    def before(self) -> float:
        return _rms(self.error) / self.size

    @property
    def noise(self) -> float:
        return max(_FLOORS * self.floor, _NOISE)

    def left(self, residual: _Floats) -> float | None:
        """The relative residual when it shows that the mistake is undone."""
        left = _rms(residual) / self.size
        return left if left <= min(max(_FLOORS * self.floor, _UNDONE), self.before / _FAR) else None

    @cached_property
    def same_energy(self) -> bool:
        """No permutation changes it."""
        ours, theirs = self.each
        return abs(ours - theirs) <= 1e-3 * theirs

    @cached_property
    def rows(self) -> _Axis:
        T = self.actual.shape[1]
        return self._axis("row", T, lambda x: x.transpose(1, 0, 2).reshape(T, -1), (0, 2))

    @cached_property
    def channels(self) -> _Axis:
        C = self.actual.shape[2]
        return self._axis("channel" if len(self.shape) > 1 else "value", C, lambda x: x.reshape(-1, C).T, (0, 1))

    @cached_property
    def heads(self) -> _Axis:
        """Heads on the leading axis, or side by side in the last one."""
        if self.side == 1:
            H = self.actual.shape[0]
            return self._axis("head", H, lambda x: x.reshape(H, -1), (1, 2))
        return self.apart.heads

    @cached_property
    def apart(self) -> "_Pair":
        """Heads that stand side by side, moved to the leading axis: (1, T, H * d) -> (H, T, d)."""
        _, T, C = self.actual.shape
        if self.side == 1:
            return self
        a, e = (x.reshape(T, self.side, C // self.side).transpose(1, 0, 2) for x in (self.actual, self.expected))
        return _Pair(a, e, self.unit, a.shape, self.floor, self.spans)

    @cached_property
    def part(self) -> "_Pair":
        """Some rows, evenly apart: what holds for the whole holds for them."""
        step = max(1, self.actual.shape[1] * self.actual.shape[2] // _SAMPLE)
        a, e = self.actual[:, ::step], self.expected[:, ::step]
        return _Pair(a, e, self.unit, a.shape, self.floor) if step > 1 else self

    @cached_property
    def squares(self) -> tuple[_Floats, _Floats]:
        """Of the error and of expected."""
        return np.square(self.error), np.square(self.expected)

    def _axis(self, name: str, count: int, view: Callable[[_Floats], _Floats], over: tuple[int, int]) -> _Axis:
        error, size = (np.sqrt(square.mean(axis=over)).reshape(count) for square in self.squares)
        middle = float(np.median(size)) or self.size
        own = error / np.maximum(size, middle)
        return _Axis(name, view(self.actual), view(self.expected), own, error / middle, self.noise)


Detector = Callable[[_Pair], Hint | None]


def _paired(actual: Tensor, expected: Tensor, floor: float, spans: Mapping[str, slice], heads: int) -> _Pair:
    """Finite where both are; what is not finite is the same on both sides by now."""
    good = np.isfinite(expected)
    a, e = (np.where(good, side, 0).astype(np.float64) for side in (actual, expected))
    largest = max(float(np.abs(a).max()), float(np.abs(e).max()))
    unit = 2.0 ** float(np.clip(np.frexp(largest)[1], -1000, 1000))
    whole = (1,) * max(0, 2 - a.ndim) + a.shape
    form = (int(np.prod(whole[:-2])), *whole[-2:])
    side = heads if a.ndim <= 2 and heads > 1 and form[-1] % heads == 0 else 1
    return _Pair(a.reshape(form) / unit, e.reshape(form) / unit, unit, a.shape, floor, spans, side)


def _findings(pair: _Pair) -> list[Hint]:
    cause = _first(_UNDOABLE, pair)
    if cause:
        return [cause, *(hint for hint in [_span(pair)] if hint)]
    places = [hint for detector in _PLACES if (hint := detector(pair))]
    return places + _inside(pair) if places else [hint for hint in [_first(_EVERYWHERE, pair)] if hint]


def _first(detectors: Sequence[Detector], pair: _Pair) -> Hint | None:
    return next((hint for detector in detectors if (hint := detector(pair))), None)


def _gated(detector: Detector) -> Detector:
    """Look at the whole only where some of its rows look like it."""
    return lambda pair: detector(pair) if pair.part is pair or detector(pair.part) else None


def _inside(pair: _Pair) -> list[Hint]:
    """What is wrong with the rows, heads or channels that alone are wrong."""
    for axis in (pair.heads, pair.rows, pair.channels):
        if axis.localised:
            part = _paired(axis.actual[axis.wrong], axis.expected[axis.wrong], pair.floor, {}, 1)
            hint = _first(_SIMPLE, part)
            return [Hint(hint.kind, f"in {axis.named(axis.wrong)}: {hint.evidence}")] if hint else []
    return []


# ---- shape and finiteness


def _other_shape(
    actual: Tensor, expected: Tensor, floor: float | None, spans: Mapping[str, slice], heads: int
) -> list[Hint]:
    ours, theirs = actual.shape, expected.shape
    said = f"the shape is {ours}, but should be {theirs}"
    if [n for n in ours if n > 1] == [n for n in theirs if n > 1] and actual.size == expected.size:
        rest = diagnose(actual.reshape(theirs), expected, floor=floor, spans=spans, heads=heads)
        equal = "; apart from that the values differ" if rest else "; the values are equal"
        return [Hint("shape", f"{said}: only axes of length 1 differ{equal}"), *rest]
    return [Hint("shape", f"{said}{_shape_relation(actual, expected)}")]


def _shape_relation(actual: Tensor, expected: Tensor) -> str:
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
    pair = _paired(actual, expected, 0.0, {}, 1) if actual.size else None
    return pair is None or pair.before <= _UNDONE


def _non_finite(actual: Tensor, expected: Tensor) -> list[Hint]:
    ours, theirs = ~np.isfinite(actual), ~np.isfinite(expected)
    if not ours.any() and not theirs.any():
        return []
    odd = (ours | theirs) & ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if not odd.any():
        return []
    whose, mask = ("the reference itself", odd & theirs) if (odd & theirs).any() else ("the output", odd)
    return [Hint("non-finite", f"{whose} holds {_bad_values(actual if whose == 'the output' else expected, mask)}")]


def _bad_values(values: Tensor, mask: _Mask) -> str:
    nan = int((np.isnan(values) & mask).sum())
    counts = [f"{n} {name}" for n, name in ((nan, "NaN"), (int(mask.sum()) - nan, "Inf")) if n]
    first = tuple(int(i) for i in np.argwhere(mask)[0])
    said = f"{' and '.join(counts)} of {mask.size} values, the first at {first}"
    if mask.ndim < 2:
        return said
    by_row = np.moveaxis(mask, -2, 0).reshape(mask.shape[-2], -1)
    rows = np.flatnonzero(by_row.any(axis=1))
    whole = " whole" if by_row[rows].all() else ""
    return f"{said}, in{whole} row{'s' if len(rows) > 1 else ''} {_listed(rows)} of {len(by_row)}"


# ---- kinds that can be undone


def _after(left: float) -> str:
    return f"(relative residual {left:.0e} after undoing it)"


def _sign(pair: _Pair) -> Hint | None:
    left = pair.left(pair.actual + pair.expected)
    return None if left is None else Hint("sign", f"every value has the other sign {_after(left)}")


def _scale(pair: _Pair) -> Hint | None:
    scale = _quotient(float(np.vdot(pair.actual, pair.expected)), float(np.vdot(pair.expected, pair.expected)))
    left = pair.left(pair.actual - scale * pair.expected)
    if left is None or not scale:
        return None
    return Hint("scale", f"every value is {scale:.6g} x the reference's {_after(left)}")


def _offset(pair: _Pair) -> Hint | None:
    offset = float(pair.error.mean())
    left = pair.left(pair.error - offset)
    return None if left is None else Hint("offset", f"every value is {offset * pair.unit:+.6g} off {_after(left)}")


def _affine(pair: _Pair) -> Hint | None:
    mean_a, mean_e = float(pair.actual.mean()), float(pair.expected.mean())
    spread = pair.expected - mean_e
    scale = _quotient(float(np.vdot(pair.actual, spread)), float(np.vdot(spread, spread)))
    offset = mean_a - scale * mean_e
    left = pair.left(pair.actual - scale * pair.expected - offset)
    if left is None or not scale or left > abs(scale) * _rms(spread) / pair.size / _FAR:
        return None
    said = f"every value is {scale:.6g} x the reference's {offset * pair.unit:+.6g} {_after(left)}"
    return Hint("affine", said)


def _rounding(pair: _Pair) -> Hint | None:
    """Values on the grid of a short format, near values that are not."""
    a, e = (_sampled(x) * pair.unit for x in (pair.actual, pair.expected))
    a, e = a[e != 0], e[e != 0]
    for name, rounded, step in (("bf16", _bf16, 2.0**-7), ("fp16", _fp16, 2.0**-10)):
        near = len(a) > 3 and np.quantile(np.abs(a - e) / np.abs(e), 0.98) <= 1.05 * step
        if near and _off_grid(a, rounded) < _FAR * 1e-7 < 10 * _FAR * 1e-7 < _off_grid(e, rounded):
            return Hint("rounding", f"the values are {name} numbers, the reference's are not; rel_l2 {pair.before:.1e}")
    return None


def _off_grid(values: _Floats, rounded: Callable[[_Floats], _Floats]) -> float:
    """The median relative distance to the grid."""
    some = values[values != 0]
    return float(np.median(np.abs(some - rounded(some)) / np.abs(some))) if len(some) else np.inf


def _fp16(values: _Floats) -> _Floats:
    return values.astype(np.float16).astype(np.float64)


def _bf16(values: _Floats) -> _Floats:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _steps(pair: _Pair) -> Hint | None:
    """Differences of whole grey levels and the like."""
    off = np.abs(pair.error[np.abs(pair.error) > 100 * pair.noise * pair.size])
    if len(off) < 8:
        return None
    step = float(np.median(off[off < 1.5 * off.min()]))
    multiples = off / step
    if multiples.max() > 64.5 or np.abs(multiples - np.round(multiples)).max() > 0.02:
        return None
    return Hint(
        "steps",
        f"{len(off)} of {pair.error.size} values differ, each by a multiple of {step * pair.unit:.6g} "
        f"(at most {multiples.max():.0f} of them)",
    )


def _inverse_order(pair: _Pair) -> Hint | None:
    ours, theirs = (np.ravel(x * pair.unit) for x in (pair.actual, pair.expected))
    count = np.arange(len(ours))
    if len(ours) < 3 or len(pair.shape) != 1 or not np.array_equal(np.sort(theirs), count):
        return None
    if not np.array_equal(ours, np.argsort(theirs)):
        return None
    return Hint("inverse order", f"{len(ours)} indices are the inverse of the reference's permutation")


def _axes(pair: _Pair) -> Hint | None:
    """The reference with its axes permuted, read in memory order as the same shape."""
    whole = pair.shape
    side = (*whole[:-1], pair.side, whole[-1] // pair.side) if pair.side > 1 else whole
    if not pair.same_energy or len(side) < 2:
        return None
    actual, expected = pair.actual.ravel(), pair.expected.reshape(side)
    places = _places(actual.size)
    for order in permutations(range(len(side))):
        if pair.side > 1 and order[:-2] == tuple(range(len(side) - 2)):
            continue  # within the channels
        permuted = expected.transpose(order)
        some = permuted[np.unravel_index(places, permuted.shape)]
        if _rms(actual[places] - some) > _rms(pair.error) / 2:
            continue
        left = pair.left(actual - permuted.ravel())
        if left is not None:
            axes = f"of its {side} " if side != whole else ""
            return Hint("axes", f"the values are the reference's with axes {axes}permuted by {order} {_after(left)}")
    return None


def _head_order(pair: _Pair) -> Hint | None:
    return _order_hint(pair.apart, pair.heads, lambda name: "head order") if len(pair.heads.error) > 1 else None


def _row_order(pair: _Pair) -> Hint | None:
    return _order_hint(pair, pair.rows, lambda name: "row order")


def _channel_order(pair: _Pair) -> Hint | None:
    return _order_hint(pair, pair.channels, lambda name: _CHANNEL_KINDS.get(name.split(" ")[0], "channel order"))


_CHANNEL_KINDS = {"swapped": "halves", "interleaved": "interleave"}


def _order_hint(pair: _Pair, axis: _Axis, kind: Callable[[str], str]) -> Hint | None:
    order = _order(pair, axis)
    if order is None:
        return None
    residual = axis.actual - axis.expected[order]
    left = pair.left(residual)
    if left is None:
        return None
    moved = np.flatnonzero(order != np.arange(len(order)))
    name = _order_name(order, moved)
    first = f"{axis.name} {moved[0]} holds {axis.name} {order[moved[0]]}, {len(moved)} of {len(order)} are moved"
    said = f"the reference's {axis.name}s in another order: {name}{', ' if name else ''}{first}"
    return Hint(kind(name), f"{said} {_after(left)}")


def _order(pair: _Pair, axis: _Axis) -> _Indices | None:
    """order with actual[i] ~ expected[order[i]]; rows that are equal as they stand stay."""
    wrong = np.flatnonzero(axis.wrong)
    if not pair.same_energy or len(wrong) < 2:
        return None
    actual, expected = axis.actual, axis.expected
    ours, theirs = (_projected(x)[wrong] for x in (actual, expected))
    ours_at, theirs_at = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    if _rms(ours[ours_at] - theirs[theirs_at]) > _rms(ours - theirs) / 10:
        return None
    found = _nearest(actual[wrong[ours_at]], expected[wrong[theirs_at]], _UNDONE * pair.size)
    order = np.arange(len(axis.error))
    order[wrong[ours_at]] = wrong[theirs_at[found]]
    return order if len(np.unique(order)) == len(order) else None


def _nearest(actual: _Floats, expected: _Floats, near: float) -> _Indices:
    """Both (n, k) sorted by a projection: noise may have swapped neighbours whose projections are alike."""
    found = np.arange(len(actual))
    distance = _norms(actual - expected, (1,))
    for shift in (1, -1, 2, -2):
        far = np.flatnonzero(distance > near)
        other = np.clip(far + shift, 0, len(actual) - 1)
        moved = _norms(actual[far] - expected[other], (1,))
        closer = moved < distance[far]
        found[far[closer]], distance[far[closer]] = other[closer], moved[closer]
    return found


def _order_name(order: _Indices, moved: _Indices) -> str:
    """What a porter would call the permutation; "" where it has no name."""
    whole, block = _pattern_name(order), _period(order)
    if whole:
        return whole
    if block < len(order):
        inner = _pattern_name(order[:block])
        return f"{inner} in every {block}" if inner else f"the same in every {block}"
    first, last = int(moved[0]), int(moved[-1]) + 1
    part = order[first:last] - first
    inside = _pattern_name(part) if (np.sort(part) == np.arange(len(part))).all() else ""
    return f"{inside} in {first}-{last - 1}" if inside else ""


def _period(order: _Indices) -> int:
    """The smallest block that is permuted within itself, and each alike."""
    n = len(order)
    for block in (b for b in range(2, n) if n % b == 0):
        parts = order.reshape(-1, block) - np.arange(0, n, block)[:, None]
        if (parts == parts[0]).all() and parts.min() >= 0 and parts.max() < block:
            return block
    return n


def _pattern_name(order: _Indices) -> str:
    turn = int(order[0])
    if turn and 2 * turn != len(order) and np.array_equal(order, np.roll(np.arange(len(order)), -turn)):
        return f"rotated by {-turn}"
    return next((name for name, pattern in _patterns(len(order)) if np.array_equal(order, pattern)), "")


def _patterns(n: int) -> Iterator[tuple[str, _Indices]]:
    straight = np.arange(n)
    yield "reversed", straight[::-1]
    if n % 2 == 0:
        yield "swapped halves", np.roll(straight, n // 2)
    for h in (h for h in range(2, n) if n % h == 0):
        yield f"interleaved ({h} x {n // h} read as {n // h} x {h})", straight.reshape(h, -1).T.ravel()
        for k in (k for k in range(2, 9) if h % k == 0 and (n // h) % k == 0):
            blocks = straight.reshape(h // k, k, n // h // k, k).transpose(0, 2, 1, 3).ravel()
            yield f"{k} x {k} windows of {h} x {n // h} where the reference goes line by line", blocks
            yield f"line by line where the reference goes by {k} x {k} windows of {h} x {n // h}", np.argsort(blocks)


def _row_shift(pair: _Pair) -> Hint | None:
    actual, expected = pair.rows.actual, pair.rows.expected
    T = len(actual)
    ours, theirs = _projected(actual), _projected(expected)
    for shift in range(1, min(T // 2, _SHIFTS) + 1):
        for n in (shift, -shift):
            to, source = slice(max(n, 0), T + min(n, 0)), slice(max(-n, 0), T + min(-n, 0))
            if T < 3 or _rms(ours[to] - theirs[source]) > 0.01 * _rms(theirs):
                continue
            left = pair.left(actual[to] - expected[source])
            if left is not None and left < _rms((actual - expected)[to]) / pair.size / _FAR:
                first = f"row {to.start} holds row {source.start}"
                return Hint("row shift", f"the rows are shifted by {n:+d}: {first}, and so on {_after(left)}")
    return None


def _value_order(pair: _Pair) -> Hint | None:
    if not pair.same_energy or pair.error.size < 4 or pair.before < 1e-2:
        return None
    ours, theirs = (np.sort(x, axis=None) for x in (pair.actual, pair.expected))
    left = pair.left(ours - theirs)
    if left is None:
        return None
    said = "the same values in another order that is none of whole rows, channels or axes"
    return Hint("value order", f"{said} {_after(left)}")


def _by_channel(pair: _Pair) -> Hint | None:
    """A factor, a summand, or both of each channel."""
    C = pair.actual.shape[2]
    a, e = pair.actual.reshape(-1, C), pair.expected.reshape(-1, C)
    if len(a) < 4 or not _widespread(pair.channels, pair.heads):
        return None
    mean_a, mean_e = a.mean(axis=0), e.mean(axis=0)
    scale = _quotient_each((a * e).sum(axis=0), (e * e).sum(axis=0))
    slope = _quotient_each(((a - mean_a) * (e - mean_e)).sum(axis=0), ((e - mean_e) ** 2).sum(axis=0))
    shift = mean_a - mean_e
    for kind, residual, numbers in (
        ("channel scale", a - scale * e, scale),
        ("channel offset", a - e - shift, shift * pair.unit),
        ("channel affine", a - mean_a - slope * (e - mean_e), slope),
    ):
        left = pair.left(residual)
        if left is not None:
            word = "summand" if kind == "channel offset" else "factor"
            said = f"each channel has its own {word}, {_spread(numbers)}{_repeating(numbers)}"
            return Hint(kind, f"{said} {_after(left)}")
    return None


def _by_row(pair: _Pair) -> Hint | None:
    """A factor of each row; where all are near 1 on one side, that is what another epsilon of a norm does."""
    H, T, C = pair.actual.shape
    if C < 4 or H * T < 2 or not _widespread(pair.rows, pair.heads):
        return None
    a, e = pair.actual, pair.expected
    scale = _quotient_each((a * e).sum(axis=-1), (e * e).sum(axis=-1))
    left = pair.left(a - scale[..., None] * e)
    if left is None:
        return None
    off = scale - 1
    epsilon = np.abs(off).max() < 0.1 and (off.min() > -pair.noise or off.max() < pair.noise)
    said = f"each row has its own factor, {_spread(scale)} {_after(left)}"
    return Hint("norm epsilon", f"{said}, all on one side of 1") if epsilon else Hint("row scale", said)


def _widespread(*axes: _Axis) -> bool:
    """Whether most are wrong; few that are wrong are a place."""
    return all(axis.wrong.mean() > 0.5 for axis in axes)


# ---- kinds that say where


def _zero(pair: _Pair) -> Hint | None:
    nothing = pair.noise * pair.each[1]
    if pair.each[0] <= nothing:
        return Hint("zero", f"every value is zero; the reference's rms is {_rms(pair.expected) * pair.unit:.3g}")
    for axis in (pair.heads, pair.rows, pair.channels):
        if not axis.localised:
            continue
        zero = (_norms(axis.actual, (1,)) <= nothing) & axis.wrong
        if (zero == axis.wrong).all():
            return Hint("zero", f"{axis.named(zero)} {_are(zero)} zero; the others are equal")
    return None


def _span(pair: _Pair) -> Hint | None:
    wrong = pair.rows.wrong
    for name, span in pair.spans.items():
        inside = np.zeros(len(wrong), np.bool_)
        inside[span] = True
        if not pair.rows.localised or not inside.any() or inside.all():
            continue
        for kind, part, words in (("image span", inside, "of"), ("outside image", ~inside, "outside")):
            if not (wrong & ~part).any() and 2 * (wrong & part).sum() > part.sum():
                said = f"{wrong.sum()} of the {part.sum()} rows {words} {name} differ, no other"
                return Hint(kind, f"{said} (rows {_listed(np.flatnonzero(wrong))})")
    return None


def _row_place(pair: _Pair) -> Hint | None:
    rows = pair.rows
    if not rows.localised:
        return None
    kind = _row_kind(rows.wrong)
    start = int(rows.wrong.argmax())
    names = [name for name, span in pair.spans.items() if start and span.indices(len(rows.wrong))[0] == start]
    begins = f"; {names[0]} begins there" if names and kind == "last rows" else ""
    said = f"{rows.named(rows.wrong)} {_differ(rows.wrong)}"
    return Hint(kind, f"{said} (relative error up to {rows.error.max():.1e}), the others are equal{begins}")


def _row_kind(wrong: _Mask) -> str:
    T, count = len(wrong), int(wrong.sum())
    first, last = int(wrong.argmax()), T - 1 - int(wrong[::-1].argmax())
    run = count == last - first + 1
    if run and last == T - 1:
        return "all but first row" if first == 1 and T > 2 else "last rows"
    if run and first == 0:
        return "all but last row" if last == T - 2 and T > 2 else "first rows"
    equal = np.flatnonzero(~wrong)
    if 2 * count <= T and wrong[0] and wrong[-1] and len(equal) == equal[-1] - equal[0] + 1:
        return "border rows"
    return "row block" if run and count > 1 else "scattered rows"


def _head_place(pair: _Pair) -> Hint | None:
    heads = pair.heads
    if not heads.localised:
        return None
    error = f"(relative error up to {heads.error.max():.1e})"
    return Hint("heads", f"{heads.named(heads.wrong)} {_differ(heads.wrong)} {error}, the others are equal")


def _channel_place(pair: _Pair) -> Hint | None:
    channels = pair.channels
    if not channels.localised:
        return None
    wrong = channels.wrong
    places = np.flatnonzero(wrong)
    error = f"(relative error up to {channels.error.max():.1e}), the others are equal"
    block = next((b for b in range(2, len(wrong)) if len(wrong) % b == 0 and _repeats(wrong, b)), 0)
    if block:
        inner = _listed(np.flatnonzero(wrong[:block]))
        return Hint("periodic channels", f"channels {inner} of every {block} differ {error}")
    run = len(places) == places[-1] - places[0] + 1
    return Hint("channel block" if run else "scattered channels", f"{channels.named(wrong)} differ {error}")


def _repeats(mask: _Mask, block: int) -> bool:
    parts = mask.reshape(-1, block)
    return bool((parts == parts[0]).all())


def _few_values(pair: _Pair) -> Hint | None:
    off = np.abs(pair.error) > max(pair.noise * pair.size, 1e-4 * float(np.abs(pair.error).max()))
    count = int(off.sum())
    if not 0 < count <= min(16, off.size // 64):
        return None
    first = tuple(int(i) for i in np.argwhere(off.reshape(pair.shape))[0])
    return Hint("few values", f"{count} of {off.size} values differ, the first at {first}; the others are equal")


# ---- kinds that are a shape of the error


def _rotary(pair: _Pair) -> Hint | None:
    """Pairs of channels keep their length but not their angle."""
    heads = pair.apart
    wrong = np.flatnonzero(heads.channels.wrong)
    d = heads.actual.shape[2]
    if len(wrong) < 2 or d > 1024 or heads.error.size < 16:
        return None
    for name, first, second in _pairings(d, int(wrong[0]), int(wrong[-1])):
        a, e = (x[..., first] + 1j * x[..., second] for x in (heads.part.actual, heads.part.expected))
        if _rms(np.abs(a) - np.abs(e)) > pair.before * pair.size / _FAR:
            continue
        a, e = (x[..., first] + 1j * x[..., second] for x in (heads.actual, heads.expected))
        left = pair.left(np.abs(a) - np.abs(e))
        if left is not None:
            return Hint("rotary", f"{name} keep their length {_after(left)} but are turned{_turn(a, e, pair.noise)}")
    return None


def _pairings(d: int, first: int, last: int) -> Iterator[tuple[str, _Indices, _Indices]]:
    """Sections at either end of d channels that hold all the wrong ones, their halves paired or their neighbours."""
    if d % 2 == 0:
        yield "neighbouring channels", np.arange(0, d, 2), np.arange(1, d, 2)
    for width in range(2, d + 1, 2):
        for start in {0, d - width}:
            if start <= first and last < start + width:
                pairs = np.arange(start, start + width // 2)
                yield f"channels i and i + {width // 2} of {start}-{start + width - 1}", pairs, pairs + width // 2


def _waves(pair: _Pair) -> Hint | None:
    """Tables of cos and sin: along the rows each channel obeys x[t-1] + x[t+1] = 2 cos(f) x[t]."""
    if pair.rows.actual.shape[0] < 5:
        return None
    (ours, odd), (theirs, odd_reference) = (_frequencies(x) for x in (pair.rows.actual, pair.rows.expected))
    if max(odd, odd_reference) > _UNDONE or np.abs(ours - theirs).max() < 1e-3:
        return None
    worst = int(np.abs(ours - theirs).argmax())
    return Hint(
        "rotary",
        f"both are waves along the rows, of other frequencies: channel {worst} goes {ours[worst]:.4g} rad a row, "
        f"but should go {theirs[worst]:.4g}",
    )


def _frequencies(x: _Floats) -> tuple[_Floats, float]:
    """(T, k) -> of each channel (k,), and how far the channels are from being waves."""
    middle, around = x[1:-1], x[:-2] + x[2:]
    twice = _quotient_each((middle * around).sum(axis=0), np.square(middle).sum(axis=0))
    return np.arccos(np.clip(twice / 2, -1, 1)), _quotient(_rms(around - twice * middle), _rms(x))


def _turn(a: Tensor, e: Tensor, noise: float) -> str:
    """How the angle goes with the row: zero at row 0 (base, scaling, direction) or the same in all (an offset)."""
    turned = (a * e.conj()).sum(axis=0)  # (T, pairs)
    angle = np.angle(turned)
    still = np.abs(angle) <= max(1e3 * noise, 1e-3)
    if len(angle) > 1 and still[0].all():
        return f"; not in row 0, by up to {np.abs(angle[1]).max():.3g} rad in row 1: other frequencies"
    if (np.abs(np.angle(turned * turned[:1].conj())) <= 5e-3).all():
        worst = int(np.abs(angle[0]).argmax())
        return f", in every row by the same angle ({angle[0, worst]:+.4f} rad in pair {worst}): positions are off"
    return f" by up to {np.abs(angle).max():.3g} rad"


def _growth(pair: _Pair) -> Hint | None:
    error = pair.rows.error
    T = len(error)
    if T < 6 or pair.rows.wrong[1:].mean() < 0.9:
        return None
    quarter = max(1, (T - 1) // 4)
    early, late = float(error[1 : 1 + quarter].mean()), float(error[-quarter:].mean())
    trend = _rank_correlation(np.arange(T - 1.0), error[1:])
    exact = not pair.rows.wrong[0]
    if (exact and trend > 0.5 and late > 1.5 * early) or (trend > 0.9 and late > 4 * early and error[0] < early):
        first = "row 0 is equal" if exact else f"{error[0]:.1e} in row 0"
        said = f"the relative error grows with the row: {first}, {early:.1e} in rows 1-{quarter}"
        return Hint("growth", f"{said}, {late:.1e} in rows {T - quarter}-{T - 1} (rank correlation {trend:.2f})")
    return None


def _activation(pair: _Pair) -> Hint | None:
    """Values sorted by the reference's: the error goes smoothly where it is a function of the value."""
    a, e = _sampled(pair.actual), _sampled(pair.expected)
    if len(e) < 256:
        return None
    order = np.argsort(e, kind="stable")
    a, e = a[order], e[order]
    error = a - e
    rough = float(np.sqrt(np.median(np.diff(error) ** 2) / 2))
    inner = slice(len(e) // 50, -len(e) // 50)  # values are sparse at both ends
    smooth = _rms(np.diff(error[inner])) < 0.1 * float(error[inner].std())
    if not smooth or rough > min(_UNDONE * pair.size, pair.before * pair.size / _FAR):
        return None
    worst = int(np.abs(error).argmax())
    return Hint(
        "activation",
        f"the error is a function of the value: neighbouring values differ by {rough / pair.size:.0e} in it; it is "
        f"largest at {e[worst] * pair.unit:.3g}, where the value is {a[worst] * pair.unit:.3g}",
    )


def _low_energy(pair: _Pair) -> Hint | None:
    """Rows of low energy are further off, absolutely: the epsilon of a norm does that."""
    error, energy = (_norms(x, (0, 2)).ravel() for x in (pair.error, pair.expected))
    if len(error) < 12 or pair.before > 1e-2:
        return None
    trend = _rank_correlation(energy, error)
    if trend > -0.6:
        return None
    said = f"rows of low energy are further off (rank correlation of error and energy {trend:.2f})"
    return Hint("norm epsilon", f"{said}; rel_l2 {pair.before:.1e}")


def _small(pair: _Pair) -> Hint | None:
    if not pair.noise * 3 < pair.before < 1e-2 or pair.error.size < 64:
        return None
    sides = [axis.error for axis in (pair.rows, pair.channels) if len(axis.error) > 1]
    if any(error.max() > 8 * np.median(error) for error in sides):
        return None
    return Hint("small everywhere", f"rel_l2 {pair.before:.1e}; no row or channel is 8 x as far off as the median")


_SIMPLE: tuple[Detector, ...] = (_sign, _scale, _offset, _affine)
_UNDOABLE: tuple[Detector, ...] = (
    *(_gated(detector) for detector in _SIMPLE),
    _zero,
    _rounding,
    _inverse_order,
    _axes,
    _head_order,
    _row_shift,
    _row_order,
    _channel_order,
    _value_order,
    _gated(_by_channel),
    _gated(_by_row),
    _steps,
    _activation,
)
_PLACES: tuple[Detector, ...] = (
    _waves,
    _rotary,
    _growth,
    _span,
    _few_values,
    _head_place,
    _row_place,
    _channel_place,
)
_EVERYWHERE: tuple[Detector, ...] = (_low_energy, _small)


# ---- arithmetic


def _rms(x: Tensor) -> float:
    return float(np.sqrt(np.vdot(x, x).real / x.size)) if x.size else 0.0


def _norms(x: _Floats, over: tuple[int, ...]) -> _Floats:
    """The rms over some axes, kept."""
    rms: _Floats = np.sqrt(np.square(x).mean(axis=over))
    return rms


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _quotient_each(part: _Floats, whole: _Floats) -> _Floats:
    return np.divide(part, whole, out=np.ones_like(part), where=whole > 0)


def _places(count: int) -> _Indices:
    """Where to look; the same for every call."""
    return np.random.default_rng(0).integers(0, count, min(count, _SAMPLE))


def _sampled(x: _Floats) -> _Floats:
    return x.ravel() if x.size <= _SAMPLE else x.ravel()[_places(x.size)]


def _projected(x: _Floats) -> _Floats:
    """(n, k) on one fixed direction -> (n,)."""
    line: _Floats = x @ np.random.default_rng(0).standard_normal(x.shape[1])
    return line


def _rank_correlation(x: _Floats, y: _Floats) -> float:
    first, second = (np.argsort(np.argsort(side, kind="stable"), kind="stable") for side in (x, y))
    centre = (len(x) - 1) / 2
    return _quotient(float((first - centre) @ (second - centre)), float(np.square(first - centre).sum()))


# ---- words


def _listed(places: _Indices) -> str:
    """`0-3, 7, 9-11`, at most six runs."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    ends = np.append(starts[1:], len(places)) - 1
    runs = [f"{places[s]}-{places[t]}" if t > s else f"{places[s]}" for s, t in zip(starts, ends, strict=True)]
    return ", ".join(runs[:6]) + (f" and {len(runs) - 6} more" if len(runs) > 6 else "")


def _differ(mask: _Mask) -> str:
    """`differ, every 8th` where the places are evenly apart."""
    gaps = np.diff(np.flatnonzero(mask))
    every = f", every {gaps[0]}th" if len(gaps) > 1 and gaps[0] > 1 and (gaps == gaps[0]).all() else ""
    return f"differ{every}" if mask.sum() > 1 else "differs"


def _are(mask: _Mask) -> str:
    return "are" if mask.sum() > 1 else "is"


def _repeating(numbers: _Floats) -> str:
    """`, repeating every 3`: colours."""
    for block in (b for b in range(2, len(numbers)) if len(numbers) % b == 0):
        if np.ptp(numbers.reshape(-1, block), axis=0).max() < 1e-3 * np.ptp(numbers):
            return f", repeating every {block}"
    return ""


def _spread(numbers: _Floats) -> str:
    return f"from {numbers.min():.6g} to {numbers.max():.6g}"
