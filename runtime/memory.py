"""Memory that a run may take: what it needs is told, and refused, before it is taken."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import InputError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")

HUGE_PAGES = "glibc.malloc.hugetlb=1"  # for GLIBC_TUNABLES
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_LARGE, _LARGEST, _KEPT = 1 << 20, 1 << 25, 1 << 29  # bytes
Needs = Mapping[str, int]  # what for -> bytes


def use_huge_pages() -> None:
    """Start over with glibc asking for huge pages, where nothing is asked of it.

    ncnn reads weights on small ones a fifth slower, and to be given those for a layer's numbers takes an export a third
    of its time.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        # large blocks on their own from the start: an export's processes take 3.4 GB so, and 4.1 otherwise
        os.environ["GLIBC_TUNABLES"] = f"{HUGE_PAGES}:glibc.malloc.mmap_threshold={_LARGE}"
        os.execv(sys.executable, sys.orig_argv)


@contextmanager
def own_blocks() -> Iterator[None]:
    """While weights are loaded what is larger than 1 MB gets memory of its own and gives it back; not afterwards.

    Weights: else one of 5 MB leaves its file's numbers behind as a hole of the same size, 3 GB over a model. Runs:
    memory that is given back and asked for again comes page by page, a fifth of a prefill's time. Elsewhere than in
    glibc this does nothing.
    """
    _set_thresholds(_LARGE, _LARGE)
    try:
        yield
    finally:
        _set_thresholds(_LARGEST, _KEPT)


def _set_thresholds(mapped: int, kept: int) -> None:
    """Bytes from which a block is mapped on its own, and that the heap keeps when they are free."""
    mallopt = getattr(ctypes.pythonapi, "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, mapped)
        mallopt(_TRIM_THRESHOLD, kept)


class Budget:
    """Bytes that may be taken; what the machine has left where no limit is given."""

    def __init__(self, limit: int | None = None) -> None:
        self.bytes = available_bytes() if limit is None else limit

    def __str__(self) -> str:
        return "no limit is known" if self.bytes is None else f"{gigabytes(self.bytes)} are free"

    def require(self, needs: Needs, advice: Callable[[int], str]) -> None:
        """Raise InputError where the needs are more, with all figures and what `advice` says about the budget."""
        if self.bytes is not None and sum(needs.values()) > self.bytes:
            raise InputError(f"this needs {told(needs)} of memory, but {self}; {advice(self.bytes)}")


def told(needs: Needs) -> str:
    """The sum and its parts in words."""
    parts = ", ".join(f"{what} {gigabytes(size)}" for what, size in needs.items())
    return f"{gigabytes(sum(needs.values()))} ({parts})"


def gigabytes(size: int) -> str:
    """Bytes in words."""
    return f"{size / 1e9:.2f} GB"


def available_bytes() -> int | None:
    """What can be had without swapping: of the machine, or of the control group; None where no system file tells."""
    found = [size for size in (_left_on_machine(), _left_in_group()) if size is not None]
    return min(found, default=None)


def _left_on_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None


def _left_in_group() -> int | None:
    try:
        limit, used = (int((_GROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        kept = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        return limit - used + next(int(line.split()[1]) for line in kept if line.startswith("file "))
    except (OSError, ValueError, StopIteration):  # no such group, or "max": no limit
        return None
