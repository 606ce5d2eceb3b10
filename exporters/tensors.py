"""A checkpoint's tensors in float32 and float64, the last ones kept: the three graphs of a layer read the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KEPT_BYTES = 3 << 29  # the largest layer known has 1.25 GB in both precisions


class Tensors:
    """Reads through `read`: a tensor's name -> its float32 values. What it gives is not to be changed in place."""

    def __init__(self, read: Callable[[str], Tensor], *, kept_bytes: int = KEPT_BYTES) -> None:
        self._read, self._limit = read, kept_bytes
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}  # the one used last stands last
        self._size = 0

    def single(self, name: str) -> Tensor:
        """A tensor in float32."""
        return self._get(name, torch.float32, self._read)

    def double(self, name: str) -> Tensor:
        """A tensor in float64."""
        return self._get(name, torch.float64, lambda name: self.single(name).double())

    def clear(self) -> None:
        """Let go of all that is kept."""
        self._kept.clear()
        self._size = 0

    def _get(self, name: str, dtype: torch.dtype, make: Callable[[str], Tensor]) -> Tensor:
        value = self._kept.pop((name, dtype), None)
        if value is None:
            value = make(name)
            self._size += value.nbytes
        self._kept[name, dtype] = value
        while self._size > self._limit and len(self._kept) > 1:
            self._size -= self._kept.pop(next(iter(self._kept))).nbytes
        return value


class Uninitialised(TorchFunctionMode):
    """Modules made inside hold whatever was in memory: to draw 100 million random numbers takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
