"""Order, rotary angles and masks of a windowed vision tower, from the patch grids alone.

Follows Youtu-VL's tower: 2x2 merge blocks, windows of 8x8 merged cells, axial rotary positions.
But: windows never span pictures, and a mask is dense: N x N numbers.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Grids = Sequence[tuple[int, int]]  # (rows, columns) of patches of each picture, both even

# Finite, so that no kernel meets inf - inf; exp(-1e9) is exactly 0 in float32 and in float64.
MASKED = -1e9


def window_index(grids: Grids, *, window_cells: int = 8, merge: int = 2) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Merged cells in window order (cells,), and the windows' bounds in patches (windows + 1,)."""
    orders, lengths = [], []
    first = 0
    for height, width in grids:
        row, column = np.divmod(np.arange(height * width // merge**2), width // merge)
        across = -(-width // merge // window_cells)
        window = (row // window_cells) * across + column // window_cells
        orders.append(first + np.argsort(window, kind="stable"))  # stable: raster order inside a window
        lengths.append(np.bincount(window) * merge**2)
        first += len(window)
    return np.concatenate(orders), _bounds(np.concatenate(lengths))


def image_bounds(grids: Grids) -> NDArray[np.int32]:
    """The pictures' bounds in patches: (pictures + 1,)."""
    return _bounds(np.array([height * width for height, width in grids]))


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def patch_order(index: NDArray[np.int64], *, merge: int = 2) -> NDArray[np.int64]:
    """Row gather that brings patches into window order: (cells,) -> (N,)."""
    unit = merge**2
    return (index[:, None] * unit + np.arange(unit)).reshape(-1)  # (N,)


def inverse_order(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row gather that undoes `order`: (N,) -> (N,)."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def positions(grids: Grids, *, merge: int = 2) -> NDArray[np.int64]:
    """(row, column) of each patch inside its picture, in merge-block order: (N, 2)."""
    return np.concatenate([_block_order(height, width, merge) for height, width in grids])


def _block_order(height: int, width: int, merge: int) -> NDArray[np.int64]:
    patch = np.arange(height * width)
    cell, inner = np.divmod(patch, merge**2)
    cell_row, cell_column = np.divmod(cell, width // merge)
    row, column = np.divmod(inner, merge)
    return np.stack([cell_row * merge + row, cell_column * merge + column], axis=1)  # (N, 2)


def rotary_tables(
    grids: Grids, head_dim: int, theta: float = 10000.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cos and sin of the rotary angles in merge-block order, rows' half first: 2 x (N, head_dim)."""
    half = head_dim // 2
    exponent = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    # numpy's float32 power is 1 ulp off here and there, which a position of 300 turns into 1e-5 of angle:
    # raise in float64, round once, as close to torch's float32 power as it gets.
    power = np.power(theta, exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1) / power  # (head_dim / 4,)
    angles = positions(grids).astype(np.float32)[:, :, None] * frequency  # (N, 2, head_dim / 4)
    angles = np.tile(angles.reshape(len(angles), half), 2)  # (N, head_dim)
    return np.cos(angles), np.sin(angles)


def block_mask(cu_seqlens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Additive mask: 0 between rows of one block, -1e9 elsewhere: (blocks + 1,) -> (N, N)."""
    mask = np.full((cu_seqlens[-1], cu_seqlens[-1]), MASKED, dtype=np.float32)
    for start, end in pairwise(cu_seqlens):
        mask[start:end, start:end] = 0.0
    return mask
