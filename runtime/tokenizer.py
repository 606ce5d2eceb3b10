"""Text to token ids and back, from a Hugging Face tokenizer.json: added tokens, splitting, byte-level BPE.

Gives the ids of the `tokenizers` library with add_special_tokens off, in steps that a port can repeat line by
line: loops, tables and one heap. NFC alone leans on Python's unicodedata.
But: no truncation, no padding, no post-processor, no dropout, no unknown token; what is asked is refused.
"""

import codecs
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bpe import Bpe, token_bytes
from runtime.errors import InputError
from runtime.pretokenizers import WHITESPACE, Splitter, run, split_groups, steps
from runtime.unicode_classes import classes_of, flags


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text itself, before any splitting."""

    id: int
    content: str
    single_word: bool  # not inside a word
    lstrip: bool  # takes the whitespace on its left
    rstrip: bool  # takes the whitespace on its right
    normalized: bool  # is matched in the normalized text
    special: bool  # is left out when decoding


class Matcher:
    """Finds added tokens, by the text that stands for each: the leftmost, of those the longest."""

    def __init__(self, tokens: dict[str, AddedToken]) -> None:
        self.tokens = tokens
        lengths: dict[str, set[int]] = {}  # by first character
        for text in tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self.lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def split(self, text: str) -> Iterator[tuple[str, AddedToken | None]]:
        """The text in pieces: a found token with the whitespace it takes, or text between (None)."""
        classes = classes_of(text)
        begun = 0  # left of here all is done; but a token may begin in whitespace that the last one took
        for start, end, token in self._matches(text):
            if token.single_word and not _stands_alone(text, start, end):
                continue
            if token.lstrip:
                start = max(_left_of_spaces(classes, start), begun)
            if token.rstrip:
                end = run(classes, end, WHITESPACE)
            if begun < start:
                yield text[begun:start], None
            yield text[start:end], token
            begun = end
        if begun < len(text):
            yield text[begun:], None

    def _matches(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        start = 0
        while start < len(text):
            end = self._longest(text, start)
            if end:
                yield start, end, self.tokens[text[start:end]]
            start = end or start + 1

    def _longest(self, text: str, start: int) -> int:
        for length in self.lengths.get(text[start], ()):
            end = start + length
            if end <= len(text) and text[start:end] in self.tokens:
                return end
        return 0


def _stands_alone(text: str, start: int, end: int) -> bool:
    word = flags("word")
    return not (start > 0 and word[ord(text[start - 1])]) and not (end < len(text) and word[ord(text[end])])


def _left_of_spaces(classes: bytes, end: int) -> int:
    while end > 0 and classes[end - 1] & WHITESPACE:
        end -= 1
    return end


def nfc(text: str) -> str:
    """Canonical composition by the library's older Unicode: what is newer passes through unchanged."""
    if text.isascii():
        return text
    inert = flags("inert")
    pieces = split_groups(inert, runs=True)(text)
    return "".join(piece if inert[ord(piece[0])] else unicodedata.normalize("NFC", piece) for piece in pieces)


