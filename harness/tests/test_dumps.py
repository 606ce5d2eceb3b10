"""A dump comes back as it was, has the same bytes each time, and is refused when anything about it is off."""

import json
import pickle
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from harness.dumps import Dump, dump_paths, read_dump, write_dump
from harness.errors import UnjudgedError
from harness.metrics import Tensor
from harness.tests.strategies import REPEATABLE

COMMAND = "make dumps"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def dump(case: str = "receipt", **provenance: object) -> Dump:
    random = np.random.default_rng(1)
    tensors: dict[str, Tensor] = {
        "vision.embed/out0": random.standard_normal((3, 4)).astype(np.float32),
        "turned": random.standard_normal((3, 4)).T,
        "single": np.asarray(7, np.int64),
        "empty": np.zeros((0, 2), np.uint8),
        "mask": np.array([True, False]),
    }
    return Dump("youtu_vl", case, tensors, {"ids": [1, 2], "text": "图 1"}, provenance)


def refused(folder: Path, **expected: object) -> str:
    with pytest.raises(UnjudgedError) as caught:
        read_dump(folder, "receipt", command=COMMAND, expect_provenance=expected)
    assert str(caught.value).endswith(f": {COMMAND}")
    return str(caught.value)


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    written = dump(checkpoint="abc")
    write_dump(tmp_path / "new", written)
    read = read_dump(tmp_path / "new", "receipt", command=COMMAND, expect_provenance={"checkpoint": "abc"})
    assert (read.model, read.case, read.values) == (written.model, written.case, written.values)
    assert set(read.tensors) == set(written.tensors)
    for name, tensor in written.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(read.tensors[name], tensor, strict=True)


@given(JSON)
@REPEATABLE
def test_values_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    folder = tmp_path_factory.mktemp("dump")
    write_dump(folder, Dump("m", "c", {"x": np.ones(1)}, {"value": value}))
    assert read_dump(folder, "c", command=COMMAND).values == {"value": value}


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    one = dump(a=1, b=2)
    other = Dump(one.model, one.case, dict(reversed(list(one.tensors.items()))), one.values, {"b": 2, "a": 1})
    write_dump(tmp_path / "one", one)
    write_dump(tmp_path / "other", other)
    for ours, theirs in zip(
        dump_paths(tmp_path / "one", "receipt"), dump_paths(tmp_path / "other", "receipt"), strict=True
    ):
        assert ours.read_bytes() == theirs.read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "receipt.json",
        "receipt.safetensors",
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_missing_is_refused(tmp_path: Path, which: int) -> None:
    write_dump(tmp_path, dump())
    path = dump_paths(tmp_path, "receipt")[which]
    path.unlink()
    assert refused(tmp_path) == f"{path} is missing; write it: {COMMAND}"


def test_truncated_tensors_are_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, dump())
    path = dump_paths(tmp_path, "receipt")[0]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert f"receipt.safetensors has bytes={size - 1}, but should be {size}" in refused(tmp_path)


def test_altered_tensors_are_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, dump())
    path = dump_paths(tmp_path, "receipt")[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    assert "receipt.safetensors does not have the hash in its manifest" in refused(tmp_path)


def test_truncated_manifest_is_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, dump())
    path = dump_paths(tmp_path, "receipt")[1]
    path.write_bytes(path.read_bytes()[:50])
    assert "receipt.json is no whole manifest" in refused(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tensors", {}, "does not hold the tensors in its manifest"),
        ("extra", 1, "should have the keys"),
    ],
)
def test_edited_manifest_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    write_dump(tmp_path, dump())
    path = dump_paths(tmp_path, "receipt")[1]
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), key: value}), "utf-8")
    assert message in refused(tmp_path)


def test_stale_provenance_names_key_and_values(tmp_path: Path) -> None:
    write_dump(tmp_path, dump(checkpoint="old", sizes=(1, 2)))
    assert "receipt.json is stale: checkpoint='old', but should be 'new'" in refused(tmp_path, checkpoint="new")
    assert "is stale: torch=None, but should be '2'" in refused(tmp_path, torch="2")
    read_dump(tmp_path, "receipt", command=COMMAND, expect_provenance={"sizes": (1, 2)})


def test_nan_is_no_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_dump(tmp_path, Dump("m", "c", {}, {"x": float("nan")}))


def test_the_bytes_are_safetensors_own(tmp_path: Path) -> None:
    names = ["bool", "float16", "float32", "float64", "complex64"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    tensors: dict[str, Tensor] = {f"{place % 3}.{name}": np.ones((place, 3), name) for place, name in enumerate(names)}
    tensors |= {name: np.ascontiguousarray(tensor) for name, tensor in dump().tensors.items() if tensor.ndim}
    write_dump(tmp_path, Dump("m", "c", tensors))
    assert dump_paths(tmp_path, "c")[0].read_bytes() == safetensors.numpy.save(dict(sorted(tensors.items())))
    read = read_dump(tmp_path, "c", command=COMMAND).tensors
    assert {name: str(read[name].dtype) for name in read} == {
        name: str(tensor.dtype) for name, tensor in tensors.items()
    }


class OneByOne(Mapping[str, Tensor]):
    """64 tensors of 1 MB, each made when it is asked for."""

    def __getitem__(self, name: str) -> Tensor:
        return np.full(1 << 17, int(name), np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(map(str, range(64)))

    def __len__(self) -> int:
        return 64


def test_is_written_and_read_tensor_by_tensor(tmp_path: Path) -> None:
    tracemalloc.start()  # numpy tells it of its arrays
    write_dump(tmp_path, Dump("m", "c", OneByOne()))
    read = read_dump(tmp_path, "c", command=COMMAND)
    assert all((tensor == int(name)).all() for name, tensor in read.tensors.items())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_tensor_that_is_read_is_a_copy_of_ones_own(tmp_path: Path) -> None:
    write_dump(tmp_path, dump())
    read = read_dump(tmp_path, "receipt", command=COMMAND)
    read.tensors["turned"][...] = 0
    assert read.tensors["turned"].any()
    with pytest.raises(KeyError):
        read.tensors["nothing"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(read)).tensors["turned"], read.tensors["turned"])
