"""Mistakes that befall every value alike: its sign, a scale, an offset, a short format, steps."""

from collections.abc import Callable

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import Floats, quotient, rms, sampled
from harness.diagnosis.pair import FAR, Pair
from harness.diagnosis.words import after


def sign(pair: Pair) -> Hint | None:
    """Every value has the other sign."""
    left = pair.left(pair.actual + pair.expected)
    return None if left is None else Hint("sign", f"every value has the other sign {after(left)}")


def scale(pair: Pair) -> Hint | None:
    """Every value times one factor."""
    scale = quotient(float(np.vdot(pair.actual, pair.expected)), float(np.vdot(pair.expected, pair.expected)))
    left = pair.left(pair.actual - scale * pair.expected)
    if left is None or not scale:
        return None
    return Hint("scale", f"every value is {scale:.6g} x the reference's {after(left)}")


def offset(pair: Pair) -> Hint | None:
    """Every value plus one summand."""
    offset = float(pair.error.mean())
    left = pair.left(pair.error - offset)
    return None if left is None else Hint("offset", f"every value is {offset * pair.unit:+.6g} off {after(left)}")


def affine(pair: Pair) -> Hint | None:
    """Every value times one factor plus one summand."""
    mean_a, mean_e = float(pair.actual.mean()), float(pair.expected.mean())
    spread = pair.expected - mean_e
    scale = quotient(float(np.vdot(pair.actual, spread)), float(np.vdot(spread, spread)))
    offset = mean_a - scale * mean_e
    left = pair.left(pair.actual - scale * pair.expected - offset)
    if left is None or not scale or left > abs(scale) * rms(spread) / pair.size / FAR:
        return None
    said = f"every value is {scale:.6g} x the reference's {offset * pair.unit:+.6g} {after(left)}"
    return Hint("affine", said)


def rounding(pair: Pair) -> Hint | None:
    """Values on the grid of a short format, near values that are not."""
    a, e = (sampled(x) * pair.unit for x in (pair.actual, pair.expected))
    a, e = a[e != 0], e[e != 0]
    for name, rounded, step in (("bf16", _bf16, 2.0**-7), ("fp16", _fp16, 2.0**-10)):
        near = len(a) > 3 and np.quantile(np.abs(a - e) / np.abs(e), 0.98) <= 1.05 * step
        if near and _off_grid(a, rounded) < FAR * 1e-7 < 10 * FAR * 1e-7 < _off_grid(e, rounded):
            return Hint("rounding", f"the values are {name} numbers, the reference's are not; rel_l2 {pair.before:.1e}")
    return None


def _off_grid(values: Floats, rounded: Callable[[Floats], Floats]) -> float:
    """The median relative distance to the grid."""
    some = values[values != 0]
    return float(np.median(np.abs(some - rounded(some)) / np.abs(some))) if len(some) else np.inf


def _fp16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float64)


def _bf16(values: Floats) -> Floats:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def steps(pair: Pair) -> Hint | None:
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
