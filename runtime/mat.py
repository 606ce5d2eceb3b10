"""The one place where numpy arrays become ncnn Mats and come back.

An ncnn Mat made on an array borrows its memory, reads views as if they were contiguous and int64 as something
else, all without an error; an in-place layer on borrowed memory kills the process. So: checked, then cloned. Arrays
from here stand in memory that ncnn owns: they go back into a graph without a copy, and an in-place layer, which sees
a second owner, copies first.
"""

from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError


def to_mat(array: NDArray[Any], *, rank: int, where: str) -> ncnn.Mat:
    """A Mat with the numbers of `array`: float32, C order, `rank` axes, the last one innermost.

    Shares the memory of an array that `empty` or `from_mat` gave; others are copied.
    Raises InputError naming `where` when the array is of another dtype, rank or order, or empty.
    """
    if array.dtype != np.float32:
        raise InputError(f"{where} has dtype {array.dtype}, but should be float32")
    if array.ndim != rank:
        raise InputError(f"{where} has shape {array.shape}, but should have {rank} axes")
    if array.size == 0:
        raise InputError(f"{where} has shape {array.shape}: it is empty")
    owner = getattr(array.base, "obj", None)
    if isinstance(owner, ncnn.Mat):
        return owner
    if not array.flags.c_contiguous:
        raise InputError(f"{where} is not contiguous; pass numpy.ascontiguousarray of it")
    return ncnn.Mat(array).clone()


def from_mat(mat: ncnn.Mat, *, rank: int, where: str) -> NDArray[np.float32]:
    """A copy of a Mat's numbers with `rank` axes, float32.

    A graph that is one Linear gives (1, N, C) for (N, C): leading axes of size 1 are dropped.
    Raises InputError naming `where` when the Mat has another number of axes.
    """
    return view(mat.clone(), rank=rank, where=where)


def view(mat: ncnn.Mat, *, rank: int, where: str) -> NDArray[np.float32]:
    """What `from_mat` gives, in the Mat's own memory: of a graph's output, that of the pool. Copy what is kept."""
    array: NDArray[np.float32] = np.asarray(mat)
    extra = array.ndim - rank
    if extra == 0:
        return array
    if extra < 0 or any(size != 1 for size in array.shape[:extra]):
        raise InputError(f"{where} has shape {array.shape}, but should have {rank} axes")
    return array.reshape(array.shape[extra:])


def empty(blocks: int, rows: int, width: int) -> NDArray[np.float32]:
    """An array (blocks, rows, width) in memory that ncnn owns, not yet written."""
    return np.asarray(ncnn.Mat(width, rows, blocks))


def first_rows(array: NDArray[np.float32], count: int) -> ncnn.Mat:
    """A Mat of the first `count` rows in each block of an array that `empty` gave, sharing its memory."""
    mat = ncnn.Mat(array.base.obj)  # type: ignore[union-attr]  # a memoryview of the Mat that owns it
    mat.h = count
    return mat
