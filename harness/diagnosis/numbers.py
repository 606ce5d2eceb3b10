"""Arithmetic of the diagnosis; what is sampled is the same in every call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[Any]
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]
SAMPLE = 1 << 14  # values looked at where a sample is enough


def rms(x: Tensor) -> float:
    """The root of the mean square; 0 of nothing."""
    return float(np.sqrt(np.vdot(x, x).real / x.size)) if x.size else 0.0


def norms(x: Floats, over: tuple[int, ...]) -> Floats:
    """The rms over some axes, kept."""
    rms: Floats = np.sqrt(np.square(x).mean(axis=over))
    return rms


def quotient(part: float, whole: float) -> float:
    """Part over whole; 1 where the whole is 0."""
    return part / whole if whole else 1.0


def quotient_each(part: Floats, whole: Floats) -> Floats:
    """The same for each place."""
    return np.divide(part, whole, out=np.ones_like(part), where=whole > 0)


def sample_places(count: int) -> Indices:
    """Where to look; the same for every call."""
    return np.random.default_rng(0).integers(0, count, min(count, SAMPLE))


def sampled(x: Floats) -> Floats:
    """Some values, all of a small tensor."""
    return x.ravel() if x.size <= SAMPLE else x.ravel()[sample_places(x.size)]


def projected(x: Floats) -> Floats:
    """(n, k) on one fixed direction -> (n,)."""
    line: Floats = x @ np.random.default_rng(0).standard_normal(x.shape[1])
    return line


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's, from -1 to 1."""
    first, second = (np.argsort(np.argsort(side, kind="stable"), kind="stable") for side in (x, y))
    centre = (len(x) - 1) / 2
    return quotient(float((first - centre) @ (second - centre)), float(np.square(first - centre).sum()))
