"""Weights of a net: one file or several in a row, read straight into ncnn's memory.

Files are shared: a decoder layer's prefill graph reads the files of its dqkv and dattn graphs.
"""

import ctypes
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import ncnn

from runtime.errors import EXPORT_AGAIN, InputError
from runtime.memory import own_blocks


def load_weights(net: "ncnn.Net", files: Sequence[Path], what: str) -> None:
    """Load files as one stream. Raises InputError, which begins with `what`, when they are too short or too long."""
    with own_blocks(), closing(_Stream(files)) as stream:
        code = net.load_model(stream)
        if code != 0:
            raise InputError(f"{what} (code {code}); {EXPORT_AGAIN}")
        if rest := stream.rest():
            raise InputError(f"{what}: {rest} bytes are left over; {EXPORT_AGAIN}")


def fill(buffer: object, size: int) -> memoryview:
    """The memory that ncnn wants a reader to fill."""
    return memoryview((ctypes.c_char * size).from_address(_pointer(buffer, None))).cast("B")


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Stream(ncnn.DataReader):
    """Files as one stream, read straight into ncnn's memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._paths = iter(paths)
        self._file = next(self._paths).open("rb")

    def read(self, buffer: object, size: int) -> int:
        """Fill ncnn's buffer; fewer than `size` bytes at the end of the last file."""
        target, done = fill(buffer, size), 0
        while done < size:
            count = self._file.readinto(target[done:])
            if not count and not self._next():
                break
            done += count
        return done

    def rest(self) -> int:
        """Bytes that were not read."""
        count = len(self._file.read())
        while self._next():
            count += len(self._file.read())
        return count

    def close(self) -> None:
        """Close the last file."""
        self._file.close()

    def _next(self) -> bool:
        path = next(self._paths, None)
        if path is not None:
            self._file.close()
            self._file = path.open("rb")
        return path is not None
