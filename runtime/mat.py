"""The one place where numpy arrays become ncnn Mats and come back.

An ncnn Mat made on an array borrows its memory, reads views as if they were contiguous and int64 as something
else, all without an error; an in-place layer on borrowed memory kills the process. So: checked, then cloned.
"""

from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError


def to_mat(array: NDArray[Any], *, rank: int, where: str) -> ncnn.Mat:
    """A Mat that owns a copy of `array`: float32, C order, `rank` axes, the last one innermost.

    Raises InputError naming `where` when the array is of another dtype, rank or order, or empty.
    """
    if array.dtype != np.float32:
        raise InputError(f"{where} has dtype {array.dtype}, but should be float32")
    if array.ndim != rank:
        raise InputError(f"{where} has shape {array.shape}, but should have {rank} axes")
    if array.size == 0:
        raise InputError(f"{where} has shape {array.shape}: it is empty")
    if not array.flags.c_contiguous:
        raise InputError(f"{where} is not contiguous; pass numpy.ascontiguousarray of it")
    return ncnn.Mat(array).clone()


def from_mat(mat: ncnn.Mat, *, rank: int, where: str) -> NDArray[np.float32]:
    """A copy of a Mat's numbers with `rank` axes, float32.

    A graph that is one Linear gives (1, N, C) for (N, C): leading axes of size 1 are dropped.
    Raises InputError naming `where` when the Mat has another number of axes.
    """
    array = np.array(mat, dtype=np.float32, order="C")
    extra = array.ndim - rank
    if extra < 0 or any(size != 1 for size in array.shape[:extra]):
        raise InputError(f"{where} has shape {array.shape}, but should have {rank} axes")
    return array.reshape(array.shape[extra:])
