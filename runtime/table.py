"""The vocabulary table: embedding rows, and the tied head's logits. Outside the graphs, shared by both."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import EXPORT_AGAIN, InputError
from runtime.half_head import HalfHead

DTYPES = {"float32": np.float32, "float16": np.float16}
_BLOCK_ROWS = 8192


class Table:
    """A (vocab, width) table on disk, float32 or float16, widened in blocks. `threads` share a row of logits.

    resident: keep a float16 table in memory, where ncnn reads it ten times as fast as numpy widens it.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any], *, threads: int = 1, resident: bool = False) -> None:
        path, dtype, (rows, width) = folder / entry["file"], DTYPES.get(entry["dtype"]), entry["shape"]
        if dtype is None:
            raise InputError(
                f"{path} has dtype {entry['dtype']}, but should be one of {', '.join(DTYPES)}; {EXPORT_AGAIN}"
            )
        wanted = rows * width * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != wanted:
            found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
            raise InputError(f"{path} {found}, but should have {wanted} bytes; {EXPORT_AGAIN}")
        self._rows: NDArray[Any] = np.memmap(path, dtype, "r", shape=(rows, width))
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self.memory_bytes = wanted if resident and dtype is np.float16 else 0

    @cached_property
    def _half(self) -> HalfHead | None:
        """The head in ncnn's memory, where the table is to be there and ncnn rounds nothing else."""
        head = HalfHead(self._rows, threads=self._threads) if self.memory_bytes else None
        return head if head and head.exact else None

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(self._rows.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the table."""
        return len(self._rows)

    def embed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """(T,) -> (T, width). Raises InputError on an id outside the table."""
        index = np.asarray(ids, np.int64)
        outside = index[(index < 0) | (index >= self.vocab_size)]
        if outside.size:
            raise InputError(
                f"token id {outside[0]} is outside the table of {self.vocab_size} rows; "
                f"tokenizer.json and weights are of different models, {EXPORT_AGAIN}"
            )
        return self._rows[index].astype(np.float32)

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """(width,) -> (vocab,)."""
        if self._half:
            return self._half.logits(hidden)
        logits = np.empty(self.vocab_size, np.float32)
        ends = [self.vocab_size * part // self._threads for part in range(self._threads + 1)]
        others = [self._pool.submit(self._fill, logits, hidden, *span) for span in pairwise(ends[1:])]
        self._fill(logits, hidden, 0, ends[1])
        for other in others:
            other.result()
        return logits

    def _fill(self, logits: NDArray[np.float32], hidden: NDArray[np.float32], start: int, end: int) -> None:
        for first in range(start, end, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, end)
            block = self._rows[first:last].astype(np.float32, copy=False)
            np.vecdot(block, hidden, out=logits[first:last])  # no BLAS, whose own threads would spin beside ncnn's
