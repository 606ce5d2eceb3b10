"""An artefact is there whole or not at all, whatever happens to its build."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import store
from harness.errors import UnjudgedError
from harness.store import Store, atomic_write_bytes, atomic_write_text, file_sha256, key

KEY = key(test="store")
SPAWN = multiprocessing.get_context("spawn")


def build_slowly(root: Path, log: Path) -> None:
    """Run in a child: get the artefact, leaving one line in the log for each build."""

    def build(folder: Path) -> None:
        (folder / "data.bin").write_bytes(b"x" * 1000)
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.5)

    Store(root).get("graphs", KEY, build)


def build_forever(root: Path, started: Path) -> None:
    """Run in a child that is going to be killed in the middle of the build."""

    def build(folder: Path) -> None:
        (folder / "data.bin").write_bytes(b"half")
        started.touch()
        time.sleep(60)

    Store(root).get("graphs", KEY, build)


class Builder:
    """Counts its builds."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> None:
        self.builds += 1
        (folder / "inner").mkdir()
        (folder / "inner" / "data.bin").write_bytes(b"whole")
        (folder / "param").write_text("7767517", encoding="utf-8")


def never(folder: Path) -> None:
    raise AssertionError("nothing should be built")


def failing(error: BaseException) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    return build


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "graphs").iterdir() if path.suffix != ".lock")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_builds_once_and_lists_what_it_built(tmp_path: Path) -> None:
    builder = Builder()
    folder = Store(tmp_path).get("graphs", KEY, builder)
    assert Store(tmp_path).get("graphs", KEY, never, verify=True) == folder == tmp_path / "graphs" / KEY
    assert (folder / "inner" / "data.bin").read_bytes() == b"whole"
    files = json.loads((folder / "complete.json").read_text("utf-8"))
    assert files["inner/data.bin"] == {"bytes": 5, "sha256": file_sha256(folder / "inner" / "data.bin")}
    assert (set(files), builder.builds) == ({"inner/data.bin", "param"}, 1)
    assert names(tmp_path) == [KEY]


def test_two_processes_build_the_same_key_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [SPAWN.Process(target=build_slowly, args=(tmp_path, log)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert log.read_text() == "built\n"
    assert names(tmp_path) == [KEY]


def test_killed_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    child = SPAWN.Process(target=build_forever, args=(tmp_path, tmp_path / "started"))
    child.start()
    wait_for(tmp_path / "started")
    child.kill()
    child.join()
    [leftover] = names(tmp_path)
    assert leftover.startswith(f"{KEY}.tmp-")
    builder = Builder()
    Store(tmp_path).get("graphs", KEY, builder)
    assert (builder.builds, names(tmp_path)) == (1, [KEY])


@pytest.mark.parametrize("error", [ValueError("bad layer"), KeyboardInterrupt()])
def test_failed_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        Store(tmp_path).get("graphs", KEY, failing(error))
    assert names(tmp_path) == []


def test_full_disk_is_said(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UnjudgedError, match=r"m/vision\.embed cannot be built: the disk .* is full, [\d,]+ bytes"):
        Store(tmp_path).get("graphs", KEY, failing(full), name="m/vision.embed")
    assert names(tmp_path) == []


def test_other_errors_of_a_build_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Store(tmp_path).get("graphs", KEY, failing(FileNotFoundError("input")))


def test_build_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match="the build wrote no file"):
        Store(tmp_path).get("graphs", KEY, lambda folder: None)


def truncate(folder: Path) -> None:
    (folder / "inner" / "data.bin").write_bytes(b"whol")


def alter(folder: Path) -> None:
    (folder / "inner" / "data.bin").write_bytes(b"WHOLE")


def remove_file(folder: Path) -> None:
    (folder / "param").unlink()


def remove_list(folder: Path) -> None:
    (folder / "complete.json").unlink()


def break_list(folder: Path) -> None:
    (folder / "complete.json").write_text('{"param": ', encoding="utf-8")


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder)


DAMAGE: dict[Callable[[Path], None], str] = {
    truncate: "inner/data.bin has bytes=4, but should be 5",
    alter: "inner/data.bin was altered after it was built",
    remove_file: "param is missing",
    remove_list: "complete.json is missing",
    break_list: "complete.json is broken",
    remove_all: "not built",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    builder = Builder()
    damage(Store(tmp_path).get("graphs", KEY, builder))
    folder = Store(tmp_path).get("graphs", KEY, builder, verify=True)
    assert builder.builds == 2
    assert (folder / "inner" / "data.bin").read_bytes() == b"whole"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_where_building_is_forbidden(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(Store(tmp_path).get("graphs", KEY, Builder()))
    with pytest.raises(UnjudgedError) as caught:
        Store(tmp_path, build=False).get(
            "graphs", KEY, never, verify=True, name="m/vision.embed", command="make export"
        )
    message = str(caught.value)
    assert message.startswith(f"m/vision.embed ({tmp_path / 'graphs' / KEY}): {DAMAGE[damage]}")
    assert message.endswith(", and building is forbidden; build it: make export")


def test_forbidden_building_still_reads(tmp_path: Path) -> None:
    folder = Store(tmp_path).get("graphs", KEY, Builder())
    assert Store(tmp_path, build=False).get("graphs", KEY, never) == folder


def test_a_large_file_is_hashed_once_under_all_its_names_until_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(store, "LARGE", 5)
    monkeypatch.setattr(store, "file_sha256", counted)
    first = Store(tmp_path).get("graphs", KEY, Builder())
    kept = Store(tmp_path)

    def again(folder: Path) -> dict[str, str]:
        os.link(first / "inner" / "data.bin", folder / "same.bin")
        return {"same.bin": file_sha256(folder / "same.bin")}

    read.clear()
    for _ in range(2):
        kept.get("graphs", KEY, never, verify=True)
        kept.get("models", KEY, again, verify=True)
    assert sorted(read) == ["data.bin", "param"]
    time.sleep(0.02)  # more than the clock of a file system counts in
    alter(first)
    builder = Builder()
    kept.get("graphs", KEY, builder, verify=True)
    assert builder.builds == 1


def test_alteration_is_only_found_by_hash(tmp_path: Path) -> None:
    alter(Store(tmp_path).get("graphs", KEY, Builder()))
    Store(tmp_path).get("graphs", KEY, never)


def test_key_follows_content_and_not_order_or_path(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"same")
    (tmp_path / "two").write_bytes(b"same")
    (tmp_path / "other").write_bytes(b"else")
    assert key(a=1, b=[2]) == key(b=[2], a=1)
    assert key(source=tmp_path / "one") == key(source=tmp_path / "two") != key(source=tmp_path / "other")
    assert len({key(a=1), key(a="1"), key(a=1.0), key(a=True), key(b=1), key(a=[1])}) == 6
    with pytest.raises(TypeError, match="set has no canonical JSON"):
        key(a={1})


def test_atomic_write_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "text"
    atomic_write_text(path, "old\n")
    assert path.read_bytes() == b"old\n"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UnjudgedError, match="text cannot be written: the disk"):
        atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"old\n"
    assert list(path.parent.iterdir()) == [path]
