"""Ids parse into their words, print as they were, and bad ones say the grammar."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UnjudgedError
from harness.ids import GraphId, suggest
from harness.tests.strategies import REPEATABLE, WORDS

KNOWN = {
    "youtu_vl/vision.embed": GraphId("youtu_vl", "vision", "embed"),
    "youtu_vl/vision.layer.07": GraphId("youtu_vl", "vision", "layer", 7),
    "youtu_vl/llm.layer.12.dattn": GraphId("youtu_vl", "llm", "layer", 12, "dattn"),
    "youtu_vl/llm.head.logits": GraphId("youtu_vl", "llm", "head", None, "logits"),
    "youtu_vl/tokenizer": GraphId("youtu_vl", "tokenizer"),
}
BAD = [
    "",
    "vision.embed",
    "youtu_vl/",
    "youtu_vl/vision.layer.7",
    "youtu_vl/vision.layer.007",
    "youtu_vl/vision.07",
    "youtu_vl/vision..embed",
    "youtu_vl/llm.layer.00.a.b",
    "Youtu/vision.embed",
    "youtu-vl/vision.embed",
    "youtu_vl/vision.embed\n",
    "youtu_vl/vision.layer.٠٧",
    "../vision.embed",
]


@pytest.mark.parametrize("text", KNOWN)
def test_known_ids_parse(text: str) -> None:
    assert GraphId.parse(text) == KNOWN[text]
    assert str(KNOWN[text]) == text


@pytest.mark.parametrize("text", BAD)
def test_bad_ids_say_the_grammar(text: str) -> None:
    with pytest.raises(UnjudgedError, match=r"graph id=.*, but should be <model>/<tower>"):
        GraphId.parse(text)


def test_words_that_would_print_as_another_id_are_refused() -> None:
    with pytest.raises(UnjudgedError, match=r"graph id='m/llm\.dattn', but should be"):
        GraphId("m", "llm", part="dattn")  # would read as a block
    with pytest.raises(UnjudgedError, match=r"m/llm.layer.100"):
        GraphId("m", "llm", "layer", 100)


@given(WORDS, WORDS, st.none() | WORDS, st.none() | st.integers(0, 99), st.none() | WORDS)
@REPEATABLE
def test_parse_and_str_are_inverse(
    model: str, tower: str, block: str | None, index: int | None, part: str | None
) -> None:
    graph = GraphId(model, tower, block, index if block else None, part if block else None)
    assert GraphId.parse(str(graph)) == graph


def test_suggest_names_the_nearest() -> None:
    assert suggest("youtu_vl/vision.layer.7", KNOWN) == "youtu_vl/vision.layer.07"
    assert suggest("zzz", ["a"]) == "a"
    assert suggest("anything", []) == ""
