"""What the machine is, what this process has used of it, and whether it has enough for what is to come."""

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.errors import UnjudgedError

_CGROUP = Path("/sys/fs/cgroup")
_CPU_FLAGS = re.compile(r"sse4\w*|avx\w*|fma\w*|f16c|amx\w*|asimd\w*|sve\w*|bf16|fphp")


@dataclass(frozen=True)
class Mode:
    """One way to do a piece of work: what to type for it, and what it needs in bytes."""

    command: str
    disk: int
    memory: int


def require(chosen: Mode, others: Sequence[Mode], folder: Path) -> None:
    """Raise UnjudgedError where the chosen mode does not fit, with the figures and the first other mode that does."""
    disk, memory = free_disk_bytes(folder), available_memory_bytes()
    short = _short(chosen, disk, memory)
    if not short:
        return
    fits = next((mode for mode in others if not _short(mode, disk, memory)), None)
    then = f"this mode fits: {fits.command}" if fits else "no narrower mode fits"
    raise UnjudgedError(f"{chosen.command} needs {'; and '.join(short)}; free some, or take another mode: {then}")


def free_disk_bytes(folder: Path) -> int:
    """Free disk where a folder is, or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def available_memory_bytes() -> int:
    """Memory that can be had without swapping: the machine's, or what the control group leaves."""
    return min(int(psutil.virtual_memory().available), _left_in_group())


def processor() -> str:
    """The processor's name, as far as the system tells one."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The kernel's words for what matters to arithmetic; elsewhere the processor's name must do."""
    return " ".join(filter(_CPU_FLAGS.fullmatch, _cpuinfo("flags", "Features").split())) or platform.machine()


def _cpuinfo(*names: str) -> str:
    """What Linux tells of the first core under one of these names; elsewhere nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith(names)), "")


def _short(mode: Mode, disk: int, memory: int) -> list[str]:
    rows = ((mode.disk, disk, "disk"), (mode.memory, memory, "memory"))
    return [f"{_gb(needed)} of {what}, but {_gb(left)} are free" for needed, left, what in rows if needed > left]


def _left_in_group() -> int:
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        kept = (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        cache = next(int(line.split()[1]) for line in kept if line.startswith("file "))  # given back under pressure
        return int(limit) - int(used) + cache
    except (OSError, ValueError, StopIteration):  # no such group, or "max": no limit
        return sys.maxsize


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


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
