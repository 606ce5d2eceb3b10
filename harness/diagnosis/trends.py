"""Shapes of the error: it grows with the row, goes with the value, or is small everywhere."""

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import rank_correlation, rms, sampled
from harness.diagnosis.pair import FAR, UNDONE, Pair


def growth(pair: Pair) -> Hint | None:
    """The error grows with the row."""
    error = pair.rows.error
    T = len(error)
    if T < 6 or pair.rows.wrong[1:].mean() < 0.9:
        return None
    quarter = max(1, (T - 1) // 4)
    early, late = float(error[1 : 1 + quarter].mean()), float(error[-quarter:].mean())
    trend = rank_correlation(np.arange(T - 1.0), error[1:])
    exact = not pair.rows.wrong[0]
    if (exact and trend > 0.5 and late > 1.5 * early) or (trend > 0.9 and late > 4 * early and error[0] < early):
        first = "row 0 is equal" if exact else f"{error[0]:.1e} in row 0"
        said = f"the relative error grows with the row: {first}, {early:.1e} in rows 1-{quarter}"
        return Hint("growth", f"{said}, {late:.1e} in rows {T - quarter}-{T - 1} (rank correlation {trend:.2f})")
    return None


def activation(pair: Pair) -> Hint | None:
    """Values sorted by the reference's: the error goes smoothly where it is a function of the value."""
    a, e = sampled(pair.actual), sampled(pair.expected)
    if len(e) < 256:
        return None
    order = np.argsort(e, kind="stable")
    a, e = a[order], e[order]
    error = a - e
    rough = float(np.sqrt(np.median(np.diff(error) ** 2) / 2))
    inner = slice(len(e) // 50, -len(e) // 50)  # values are sparse at both ends
    smooth = rms(np.diff(error[inner])) < 0.1 * float(error[inner].std())
    if not smooth or rough > min(UNDONE * pair.size, pair.before * pair.size / FAR):
        return None
    worst = int(np.abs(error).argmax())
    return Hint(
        "activation",
        f"the error is a function of the value: neighbouring values differ by {rough / pair.size:.0e} in it; it is "
        f"largest at {e[worst] * pair.unit:.3g}, where the value is {a[worst] * pair.unit:.3g}",
    )


def small(pair: Pair) -> Hint | None:
    """A small error, evenly spread."""
    if not pair.noise * 3 < pair.before < 1e-2 or pair.error.size < 64:
        return None
    sides = [axis.error for axis in (pair.rows, pair.channels) if len(axis.error) > 1]
    if any(error.max() > 8 * np.median(error) for error in sides):
        return None
    return Hint("small everywhere", f"rel_l2 {pair.before:.1e}; no row or channel is 8 x as far off as the median")
