"""Proof: every check of the harness can fail: a mistake planted into it turns the test red that is there for it."""

import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from parity import mutating
from parity.mutating import check_green, find, play, play_all
from parity.mutations import MUTATIONS, Mutation, always, constant, edited

pytestmark = pytest.mark.proof

EACH_DAY = 6
HALF_A_RECORD = find("half a record is not counted")


def of_today(day: int) -> list[Mutation]:
    """A handful that is another one every day, until all had their turn."""
    return [MUTATIONS[(day * EACH_DAY + number) % len(MUTATIONS)] for number in range(EACH_DAY)]


def test_names_are_given_once_and_every_mutation_says_what_turns_red() -> None:
    assert [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1] == []
    assert all(mutation.expected for mutation in MUTATIONS)


def test_every_mutation_has_its_day() -> None:
    days = range(-(-len(MUTATIONS) // EACH_DAY))
    assert {mutation.name for day in days for mutation in of_today(day)} == {m.name for m in MUTATIONS}


def test_the_mutations_of_today_are_seen() -> None:
    outcomes = play_all(of_today(datetime.now(UTC).toordinal()))
    assert len(outcomes) == EACH_DAY
    assert [f"{outcome.name}: {outcome.said}" for outcome in outcomes if not outcome.seen] == []


def test_a_mutation_that_no_test_minds_is_not_seen() -> None:
    """What it breaks is judged elsewhere; of two tests that are expected red, both must be."""
    elsewhere = "parity/tests/test_suite.py::test_a_port_compared_with_itself_is_not_green"
    began = time.perf_counter()
    outcome = play(replace(HALF_A_RECORD, expected=(elsewhere,)))
    assert not outcome.seen
    assert "1 passed" in outcome.said
    assert 0 < outcome.seconds <= time.perf_counter() - began

    half = play(replace(HALF_A_RECORD, expected=(*HALF_A_RECORD.expected, elsewhere)))
    assert not half.seen
    assert "1 failed" in half.said


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ("harness/tests/test_ids.py::test_", "does not apply any more"),  # never calls what is planted
        ("parity/tests/test_suite.py::test_that_has_gone", "test_that_has_gone is no test"),
        ("parity/tests/test_gone.py::test_", "file or directory not found"),
    ],
)
def test_a_mutation_that_proves_nothing_is_an_error(expected: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        play(replace(HALF_A_RECORD, expected=(expected,)))


def test_what_is_red_anyway_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_green([HALF_A_RECORD])
    monkeypatch.setattr(mutating, "PYTEST", (*mutating.PYTEST, "--no-such-option"))
    with pytest.raises(LookupError, match="red without any mutation"):
        check_green([HALF_A_RECORD])


def exit_code_of_old(code: int) -> str:
    return "equal" if code == 0 else "different"


def test_a_mutation_whose_place_has_gone_is_an_error() -> None:
    assert edited(('"equal"', '"fine"'))(exit_code_of_old)(0) == "fine"
    with pytest.raises(LookupError, match="exit_code_of_old holds 'unjudged' 0 times, but should once"):
        edited(("unjudged", "equal"))(exit_code_of_old)
    with pytest.raises(LookupError, match="holds 'code' 3 times"):
        edited(("code", "other"))(exit_code_of_old)
    for where, how, said in (
        ("harness.origin:NEAR", constant(1), "harness.origin:NEAR is not there"),
        ("harness.origin:FAR", constant(10.0), "harness.origin:FAR stays as it is"),
        ("harness.origin:Fate.lost", always(0), "harness.origin:Fate.lost is not there"),
    ):
        with pytest.raises(LookupError, match=said):
            mutating.Planted(Mutation("gone", where, how, ("x",)), ("x",))
