"""Claim: where the port's ids leave the reference's, a near-tie is told from a bug, and never excused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.compare import compare_exact
from harness.records import Record, Where
from parity.divergence import explained

WHERE = Where("m/decode.ids", "ids", "square", "exact")
IDS = [0, 0, 0]
NOISE = 2.0**-10  # every logit of the port is off by this, up or down


def subject(margins: list[float], forced: list[Any] | None = None) -> Any:
    """A reference whose two first logits are `margins` apart at each step, and a port that has moved them by NOISE."""
    rows = np.array([[margin, 0.0, -9.0] for margin in margins], np.float32)

    def generate(case: Any, pictures: Any, ids: list[int] | None) -> list[Any]:
        if forced is not None:
            forced.append(ids)
        return [SimpleNamespace(logits=row + np.array([-NOISE, NOISE, 0], np.float32)) for row in rows]

    dump = SimpleNamespace(values={"ids": IDS, "margins": margins}, tensors={"logits": rows})
    return SimpleNamespace(case=None, pictures=[], dump=dump, generate=generate)


def told(actual: list[int], margins: list[float]) -> Record:
    record = compare_exact(actual, IDS, where=WHERE, rerun="pytest -k ids")
    return explained(record, subject(margins))


@pytest.mark.parametrize(
    ("margin", "kind"),
    [
        (0.0, "a near-tie"),  # two equal rows of the head
        (1.8 * NOISE, "a near-tie"),  # of two logits, each moves by the noise
        (2.2 * NOISE, "a bug, no near-tie"),
        (200 * NOISE, "a bug, no near-tie"),
    ],
)
def test_a_margin_is_a_near_tie_up_to_twice_the_noise(margin: float, kind: str) -> None:
    line = told([0, 1, 0], [5.0, margin, 5.0]).detail.splitlines()[2]
    assert line == f"  step 1: the reference's margin is {margin:.2g}, the logits differ by up to 0.00098: {kind}"


def test_the_margin_is_that_of_the_step() -> None:
    margins = [0.0, 5.0, 0.0]
    assert ": a near-tie" in told([1, 0, 0], margins).detail
    assert ": a bug, no near-tie" in told([0, 1, 0], margins).detail


def test_a_near_tie_is_still_different() -> None:
    record = told([0, 1, 0], [5.0, 0.0, 5.0])
    assert (record.verdict, record.failed) == ("different", ("exact",))
    assert record.detail.endswith("\n  rerun: pytest -k ids")


def test_the_reference_ids_are_forced() -> None:
    forced: list[Any] = []
    record = explained(compare_exact([0, 1, 0], IDS, where=WHERE, rerun="x"), subject([5.0, 0.0, 5.0], forced))
    assert forced == [IDS]
    assert "with the reference's ids forced, 2 of 3 agree; not at 1\n" in record.detail


def test_equal_ids_need_no_explanation() -> None:
    forced: list[Any] = []
    record = compare_exact(IDS, IDS, where=WHERE)
    assert explained(record, subject([5.0, 5.0, 5.0], forced)) is record
    assert forced == []


def test_a_port_that_goes_on_is_told_so() -> None:
    assert "the port goes on where the reference stopped" in told([0, 0, 0, 0], [5.0, 5.0, 5.0]).detail
