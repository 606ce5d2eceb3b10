"""A store of artefacts, built on demand: each is a folder `<root>/<kind>/<key>`, whole or not there at all.

An artefact is built in a temporary sibling folder under a file lock, listed in `complete.json` (size and
sha256 of every file), and put in place by one rename. Two workers, a killed build, a full disk or a file
cut short never leave anything that counts as built.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from harness.errors import UnjudgedError

_COMPLETE = "complete.json"
Hashes = Mapping[str, str]  # file name -> sha256, of files whose bytes the build has hashed already
Build = Callable[[Path], Hashes | None]
LARGE = 1 << 24  # bytes of a file, from which on it counts how often it is read
_DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Store:
    """Artefacts by kind and key, built when first asked for; build=False only ever reads."""

    def __init__(self, root: Path, *, build: bool = True) -> None:
        self.root = root
        self._may_build = build
        self._hashed: dict[tuple[int, ...], str] = {}  # large files as they were when they were hashed

    def get(
        self,
        kind: str,
        key: str,
        build: Build,
        *,
        verify: bool = False,
        name: str = "",
        command: str = "",
    ) -> Path:
        """Return the artefact's folder, built by `build(folder)` unless it is there and whole.

        What `build` returns, hashes of files by name, is listed as it is: gigabytes are not read again.
        verify: check hashes as well as sizes. name and command: what to call it and what to type, in errors.
        """
        folder = self.root / kind / key
        if not self._fault(folder, verify):
            return folder
        if not self._may_build:
            raise UnjudgedError(self._forbidden(folder, verify, name, command))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(kind, key):
            if self._fault(folder, verify):  # nobody else built it while we waited
                known = _build(folder, build, name or f"{kind}/{key}")
                self._hashed |= {_state(folder / file): sha256 for file, sha256 in known.items()}
        return folder

    def holds(self, kind: str, key: str) -> bool:
        """Whether an artefact is there and whole, by the sizes of its files."""
        return not self._fault(self.root / kind / key, verify=False)

    def _fault(self, folder: Path, verify: bool) -> str:
        """What keeps the folder from counting as built; "" where nothing does."""
        try:
            files = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
            faults = (self._file_fault(folder, name, files[name], verify) for name in files)
            return next(filter(None, faults), "")
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            return f"{missing} is missing" if folder.is_dir() else "not built"
        except (ValueError, KeyError, TypeError):
            return f"{_COMPLETE} is broken"

    def _file_fault(self, folder: Path, name: str, listed: Mapping[str, Any], verify: bool) -> str:
        size = (folder / name).stat().st_size
        if size != listed["bytes"]:
            return f"{name} has bytes={size}, but should be {listed['bytes']}"
        if verify and self._sha256(folder / name) != listed["sha256"]:
            return f"{name} was altered after it was built"
        return ""

    def _sha256(self, path: Path) -> str:
        """Hash of a file; a large one is read once, by whatever names, unless it was written to since."""
        if path.stat().st_size < LARGE:
            return file_sha256(path)
        state = _state(path)
        if state not in self._hashed:
            self._hashed[state] = file_sha256(path)
        return self._hashed[state]

    def _lock(self, kind: str, key: str) -> FileLock:
        return FileLock(self.root / kind / f"{key}.lock")

    def _forbidden(self, folder: Path, verify: bool, name: str, command: str) -> str:
        what = f"{name} ({folder})" if name else str(folder)
        then = f"; build it: {command}" if command else ""
        return f"{what}: {self._fault(folder, verify)}, and building is forbidden{then}"


def key(**parts: Any) -> str:
    """Name an artefact by all that its content depends on: JSON values, and paths by their content."""
    text = json.dumps(parts, sort_keys=True, allow_nan=False, default=_by_content)
    return hashlib.sha256(text.encode()).hexdigest()[:32]  # 128 bits; Windows paths are short


def listed_sha256(folder: Path, name: str) -> str:
    """The hash of an artefact's file, as it was when it was built."""
    return str(json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))[name]["sha256"])


def file_sha256(path: Path) -> str:
    """Hash a file without holding it in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 with the newlines as given, whole or not at all."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, creating its folder."""
    atomic_write_chunks(path, [data])


def atomic_write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all, chunk by chunk as they are made, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _disk_full_said(path):
            with temporary.open("wb") as file:
                file.writelines(chunks)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _by_content(part: object) -> str:
    if isinstance(part, Path):
        return f"sha256:{file_sha256(part)}"
    raise TypeError(f"{type(part).__name__} has no canonical JSON: {part!r}")


def _build(folder: Path, build: Build, name: str) -> Hashes:
    """Build under the lock that the caller holds; what the build hashed. Any temporary folder is of a dead build."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        _remove(leftover)
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with _disk_full_said(folder, name):
            temporary.mkdir()
            known = build(temporary) or {}
            if not any(temporary.iterdir()):
                raise UnjudgedError(f"{name}: the build wrote no file")
            atomic_write_text(temporary / _COMPLETE, json.dumps(_list_files(temporary, known), indent=1))
            _remove(folder)
            os.replace(temporary, folder)
            return known
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what stays is removed by the next build


def _list_files(folder: Path, known: Hashes) -> dict[str, dict[str, Any]]:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or file_sha256(path)}
        for name, path in files.items()
    }


def _state(path: Path) -> tuple[int, ...]:
    """What tells a file from others, and from itself before it was written to."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _disk_full_said(path: Path, name: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        what = f"{name} cannot be built" if name else f"{path} cannot be written"
        raise UnjudgedError(
            f"{what}: the disk of {path.parent} is full, {free:,} bytes are free; free some and run again"
        ) from error
