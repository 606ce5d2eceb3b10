"""Records come back from JSON as they were, from several workers, and half a line is reported."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.compare import compare_exact, compare_tensor
from harness.errors import UnjudgedError
from harness.limits import fixed
from harness.metrics import Metrics, NonFinite, Tensor
from harness.records import Record, Records, RecordWriter, Where, clear_records, read_records
from harness.tests.strategies import REPEATABLE, tensor_pairs

WHERE = Where("m/vision.layer.00", "out0", "page", "chained")

FLOATS = st.floats(allow_nan=False) | st.just(math.nan)
INDICES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
BAD = st.builds(NonFinite, st.integers(0, 9), st.integers(0, 9), st.none() | INDICES)
METRICS = st.builds(
    Metrics,
    INDICES,
    INDICES,
    rel_l2=FLOATS,
    scale=FLOATS,
    worst_row=INDICES,
    actual_bad=BAD,
    expected_bad=BAD,
)
RECORDS = st.builds(
    Record,
    st.just(WHERE),
    st.sampled_from(["equal", "different", "unjudged"]),
    st.none() | METRICS,
    floor=st.none() | FLOATS,
    failed=st.lists(st.text()).map(tuple),
    detail=st.text(),
    rerun=st.text(),
)


@given(RECORDS)
@REPEATABLE
def test_json_round_trip(record: Record) -> None:
    line = record.to_json()
    assert Record.from_json(line) == record
    assert "\n" not in line
    json.loads(line, parse_constant=pytest.fail)  # strict JSON has no NaN


@given(tensor_pairs())
@REPEATABLE
def test_json_round_trip_of_comparisons(pair: tuple[Tensor, Tensor]) -> None:
    tensor = compare_tensor(*pair, fixed(cosine_min=0.9999), where=WHERE, floor=1e-7)
    exact = compare_exact(*pair, where=WHERE)
    assert Record.from_json(tensor.to_json()) == tensor
    assert Record.from_json(exact.to_json()) == exact


def test_where_refuses_an_id_that_is_none() -> None:
    with pytest.raises(UnjudgedError, match="graph id='vision', but should be"):
        Where("vision", "out0", "page", "chained")


def test_floor_multiple_needs_both_numbers() -> None:
    metrics = Metrics((1,), (1,), rel_l2=3e-6)
    assert Record(WHERE, "equal", metrics, floor=1e-6).floor_multiple == pytest.approx(3)
    assert Record(WHERE, "equal", metrics).floor_multiple is None
    assert Record(WHERE, "equal", metrics, floor=0.0).floor_multiple is None
    assert Record(WHERE, "equal", floor=1e-6).floor_multiple is None


def test_workers_are_merged(tmp_path: Path) -> None:
    for worker in ("gw1", "gw0"):
        for number in range(2):
            RecordWriter(tmp_path, worker).write(Record(WHERE, "equal", detail=f"{worker} {number}"))
    merged = read_records(tmp_path)
    assert [record.detail for record in merged.records] == ["gw0 0", "gw0 1", "gw1 0", "gw1 1"]
    assert merged.unreadable == ()
    clear_records(tmp_path)
    assert read_records(tmp_path) == Records((), ())


def test_half_a_line_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    record = compare_exact(np.arange(3), np.arange(3), where=WHERE)
    RecordWriter(tmp_path, "gw0").write(record)
    path = tmp_path / "records-gw0.jsonl"
    whole = path.read_bytes()
    for length in range(1, len(whole) - 1, 37):
        path.write_bytes(whole + whole[:length])
        read = read_records(tmp_path)
        assert read.records == (record,)
        assert read.unreadable == ("records-gw0.jsonl:2 is no whole record: was the run killed?",)


@pytest.mark.parametrize("line", ["5", "[]", "{}", "null", '{"where": {"id": "x"}}', "\\xff"])
def test_other_lines_are_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "records-gw0.jsonl").write_text(line + "\n", encoding="utf-8")
    assert len(read_records(tmp_path).unreadable) == 1
