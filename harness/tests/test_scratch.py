"""A record is there whole or not at all, outlives the process, and comes back as it was."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UnjudgedError
from harness.metrics import Tensor
from harness.scratch import Scratch, discard

TENSORS: dict[str, Tensor] = {
    "turned": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "single": np.asarray(7, np.int64),
    "empty": np.zeros((0, 2), np.uint8),
    "mask": np.array([True, False]),
}


@pytest.mark.parametrize("on_disk", [True, False])
def test_comes_back_as_it_was(tmp_path: Path, on_disk: bool) -> None:
    path = tmp_path / "new" / "run.db" if on_disk else None
    scratch = Scratch(path)
    scratch.put("first", TENSORS, {"floor": 1.5e-7})
    if on_disk:
        scratch.close()
        scratch = Scratch(path)
    assert "first" in scratch
    assert "other" not in scratch
    assert scratch.value("first") == {"floor": 1.5e-7}
    assert scratch.names("first") == list(TENSORS)
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(scratch.tensor(name), tensor, strict=True)


def test_hidden_tensors_are_no_part_of_what_is_shown() -> None:
    scratch = Scratch()
    scratch.put("greedy.0", {"greedy.0.key": np.ones(2)})
    scratch.put("graph", {"b": np.ones(2), "a": np.zeros(3)})
    shown = scratch.tensors("greedy.")
    assert list(shown) == ["a", "b"]
    with pytest.raises(KeyError):
        shown["greedy.0.key"]


def test_a_record_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "run.db")
    scratch.put("first", {"a": np.ones(2)})
    with pytest.raises(Exception, match="UNIQUE"):
        scratch.put("second", {"b": np.ones(2), "a": np.ones(2)})
    assert "second" not in scratch
    with pytest.raises(KeyError):
        scratch.tensor("b")


def test_what_is_put_outlives_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, numpy, harness.scratch as s\n"
        f"scratch = s.Scratch(pathlib.Path({str(tmp_path / 'run.db')!r}))\n"
        "scratch.put('first', {'a': numpy.ones(100000)})\n"
        "scratch._db.execute('INSERT INTO records VALUES (?, ?)', ('second', 'null'))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    scratch = Scratch(tmp_path / "run.db")
    assert ("first" in scratch, "second" in scratch) == (True, False)
    assert scratch.tensor("a").sum() == 100000


def test_a_damaged_file_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(b"no database at all " * 100)
    scratch = Scratch(path)
    assert "first" not in scratch
    scratch.put("first", {})
    assert "first" in scratch


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "run.db")
    scratch._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(UnjudgedError, match=r"run\.db cannot be written .*free some disk and run again"):
        scratch.put("first", {"a": np.ones(100_000)})
    assert "first" not in scratch


def test_discard_leaves_no_file(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "run.db")
    scratch.put("first", TENSORS)
    scratch.close()
    discard(tmp_path / "run.db")
    discard(tmp_path / "run.db")
    assert list(tmp_path.iterdir()) == []
