"""Key and value rows of every decoder layer, preallocated to the context length."""

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError
from runtime.mat import empty


class KVCache:
    """One layer's cache: keys (heads, context, dk) and values (heads, context, dv), filled from the left."""

    def __init__(self, heads: int, context: int, key_dim: int, value_dim: int) -> None:
        self.keys, self.values = empty(heads, context, key_dim), empty(heads, context, value_dim)
        self.length = 0

    def append(self, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Add rows (heads, T, d). Raises InputError when they do not fit into the context."""
        end = self.length + key.shape[1]
        if end > self.keys.shape[1]:
            raise InputError(f"{end} rows do not fit into the context of {self.keys.shape[1]}; pass a larger --context")
        self.keys[:, self.length : end] = key
        self.values[:, self.length : end] = value
        self.length = end

    def rows(self, count: int | None = None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of the first `count` rows, without it of all filled ones: (heads, count, dk), (heads, count, dv)."""
        count = self.length if count is None else count
        return self.keys[:, :count].copy(), self.values[:, :count].copy()
