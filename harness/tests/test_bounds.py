"""Every number of limits.toml decides: what is just beyond it is red by it alone, what is just inside is green."""

import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.compare import compare_tensor
from harness.limits import METRICS, TARGETS, Limits, Row
from harness.metrics import Tensor
from harness.records import Record, Where
from harness.tests.test_limits import COMMITTED

WHERE = Where("m/llm.layer.12.prefill", "hidden", "receipt", "isolated")
NEAR = 0.02  # this much beyond or inside the bound
T, D = 344, 64  # one value in so many may be off by its bound, and rel_l2 does not see it
PAIR = tuple[Tensor, Tensor]


def noise(seed: int) -> Tensor:
    """(T, D) with mean 0 and rms 1."""
    x = np.random.default_rng(seed).standard_normal((T, D))
    normal: Tensor = (x - x.mean()) / x.std()
    return normal


def beside(x: Tensor) -> Tensor:
    """As large as x and orthogonal to it, with mean 0 where x has."""
    other: Tensor = np.random.default_rng(2).standard_normal(x.shape)
    other -= other.mean()
    other -= x * (other * x).sum() / (x * x).sum()
    other *= np.sqrt((x * x).sum() / (other * other).sum())
    return other


def turned(x: Tensor, off: float) -> Tensor:
    """x turned until its cosine with itself is 1 - off."""
    made: Tensor = (1 - off) * x + np.sqrt(1 - (1 - off) ** 2) * beside(x)
    return made


# Each makes (actual, expected) whose metric is `off` from where it should be, the others nearer than that.
def cosine(off: float) -> PAIR:
    return turned(noise(1), off), noise(1)


def worst_row_cosine(off: float) -> PAIR:
    expected = noise(1)
    expected[311] *= 1e-5  # too small to be seen in the whole
    actual = expected.copy()
    actual[311] = turned(expected[311], off)
    return actual, expected


def rel_l2(off: float) -> PAIR:
    return noise(1) + off * beside(noise(1)), noise(1)


def scale(off: float) -> PAIR:
    """Around a large mean, which hides half of it from the offset and half from rel_l2."""
    return fitted(1 + off, -off / 2)


def offset_over_rms(off: float) -> PAIR:
    rms = np.sqrt(1.01)
    return fitted(1 - off * rms / 2, off * rms)


def fitted(scale: float, offset: float) -> PAIR:
    expected = 1 + 0.1 * noise(1)
    return scale * expected + offset, expected


def max_abs_over_rms(off: float) -> PAIR:
    actual = noise(1)
    actual[311, 7] += off
    return actual, noise(1)


def holding(value: float) -> Callable[[float], PAIR]:
    def made(count: float) -> PAIR:
        actual = noise(1)
        actual[311, : int(count)] = value
        return actual, noise(1)

    return made


MADE: dict[str, Callable[[float], PAIR]] = {
    "cosine_min": cosine,
    "worst_row_cosine_min": worst_row_cosine,
    "rel_l2_max": rel_l2,
    "scale_tol": scale,
    "offset_tol": offset_over_rms,
    "max_abs_over_rms_max": max_abs_over_rms,
    "nan_max": holding(np.nan),
    "inf_max": holding(-np.inf),
}
COUNTS = ("nan_max", "inf_max")
IMPLIED = ("cosine_min",)  # who turns by 1e-4 is off by 1e-2: rel_l2 sees it as well, whatever is made

NUMBERS = [
    pytest.param(place, key, bound, sign, id=f"{row['ids']}-{row['mode']}-{key}{'-' if sign < 0 else ''}")
    for place, row in enumerate(tomllib.loads(COMMITTED.read_text(encoding="utf-8"))["limits"])
    for key, bound in row.items()
    if key in METRICS
    for sign in ((1, -1) if key in TARGETS else (1,))
]


def judged(row: Row, key: str, off: float) -> Record:
    limits = {limit.key: limit for limit in row.limits if key not in IMPLIED or limit.key == key}
    return compare_tensor(*MADE[key](off), limits, where=WHERE)


@pytest.mark.parametrize(("place", "key", "bound", "sign"), NUMBERS)
def test_each_number_decides(place: int, key: str, bound: Any, sign: int) -> None:
    """The bound is read from the file here, past the code that is judged."""
    row = Limits.read(COMMITTED).rows[place]
    allowed = 1 - bound if key.endswith("_min") else bound
    inside, beyond = (bound, bound + 1) if key in COUNTS else (allowed * (1 - NEAR), allowed * (1 + NEAR))

    record = judged(row, key, sign * beyond)
    assert (record.verdict, record.failed) == ("different", (key,))
    assert judged(row, key, sign * inside).verdict == "equal"
