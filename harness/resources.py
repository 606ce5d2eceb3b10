"""What this process has used of the machine."""

import sys
from pathlib import Path

import psutil


def peak_memory_bytes() -> int:
    """Return the largest resident set this process has had, in bytes."""
    return _high_water_mark() or _system_peak()


def _high_water_mark() -> int:
    """Linux's own count: ru_maxrss of a child starts at the peak of the parent that spawned it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _system_peak() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
