"""Metrics equal the plain float64 formulas, see every planted fault, and keep memory bounded."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given

from harness import metrics
from harness.errors import UnjudgedError
from harness.metrics import Metrics, NonFinite, Tensor, measure
from harness.tests.strategies import REPEATABLE, tensor_pairs

T, D = 40, 64


def tokens(*shape: int) -> Tensor:
    return np.random.default_rng(1).standard_normal(shape or (T, D)).astype(np.float32)


def plain(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """The formulas as a textbook has them, with every array in float64."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    rows_a, rows_e = a.reshape(-1, a.shape[-1]), e.reshape(-1, e.shape[-1])
    return {
        "cosine": plain_cosine(a.ravel(), e.ravel()),
        "worst_row_cosine": min(plain_cosine(*pair) for pair in zip(rows_a, rows_e, strict=True)),
        "rel_l2": plain_ratio(float(np.linalg.norm(a - e)), float(np.linalg.norm(e))),
        "rms": math.sqrt(float((e**2).mean())),
        "max_abs": float(np.abs(a - e).max()),
    }


def plain_cosine(a: Tensor, e: Tensor) -> float:
    if not a.any() or not e.any():
        return float(a.any() == e.any())
    return float(a @ e / np.linalg.norm(a) / np.linalg.norm(e))


def plain_ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_metrics_equal_the_plain_formulas(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BLOCK", block)

    @given(tensor_pairs())
    @REPEATABLE
    def check(pair: tuple[Tensor, Tensor]) -> None:
        result = measure(*pair)
        for name, value in plain(*pair).items():
            assert getattr(result, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert result.elements == pair[0].size
        assert result.differing == np.count_nonzero(pair[0] != pair[1])
        assert result.actual_there == pair[0][result.max_abs_at]
        assert result.expected_there == pair[1][result.max_abs_at]

    check()


def test_identical_is_exactly_zero() -> None:
    result = measure(tokens(), tokens())
    assert (result.cosine, result.worst_row_cosine, result.rel_l2, result.max_abs) == (1.0, 1.0, 0.0, 0.0)
    assert (result.scale, result.offset, result.differing) == (1.0, 0.0, 0)


def test_scale_is_seen_where_cosine_is_blind() -> None:
    result = measure(tokens() * 1.5, tokens())
    assert result.cosine == pytest.approx(1.0, abs=1e-12)
    assert result.scale == pytest.approx(1.5)
    assert result.rel_l2 == pytest.approx(0.5)


def test_swapped_arguments_give_the_inverse_scale() -> None:
    assert measure(tokens(), tokens() * 1.5).scale == pytest.approx(1 / 1.5)


def test_offset_is_seen_where_cosine_is_blind() -> None:
    expected = tokens() + 8
    result = measure(expected + np.float32(0.1), expected)
    assert result.cosine > 0.9999
    assert result.offset == pytest.approx(0.1, rel=1e-4)
    assert result.scale == pytest.approx(1.0, abs=1e-5)


def test_bad_row_is_seen_behind_a_massive_activation() -> None:
    expected = tokens(512, 2560)
    expected[0, 0] = 6000
    actual = expected.copy()
    actual[311] = np.random.default_rng(2).standard_normal(2560)
    result = measure(actual, expected)
    assert result.cosine > 0.9999
    assert result.worst_row_cosine < 0.2
    assert (result.worst_row, result.worst_rows) == ((311,), (311, 311))


def test_run_of_bad_rows_stays_within_its_head() -> None:
    expected = tokens(3, T, D)
    actual = expected.copy()
    actual[1, 30:] *= -1
    actual[1, 35] *= 1.1
    result = measure(actual, expected)
    assert result.worst_row[0] == 1
    assert result.worst_rows == (30, T - 1)


def test_padding_rows_count_only_when_asked_for() -> None:
    expected = np.ones((512, D), np.float32)
    expected[:T] = tokens()
    actual = expected.copy()
    actual[:T] += 0.1 * np.random.default_rng(3).standard_normal((T, D))
    padded, real = measure(actual, expected), measure(actual, expected, rows=slice(0, T))
    assert padded.rel_l2 < real.rel_l2 / 2
    assert real.elements == T * D
    assert real == measure(actual, expected, rows=np.arange(512) < T)


def test_garbage_in_padding_is_not_seen_and_indices_stay_whole() -> None:
    expected = tokens(2, T, D)
    actual = expected.copy()
    actual[:, :5] = np.nan
    actual[1, 7, 3] += 9
    real = np.broadcast_to(np.arange(T) >= 5, (2, T))
    result = measure(actual, expected, rows=real)
    assert (result.actual_bad, result.max_abs_at, result.worst_row) == (NonFinite(), (1, 7, 3), (1, 7))
    assert result.worst_rows == (7, 7)


@pytest.mark.parametrize("rows", [np.ones(T), np.ones(T - 1, np.bool_), np.arange(T)])
def test_rows_that_are_no_mask_are_refused(rows: Tensor) -> None:
    with pytest.raises(UnjudgedError, match="but should be a slice or a bool mask"):
        measure(tokens(), tokens(), rows=rows)


def test_nan_and_inf_are_counted_and_left_out() -> None:
    actual = tokens(2, T, D)
    expected = actual.copy()
    actual[1, 2, 3], actual[0, 9, 9], actual[1, 0, 0] = np.nan, -np.inf, np.inf
    result = measure(actual, expected)
    assert result.actual_bad == NonFinite(nan=1, inf=2, first=(0, 9, 9))
    assert (result.rel_l2, result.cosine, result.elements) == (0.0, 1.0, actual.size - 3)
    assert (result.max_abs, result.scale, result.differing) == (0.0, 1.0, 0)
    assert measure(expected, actual).expected_bad == result.actual_bad


def test_zero_rows_are_like_zero_rows_only() -> None:
    expected = tokens()
    expected[4] = 0
    actual = expected.copy()
    assert measure(actual, expected).worst_row_cosine == 1.0
    actual[4, 0] = 1e-30
    assert measure(actual, expected).worst_row_cosine == 0.0


def test_zero_reference() -> None:
    zero = np.zeros((2, 3), np.float32)
    same, other = measure(zero, zero), measure(zero + 1, zero)
    assert (same.cosine, same.rel_l2, same.scale, same.offset, same.max_abs_over_rms) == (1, 0, 1, 0, 0)
    assert (other.cosine, other.rel_l2, other.scale, other.offset) == (0, math.inf, 1, 1)
    assert other.max_abs_over_rms == math.inf


def test_constant_reference_is_fitted_through_the_origin() -> None:
    result = measure(np.full(9, 0.2, np.float32), np.full(9, 0.1, np.float32))
    assert result.scale == pytest.approx(2)
    assert result.offset == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_compare_is_not_measured(shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.float32)
    assert measure(empty, empty) == Metrics(shape, shape)


def test_other_shapes_are_not_measured() -> None:
    assert measure(tokens(), tokens().T).elements == 0


def test_single_values_and_vectors_have_one_row() -> None:
    assert measure(np.asarray(2.0), np.asarray(1.0)).max_abs_at == ()
    assert measure(tokens(D), tokens(D)).worst_row == ()


def test_overflowing_float64_is_never_good() -> None:
    huge = np.full((2, 2), 1e200)
    assert not measure(huge * 2, huge).rel_l2 <= 1e-3


def test_memory_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BLOCK", 1 << 14)
    tensor = np.ones((1 << 10, 1 << 11), np.float32)  # 8 MB; one float64 copy would be 16
    tracemalloc.start()
    try:
        measure(tensor, tensor)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6
