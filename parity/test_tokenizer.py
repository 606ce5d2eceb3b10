"""Claim: the runtime's tokenizer gives what the `tokenizers` library gives, ids and text, for any text."""

import itertools
import json
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from references import unicode_classes as asked
from references.youtu_vl import config as youtu
from references.youtu_vl import tokenizer as tiny
from runtime import unicode_classes
from runtime.errors import InputError
from runtime.tokenizer import Tokenizer

PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=150)

# The texts that public tokenizer.json files hold, written here on their own and not taken from the runtime.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS_ASCII_SUFFIX = tiny.PATTERNS["A"][1].replace(
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*components: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(components)}}


def digits(individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


BYTES = tiny.byte_level()
GPT2_BYTES = BYTES | {"use_regex": True}
NFC = {"type": "NFC"}

# What each configuration changes in the tiny tokenizer.json.
CHANGES: dict[str, dict[str, Any]] = {
    "youtu-a": {},
    "youtu-a-ascii-suffix": sequence(split(tiny.PATTERNS["A"][0]), split(WORDS_ASCII_SUFFIX), BYTES),
    "youtu-b": {"pre_tokenizer": tiny.pre_tokenizer("B")},
    "llama3": sequence(split(LLAMA3), BYTES),
    "qwen2": sequence(split(QWEN2), BYTES) | {"normalizer": NFC},
    "gpt2": {"pre_tokenizer": GPT2_BYTES},
    "gpt2-split": sequence(split(GPT2), BYTES),
    "gpt2-prefix-space": {"pre_tokenizer": GPT2_BYTES | {"add_prefix_space": True}},
    "smollm2": sequence(digits(True), GPT2_BYTES),
    "digit-runs-prefix-space": sequence(digits(False), BYTES | {"add_prefix_space": True}),
    "bytes-alone": {"pre_tokenizer": BYTES},
}


@dataclass(frozen=True)
class Twins:
    """The same tokenizer.json, read by the runtime and by the library."""

    ours: Tokenizer
    library: Any

    def library_ids(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False).ids)

    def check(self, text: str) -> None:
        ids, expected = self.ours.encode(text), self.library_ids(text)
        assert ids == expected, f"{ids=}, but should be {expected} [{text!r}]"

    def check_decode(self, ids: list[int]) -> None:
        for skip in (True, False):
            text = self.ours.decode(ids, skip_special_tokens=skip)
            expected = self.library.decode(ids, skip_special_tokens=skip)
            assert text == expected, f"{text=}, but should be {expected!r} [{ids}, {skip=}]"


def twins_of(config: dict[str, Any]) -> Twins:
    return Twins(Tokenizer(config, "test"), tokenizers.Tokenizer.from_str(json.dumps(config)))


@cache
def twins(name: str) -> Twins:
    return twins_of(tiny.committed() | CHANGES[name])


every_configuration = pytest.mark.parametrize("name", CHANGES)

# One or two characters of every class, and what the splitters treat apart.
EDGES = (
    "aZ\u01c5\u02b0\u00aa\u05d0\u0301\u0903\u0967\u00b2\u00bd0 19\t\n\r\x0b\u00a0\u3000\u0085/'\u017f."
    "\u20ac\u200d\uac00\u318e\u3105\u6f22\u304b\u30a2\u3002\uff1f\u2026\u2014\U00020000\U0001f600\ue000\u0378\U0010ffff\0"
)
FRAGMENTS = (
    *(
        "<|begin_of_text|>",
        "<|image_pad|>",
        "<x_1>",
        "<x_10>",
        "<ref>",
        "</ref>",
        "<|",
        "<x_",
        "<|image_pad|",
    ),
    *(
        "'s",
        "'LL",
        "'re",
        "'VE",
        "'\u017f",
        "don't",
        "HTML",
        "YouTube",
        "the image",
        " the",
        "  ",
        "\n\n",
        "\r\n",
        " \n ",
    ),
    *(
        "2024",
        " 12345",
        "12.5%",
        "//",
        "a/b/\n",
        "!!\n/",
        "\u63cf\u8ff0\u8fd9\u5f20\u56fe\u7247",
        "\u304b\u306a\u30ab\u30ca",
    ),
    *(
        "\ud55c\uad6d\uc5b4",
        "\u2014\u2014",
        "\u201c\u4f60\u597d\u201d",
        "e\u0301",
        "\u1e0b\u0323",
        "\u0344",
        "\u212b",
        "\u0898",
    ),
)
characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=40)
edge_texts = st.text(st.sampled_from(EDGES), max_size=40)
mixed_texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(characters, max_size=2), max_size=12).map("".join)
any_text = texts | edge_texts | mixed_texts


