"""Reference modules on demand: all of them where they fit into memory, else one and the one behind it.

A layer of the true widths is 0.4 GB in float32. Widening it takes longer than one row's way through it, so a thread
reads the next layer while the current one computes.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import nn

Key = tuple[str, int]  # kind and index


class Layers:
    """The modules of a reference by kind and index, and the float64 copy of the current one."""

    def __init__(self, load: Callable[[Key], nn.Module], *, keep_all: bool) -> None:
        self._load, self._keep_all = load, keep_all
        self._held: dict[Key, nn.Module] = {}
        self._doubles: dict[Key, nn.Module] = {}
        self._behind: Mapping[Key, Key] = {}
        self._coming: dict[Key, Future[nn.Module]] = {}
        self._reader: ThreadPoolExecutor | None = None

    def get(self, key: Key) -> Any:
        """A module in float32."""
        if key not in self._held:
            coming = self._coming.pop(key, None)
            self._make_room()
            self._held[key] = coming.result() if coming else self._load(key)
        self._read_ahead(key)
        return self._held[key]

    def double(self, key: Key, widen: Callable[[Any], nn.Module]) -> Any:
        """A module in float64; only the last one asked for is kept."""
        module = self.get(key)
        if key not in self._doubles:
            self._doubles.clear()
            self._doubles[key] = widen(module)
        return self._doubles[key]

    @contextmanager
    def reading_ahead(self, behind: Mapping[Key, Key]) -> Iterator[None]:
        """Read the module that comes behind the current one, in a thread of its own; afterwards none is held.

        A reference is part of a cycle. Its layers would stay until the collector comes round, beside those of the next
        case: 1.3 GB more at true widths.
        """
        with ThreadPoolExecutor(1) as reader:
            self._behind, self._reader = behind, reader
            try:
                yield
            finally:
                self._behind, self._reader = {}, None
                self._make_room()

    def _make_room(self) -> None:
        if not self._keep_all:
            self._held.clear()
            self._doubles.clear()
            self._coming.clear()

    def _read_ahead(self, key: Key) -> None:
        behind = self._behind.get(key)
        if self._reader and behind and behind not in self._held and behind not in self._coming:
            self._coming[behind] = self._reader.submit(self._load, behind)
