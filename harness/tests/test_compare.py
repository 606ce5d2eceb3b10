"""Every comparison fails on a planted fault, by the limit meant for it, in words that name the place."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from harness.compare import compare_exact, compare_tensor
from harness.limits import METRICS, Limits, fixed
from harness.metrics import Tensor
from harness.records import Record, Where
from harness.tests.test_limits import COMMITTED

WHERE = Where("youtu_vl/llm.layer.12.prefill", "out0", "receipt", "isolated")
EXACT = Where("youtu_vl/tokenizer", "ids", "receipt", "exact")
T, D = 344, 64


def reference() -> Tensor:
    return np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32)


def judged(actual: Tensor, expected: Tensor | None = None, mode: str = "isolated") -> Record:
    limits = Limits.read(COMMITTED).of(WHERE.id, mode)
    return compare_tensor(actual, reference() if expected is None else expected, limits, where=WHERE)


# One fault per limit: what it does to the reference.
def scaled(x: Tensor) -> None:
    x *= 1.5


def shifted(x: Tensor) -> None:
    x += 0.01


def one_row_noise(x: Tensor) -> None:
    x[0, 311] = np.random.default_rng(2).standard_normal(D)


def one_row_slightly_turned(x: Tensor) -> None:
    x[0, 311] += 0.02 * np.random.default_rng(2).standard_normal(D)


def all_noise(x: Tensor) -> None:
    x += 0.03 * np.random.default_rng(2).standard_normal(x.shape)


def one_element(x: Tensor) -> None:
    x[0, 311, 7] += 0.0025


def one_nan(x: Tensor) -> None:
    x[0, 311, 7] = np.nan


def one_inf(x: Tensor) -> None:
    x[0, 311, 7] = -np.inf


FAULTS: dict[str, tuple[Callable[[Tensor], None], bool]] = {  # fault, and whether it trips its limit alone
    "cosine_min": (all_noise, False),
    "worst_row_cosine_min": (one_row_slightly_turned, False),
    "rel_l2_max": (all_noise, False),
    "scale_tol": (scaled, False),
    "offset_tol": (shifted, False),
    "max_abs_over_rms_max": (one_element, True),
    "nan_max": (one_nan, True),
    "inf_max": (one_inf, True),
}


def test_every_committed_limit_has_a_fault() -> None:
    assert set(FAULTS) == set(Limits.read(COMMITTED).of(WHERE.id, "isolated"))


@pytest.mark.parametrize("key", FAULTS)
def test_each_committed_limit_trips(key: str) -> None:
    fault, alone = FAULTS[key]
    actual = reference()
    fault(actual)
    record = judged(actual)
    assert record.verdict == "different"
    assert key in record.failed
    assert not alone or record.failed == (key,)


@pytest.mark.parametrize("key", FAULTS)
def test_each_limit_is_enough_to_fail_alone(key: str) -> None:
    bounds = Limits.read(COMMITTED).of(WHERE.id, "isolated")
    actual = reference()
    FAULTS[key][0](actual)
    record = compare_tensor(actual, reference(), {key: bounds[key]}, where=WHERE)
    assert (record.verdict, record.failed) == ("different", (key,))
    assert record.limits[-1] == bounds[key] or key in ("nan_max", "inf_max")


@pytest.mark.parametrize("mode", ["isolated", "chained"])
def test_equal_is_equal(mode: str) -> None:
    record = judged(reference() * np.float32(1 + 1e-7), mode=mode)
    assert (record.verdict, record.failed, record.detail) == ("equal", (), "")
    assert len(record.limits) == len(FAULTS)


def test_swapped_arguments_are_not_the_same_fault() -> None:
    assert "scale 1.5, but" in judged(reference() * np.float32(1.5)).detail
    assert "scale 0.6667, but" in judged(reference(), reference() * np.float32(1.5)).detail


def test_bad_row_behind_a_massive_activation() -> None:
    expected = reference()
    expected[0, 0, 0] = 30000
    actual = expected.copy()
    actual[0, 311:341] *= -1
    record = compare_tensor(actual, expected, fixed(cosine_min=0.9999, worst_row_cosine_min=0.9999), where=WHERE)
    assert record.failed == ("worst_row_cosine_min",)
    assert "worst_row_cosine -1, but should be >= 0.9999" in record.detail
    assert record.detail.endswith("; worst rows 311-340")


def test_bad_row_of_a_head_is_named_with_its_head() -> None:
    expected = reference().reshape(4, T // 4, D)
    actual = expected.copy()
    actual[2, 5] *= -1
    assert judged(actual, expected).detail.endswith("; worst row 5 of (2,)")


def test_padded_rows_hide_an_error_that_real_rows_show() -> None:
    expected = np.full((1, 4096, D), 100, np.float32)
    expected[:, :T] = reference()
    actual = expected.copy()
    actual[:, :T] *= 1.01
    limits = fixed(rel_l2_max=1e-3)
    assert compare_tensor(actual, expected, limits, where=WHERE).verdict == "equal"
    assert compare_tensor(actual, expected, limits, where=WHERE, rows=slice(0, T)).failed == ("rel_l2_max",)


def test_failure_text_in_full() -> None:
    expected = np.zeros((1, 4, 8), np.float32)
    expected[..., :4] = 0.357
    actual = expected.copy()
    actual[0, 2, 3] = -0.113
    limits = Limits.read(COMMITTED).of(WHERE.id, "chained")
    limits = {key: limits[key] for key in ("rel_l2_max", "worst_row_cosine_min")}
    where = Where(WHERE.id, "out0", "receipt", "chained")
    record = compare_tensor(actual, expected, limits, where=where, floor=1e-6, rerun="pytest -k prefill")
    lines = [re.sub(r"toml:\d+", "toml:N", line) for line in record.detail.splitlines()]
    assert lines == [
        "youtu_vl/llm.layer.12.prefill out0 (1, 4, 8) differs from the reference [fp32, receipt, chained]",
        "  rel_l2 3.3e-01, but should be <= 2e-04   (parity/limits.toml:N  *)",
        "  worst_row_cosine 0.762, but should be >= 0.9999   (parity/limits.toml:N  *)",
        "  max_abs 4.7e-01 at (0, 2, 3): -0.113, but should be 0.357; worst row 2",
        "  error is 3.29e+05 x the noise floor (rel_l2 1.0e-06)",
        "  rerun: pytest -k prefill",
    ]
    assert record.floor_multiple == pytest.approx(3.29e5, rel=1e-2)
    assert record.rerun == "pytest -k prefill"


def test_non_finite_values_are_said_plainly() -> None:
    actual = reference()
    actual[0, 3, 4], actual[0, 5, 6], actual[0, 5, 7] = np.nan, np.inf, np.nan
    record = judged(actual)
    assert record.failed == ("nan_max", "inf_max")
    assert "\n  2 NaN and 1 Inf, the first at (0, 3, 4); the reference is finite\n" in record.detail


def test_nan_fails_even_without_a_limit_on_it() -> None:
    actual = reference()
    one_nan(actual)
    record = compare_tensor(actual, reference(), fixed(cosine_min=0.5), where=WHERE)
    assert (record.verdict, record.failed) == ("different", ("nan_max",))


def test_all_nan_is_different_and_not_empty() -> None:
    record = judged(np.full_like(reference(), np.nan))
    assert record.verdict == "different"
    assert "nan_max" in record.failed


def test_broken_reference_cannot_judge() -> None:
    expected = reference()
    one_nan(expected)
    record = judged(reference(), expected)
    assert record.verdict == "unjudged"
    assert "could not be judged [fp32, receipt, isolated]" in record.detail
    assert "the reference itself holds 1 NaN, the first at (0, 311, 7): dump it again" in record.detail


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (reference().swapaxes(1, 2), "float32 (1, 64, 344), but should be float32 (1, 344, 64)"),
        (reference()[:, 1:], "float32 (1, 343, 64), but should be float32 (1, 344, 64)"),
        (np.pad(reference(), ((0, 0), (0, 8), (0, 0))), "float32 (1, 352, 64), but should be float32 (1, 344, 64)"),
        (reference()[0], "float32 (344, 64), but should be float32 (1, 344, 64)"),
        (reference().astype(np.float16), "float16 (1, 344, 64), but should be float32 (1, 344, 64)"),
    ],
)
def test_other_shape_or_dtype_is_different(actual: Tensor, text: str) -> None:
    record = judged(actual)
    assert (record.verdict, record.failed) == ("different", ("shape",))
    assert text in record.detail
    record = compare_exact(actual, reference(), where=EXACT)
    assert (record.verdict, record.failed) == ("different", ("shape",))


def test_nothing_compared_is_unjudged() -> None:
    empty = reference()[:, :0]
    assert "0 elements compared of (1, 0, 64)" in judged(empty, empty).detail
    record = compare_tensor(reference(), reference(), fixed(cosine_min=0), where=WHERE, rows=slice(0, 0))
    assert record.verdict == "unjudged"


def test_no_limits_is_unjudged() -> None:
    record = compare_tensor(reference(), reference(), {}, where=WHERE)
    assert record.verdict == "unjudged"
    assert "no limit is given" in record.detail


def test_rounding_is_limited_in_lsb_and_count() -> None:
    expected = np.arange(12, dtype=np.uint8).reshape(3, 4)
    actual = expected.copy()
    actual[1, 2] += 1
    assert compare_tensor(actual, expected, fixed(lsb_max=1, differing_max=1), where=EXACT).verdict == "equal"
    assert compare_tensor(actual, expected, fixed(lsb_max=0), where=EXACT).failed == ("lsb_max",)
    assert compare_tensor(actual, expected, fixed(differing_max=0), where=EXACT).failed == ("differing_max",)


def test_all_limit_keys_are_tried_here() -> None:
    assert set(METRICS) == {*FAULTS, "lsb_max", "differing_max"}


@pytest.mark.parametrize(
    "value",
    [[1, 2, 3], (1, 2), "text", "图", np.arange(6).reshape(2, 3), np.array([np.nan, -0.0]), 7, True, None],
)
def test_exactly_equal_values(value: object) -> None:
    record = compare_exact(value, value, where=EXACT)
    assert (record.verdict, record.mismatch, record.detail) == ("equal", None, "")


def test_one_flipped_id_is_named_with_its_neighbours() -> None:
    expected = list(range(100, 110))
    actual = [*expected]
    actual[5] = 7
    record = compare_exact(actual, expected, where=EXACT, rerun="pytest -k tokenizer")
    assert record.failed == ("exact",)
    assert record.detail.splitlines() == [
        "youtu_vl/tokenizer ids differs from the reference [fp32, receipt, exact]",
        "  1 of 10 differ, the first at 5: 7 in [102, 103, 104, 7, 106, 107, 108], "
        "but should be 105 in [102, 103, 104, 105, 106, 107, 108]",
        "  rerun: pytest -k tokenizer",
    ]
    assert record.mismatch is not None
    assert (record.mismatch.differing, record.mismatch.index) == (1, (5,))


def test_shorter_and_longer_sequences_differ() -> None:
    short = compare_exact([1, 2], [1, 2, 3], where=EXACT).detail
    assert "1 of 3 differ, the first at 2: the end, after [1, 2], but should be 3 in [1, 2, 3]" in short
    assert "2 items, but should be 3" in short
    assert "3 items, but should be 2" in compare_exact([1, 2, 3], [1, 2], where=EXACT).detail
    assert compare_exact([], [1], where=EXACT).verdict == "different"
    assert compare_exact([1], [], where=EXACT).verdict == "different"


@pytest.mark.parametrize("actual", [[1, 3, 2], [1, 2, 3, 3], [1, 1, 2, 3]])
def test_ids_in_another_order_differ(actual: list[int]) -> None:
    assert compare_exact(actual, [1, 2, 3], where=EXACT).verdict == "different"


def test_texts_differ_by_character() -> None:
    detail = compare_exact("caffe latte", "caffè latte", where=EXACT).detail
    assert "the first at 4: 'e' in 'affe la', but should be 'è' in 'affè la'" in detail


def test_arrays_differ_by_bit_and_by_index() -> None:
    expected = np.zeros((2, 3), np.float32)
    actual = expected.copy()
    actual[1, 2] = -0.0
    record = compare_exact(actual, expected, where=EXACT)
    assert record.mismatch is not None
    assert record.mismatch.index == (1, 2)
    assert "ids (2, 3) differs" in record.detail
    assert "1 of 6 differ, the first at (1, 2): -0.0 in [" in record.detail


@pytest.mark.parametrize("value", [[], "", np.zeros((0, 3))])
def test_two_empty_values_are_unjudged(value: object) -> None:
    record = compare_exact(value, value, where=EXACT)
    assert record.verdict == "unjudged"
    assert "0 elements compared: both sides are empty" in record.detail


def test_kinds_of_values_do_not_mix() -> None:
    record = compare_exact("12", [1, 2], where=EXACT)
    assert (record.verdict, record.failed) == ("different", ("shape",))
    assert "str, but should be a sequence" in record.detail
    assert compare_exact(None, 0, where=EXACT).verdict == "different"
