"""The vocabulary table: embedding rows, and the tied head's logits. Outside the graphs, shared by both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import EXPORT_AGAIN, InputError

DTYPES = {"float32": np.float32, "float16": np.float16}
_BLOCK_ROWS = 8192


class Table:
    """A (vocab, width) table on disk, float32 or float16, widened in blocks."""

    def __init__(self, folder: Path, entry: Mapping[str, Any]) -> None:
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
        logits = np.empty(self.vocab_size, np.float32)
        for start in range(0, self.vocab_size, _BLOCK_ROWS):
            block = self._rows[start : start + _BLOCK_ROWS].astype(np.float32, copy=False)
            logits[start : start + len(block)] = block @ hidden
        return logits
