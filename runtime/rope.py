"""Rotary tables of a decoder: cos and sin per position, angles said twice."""

import numpy as np
from numpy.typing import NDArray


def rotary_tables(start: int, count: int, *, dim: int, theta: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Positions start..start+count-1: cos and sin (1, count, dim), frequencies theta ** (-2i / dim)."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # raised in float64 and rounded once: numpy's float32 power is 1 ulp off here and there
    frequency = np.float32(1) / np.power(theta, exponent.astype(np.float64)).astype(np.float32)
    angles = np.arange(start, start + count, dtype=np.float32)[:, None] * frequency  # (count, dim / 2)
    angles = np.tile(angles, 2)[None]  # (1, count, dim)
    return np.cos(angles), np.sin(angles)
