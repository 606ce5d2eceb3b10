"""Splits text into the pieces that byte-pair merging never crosses, without a regex engine.

Follows the `pre_tokenizer` of a Hugging Face tokenizer.json: a chain of steps, each splitting every piece of
the step before it on its own. A regex is known by its exact text (`SPLITTERS`), split by hand-written code.
But: any other regex, and any other component, is refused.
"""

import json
from collections.abc import Callable
from typing import Any

from runtime.errors import InputError
from runtime.unicode_classes import (
    CODE_POINTS,
    LETTER,
    LOWER,
    MARK,
    NEWLINE,
    NUMBER,
    OTHER,
    SPACE,
    UPPER,
    classes_of,
    code_points,
    flags,
)

Splitter = Callable[[str], list[str]]  # a piece, not empty -> its pieces in order, which cover it
NextEnd = Callable[[str, bytes, int], int]  # text, classes_of(text), start of a piece -> its end

# The sets that the regexes are made of.
ANY_LETTER = UPPER | LOWER | LETTER  # \p{L}
UPPERISH = UPPER | LETTER | MARK  # [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
LOWERISH = LOWER | LETTER | MARK  # [\p{Ll}\p{Lm}\p{Lo}\p{M}]
WHITESPACE = SPACE | NEWLINE  # \s
LEAD = SPACE | MARK | OTHER  # [^\r\n\p{L}\p{N}]
SYMBOL = MARK | OTHER  # [^\s\p{L}\p{N}]


def run(classes: bytes, start: int, mask: int) -> int:
    """End of the longest run from `start` whose classes are all in `mask`; `start` if there is none."""
    end = start
    while classes[end] & mask:
        end += 1
    return end


# English suffixes, per spelling in the regex.
EXACT = frozenset({"s", "t", "re", "ve", "m", "ll", "d"})  # 's|'t|'re|'ve|'m|'ll|'d
ASCII_CASE = frozenset(  # '[sS]|'[tT]|'[rR][eE]|...
    {"s", "S", "t", "T", "m", "M", "d", "D"} | {"re", "rE", "Re", "RE", "ve", "vE", "Ve", "VE", "ll", "lL", "Ll", "LL"}
)
ANY_CASE = ASCII_CASE | {"\u017f"}  # (?i:'s|...): the long s is an s in another case


def contraction(text: str, start: int, suffixes: frozenset[str]) -> int:
    """End of an apostrophe and one of `suffixes` at `start`; 0 if there is none."""
    if text[start : start + 1] != "'":
        return 0
    for end in (start + 2, start + 3):
        if text[start + 1 : end] in suffixes:
            return end
    return 0


def symbols(text: str, classes: bytes, start: int) -> int:
    r"""End of ` ?[^\s\p{L}\p{N}]+` at `start`; 0 if it does not match."""
    first = start + (text[start] == " ")
    end = run(classes, first, SYMBOL)
    return end if end > first else 0


def spaces(classes: bytes, start: int) -> int:
    r"""End of `\s+(?!\S)|\s+` at `start`: a run leaves its last space to the word behind it."""
    end = run(classes, start, WHITESPACE)
    return end - 1 if classes[end] and end - start > 1 else end


def spaces_or_lines(classes: bytes, start: int) -> int:
    r"""End of `\s*[\r\n]+|\s+(?!\S)|\s+` at `start`: a run is cut behind its last newline."""
    last = classes.rfind(NEWLINE, start, run(classes, start, WHITESPACE))
    return last + 1 if last >= 0 else spaces(classes, start)


def gpt2_end(text: str, classes: bytes, start: int) -> int:
    r"""`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`."""
    if end := contraction(text, start, EXACT):
        return end
    first = start + (text[start] == " ")
    for mask in (ANY_LETTER, NUMBER, SYMBOL):
        if classes[first] & mask:
            return run(classes, first, mask)
    return spaces(classes, start)


def llama3_end(*, digits: int) -> NextEnd:
    r"""The pattern of Llama 3, whose third branch `\p{N}{1,3}` takes up to `digits` numbers."""

    def next_end(text: str, classes: bytes, start: int) -> int:
        here = classes[start]
        if here & ANY_LETTER:
            return run(classes, start, ANY_LETTER)
        if here & NUMBER:
            return min(run(classes, start, NUMBER), start + digits)
        if end := contraction(text, start, ANY_CASE):
            return end
        if here & LEAD and classes[start + 1] & ANY_LETTER:
            return run(classes, start + 1, ANY_LETTER)
        if end := symbols(text, classes, start):
            return run(classes, end, NEWLINE)
        return spaces_or_lines(classes, start)

    return next_end


def lower_word(classes: bytes, start: int) -> int:
    """End of UPPERISH* LOWERISH+ at `start`; 0 if it does not match."""
    border = run(classes, start, UPPERISH)
    end = run(classes, border, LOWERISH)
    if end > border:
        return end
    # A regex gives back characters of the first run until one of them can stand for the second.
    while border > start and not classes[border - 1] & LOWERISH:
        border -= 1
    return border if border > start else 0


def upper_word(classes: bytes, start: int) -> int:
    """End of UPPERISH+ LOWERISH* at `start`; 0 if it does not match."""
    border = run(classes, start, UPPERISH)
    return run(classes, border, LOWERISH) if border > start else 0


