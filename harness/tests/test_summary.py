"""The summary counts, names the worst and the first red in pipeline order, and ends with a command."""

import numpy as np

from harness.compare import compare_exact, compare_tensor
from harness.limits import fixed
from harness.records import Record, Where
from harness.summary import summary

GRAPHS = [f"m/vision.layer.{number:02d}" for number in range(3)] + ["m/llm.layer.00.prefill"]
ORDER = ["m/tokenizer", *GRAPHS]
LIMITS = fixed(rel_l2_max=1e-3)


def tensor(name: str, error: float, mode: str = "isolated", rerun: str = "") -> Record:
    expected = np.ones((2, 3))
    where = Where(name, "out0", "receipt", mode)
    return compare_tensor(expected * (1 + error), expected, LIMITS, where=where, floor=1e-6, rerun=rerun)


def tokenizer(*ids: int) -> Record:
    return compare_exact([*ids], [1, 2, 3], where=Where("m/tokenizer", "ids", "receipt", "exact"))


def lines(records: list[Record], unreadable: tuple[str, ...] = ()) -> list[str]:
    return list(
        summary(
            records,
            ORDER,
            rerun=lambda name: f"pytest -k {name}",
            rerun_all="make parity",
            when_green="make report",
            graphs=GRAPHS,
            unreadable=unreadable,
        )
    )


def all_equal() -> list[Record]:
    return [tokenizer(1, 2, 3), *(tensor(name, 1e-5) for name in GRAPHS)]


def test_green_run_in_full() -> None:
    records = [tensor("m/vision.layer.01", 4e-4, "chained"), *reversed(all_equal())]
    assert lines(records) == [
        "4 of 4 graphs have a verdict; comparisons: 6 equal",
        "  tokenizer  1 equal",
        "  vision     4 equal",
        "  llm        1 equal",
        "worst vision isolated fp32: rel_l2 1.0e-05 at m/vision.layer.00 out0, 10 x the noise floor",
        "worst vision chained fp32: rel_l2 4.0e-04 at m/vision.layer.01 out0, 400 x the noise floor",
        "worst llm isolated fp32: rel_l2 1.0e-05 at m/llm.layer.00.prefill out0, 10 x the noise floor",
        "next: make report",
    ]


def test_first_red_is_the_first_in_pipeline_order() -> None:
    late = tensor(GRAPHS[-1], 1.0, rerun="pytest late")
    early = tensor("m/vision.layer.01", 0.1, rerun="pytest early")
    told = lines([late, early, *all_equal()])
    assert told[:2] == [
        "origin: m/vision.layer.01 and 1 more",
        "4 of 4 graphs have a verdict; comparisons: 5 equal, 2 different",
    ]
    assert told[-2:] == [
        "first red: m/vision.layer.01 out0 (2, 3) differs from the reference [fp32, receipt, isolated]",
        "next: pytest early",
    ]


def test_carriers_stand_behind_their_origin() -> None:
    chain = [tensor(name, 0.1, "chained") for name in GRAPHS[1:3]]
    assert lines([*all_equal(), tensor(GRAPHS[1], 0.1), *chain])[0] == "origin: m/vision.layer.01; 1 carriers"
    assert lines([*all_equal(), *chain])[0] == (
        "origin: no id is wrong on the reference's own input; the first wrong in the chain is m/vision.layer.01"
    )


def test_red_without_a_command_gets_the_callers() -> None:
    assert lines([tokenizer(1, 2), *all_equal()[1:]])[-1] == "next: pytest -k m/tokenizer"


def test_ids_without_a_verdict_are_red() -> None:
    one, two = all_equal()[:-1], all_equal()[:-2]
    assert lines(one)[0].startswith("3 of 4 graphs have a verdict")
    assert lines(one)[-2:] == [
        "without a verdict (1): m/llm.layer.00.prefill",
        "next: pytest -k m/llm.layer.00.prefill",
    ]
    assert lines(two)[-1] == "next: make parity"


def test_unjudged_is_red_and_no_verdict() -> None:
    unjudged = compare_tensor(
        np.ones((0, 3)), np.ones((0, 3)), LIMITS, where=Where(GRAPHS[0], "out0", "receipt", "isolated")
    )
    told = lines([*all_equal(), unjudged])
    assert told[0] == "origin: m/vision.layer.00"
    assert told[1] == "3 of 4 graphs have a verdict; comparisons: 5 equal, 1 unjudged"
    assert told[-2].startswith("first red: m/vision.layer.00 out0 (0, 3) could not be judged")


def test_notes_stand_behind_what_was_measured() -> None:
    told = list(
        summary(all_equal(), ORDER, rerun=str, rerun_all="", when_green="make report", graphs=GRAPHS, notes=["a note"])
    )
    assert told[-2:] == ["a note", "next: make report"]


def test_a_doubt_takes_the_place_of_the_green_command() -> None:
    def told(records: list[Record]) -> list[str]:
        doubts = {"m [receipt]: compared with itself": "make dumps"}
        return list(summary(records, ORDER, rerun=str, rerun_all="", when_green="", graphs=GRAPHS, doubts=doubts))

    assert told(all_equal())[-2:] == ["could not be judged: m [receipt]: compared with itself", "next: make dumps"]
    assert told([tokenizer(1), *all_equal()[1:]])[-1] == "next: m/tokenizer"


def test_lost_records_and_unknown_ids_are_told() -> None:
    told = lines([*all_equal(), tensor("m/vision.layer.99", 0)], unreadable=tuple("abcdefg"))
    assert "unknown ids (1): m/vision.layer.99" in told
    assert "unreadable records (7): a, b, c, d, e and 2 more" in told
    assert told[-1] == "next: make parity"


def test_empty_run_says_so() -> None:
    assert lines([])[0] == "0 of 4 graphs have a verdict; comparisons: 0 equal"