# --- the tiny tokenizer.json ---


def test_training_again_gives_the_committed_file() -> None:
    assert tiny.text_of(tiny.train()) == tiny.TOKENIZER.read_text(encoding="utf-8")


def test_tiny_ids_follow_the_config() -> None:
    ours = Tokenizer.from_file(tiny.TOKENIZER)
    assert ours.vocab_size == youtu.TINY["vocab_size"]
    named = {
        "bos_token_id": "<|begin_of_text|>",
        "eos_token_id": "<|end_of_text|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    assert {key: ours.token_id(token) for key, token in named.items()} == {key: youtu.TINY[key] for key in named}
    assert ours.token_id("<y_63>") == ours.token_id("<x_0>") + 127  # type: ignore[operator]
    assert ours.token_id("no such token") is None


def test_tiny_base_ids_are_those_of_the_published_vocabulary() -> None:
    ours = Tokenizer.from_file(tiny.TOKENIZER)
    published = {"(": 7, ")": 8, ",": 11, "0": 15, "9": 24, "<": 27, "L": 43, "Y": 56}
    assert {char: ours.token_id(char) for char in published} == published
    assert [ours.token_id(chr(code)) for code in range(33, 127)] == list(range(94))


# --- splitting ---

SPLITS = [  # text, reading A, reading B
    ("Describe the image briefly.", "Describe| the| image| briefly|.", None),
    ("YouTube's 2024", "You|Tube's| |2|0|2|4", "YouTube|'s| |202|4"),
    ("HTML don't", "HTML| don't", "HTML| don|'t"),
    ("描述这张图片。", "描述这张图片|。", "描|述|这|张|图|片|。"),
    ("它有3个点，对吗？", "它有|3|个点|，|对吗|？", "它|有|3|个|点|，|对|吗|？"),
    ("“你好”——！", "“|你好|”——！", "“|你|好|”|—|—|！"),
]


@pytest.mark.parametrize("reading", ["A", "B"])
@pytest.mark.parametrize(("text", "a", "b"), SPLITS)
def test_readings_split_as_the_facts_say(text: str, a: str, b: str | None, reading: str) -> None:
    expected = b if b is not None and reading == "B" else a
    assert "|".join(twins(f"youtu-{reading.lower()}").ours.pieces(text)) == expected


def test_cjk_pattern_may_be_spelt_with_escapes() -> None:
    for reading in "AB":
        escaped = "".join(c if c.isascii() else f"\\u{ord(c):04X}" for c in tiny.PATTERNS[reading][0])
        config = tiny.committed() | sequence(split(escaped), split(tiny.PATTERNS[reading][1]), BYTES)
        text = "描述ㄅ한국어ㄱ、。3 images——“好”！？カナ"
        twins_of(config).check(text)
        assert Tokenizer(config, "test").pieces(text) == twins(f"youtu-{reading.lower()}").ours.pieces(text)


@cache
def splitting(name: str) -> Twins:
    """Without what comes before splitting, so that the library's pre-tokenizer can be asked alone."""
    return twins_of(tiny.committed() | CHANGES[name] | {"added_tokens": [], "normalizer": None})


def symbols_of(piece: str) -> str:
    return "".join(part for part, _ in tokenizers.pre_tokenizers.ByteLevel(False, False, False).pre_tokenize_str(piece))


@every_configuration
@given(text=any_text)
@settings(PROPERTY, max_examples=300)
def test_pieces_of_any_text(name: str, text: str) -> None:
    """Ids alone do not show a wrong border where the tiny vocabulary has no merge across it."""
    pieces = [symbols_of(piece) for piece in splitting(name).ours.pieces(text)]
    expected = [piece for piece, _ in splitting(name).library.pre_tokenizer.pre_tokenize_str(text)] if text else []
    assert pieces == expected, f"{pieces=}, but should be {expected} [{text!r}]"


def test_pieces_cover_the_text() -> None:
    text = "<|image_pad|>You're 描述 12345//\n\n  <x_1> end \t"
    assert "".join(twins("youtu-a").ours.pieces(text)) == text
    assert twins("youtu-a").ours.pieces("<|image_pad|>Hi<x_1>") == ["<|image_pad|>", "Hi", "<x_1>"]


# --- ids ---


@every_configuration
def test_corpus_ids(name: str) -> None:
    twins(name).check(tiny.CORPUS.read_text(encoding="utf-8"))


@every_configuration
@given(text=any_text)
@PROPERTY
def test_ids_of_any_text(name: str, text: str) -> None:
    twins(name).check(text)


@given(text=any_text)
@PROPERTY
def test_decode_gives_the_text_back(text: str) -> None:
    ours = twins("youtu-a").ours
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_ignore_merges(ignore_merges: bool) -> None:
    """A vocabulary entry that no merge reaches is used only if the merges are ignored."""
    config = tiny.committed()
    config["added_tokens"] = []
    config["model"]["vocab"]["qzj"] = len(config["model"]["vocab"])
    config["model"]["ignore_merges"] = ignore_merges
    pair = twins_of(config)
    pair.check("qzj qzj, qzjqzj the image")
    assert (len(pair.ours.encode("qzj")) == 1) is ignore_merges


def test_merges_as_strings_are_the_merges_as_pairs() -> None:
    config = tiny.committed()
    config["model"]["merges"] = [" ".join(pair) for pair in config["model"]["merges"]]
    text = tiny.CORPUS.read_text(encoding="utf-8")
    assert Tokenizer(config, "test").encode(text) == twins("youtu-a").library_ids(text)


@pytest.mark.parametrize("text", ["a" * 3000, " " * 500 + "x", "的" * 700, "\n" * 300, "ab" * 900, "<" * 400, ""])
def test_long_runs(text: str) -> None:
    for name in CHANGES:
        twins(name).check(text)


def test_bytes_that_the_vocabulary_lacks_are_dropped() -> None:
    symbols = [symbol for symbol in tiny.committed()["model"]["vocab"] if len(symbol) == 1 and symbol != "b"]
    model = {"type": "BPE", "vocab": {symbol: number for number, symbol in enumerate(symbols)}, "merges": []}
    pair = twins_of(tiny.committed() | {"model": model, "added_tokens": []})
    pair.check("abc b")
    assert len(pair.ours.encode("abc")) == 2


def test_special_token_text_in_a_prompt_becomes_the_special_token() -> None:
    text = "Say <|image_pad|> and <|end_of_text|>, not <|image_pad| > or <x_1><x_10>."
    twins("youtu-a").check(text)
    assert twins("youtu-a").ours.encode(text).count(youtu.TINY["image_token_id"]) == 1


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff!", "\udc80\ud800"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        twins("youtu-a").ours.encode(text)


# --- added tokens ---


def added(number: int, content: str, *flags: str) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": number, "content": content} | {name: name in flags for name in names}


FLAGGED = {  # content: flags. Prefixes of each other, whitespace alone, contents that NFC changes
    "<l>": "lstrip",
    "<r>": "rstrip special",
    "<lr>": "lstrip rstrip",
    "<w>": "single_word",
    "<w>>": "single_word special",
    "<wr>": "single_word lstrip rstrip",
    "<": "special",
    "  ": "",
    "ab": "",
    "abc": "single_word",
    "bcd": "",
    "n:": "normalized",
    "n:e\u0301": "normalized",
    "n:u\u0308": "normalized special",
    "\u00e9\u00e9": "",
    "\u6f22": "normalized lstrip single_word",
    "e\u0301!": "special",
    "\u00e9!": "normalized",
    "b c": "rstrip normalized",
}


@cache
def flagged(name: str) -> Twins:
    config = tiny.committed() | CHANGES[name] | {"added_tokens": []}
    vocab = config["model"]["vocab"]
    free = itertools.count(tiny.BASE_TOKENS)
    for content, flags in FLAGGED.items():
        number = vocab[content] if content in vocab else next(free)
        config["added_tokens"].append(added(number, content, *flags.split()))
    return twins_of(config)


between = st.sampled_from("abcdeu_1-<>!n: \t\n\u3000\u00e9\u0301\u0308\u200d\u6f22\u24d0\u2160")
flagged_texts = st.lists(st.sampled_from(sorted(FLAGGED)) | between, max_size=14).map("".join)


@pytest.mark.parametrize("name", ["youtu-a", "qwen2", "gpt2-prefix-space"])
@given(text=flagged_texts)
@settings(PROPERTY, max_examples=400)
def test_flags_of_added_tokens(name: str, text: str) -> None:
    flagged(name).check(text)
    flagged(name).check_decode(flagged(name).ours.encode(text))


def test_whitespace_taken_by_one_token_can_be_another() -> None:
    flagged("youtu-a").check("<r>    <l> <lr>  <lr>")
    assert flagged("youtu-a").ours.pieces("a<r> <l>")[1:] == ["<r> ", "<l>"]


def test_added_token_may_be_in_the_vocabulary() -> None:
    pair = twins_of(tiny.committed() | {"added_tokens": [added(32, "A", "special"), added(1536, "<z>")]})
    pair.check("BAB <z>A")
    pair.check_decode(pair.ours.encode("BAB <z>A"))


# --- normalizer ---

marks = [char for char in asked.CHARACTERS if unicodedata.combining(char)]
composed = [char for char in asked.CHARACTERS if unicodedata.decomposition(char)]
nfc_texts = st.text(st.sampled_from(marks) | st.sampled_from(composed) | st.sampled_from("aeo\u304b\u1100\u1161\u11a8"))


@given(text=nfc_texts)
@settings(PROPERTY, max_examples=400)
def test_nfc(text: str) -> None:
    twins("qwen2").check(text)


def test_nfc_of_every_mark() -> None:
    for other in "\u0301\u0323\u3099":
        twins("qwen2").check(" ".join(f"a{mark}{other}a{other}{mark}" for mark in marks))


def test_nfc_in_a_sequence() -> None:
    config = tiny.committed() | {"normalizer": {"type": "Sequence", "normalizers": [NFC, NFC]}}
    twins_of(config).check("e\u0301 \u212b")


# --- classes of code points ---


ASSIGNED_PLANES = [char for char in asked.CHARACTERS if ord(char) >> 16 in (0, 1, 2, 3, 14)]
OTHER_PLANES = [char for char in asked.CHARACTERS if ord(char) >> 16 not in (0, 1, 2, 3, 14)]


def members(name: str) -> set[str]:
    return {chr(code) for first, last in unicode_classes.ranges()[name] for code in range(first, last + 1)}


def check_set(name: str, actual: set[str], expected: set[str]) -> None:
    extra, missing = (" ".join(asked.spans(group)) or "none" for group in (actual - expected, expected - actual))
    assert actual == expected, f"{name}: {extra=}, {missing=}; run python -m references.unicode_classes"


@pytest.mark.parametrize("name", asked.REGEX_SETS)
def test_class_of_every_code_point(name: str) -> None:
    check_set(name, members(name), asked.regex_set(asked.REGEX_SETS[name], ASSIGNED_PLANES))


def test_no_other_plane_has_a_class() -> None:
    check_set("other planes", set(), asked.regex_set(r"[\p{L}\p{M}\p{N}\s]", OTHER_PLANES))
    together = "".join(OTHER_PLANES)
    assert len(tokenizers.pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(together)) == 1


def test_numeric() -> None:
    check_set("numeric", members("numeric"), asked.numeric_set(ASSIGNED_PLANES))


def test_word() -> None:
    check_set("word", members("word"), asked.word_set(ASSIGNED_PLANES))


def test_inert() -> None:
    check_set("inert", members("inert"), asked.inert_set())


def test_every_code_point_has_one_class() -> None:
    text = "".join(asked.CHARACTERS)
    classes = unicode_classes.classes_of(text)
    assert set(classes[:-1]) == {1 << bit for bit in range(8)}
    assert classes[-1] == 0
    letters = unicode_classes.UPPER | unicode_classes.LOWER | unicode_classes.LETTER
    for name, mask in {"L": letters, "M": unicode_classes.MARK, "N": unicode_classes.NUMBER}.items():
        found = {char for char, value in zip(text, classes, strict=False) if value & mask}
        check_set(name, found, asked.regex_set(r"\p{L}", ASSIGNED_PLANES) if name == "L" else members(name))


# --- decoding ---


@cache
def id_of_byte() -> list[int]:
    ours = twins("youtu-a").ours
    found = {ours.token_bytes(number): number for number in range(256)}
    return [found[bytes([byte])] for byte in range(256)]


any_ids = st.lists(st.integers(0, 255) | st.integers(0, 2100), max_size=30)


@given(ids=any_ids)
@settings(PROPERTY, max_examples=400)
def test_decode_of_any_ids(ids: list[int]) -> None:
    twins("youtu-a").check_decode(ids)


def test_decode_of_broken_utf8() -> None:
    """Every order of three bytes at the borders of UTF-8's table, alone between letters."""
    borders = bytes.fromhex("007f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    ids = [id_of_byte()[byte] for three in itertools.product(borders, repeat=3) for byte in (*three, ord("A"))]
    twins("youtu-a").check_decode(ids)


def test_ids_without_a_token_decode_to_nothing() -> None:
    twins("youtu-a").check_decode([32, 2048, 32, 99999])
    with pytest.raises(InputError, match="id -1"):
        twins("youtu-a").ours.decode([-1])


def test_special_tokens_are_skipped_and_coordinates_survive() -> None:
    ours = twins("youtu-a").ours
    ids = ours.encode("<|begin_of_text|><ref>cat</ref><box><x_1><y_2></box><custom_3><|end_of_text|>")
    assert ours.decode(ids) == "<ref>cat</ref><box><x_1><y_2></box><custom_3>"


def test_added_token_decodes_to_its_text_unless_its_characters_are_byte_symbols() -> None:
    contents = ["x \u00e9", "\u00e9\u00e9", "\u20acx", "<s>"]
    pair = twins_of(tiny.committed() | {"added_tokens": [added(1536 + n, c) for n, c in enumerate(contents)]})
    for number in range(1536, 1540):
        pair.check_decode([number])
    assert pair.ours.decode([1537]) == "\ufffd\ufffd"


@given(ids=any_ids)
@settings(PROPERTY, max_examples=400)
def test_stream_is_decode_and_never_takes_text_back(ids: list[int]) -> None:
    ours = twins("youtu-a").ours
    whole, stream, given_out = ours.decode(ids), ours.stream(), ""
    for token in ids:
        given_out += stream.push(token)
        assert whole.startswith(given_out), f"{given_out=}, but should begin {whole!r} [{ids}]"
    assert given_out + stream.finish() == whole


def test_stream_waits_for_the_whole_character() -> None:
    stream = twins("youtu-a").ours.stream()
    ids = [id_of_byte()[byte] for byte in "猫🐱".encode()]
    assert [stream.push(token) for token in ids] == ["", "", "猫", "", "", "", "🐱"]
    assert stream.push(ids[0]) + stream.push(youtu.TINY["eos_token_id"]) + stream.push(ids[1]) == ""
    assert stream.finish() == "\ufffd"


# --- what is refused ---


def with_model(**changes: Any) -> dict[str, Any]:
    return {"model": tiny.committed()["model"] | changes}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # what is changed, what the message must quote
    "pattern": (sequence(split(r"\p{Han}+"), BYTES), r"\p{Han}+"),
    "almost the pattern": (sequence(split(LLAMA3 + "+"), BYTES), LLAMA3 + "+"),
    "behavior": (sequence(split(LLAMA3) | {"behavior": "Removed"}, BYTES), "Removed"),
    "inverted": (sequence(split(LLAMA3) | {"invert": True}, BYTES), '"invert": true'),
    "text pattern": (sequence(split(LLAMA3) | {"pattern": {"String": " "}}, BYTES), '{"String": " "}'),
    "component": (sequence({"type": "Metaspace", "replacement": "_"}, BYTES), "Metaspace"),
    "no byte level": (sequence(split(LLAMA3)), "ByteLevel"),
    "behind byte level": (sequence(BYTES, digits(True)), "ByteLevel"),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "ByteLevel"),
    "normalizer": ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    "normalizer in a sequence": (
        {"normalizer": {"type": "Sequence", "normalizers": [NFC, {"type": "NFKC"}]}},
        "NFKC",
    ),
    "decoder": ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
    "no decoder": ({"decoder": None}, "decoder null"),
    "truncation": ({"truncation": {"max_length": 7}}, '"max_length": 7'),
    "padding": ({"padding": {"pad_id": 5}}, '"pad_id": 5'),
    "model type": (with_model(type="Unigram"), "Unigram"),
    "dropout": (with_model(dropout=0.1), "dropout 0.1"),
    "unknown token": (with_model(unk_token="<unk>"), '"<unk>"'),
    "byte fallback": (with_model(byte_fallback=True), "byte_fallback true"),
    "fused unknown": (with_model(fuse_unk=True), "fuse_unk true"),
    "prefix": (with_model(continuing_subword_prefix="##"), '"##"'),
    "suffix": (with_model(end_of_word_suffix="</w>"), '"</w>"'),
    "merge": (with_model(merges=[["q", "zj"]]), "'q' + 'zj'"),
    "two tokens, one id": (with_model(vocab={"a": 0, "b": 0}, merges=[]), "an id of its own"),
    "id with a gap": ({"added_tokens": [added(1540, "<z>")]}, "'<z>' has id 1540, but should be 1536"),
    "id beside the vocabulary's": ({"added_tokens": [added(1536, "A")]}, "'A' has id 1536, but should be 32"),
    "twice": ({"added_tokens": [added(1536, "<z>"), added(1537, "<z>")]}, "'<z>'"),
    "empty": ({"added_tokens": [added(1536, "")]}, "''"),
    "equal once normalized": (
        {
            "normalizer": NFC,
            "added_tokens": [added(1536, "e\u0301!", "normalized"), added(1537, "\u00e9!", "normalized")],
        },
        "1536 and 1537 are both '\u00e9!'",
    ),
}


