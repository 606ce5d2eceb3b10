"""Right values in another order: axes, heads, rows, channels, shifts."""

from collections.abc import Callable, Iterator
from itertools import permutations

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import Floats, Indices, norms, projected, rms, sample_places
from harness.diagnosis.pair import FAR, UNDONE, Axis, Pair
from harness.diagnosis.words import after

_SHIFTS = 64  # tried at most, either way
_CHANNEL_KINDS = {"swapped": "halves", "interleaved": "interleave"}


def inverse_order(pair: Pair) -> Hint | None:
    """Indices that undo the reference's permutation instead of being it."""
    ours, theirs = (np.ravel(x * pair.unit) for x in (pair.actual, pair.expected))
    count = np.arange(len(ours))
    if len(ours) < 3 or len(pair.shape) != 1 or not np.array_equal(np.sort(theirs), count):
        return None
    if not np.array_equal(ours, np.argsort(theirs)):
        return None
    return Hint("inverse order", f"{len(ours)} indices are the inverse of the reference's permutation")


def axes(pair: Pair) -> Hint | None:
    """The reference with its axes permuted, read in memory order as the same shape."""
    whole = pair.shape
    side = (*whole[:-1], pair.side, whole[-1] // pair.side) if pair.side > 1 else whole
    if not pair.same_energy or len(side) < 2:
        return None
    actual, expected = pair.actual.ravel(), pair.expected.reshape(side)
    places = sample_places(actual.size)
    for order in permutations(range(len(side))):
        if pair.side > 1 and order[:-2] == tuple(range(len(side) - 2)):
            continue  # within the channels
        permuted = expected.transpose(order)
        some = permuted[np.unravel_index(places, permuted.shape)]
        if rms(actual[places] - some) > rms(pair.error) / 2:
            continue
        left = pair.left(actual - permuted.ravel())
        if left is not None:
            axes = f"of its {side} " if side != whole else ""
            return Hint("axes", f"the values are the reference's with axes {axes}permuted by {order} {after(left)}")
    return None


def head_order(pair: Pair) -> Hint | None:
    """Whole heads permuted."""
    return _order_hint(pair.apart, pair.heads, lambda name: "head order") if len(pair.heads.error) > 1 else None


def row_order(pair: Pair) -> Hint | None:
    """Whole rows permuted."""
    return _order_hint(pair, pair.rows, lambda name: "row order")


def channel_order(pair: Pair) -> Hint | None:
    """Channels permuted; halves and interleaving have kinds of their own."""
    return _order_hint(pair, pair.channels, lambda name: _CHANNEL_KINDS.get(name.split(" ")[0], "channel order"))


def row_shift(pair: Pair) -> Hint | None:
    """All rows moved by the same number of rows."""
    actual, expected = pair.rows.actual, pair.rows.expected
    T = len(actual)
    ours, theirs = projected(actual), projected(expected)
    for shift in range(1, min(T // 2, _SHIFTS) + 1):
        for n in (shift, -shift):
            to, source = slice(max(n, 0), T + min(n, 0)), slice(max(-n, 0), T + min(-n, 0))
            if T < 3 or rms(ours[to] - theirs[source]) > 0.01 * rms(theirs):
                continue
            left = pair.left(actual[to] - expected[source])
            if left is not None and left < rms((actual - expected)[to]) / pair.size / FAR:
                first = f"row {to.start} holds row {source.start}"
                return Hint("row shift", f"the rows are shifted by {n:+d}: {first}, and so on {after(left)}")
    return None


def value_order(pair: Pair) -> Hint | None:
    """The same values in an order without a name."""
    if not pair.same_energy or pair.error.size < 4 or pair.before < 1e-2:
        return None
    ours, theirs = (np.sort(x, axis=None) for x in (pair.actual, pair.expected))
    left = pair.left(ours - theirs)
    if left is None:
        return None
    said = "the same values in another order that is none of whole rows, channels or axes"
    return Hint("value order", f"{said} {after(left)}")


# ---- one permutation of rows, heads or channels


def _order_hint(pair: Pair, axis: Axis, kind: Callable[[str], str]) -> Hint | None:
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
    return Hint(kind(name), f"{said} {after(left)}")


def _order(pair: Pair, axis: Axis) -> Indices | None:
    """order with actual[i] ~ expected[order[i]]; rows that are equal as they stand stay."""
    wrong = np.flatnonzero(axis.wrong)
    if not pair.same_energy or len(wrong) < 2:
        return None
    actual, expected = axis.actual, axis.expected
    ours, theirs = (projected(x)[wrong] for x in (actual, expected))
    ours_at, theirs_at = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    if rms(ours[ours_at] - theirs[theirs_at]) > rms(ours - theirs) / 10:
        return None
    found = _nearest(actual[wrong[ours_at]], expected[wrong[theirs_at]], UNDONE * pair.size)
    order = np.arange(len(axis.error))
    order[wrong[ours_at]] = wrong[theirs_at[found]]
    return order if len(np.unique(order)) == len(order) else None


def _nearest(actual: Floats, expected: Floats, near: float) -> Indices:
    """Both (n, k) sorted by a projection: noise may have swapped neighbours whose projections are alike."""
    found = np.arange(len(actual))
    distance = norms(actual - expected, (1,))
    for shift in (1, -1, 2, -2):
        far = np.flatnonzero(distance > near)
        other = np.clip(far + shift, 0, len(actual) - 1)
        moved = norms(actual[far] - expected[other], (1,))
        closer = moved < distance[far]
        found[far[closer]], distance[far[closer]] = other[closer], moved[closer]
    return found


# ---- what a porter would call it


def _order_name(order: Indices, moved: Indices) -> str:
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


def _period(order: Indices) -> int:
    """The smallest block that is permuted within itself, and each alike."""
    n = len(order)
    for block in (b for b in range(2, n) if n % b == 0):
        parts = order.reshape(-1, block) - np.arange(0, n, block)[:, None]
        if (parts == parts[0]).all() and parts.min() >= 0 and parts.max() < block:
            return block
    return n


def _pattern_name(order: Indices) -> str:
    turn = int(order[0])
    if turn and 2 * turn != len(order) and np.array_equal(order, np.roll(np.arange(len(order)), -turn)):
        return f"rotated by {-turn}"
    return next((name for name, pattern in _patterns(len(order)) if np.array_equal(order, pattern)), "")


def _patterns(n: int) -> Iterator[tuple[str, Indices]]:
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
