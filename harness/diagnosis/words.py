"""Words of the evidence: places, ranges, what was left."""

import numpy as np

from harness.diagnosis.numbers import Floats, Indices, Mask


def after(left: float) -> str:
    """What is left when a mistake is undone."""
    return f"(relative residual {left:.0e} after undoing it)"


def listed(places: Indices) -> str:
    """`0-3, 7, 9-11`, at most six runs."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    ends = np.append(starts[1:], len(places)) - 1
    runs = [f"{places[s]}-{places[t]}" if t > s else f"{places[s]}" for s, t in zip(starts, ends, strict=True)]
    return ", ".join(runs[:6]) + (f" and {len(runs) - 6} more" if len(runs) > 6 else "")


def differ(mask: Mask) -> str:
    """`differ, every 8th` where the places are evenly apart."""
    gaps = np.diff(np.flatnonzero(mask))
    every = f", every {gaps[0]}th" if len(gaps) > 1 and gaps[0] > 1 and (gaps == gaps[0]).all() else ""
    return f"differ{every}" if mask.sum() > 1 else "differs"


def are(mask: Mask) -> str:
    """`is` of one place, else `are`."""
    return "are" if mask.sum() > 1 else "is"


def repeating(numbers: Floats) -> str:
    """`, repeating every 3`: colours."""
    for block in (b for b in range(2, len(numbers)) if len(numbers) % b == 0):
        if np.ptp(numbers.reshape(-1, block), axis=0).max() < 1e-3 * np.ptp(numbers):
            return f", repeating every {block}"
    return ""


def spread(numbers: Floats) -> str:
    """The range of some numbers."""
    return f"from {numbers.min():.6g} to {numbers.max():.6g}"