@pytest.mark.parametrize(("changes", "quoted"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_its_text(changes: dict[str, Any], quoted: str) -> None:
    with pytest.raises(InputError) as caught:
        Tokenizer(tiny.committed() | changes, "folder/tokenizer.json")
    assert "folder/tokenizer.json" in str(caught.value)
    assert quoted in str(caught.value)


def damaged(text: str) -> dict[str, bytes]:
    config = json.loads(text)
    del config["model"]["vocab"]
    return {
        "empty": b"",
        "cut": text[: len(text) // 2].encode(),
        "last byte missing": text.strip()[:-1].encode(),
        "not UTF-8": b"\xff\xfe" + text.encode("utf-16-le"),
        "a list": b"[1, 2]",
        "a number": b"7",
        "no model": b"{}",
        "no vocabulary": json.dumps(config).encode(),
        "odd merge": text.replace('"merges": [', '"merges": ["a b c", ', 1).encode(),
        "odd token": text.replace('"special": true', '"special": true, "color": 1', 1).encode(),
        "nested without end": b"[" * 100000,
        "a web page": b"<html>",
    }


@pytest.mark.parametrize("kind", damaged(tiny.TOKENIZER.read_text(encoding="utf-8")))
def test_damaged_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(damaged(tiny.TOKENIZER.read_text(encoding="utf-8"))[kind])
    with pytest.raises(InputError) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


# --- chat template ---

SYSTEM = "<|begin_of_text|>system\nYou are a helpful assistant.<|end_of_text|>\n"
ASK = "<|begin_of_text|>assistant\n"


def turn(role: str, content: str) -> str:
    return f"<|begin_of_text|>{role}\n{content}<|end_of_text|>\n"


IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "What is it?"}
CHATS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"role": "user", "content": "Hi"}], SYSTEM + turn("user", "Hi") + ASK),
    "image": (
        [{"role": "user", "content": [IMAGE, TEXT]}],
        SYSTEM + turn("user", "<|vision_start|><|image_pad|><|vision_end|>What is it?") + ASK,
    ),
    "system": (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [TEXT]}],
        turn("system", "Be brief.") + turn("user", "What is it?") + ASK,
    ),
    "turns": (
        [{"role": role, "content": text} for role, text in (("user", "A"), ("assistant", "B"), ("user", "C"))],
        SYSTEM + turn("user", "A") + turn("assistant", "B") + turn("user", "C") + ASK,
    ),
}


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    source = (tiny.HERE / "chat_template.jinja").read_text(encoding="utf-8")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, raise_exception=raise_exception
    )


@pytest.mark.parametrize(("messages", "expected"), CHATS.values(), ids=CHATS.keys())
def test_chat_template(messages: list[dict[str, Any]], expected: str) -> None:
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=False) == expected.removesuffix(ASK)


def test_chat_template_refuses_an_unknown_part() -> None:
    with pytest.raises(jinja2.TemplateError, match="audio"):
        render([{"role": "user", "content": [{"type": "audio"}]}])
