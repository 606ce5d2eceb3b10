"""Scratch: what a long run has made so far, record by record in one SQLite file, so that a broken run goes on.

A record is named, holds tensors and a JSON value, and is there whole or not at all, however the run ended.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UnjudgedError
from harness.metrics import Tensor

_TABLES = """
    CREATE TABLE IF NOT EXISTS records (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS tensors (
        name TEXT PRIMARY KEY, record TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, data BLOB NOT NULL
    );
"""


class Scratch:
    """Records of one run; without a path they last as long as the object. A file that is damaged starts anew."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        try:
            self._db = _open(path)
        except sqlite3.DatabaseError:
            discard(path)
            self._db = _open(path)

    def __contains__(self, record: str) -> bool:
        return self._one("SELECT 1 FROM records WHERE name = ?", record) is not None

    def put(self, record: str, tensors: Mapping[str, Tensor], value: Any = None) -> None:
        """Keep a record. Its tensors' names are their own, of all records together."""
        try:
            with self._db:  # one transaction
                for name, tensor in tensors.items():
                    shape, data = json.dumps(tensor.shape), tensor.tobytes()
                    row = (name, record, str(tensor.dtype), shape, data)
                    self._db.execute("INSERT INTO tensors VALUES (?, ?, ?, ?, ?)", row)
                self._db.execute("INSERT INTO records VALUES (?, ?)", (record, json.dumps(value)))
        except sqlite3.OperationalError as error:
            raise UnjudgedError(f"{self._path} cannot be written ({error}); free some disk and run again") from error

    def value(self, record: str) -> Any:
        """The JSON value of a record. Raises KeyError where it is not there."""
        return json.loads(self._found("SELECT value FROM records WHERE name = ?", record)[0])

    def names(self, record: str) -> list[str]:
        """Names of the tensors of a record."""
        return [name for (name,) in self._db.execute("SELECT name FROM tensors WHERE record = ?", (record,))]

    def tensor(self, name: str) -> Tensor:
        """One tensor, a copy. Raises KeyError where it is not there."""
        row = self._found("SELECT dtype, shape, data FROM tensors WHERE name = ?", name)
        return np.frombuffer(bytearray(row[2]), row[0]).reshape(json.loads(row[1]))

    def tensors(self, hidden: str) -> Mapping[str, Tensor]:
        """All tensors by name, each read when asked for, but for those whose names start with `hidden`."""
        names = [name for (name,) in self._db.execute("SELECT name FROM tensors ORDER BY name")]
        return _Tensors(self, [name for name in names if not name.startswith(hidden)])

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _one(self, query: str, name: str) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._db.execute(query, (name,)).fetchone()
        return found

    def _found(self, query: str, name: str) -> tuple[Any, ...]:
        row = self._one(query, name)
        if row is None:
            raise KeyError(name)
        return row


def discard(path: Path | None) -> None:
    """Remove a scratch's file and what SQLite keeps beside it."""
    for found in [] if path is None else path.parent.glob(f"{path.name}*"):
        found.unlink()


class _Tensors(Mapping[str, Tensor]):
    """Tensors of a scratch by name."""

    def __init__(self, scratch: Scratch, names: list[str]) -> None:
        self._scratch, self._names = scratch, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._scratch.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path or ":memory:")
    try:
        db.execute("PRAGMA journal_mode = WAL")  # with NORMAL: whole after a crash, without a wait for each record
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_TABLES)
    except BaseException:
        db.close()
        raise
    return db
