"""Limits are read with their lines, the last row wins, and a row that is wrong or stale is an error."""

import math
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UnjudgedError
from harness.limits import METRICS, Limits, fixed
from harness.metrics import Metrics, NonFinite, measure

COMMITTED = Path(__file__).parents[2] / "parity" / "limits.toml"

TEXT = """\
# a comment with [[limits]] in it
[[limits]]
ids = "*"
mode = "chained"
reason = "rel_l2_max = 5"
cosine_min = 0.9999
rel_l2_max = 1e-3

[[limits]]
ids = "*/llm.layer.*.prefill"
mode = "chained"
reason = "why not"
rel_l2_max = 2e-3
"""


def read(tmp_path: Path, text: str = TEXT) -> Limits:
    path = tmp_path / "parity" / "limits.toml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return Limits.read(path)


def test_last_matching_row_decides_each_key_and_is_remembered(tmp_path: Path) -> None:
    limits = read(tmp_path).of("m/llm.layer.12.prefill", "chained")
    assert {key: limit.bound for key, limit in limits.items()} == {"cosine_min": 0.9999, "rel_l2_max": 2e-3}
    assert limits["cosine_min"].line == "parity/limits.toml:6"
    assert limits["rel_l2_max"].line == "parity/limits.toml:13"
    assert limits["rel_l2_max"].glob == "*/llm.layer.*.prefill"


def test_rows_of_other_ids_and_modes_do_not_decide(tmp_path: Path) -> None:
    limits = read(tmp_path)
    assert limits.of("m/vision.embed", "chained")["rel_l2_max"].bound == 1e-3
    with pytest.raises(UnjudgedError, match=r"parity/limits\.toml has no row for m/a in mode 'isolated'"):
        limits.of("m/a", "isolated")


def test_unmatched_row_is_told_with_the_nearest_id(tmp_path: Path) -> None:
    limits = read(tmp_path)
    assert limits.unmatched(["m/llm.layer.00.prefill"]) == []
    assert limits.unmatched(["m/llm.layer.00.prefil", "x/y"]) == [
        "parity/limits.toml:9: ids='*/llm.layer.*.prefill' matches no known id; the nearest is 'm/llm.layer.00.prefil'"
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rel_l2_max = 2e-3", "rel_l2_mx = 1", "toml:13: rel_l2_mx is no limit; did you mean rel_l2_max?"),
        ("rel_l2_max = 2e-3", "rel_l2_max = true", "toml:13: rel_l2_max=True, but should be a finite number"),
        ("rel_l2_max = 2e-3", "rel_l2_max = nan", "toml:13: rel_l2_max=nan, but should be a finite number"),
        ("rel_l2_max = 2e-3", "rel_l2_max = inf", "toml:13: rel_l2_max=inf, but should be a finite number"),
        ("rel_l2_max = 2e-3", "rel_l2_max = -1", "toml:13: rel_l2_max=-1, but should be a finite number"),
        ('reason = "why not"', "", "toml:9: reason=None, but should be a text"),
        ('reason = "why not"', 'reason = " "', "toml:9: reason=' ', but should be a text"),
        ('ids = "*"', "", "toml:2: ids=None, but should be a text"),
        ("rel_l2_max = 2e-3", "rel_l2_max =", "limits.toml cannot be read"),
        ("# a comment", "other = 1 #", "has ['limits', 'other'], but should be [[limits]] rows"),
    ],
)
def test_wrong_rows_are_errors(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UnjudgedError) as caught:
        read(tmp_path, TEXT.replace(old, new, 1))
    assert message in str(caught.value)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"limits\.toml cannot be read"):
        Limits.read(tmp_path / "limits.toml")


def test_rows_must_begin_on_lines_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match="each row should begin with"):
        read(tmp_path, 'limits = [{ids = "*", mode = "exact", reason = "inline"}]')


# What no row may go beyond: a row for a special id may be looser than the general one, but not without end.
AGREED = {
    "isolated": {"rel_l2_max": 1e-4, "scale_tol": 1e-4, "offset_tol": 1e-4, "max_abs_over_rms_max": 1e-2},
    "chained": {"rel_l2_max": 1e-3, "scale_tol": 1e-3, "offset_tol": 1e-3, "max_abs_over_rms_max": 1e-1},
}
COSINES = ("cosine_min", "worst_row_cosine_min")


def test_no_committed_limit_is_looser_than_agreed() -> None:
    for row in Limits.read(COMMITTED).rows:
        most = {"nan_max": 0.0, "inf_max": 0.0, **AGREED[row.mode]}
        for limit in row.limits:
            kept = limit.bound >= 0.9999 if limit.key in COSINES else limit.bound <= most[limit.key]
            assert kept, f"{limit.line}: {limit.key}={limit.bound}"


@pytest.mark.parametrize("key", METRICS)
def test_a_metric_that_is_nan_keeps_no_limit(key: str) -> None:
    unmeasured = Metrics((1,), (1,), actual_bad=NonFinite(math.nan, math.nan), differing=math.nan)  # type: ignore[arg-type]
    assert not fixed(**{key: 1.0})[key].keeps(unmeasured)


@pytest.mark.parametrize("mode", ["isolated", "chained"])
def test_committed_limits_leave_no_metric_of_a_float_tensor_free(mode: str) -> None:
    limits = Limits.read(COMMITTED).of("any_model/llm.layer.00.prefill", mode)
    assert set(limits) == set(METRICS) - {"lsb_max", "differing_max"}


@pytest.mark.parametrize(
    ("key", "bound", "text"),
    [
        ("rel_l2_max", 1e-3, "rel_l2 5.0e-01, but should be <= 1e-03   (given  *)"),
        ("rel_l2_max", 0.49999999, "rel_l2 5.0e-01, but should be <= 0.49999999   (given  *)"),
        ("scale_tol", 1e-4, "scale 1.5, but should be within 1e-04 of 1   (given  *)"),
        ("lsb_max", 2, "lsb 3, but should be <= 2   (given  *)"),
        ("differing_max", 3, "differing 4, but should be <= 3   (given  *)"),
    ],
)
def test_complaint_says_value_bound_and_line(key: str, bound: float, text: str) -> None:
    expected = np.array([1.0, 2, -4, 6])
    metrics = measure(expected * 1.5, expected)
    assert fixed(**{key: bound})[key].complaint(metrics) == text


def test_complaint_never_shows_a_value_that_would_pass() -> None:
    expected = np.ones(4)
    metrics = measure(expected * (1 + 1.04e-3), expected)
    assert fixed(rel_l2_max=1e-3)["rel_l2_max"].complaint(metrics).startswith("rel_l2 1.04e-03, but")


def test_fixed_refuses_unknown_keys() -> None:
    with pytest.raises(UnjudgedError, match="cosine is no limit; did you mean cosine_min"):
        fixed(cosine=1)
