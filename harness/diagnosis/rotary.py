"""Rotary mistakes: pairs of channels turned by a wrong angle, tables of other frequencies."""

from collections.abc import Iterator

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import Floats, Indices, Tensor, quotient, quotient_each, rms
from harness.diagnosis.pair import FAR, UNDONE, Pair
from harness.diagnosis.words import after


def rotary(pair: Pair) -> Hint | None:
    """Pairs of channels keep their length but not their angle."""
    heads = pair.apart
    wrong = np.flatnonzero(heads.channels.wrong)
    d = heads.actual.shape[2]
    if len(wrong) < 2 or d > 1024 or heads.error.size < 16:
        return None
    for name, first, second in _pairings(d, int(wrong[0]), int(wrong[-1])):
        a, e = (x[..., first] + 1j * x[..., second] for x in (heads.part.actual, heads.part.expected))
        if rms(np.abs(a) - np.abs(e)) > pair.before * pair.size / FAR:
            continue
        a, e = (x[..., first] + 1j * x[..., second] for x in (heads.actual, heads.expected))
        left = pair.left(np.abs(a) - np.abs(e))
        if left is not None:
            return Hint("rotary", f"{name} keep their length {after(left)} but are turned{_turn(a, e, pair.noise)}")
    return None


def _pairings(d: int, first: int, last: int) -> Iterator[tuple[str, Indices, Indices]]:
    """Sections at either end of d channels that hold all the wrong ones, their halves paired or their neighbours."""
    if d % 2 == 0:
        yield "neighbouring channels", np.arange(0, d, 2), np.arange(1, d, 2)
    for width in range(2, d + 1, 2):
        for start in {0, d - width}:
            if start <= first and last < start + width:
                pairs = np.arange(start, start + width // 2)
                yield f"channels i and i + {width // 2} of {start}-{start + width - 1}", pairs, pairs + width // 2


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


def waves(pair: Pair) -> Hint | None:
    """Tables of cos and sin: along the rows each channel obeys x[t-1] + x[t+1] = 2 cos(f) x[t]."""
    if pair.rows.actual.shape[0] < 5:
        return None
    (ours, odd), (theirs, odd_reference) = (_frequencies(x) for x in (pair.rows.actual, pair.rows.expected))
    if max(odd, odd_reference) > UNDONE or np.abs(ours - theirs).max() < 1e-3:
        return None
    worst = int(np.abs(ours - theirs).argmax())
    return Hint(
        "rotary",
        f"both are waves along the rows, of other frequencies: channel {worst} goes {ours[worst]:.4g} rad a row, "
        f"but should go {theirs[worst]:.4g}",
    )


def _frequencies(x: Floats) -> tuple[Floats, float]:
    """(T, k) -> of each channel (k,), and how far the channels are from being waves."""
    middle, around = x[1:-1], x[:-2] + x[2:]
    twice = quotient_each((middle * around).sum(axis=0), np.square(middle).sum(axis=0))
    return np.arccos(np.clip(twice / 2, -1, 1)), quotient(rms(around - twice * middle), rms(x))