class Tokenizer:
    """Text to ids and back. Made from the content of a tokenizer.json; `where` is its name in messages."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        _refuse_if_set(config, ("truncation", "padding"), where)
        self._bpe = _read_model(config["model"], where)
        self._added = _read_added_tokens(config.get("added_tokens") or [], self._bpe.vocab, where)
        self._nfc = _reads_nfc(config.get("normalizer"), where)
        self._steps: list[Splitter] = steps(config.get("pre_tokenizer"), where)
        if (config.get("decoder") or {}).get("type") != "ByteLevel":
            raise _refusal(where, "decoder", config.get("decoder"), "only ByteLevel is known")
        self._tokens = {number: token for token, number in self._bpe.vocab.items()}
        # The library decodes a normalized token to its normalized text and skips by text: a special token
        # whose text the normalizer changes is not skipped.
        shown = {token.id: self._searched(token) for token in self._added.values()}
        special = {token.content for token in self._added.values() if token.special}
        self._tokens |= shown
        self._vocab_size = max(self._tokens) + 1
        self._special = frozenset(number for number, text in shown.items() if text in special)
        self._in_raw_text, self._in_normalized_text = self._matchers(where)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read a Hugging Face tokenizer.json. Raises InputError, naming the file, if it cannot be obeyed."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")), str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); give a folder with tokenizer.json") from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path}: is not a whole Hugging Face tokenizer.json ({type(error).__name__}: {error})\n"
                "  copy the file again from the checkpoint"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included."""
        return self._vocab_size

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the file, None if it has none."""
        added = self._added.get(token)
        return added.id if added else self._bpe.vocab.get(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a text: what the `tokenizers` library gives with add_special_tokens=False."""
        ids: list[int] = []
        for piece, token in self._pieces(text):
            if token:
                ids.append(token.id)
            else:
                ids += self._bpe.ids(piece)
        return ids

    def pieces(self, text: str) -> list[str]:
        """The pieces that are turned into ids one by one: added tokens, and text that no merge crosses."""
        return [piece for piece, _ in self._pieces(text)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. An id without a token gives nothing; bytes that are not UTF-8 give U+FFFD."""
        parts = [self.token_bytes(token, skip_special_tokens=skip_special_tokens) for token in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def stream(self) -> "TextStream":
        """Decode ids as they come."""
        return TextStream(self)

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Bytes that one id adds to a decoded text."""
        if token < 0:
            raise InputError(f"cannot decode id {token}: ids are 0 or more")
        if skip_special_tokens and token in self._special:
            return b""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = token_bytes(self._tokens.get(token, ""))
        return found

    def _pieces(self, text: str) -> Iterator[tuple[str, AddedToken | None]]:
        _refuse_surrogates(text)
        for gap, raw_token in self._in_raw_text.split(text):
            if raw_token:
                yield gap, raw_token
                continue
            for piece, token in self._in_normalized_text.split(nfc(gap) if self._nfc else gap):
                if token:
                    yield piece, token
                else:
                    yield from ((word, None) for word in self._words(piece))

    def _words(self, text: str) -> list[str]:
        pieces = [text]
        for step in self._steps:
            pieces = [part for piece in pieces for part in step(piece)]
        return pieces

    def _searched(self, token: AddedToken) -> str:
        return nfc(token.content) if token.normalized and self._nfc else token.content

    def _matchers(self, where: str) -> tuple[Matcher, Matcher]:
        raw: dict[str, AddedToken] = {}
        normalized: dict[str, AddedToken] = {}
        for token in self._added.values():
            if not token.normalized:
                raw[token.content] = token
                continue
            content = self._searched(token)
            if content in normalized:
                raise InputError(
                    f"{where}: added tokens {normalized[content].id} and {token.id} are both {content!r} "
                    "once normalized, and which one the library finds is chance; remove one of them"
                )
            normalized[content] = token
        return Matcher(raw), Matcher(normalized)


class TextStream:
    """Text of ids that come one by one; special tokens are left out.

    The texts of all pushes and of the finish are together `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes; often none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character was not completed."""
        return self._decoder.decode(b"", final=True)


def _read_model(model: dict[str, Any], where: str) -> Bpe:
    if model.get("type") != "BPE":
        raise _refusal(where, "model type", model.get("type"), "only BPE is known")
    unknown = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
    )
    _refuse_if_set(model, unknown, where)
    vocab: dict[str, int] = model["vocab"]
    if len(set(vocab.values())) != len(vocab) or not all(type(number) is int for number in vocab.values()):
        raise InputError(f"{where}: the vocabulary must give each token an id of its own; copy the file again")
    merges = [_pair(merge) for merge in model["merges"]]
    for left, right in merges:
        if not (left in vocab and right in vocab and left + right in vocab):
            raise InputError(f"{where}: merge {left!r} + {right!r} is not in the vocabulary; copy the file again")
    return Bpe(vocab, merges, ignore_merges=bool(model.get("ignore_merges")))


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _read_added_tokens(entries: list[dict[str, Any]], vocab: dict[str, int], where: str) -> dict[str, AddedToken]:
    added: dict[str, AddedToken] = {}
    following = len(vocab)
    for entry in entries:
        token = AddedToken(**entry)
        expected = vocab.get(token.content, following)
        if token.id != expected or token.content in added or not token.content:
            raise InputError(
                f"{where}: added token {token.content!r} has id {token.id}, but should be {expected}:\n"
                "  added tokens are numbered in the order of the file, each once, behind the vocabulary;\n"
                "  export tokenizer.json again with the library"
            )
        added[token.content] = token
        following = max(following, token.id + 1)
    return added


def _reads_nfc(normalizer: Any, where: str) -> bool:
    match normalizer:
        case None:
            return False
        case {"type": "NFC"}:
            return True
        case {"type": "Sequence", "normalizers": list(parts)}:
            return True in [_reads_nfc(part, where) for part in parts]
    raise _refusal(where, "normalizer", normalizer, "only NFC is known")


def _refuse_if_set(config: dict[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if config.get(name):
            raise _refusal(where, name, config[name], "it must be null, false or empty")


def _refusal(where: str, what: str, value: Any, why: str) -> InputError:
    return InputError(f"{where}: cannot obey {what} {json.dumps(value, ensure_ascii=False)}: {why}")


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"cannot encode text: lone surrogate U+{ord(text[error.start]):04X} at character {error.start};\n"
            "  decode its source as UTF-8 or UTF-16"
        ) from None
