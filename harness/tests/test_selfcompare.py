"""A port that shows no error in any graph of a case is told apart from a good one."""

import numpy as np
import pytest

from harness.compare import compare_exact, compare_tensor
from harness.limits import fixed
from harness.records import Record, Where
from harness.selfcompare import SelfComparison, self_compared


def graph(number: int, error: float = 0.0, *, case: str = "square", mode: str = "isolated") -> Record:
    expected = np.ones((2, 3), np.float32)
    where = Where(f"m/llm.layer.{number:02d}.prefill", "hidden", case, mode)
    return compare_tensor(expected + np.float32(error), expected, fixed(rel_l2_max=1e-3), where=where, floor=1e-7)


def case_of(graphs: int, case: str = "square") -> list[Record]:
    return [graph(number, case=case) for number in range(graphs)]


def test_a_case_without_any_error_is_a_self_comparison() -> None:
    (found,) = self_compared([*case_of(8), graph(0)])
    assert found == SelfComparison("m", "square", 9)
    assert str(found) == (
        "m [square]: 9 of 9 isolated comparisons are equal to the last bit: "
        "the port was most likely compared with its own output"
    )


def test_one_last_bit_anywhere_is_a_port() -> None:
    assert self_compared([*case_of(40), graph(7, 1.2e-7)]) == []


def test_a_few_graphs_may_be_equal_by_chance() -> None:
    assert self_compared(case_of(7) * 2) == []


def test_each_case_has_a_dump_of_its_own() -> None:
    honest = [graph(number, 1e-6, case="tall") for number in range(8)]
    assert [found.case for found in self_compared([*honest, *case_of(8)])] == ["square"]


@pytest.mark.parametrize("mode", ["chained", "exact"])
def test_other_modes_neither_help_nor_harm(mode: str) -> None:
    others = [graph(number, 1e-5, mode=mode) for number in range(8)]
    assert self_compared([graph(number, mode=mode) for number in range(8)]) == []
    assert len(self_compared([*others, *case_of(8)])) == 1


def test_what_has_no_noise_is_no_evidence() -> None:
    where = [Where(f"m/positions.table_{letter}", "cos", "square", "isolated") for letter in "abcdefghi"]
    tables = [compare_tensor(np.ones(3), np.ones(3), fixed(rel_l2_max=1), where=place) for place in where]
    ids = [compare_exact([1], [1], where=place) for place in where]
    assert self_compared([*tables, *ids]) == []
    assert self_compared([]) == []


def test_what_could_not_be_computed_is_no_port() -> None:
    lost = [Record(Where(f"m/llm.layer.{n:02d}.prefill", "-", "square", "isolated"), "unjudged") for n in range(9)]
    assert self_compared(lost) == []