def gpt4o_end(*, suffixes: frozenset[str]) -> NextEnd:
    r"""The pattern of GPT-4o, but one number at a time: words split at capitals and keep their suffix."""

    def next_end(text: str, classes: bytes, start: int) -> int:
        here = classes[start]
        if here & NUMBER:
            return start + 1
        # The optional leading character is taken if it can be; a mark can be the lead or part of the word.
        firsts = (start + 1, start) if here & MARK else (start + 1,) if here & LEAD else (start,)
        for word in (lower_word, upper_word):
            for first in firsts:
                if end := word(classes, first):
                    return contraction(text, end, suffixes) or end
        if end := symbols(text, classes, start):
            while classes[end] & NEWLINE or text[end : end + 1] == "/":
                end += 1
            return end
        return spaces_or_lines(classes, start)

    return next_end


def split_with(next_end: NextEnd) -> Splitter:
    """A splitter from a rule that matches at every position, as all of the above do."""

    def split(text: str) -> list[str]:
        classes = classes_of(text)
        pieces = []
        start = 0
        while start < len(text):
            end = next_end(text, classes, start)
            pieces.append(text[start:end])
            start = end
        return pieces

    return split


def split_groups(groups: bytes, *, runs: bool) -> Splitter:
    """A splitter by group number per code point, 0 for none: a run of a group, or each member, is a piece."""

    def split(text: str) -> list[str]:
        members = [groups[code] for code in code_points(text)]
        pieces = []
        start = 0
        for index in range(1, len(text)):
            if members[index] != members[index - 1] or (members[index] and not runs):
                pieces.append(text[start:index])
                start = index
        return [*pieces, text[start:]]

    return split


# Youtu's first stage: Hangul, CJK punctuation, Bopomofo, Han with kana. Ranges, as inside a regex set.
CJK_SETS = (
    "\uac00-\ud7a3\u3131-\u318e",
    "\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f",
    "\u3105-\u312f",
    "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff",
)


def cjk_groups() -> bytes:
    """1 to 4 for the code points of each of CJK_SETS, else 0."""
    groups = bytearray(CODE_POINTS)
    for number, members in enumerate(CJK_SETS, start=1):
        for index, char in enumerate(members):
            if char == "-":
                continue
            first = members[index - 2] if members[index - 1 : index] == "-" else char
            for code in range(ord(first), ord(char) + 1):
                groups[code] = number
    return bytes(groups)


def cjk(*, runs: bool) -> Splitter:
    """Youtu's first stage: whole runs of a set, or one character each."""
    split = split_groups(cjk_groups(), runs=runs)
    return lambda text: [text] if text.isascii() else split(text)


def escaped(pattern: str) -> str:
    r"""The same regex with every character beyond ASCII spelt \uXXXX."""
    return "".join(char if char.isascii() else f"\\u{ord(char):04X}" for char in pattern)


CJK_RUNS = "|".join(f"[{members}]+" for members in CJK_SETS)
CJK_SINGLE = "|".join(f"[{members}]" for members in CJK_SETS)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SINGLE_DIGITS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with the suffixes' cases spelt out: without the long s.
GPT4O_SINGLE_DIGITS_ASCII = GPT4O_SINGLE_DIGITS.replace(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Exact pattern text -> how to make its splitter.
SPLITTERS: dict[str, Callable[[], Splitter]] = {
    CJK_RUNS: lambda: cjk(runs=True),
    escaped(CJK_RUNS): lambda: cjk(runs=True),
    CJK_SINGLE: lambda: cjk(runs=False),
    escaped(CJK_SINGLE): lambda: cjk(runs=False),
    GPT4O_SINGLE_DIGITS: lambda: split_with(gpt4o_end(suffixes=ANY_CASE)),
    GPT4O_SINGLE_DIGITS_ASCII: lambda: split_with(gpt4o_end(suffixes=ASCII_CASE)),
    LLAMA3: lambda: split_with(llama3_end(digits=3)),
    QWEN2: lambda: split_with(llama3_end(digits=1)),
    GPT2: lambda: split_with(gpt2_end),
}


def steps(config: Any, where: str) -> list[Splitter]:
    """The chain that a tokenizer.json's `pre_tokenizer` asks for. Refuses, quoting it, what it cannot do."""
    components = _flat(config)
    if not components or _kind(components[-1]) != "ByteLevel":
        raise _refusal(where, config, "the last component must be ByteLevel")
    return [step for component in components for step in _steps(component, where)]


def _flat(config: Any) -> list[Any]:
    if _kind(config) != "Sequence":
        return [config]
    return [leaf for component in config.get("pretokenizers", []) for leaf in _flat(component)]


def _kind(component: Any) -> Any:
    return component.get("type") if isinstance(component, dict) else None


def _steps(component: Any, where: str) -> list[Splitter]:
    match component:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            if pattern not in SPLITTERS:
                raise _refusal(where, pattern, "its text is not in SPLITTERS")
            return [SPLITTERS[pattern]()]
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return [split_groups(flags("numeric"), runs=not individual)]
        case {"type": "ByteLevel", "add_prefix_space": bool(prefix), "trim_offsets": bool(), **rest}:
            return ([_prefix_space] if prefix else []) + ([split_with(gpt2_end)] if rest.get("use_regex", True) else [])
    raise _refusal(where, component, "this component, or one of its options, is not known")


def _prefix_space(piece: str) -> list[str]:
    return [piece if piece.startswith(" ") else " " + piece]


def _refusal(where: str, quoted: Any, why: str) -> InputError:
    text = quoted if isinstance(quoted, str) else json.dumps(quoted, ensure_ascii=False)
    return InputError(
        f"{where}: cannot split text as the pre-tokenizer asks: {text}\n"
        f"  {why}; write its splitter in runtime/pretokenizers.py"
    )
