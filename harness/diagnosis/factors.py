"""Factors and summands of single channels or rows: weight, bias and epsilon of a norm."""

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import norms, quotient_each, rank_correlation
from harness.diagnosis.pair import Pair, widespread
from harness.diagnosis.words import after, repeating, spread


def by_channel(pair: Pair) -> Hint | None:
    """A factor, a summand, or both of each channel."""
    C = pair.actual.shape[2]
    a, e = pair.actual.reshape(-1, C), pair.expected.reshape(-1, C)
    if len(a) < 4 or not widespread(pair.channels, pair.heads):
        return None
    mean_a, mean_e = a.mean(axis=0), e.mean(axis=0)
    scale = quotient_each((a * e).sum(axis=0), (e * e).sum(axis=0))
    slope = quotient_each(((a - mean_a) * (e - mean_e)).sum(axis=0), ((e - mean_e) ** 2).sum(axis=0))
    shift = mean_a - mean_e
    for kind, residual, numbers in (
        ("channel scale", a - scale * e, scale),
        ("channel offset", a - e - shift, shift * pair.unit),
        ("channel affine", a - mean_a - slope * (e - mean_e), slope),
    ):
        left = pair.left(residual)
        if left is not None:
            word = "summand" if kind == "channel offset" else "factor"
            said = f"each channel has its own {word}, {spread(numbers)}{repeating(numbers)}"
            return Hint(kind, f"{said} {after(left)}")
    return None


def by_row(pair: Pair) -> Hint | None:
    """A factor of each row; where all are near 1 on one side, that is what another epsilon of a norm does."""
    H, T, C = pair.actual.shape
    if C < 4 or H * T < 2 or not widespread(pair.rows, pair.heads):
        return None
    a, e = pair.actual, pair.expected
    scale = quotient_each((a * e).sum(axis=-1), (e * e).sum(axis=-1))
    left = pair.left(a - scale[..., None] * e)
    if left is None:
        return None
    off = scale - 1
    epsilon = np.abs(off).max() < 0.1 and (off.min() > -pair.noise or off.max() < pair.noise)
    said = f"each row has its own factor, {spread(scale)} {after(left)}"
    return Hint("norm epsilon", f"{said}, all on one side of 1") if epsilon else Hint("row scale", said)


def low_energy(pair: Pair) -> Hint | None:
    """Rows of low energy are further off, absolutely: the epsilon of a norm does that."""
    error, energy = (norms(x, (0, 2)).ravel() for x in (pair.error, pair.expected))
    if len(error) < 12 or pair.before > 1e-2:
        return None
    trend = rank_correlation(energy, error)
    if trend > -0.6:
        return None
    said = f"rows of low energy are further off (rank correlation of error and energy {trend:.2f})"
    return Hint("norm epsilon", f"{said}; rel_l2 {pair.before:.1e}")
