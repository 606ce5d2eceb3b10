"""Files of numbers: the same bytes in any pieces, the hash of what is in the file, and no number that is none."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from exporters import output
from exporters.layout import Entry
from exporters.model_folder import write_base
from exporters.output import PAGE, Output
from exporters.weights import Part, write
from harness.errors import UnjudgedError
from harness.store import file_sha256
from parity.workspace import Choice, Workspace

BUFFER = 4 * PAGE  # so that a few thousand numbers fill it several times
WORDS = BUFFER // 4


@pytest.fixture(autouse=True, scope="module")
def _small_buffer() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "BUFFER", BUFFER)
        yield


def whole(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def columns(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return whole((shape[0], 3 * shape[-1]))[:, shape[-1] : 2 * shape[-1]]


def turned(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return whole((shape[-1], shape[0])).T


ROWS = st.tuples(st.integers(1, 3 * WORDS))
MATRICES = st.tuples(st.integers(1, 60), st.sampled_from([1, 7, 64, WORDS // 2, WORDS - PAGE // 4, WORDS, WORDS + 1]))
ARRAYS = st.one_of(st.builds(whole, ROWS), *(st.builds(make, MATRICES) for make in (whole, columns, turned)))


@settings(max_examples=60)
@given(arrays=st.lists(ARRAYS, max_size=6))
def test_a_file_holds_the_arrays_in_a_row_and_tells_its_own_hash(
    arrays: list[NDArray[np.float32]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("output") / "numbers.bin"
    with Output(path) as file:
        assert [file.write(array) for array in arrays] == [0] * len(arrays)
    assert path.read_bytes() == b"".join(array.tobytes() for array in arrays)
    assert file.sha256 == file_sha256(path)


def test_a_file_system_that_knows_no_way_past_its_cache_is_written_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(path: Any, flags: int, mode: int) -> int:
        asked.append(flags)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    array = whole((3 * WORDS + 5,))
    with Output(tmp_path / "numbers.bin") as file:
        file.write(array)
    monkeypatch.undo()
    assert len(asked) == 1
    assert (tmp_path / "numbers.bin").read_bytes() == array.tobytes()


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Output(tmp_path / "nowhere" / "numbers.bin")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, WORDS - 1, WORDS, 2 * WORDS + 7])
@pytest.mark.parametrize("make", [whole, lambda shape: columns((shape[0], 1))])
def test_numbers_that_are_none_are_counted(
    tmp_path: Path, make: Callable[[tuple[int, ...]], Any], place: int, bad: float
) -> None:
    array = make((2 * WORDS + 8,))
    array.reshape(len(array), -1)[place] = bad
    with Output(tmp_path / "numbers.bin") as file:
        assert file.write(array) == 1
        assert file.write(whole((9,))) == 0


def test_numbers_whose_sum_is_too_large_are_numbers(tmp_path: Path) -> None:
    with Output(tmp_path / "numbers.bin") as file:
        assert file.write(np.full(WORDS, np.finfo(np.float32).max)) == 0


def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    entries = (Entry("weight", False, True), Entry("bias", False, True))
    values = {"weight": whole((3, 4)), "bias": whole((3,))}
    part = Part(entries, ("layer.weight", "layer.bias"))
    hashes = write(tmp_path / "weights.bin", part, values)
    assert hashes == {"weights.bin": file_sha256(tmp_path / "weights.bin")}
    values["bias"][1:] = np.nan
    with pytest.raises(ValueError, match=r"^tensor bias holds 2 NaN or Inf$"):
        write(tmp_path / "weights.bin", part, values)


def test_a_table_beyond_float16_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Workspace(Choice("youtu_vl")).exporter
    blocks = exporter.reference.checkpoint.blocks

    def larger(name: str, size: int) -> Any:
        for block in blocks(name, size):
            block[0, :3] = 1e5
            yield block

    monkeypatch.setattr(exporter.reference.checkpoint, "blocks", larger)
    write_base(exporter, tmp_path, "float32")
    with pytest.raises(
        UnjudgedError, match=r"embed_tokens.weight holds 3 numbers beyond float16; pass --table float32"
    ):
        write_base(exporter, tmp_path, "float16")
