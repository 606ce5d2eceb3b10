"""Key and value rows of every decoder layer, preallocated to the context length."""

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError


class KVCache:
    """One layer's cache: keys (heads, context, dk) and values (heads, context, dv), filled from the left."""

    def __init__(self, heads: int, context: int, key_dim: int, value_dim: int) -> None:
        self._keys = np.zeros((heads, context, key_dim), np.float32)
        self._values = np.zeros((heads, context, value_dim), np.float32)
        self.length = 0

    def append(self, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Add rows (heads, T, d). Raises InputError when they do not fit into the context."""
        end = self.length + key.shape[1]
        if end > self._keys.shape[1]:
            raise InputError(
                f"{end} rows do not fit into the context of {self._keys.shape[1]}; pass a larger --context"
            )
        self._keys[:, self.length : end] = key
        self._values[:, self.length : end] = value
        self.length = end

    def rows(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Filled rows, contiguous: (heads, length, dk) and (heads, length, dv)."""
        return np.ascontiguousarray(self._keys[:, : self.length]), np.ascontiguousarray(self._values[:, : self.length])
