"""Write runtime/unicode_classes.txt: `python -m references.unicode_classes`.

Every set is asked from the `tokenizers` library itself, since its three Unicode tables (regex engine, Rust's
standard library, normalizer) are of three different Unicode versions, none of them Python's.
But: `inert` also depends on Python's unicodedata, so it holds for the Python version of pyproject.toml only.
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import NFC, NFD
from tokenizers.pre_tokenizers import Digits, Split

TABLE = Path(__file__).parents[1] / "runtime" / "unicode_classes.txt"
CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
REGEX_SETS = {name: rf"\p{{{name}}}" for name in ("Lu", "Lt", "Ll", "Lm", "Lo", "M", "N")} | {"space": r"\s"}

HEADER = """\
# Sets of code points as the tokenizers library sees them; written by python -m references.unicode_classes.
# Lu Lt Ll Lm Lo M N space: its regex engine.  numeric: what its Digits pre-tokenizer isolates.
# word: neighbours that keep a single_word token from matching.  inert: unknown to its NFC, known to ours.
"""


def regex_set(pattern: str, characters: Iterable[str] = CHARACTERS) -> set[str]:
    """Characters that the library's regex engine matches with `pattern`, a pattern of one character."""
    runs = Split(Regex(f"(?:{pattern})+"), "removed", invert=True).pre_tokenize_str("".join(characters))
    return {char for run, _ in runs for char in run}


def numeric_set(characters: Iterable[str] = CHARACTERS) -> set[str]:
    """Characters that the Digits pre-tokenizer isolates."""
    text = "".join(f"{char}--" for char in characters)
    pieces = Digits(individual_digits=True).pre_tokenize_str(text)
    return {piece for piece, _ in pieces if len(piece) == 1}


def word_set(characters: Iterable[str] = CHARACTERS) -> set[str]:
    """Characters after which a single_word token is not matched."""
    token = {"id": 0, "content": "<w>", "single_word": True, "special": False}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": {"<w>": 0}, "merges": []}
    tokenizer = Tokenizer.from_str(json.dumps({"added_tokens": [token | flags], "model": model}))
    characters = list(characters)
    found: set[str] = set()
    for start in range(0, len(characters), 65536):
        block = characters[start : start + 65536]
        spans = tokenizer.encode("".join(f"{char}<w> " for char in block)).offsets
        matched = {first // 5 for first, _ in spans}
        found.update(char for index, char in enumerate(block) if index not in matched)
    return found


def inert_set() -> set[str]:
    """Characters that Python's NFC reorders or composes and the library's, an older one, passes through."""
    combining = [char for char in CHARACTERS if unicodedata.combining(char)]
    found = {char for char in combining if any(_nfc_differs(form) for form in _around(char))}
    for char in CHARACTERS:
        if _nfd_differs(char):
            found.update(char, unicodedata.normalize("NFD", char))
    return found


def _around(mark: str) -> Iterator[str]:
    for other in "\u0301\u0323\u3099\u0345\u0327":
        yield from (f"a{mark}{other}", f"a{other}{mark}")


def _nfc_differs(text: str) -> bool:
    return str(NFC().normalize_str(text)) != unicodedata.normalize("NFC", text)


def _nfd_differs(text: str) -> bool:
    return str(NFD().normalize_str(text)) != unicodedata.normalize("NFD", text)


def spans(characters: Iterable[str]) -> Iterator[str]:
    """Ranges in hexadecimal, `first-last` or `first` alone."""
    codes = sorted(map(ord, characters))
    start = 0
    for index, code in enumerate(codes):
        if index + 1 == len(codes) or codes[index + 1] != code + 1:
            first = codes[start]
            yield f"{first:04X}" if first == code else f"{first:04X}-{code:04X}"
            start = index + 1


def table_text() -> str:
    """The whole file."""
    sets = {name: regex_set(pattern) for name, pattern in REGEX_SETS.items()}
    sets |= {"numeric": numeric_set(), "word": word_set(), "inert": inert_set()}
    lines = [line for name, characters in sets.items() for line in _lines(name, characters)]
    return HEADER + "\n".join(lines) + "\n"


def _lines(name: str, characters: set[str], *, width: int = 110) -> Iterator[str]:
    line = name
    for span in spans(characters):
        if len(line) + 1 + len(span) > width:
            yield line
            line = name
        line += " " + span
    yield line


if __name__ == "__main__":
    TABLE.write_text(table_text(), encoding="ascii")
