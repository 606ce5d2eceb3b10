"""Isolated and chained records become one word per id."""

import numpy as np
import pytest

from harness.compare import compare_exact, compare_tensor
from harness.limits import fixed
from harness.origin import FAR, MEANINGS, Word, fates
from harness.records import Record, Where

ORDER = [f"m/vision.layer.{number:02d}" for number in range(6)]
LIMITS = fixed(rel_l2_max=1e-3)


def record(number: int, mode: str, error: float) -> Record:
    expected = np.ones((2, 3))
    return compare_tensor(
        expected * (1 + error), expected, LIMITS, where=Where(ORDER[number], "hidden", "square", mode)
    )


def run(isolated: dict[int, float], chained: dict[int, float]) -> dict[int, Word]:
    """Words by number; errors that are not given are those of a healthy chain, which doubles at every graph."""
    records = [record(n, "isolated", isolated.get(n, 1e-6)) for n in range(6)]
    records += [record(n, "chained", chained.get(n, 1e-6 * 2**n)) for n in range(6)]
    return {ORDER.index(name): fate.word for name, fate in fates(records, ORDER).items()}


@pytest.mark.parametrize(
    ("isolated", "chained", "words"),
    [
        ({}, {}, {}),
        ({2: 0.1}, {2: 0.1, 3: 0.1, 4: 0.1, 5: 0.1}, {2: "origin", 3: "carrier", 4: "carrier", 5: "carrier"}),
        ({2: 0.1}, {2: 0.1, 3: 0.1}, {2: "origin", 3: "carrier", 4: "healed", 5: "healed"}),
        ({1: 0.1, 4: 0.1}, {1: 0.1, 4: 0.1}, {1: "origin", 2: "healed", 3: "healed", 4: "origin", 5: "healed"}),
        ({}, {3: 5e-4, 4: 6e-4, 5: 7e-4}, {3: "amplifier"}),
        ({}, {3: 0.1, 4: 0.1, 5: 0.1}, {3: "amplifier", 4: "carrier", 5: "carrier"}),
        ({0: 0.1}, {}, {0: "origin", **dict.fromkeys(range(1, 6), "healed")}),
    ],
)
def test_words(isolated: dict[int, float], chained: dict[int, float], words: dict[int, Word]) -> None:
    assert run(isolated, chained) == {number: words.get(number, "equal") for number in range(6)}
    assert set(words.values()) <= set(MEANINGS)


def test_the_gain_is_that_over_the_graph_before() -> None:
    records = [record(n, "chained", 1e-6 * 3**n) for n in range(6)]
    gains = [fate.gain for fate in fates(records, ORDER).values()]
    assert gains[0] is None
    assert gains[1:] == pytest.approx([3.0] * 5, rel=1e-3)


def test_just_far_is_not_far() -> None:
    for factor, word in ((0.9, "equal"), (1.1, "amplifier")):
        far = 1e-6 * 2**2 * 2 * FAR * factor
        assert run({}, {3: far, 4: far * 2, 5: far * 4})[3] == word


def test_unjudged_is_red_and_ids_without_records_have_no_word() -> None:
    lost = Record(Where(ORDER[1], "-", "square", "isolated"), "unjudged")
    found = fates([record(0, "isolated", 0.0), lost], ORDER)
    assert {name: fate.word for name, fate in found.items()} == {ORDER[0]: "equal", ORDER[1]: "origin"}


def test_an_error_of_one_case_does_not_heal_in_another() -> None:
    records = [record(n, mode, 1e-6) for n in range(3) for mode in ("isolated", "chained")]
    wrong = compare_tensor(np.full(3, 1.1), np.ones(3), LIMITS, where=Where(ORDER[0], "hidden", "length_1", "isolated"))
    assert [fate.word for fate in fates([*records, wrong], ORDER).values()] == ["origin", "equal", "equal"]


def test_an_answer_carries_what_came_before_it() -> None:
    """Its ids are compared exactly, but on no input of the reference's."""
    order = [*ORDER[:2], "m/decode.ids"]
    ids = Where("m/decode.ids", "ids", "square", "exact")
    records = [record(0, "isolated", 1e-6), record(0, "chained", 0.1)]
    records.append(compare_exact([1, 2], [1, 3], where=ids))
    assert [fate.word for fate in fates(records, order).values()] == ["carrier", "carrier"]
