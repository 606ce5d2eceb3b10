"""A kept run: what grew, changed, vanished or appeared since is told, with the exit code that it deserves."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import UnjudgedError
from harness.metrics import Metrics
from harness.records import Record, Verdict, Where
from parity import baseline
from parity.baseline import Regression, compare, exit_code, lines, read, store

FLOOR = 2e-7
FIRST, SECOND, STAGE = "youtu_vl/vision.layer.00", "youtu_vl/llm.layer.00.prefill", "youtu_vl/tokenizer.ids"


def record(
    name: str,
    error: float | None = 3e-7,
    *,
    case: str = "square",
    verdict: Verdict = "equal",
    floor: float | None = FLOOR,
    tensor: str = "hidden",
) -> Record:
    where = Where(name, tensor, case, "exact" if error is None else "isolated")
    metrics = None if error is None else Metrics((4, 4), (4, 4), elements=16, rel_l2=error)
    return Record(where, verdict, metrics=metrics, floor=floor, rerun=f"pytest -k '{name} and {case}'")


GREEN = [record(FIRST), record(FIRST, case="tall"), record(SECOND), record(STAGE, None, floor=None)]


def judged(before: Sequence[Record], now: Sequence[Record], folder: Path) -> tuple[list[Regression], int, str]:
    """Regressions, exit code and text of a run against one kept before."""
    store(before, folder / "baseline.json")
    kept = read(folder / "baseline.json")
    found = compare(now, kept, [FIRST, SECOND, STAGE])
    return found, exit_code(found), "\n".join(lines(found, kept))


def grown(floors: float, *, floor: float | None = FLOOR) -> list[Record]:
    """The green run with one error grown by so many floors; every limit is still kept."""
    error = 3e-7 + floors * (floor or baseline.FLOOR)
    return [record(SECOND, error, floor=floor) if one.where.id == SECOND else one for one in GREEN]


def test_the_same_run_is_no_regression(tmp_path: Path) -> None:
    found, code, text = judged(GREEN, GREEN, tmp_path)

    assert (found, code) == ([], 0)
    assert text == "no error grew by more than 10 noise floors since the baseline"


def test_growth_of_11_floors_is_red_though_every_limit_is_kept(tmp_path: Path) -> None:
    (found,), code, text = judged(GREEN, grown(11), tmp_path)

    assert (found.kind, found.entry.id, code) == ("grew", SECOND, 1)
    assert found.floors == pytest.approx(11)
    assert f"{SECOND} hidden [square, isolated]: rel_l2 2.50e-06, but was 3.00e-07: 11 floors of 2.0e-07 more" in text
    assert text.endswith(f"next: pytest -k '{SECOND} and square'")


@pytest.mark.parametrize("floors", [9, -1])
def test_growth_of_9_floors_and_a_smaller_error_are_green(floors: float, tmp_path: Path) -> None:
    assert judged(GREEN, grown(floors), tmp_path)[:2] == ([], 0)


@pytest.mark.parametrize(("floors", "code"), [(11, 1), (9, 0)])
def test_without_a_floor_one_rounding_of_fp32_counts(floors: float, code: int, tmp_path: Path) -> None:
    before = [record(SECOND, floor=None) if one.where.id == SECOND else one for one in GREEN]

    assert judged(before, grown(floors, floor=None), tmp_path)[1] == code


def test_an_id_that_vanished_could_not_be_judged(tmp_path: Path) -> None:
    (found,), code, text = judged(GREEN, GREEN[:2] + GREEN[3:], tmp_path)

    assert (found.kind, found.entry.id, code) == ("vanished", SECOND, 2)
    assert f"{SECOND} hidden [isolated]: compared in the baseline, not in this run" in text


def test_an_output_that_is_no_longer_compared_vanished(tmp_path: Path) -> None:
    (found,), code, _ = judged([*GREEN, record(SECOND, tensor="key")], GREEN, tmp_path)

    assert (found.kind, found.entry.tensor, code) == ("vanished", "key", 2)


def test_fewer_cases_make_the_same_claims(tmp_path: Path) -> None:
    assert judged(GREEN, [one for one in GREEN if one.where.case == "square"], tmp_path)[:2] == ([], 0)


def test_an_id_that_appeared_is_told_and_is_no_fault(tmp_path: Path) -> None:
    (found,), code, text = judged(GREEN[1:], [*GREEN[1:], record("youtu_vl/vision.tail")], tmp_path)

    assert (found.kind, found.entry.id, code) == ("appeared", "youtu_vl/vision.tail", 0)
    assert "1 comparisons were not compared before" in text


@pytest.mark.parametrize(
    ("was", "now", "code"),
    [("equal", "different", 1), ("equal", "unjudged", 2), ("different", "equal", 0)],
)
def test_another_verdict_is_told(was: Verdict, now: Verdict, code: int, tmp_path: Path) -> None:
    before, after = [*GREEN[:3], replace(GREEN[3], verdict=was)], [*GREEN[:3], replace(GREEN[3], verdict=now)]
    (found,), found_code, text = judged(before, after, tmp_path)

    assert (found.kind, found_code) == ("verdict", code)
    assert f"{STAGE} hidden [square, exact]: {now}, but was {was}" in text


def test_regressions_come_in_pipeline_order_and_only_five_are_listed(tmp_path: Path) -> None:
    names = [f"youtu_vl/vision.layer.{n:02d}" for n in range(7)]
    store([record(name) for name in names], tmp_path / "baseline.json")
    kept = read(tmp_path / "baseline.json")
    found = compare([record(name, 1e-4) for name in reversed(names)], kept, names)

    assert [one.entry.id for one in found] == names
    text = list(lines(found, kept))
    assert text[0] == "7 comparisons grew by more than 10 noise floors:"
    assert text[6] == "  and 2 more"
    assert text[-1] == f"next: pytest -k '{names[0]} and square'"


def test_other_versions_are_told(tmp_path: Path) -> None:
    store(GREEN, tmp_path / "baseline.json")
    kept = read(tmp_path / "baseline.json")
    text = list(lines([], replace(kept, versions={**kept.versions, "ncnn": "1.0"})))

    assert text[0].endswith(", but the baseline was made with 1.0")
    assert text[0].startswith("ncnn ")


def test_an_error_that_is_no_number_is_kept_by_its_verdict(tmp_path: Path) -> None:
    broken = record(SECOND, float("nan"), verdict="different")
    (found,), code, _ = judged(GREEN, [*GREEN[:2], broken, GREEN[3]], tmp_path)

    assert (found.kind, code) == ("verdict", 1)
    assert json.loads((tmp_path / "baseline.json").read_text(encoding="utf-8"))["records"][0]["rel_l2"] == 3e-7


def test_there_must_be_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"baseline .*none\.json is missing; keep a run: .* -m parity baseline"):
        read(tmp_path / "none.json")
    with pytest.raises(UnjudgedError, match=r"there are no records to keep .*: python -m parity run"):
        store([], tmp_path / "baseline.json")
    assert not (tmp_path / "baseline.json").exists()


@pytest.mark.parametrize("planted", ["", "{", "[]", "{}", '{"versions": {}, "records": [{"id": 1}]}', "half"])
def test_a_broken_baseline_is_told(planted: str, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    store(GREEN, path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2] if planted == "half" else planted, encoding="utf-8")

    with pytest.raises(UnjudgedError, match=r"baseline\.json is broken \(\w+: .*\); keep a run again: python -m"):
        read(path)
