"""Lines of text in many scripts and of every awkward kind, made by code: the same lines on every machine.

Words are drawn from Unicode's blocks, so most are no words of a language: merges of whole words are better
tried with texts out of a vocabulary (`shuffled`).
But: no lone surrogates, which are not text.
"""

from collections.abc import Callable, Sequence
from functools import cache

from references.lines import LINES

# Letters, marks and digits of a script, unassigned code points between them included: ranges as in a regex set.
SCRIPTS = {
    "Latin": "a-za-zA-Z",
    "Latin, accented": "a-z\u00c0-\u024f\u1e00-\u1eff",
    "Greek": "\u0386-\u03ce\u1f00-\u1fbc",
    "Cyrillic": "\u0400-\u045f\u0430-\u044f",
    "Armenian": "\u0531-\u0556\u0561-\u0587",
    "Hebrew": "\u05d0-\u05ea\u05d0-\u05ea\u05b0-\u05c2",
    "Arabic": "\u0620-\u064a\u0620-\u064a\u064b-\u0669",
    "Syriac": "\u0710-\u074a",
    "Thaana": "\u0780-\u07b1",
    "NKo": "\u07c0-\u07f5",
    "Devanagari": "\u0905-\u0939\u0901-\u0903\u093c-\u094d\u0966-\u096f",
    "Bengali": "\u0985-\u09b9\u09bc-\u09cd\u09e6-\u09ef",
    "Gurmukhi": "\u0a05-\u0a39\u0a3c-\u0a4d",
    "Gujarati": "\u0a85-\u0ab9\u0abc-\u0acd",
    "Oriya": "\u0b05-\u0b39\u0b3c-\u0b4d",
    "Tamil": "\u0b85-\u0bb9\u0bbe-\u0bcd\u0bf0-\u0bf2",
    "Telugu": "\u0c05-\u0c39\u0c3e-\u0c4d",
    "Kannada": "\u0c85-\u0cb9\u0cbc-\u0ccd",
    "Malayalam": "\u0d05-\u0d39\u0d3e-\u0d4d",
    "Sinhala": "\u0d85-\u0dc6\u0dca-\u0ddf",
    "Thai": "\u0e01-\u0e3a\u0e40-\u0e59",
    "Lao": "\u0e81-\u0ecd\u0ed0-\u0ed9",
    "Tibetan": "\u0f40-\u0f6c\u0f71-\u0fbc\u0f20-\u0f33",
    "Myanmar": "\u1000-\u1049",
    "Georgian": "\u10a0-\u10c5\u10d0-\u10fa\u1c90-\u1cba",
    "Hangul": "\uac00-\ud7a3",
    "Hangul jamo": "\u1100-\u1112\u1161-\u1175\u11a8-\u11c2\u3131-\u318e",
    "Ethiopic": "\u1200-\u135a\u1369-\u137c",
    "Cherokee": "\u13a0-\u13f5\uab70-\uabbf",
    "Canadian syllabics": "\u1401-\u166c",
    "Ogham": "\u1680-\u169c",
    "Khmer": "\u1780-\u17d2\u17e0-\u17e9",
    "Mongolian": "\u1810-\u1877\u180b-\u180e",
    "Hiragana": "\u3041-\u309f",
    "Katakana": "\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "Bopomofo": "\u3105-\u312f\u31a0-\u31bf",
    "Han": "\u4e00-\u9fff",
    "Han, rare": "\u3400-\u4dbf\U00020000-\U0002a6df\uf900-\ufad9",
    "Yi": "\ua000-\ua48c",
    "Gothic": "\U00010330-\U0001034a",
    "Deseret": "\U00010400-\U0001044f",
    "Cuneiform": "\U00012000-\U00012399\U00012400-\U0001246e",
    "Adlam": "\U0001e900-\U0001e959",
    "mathematical": "\U0001d400-\U0001d7ff",
    "fullwidth": "\uff10-\uff19\uff21-\uff3a\uff41-\uff5a",
}
LINES_PER_SCRIPT = 48

BETWEEN = (
    " ",
    " ",
    " ",
    " ",
    ", ",
    ". ",
    "-",
    "'",
    "\u00a0",
    "\u3000",
    "\u3001",
    "\u061f ",
    " \u2014 ",
    "\u0964 ",
    "/",
)
ENDS = (".", "!", "?", "\u3002", "\uff1f", "\u2026", " 12", "'s", ":\n", "\n", "")
MARKS = (
    "\u0300-\u036f\u0483-\u0489\u064b-\u0652\u093c-\u094d\u0e31-\u0e3a\u20d0-\u20f0\u3099-\u309a\U0001d165-\U0001d172"
)
BASES = "aeonAE\u0131\u03b1\u0438\u05d0\u0628\u0915\u304b\u1100\u6f22\u00e9\u1e69\u212b1 .\U0001f600"
EMOJI = "\u2600-\u27bf\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001faff"
JOINERS = ("\u200d", "\u200d", "\ufe0f\u200d", "\U0001f3fd", "\ufe0e", "\u20e3", "", " ")
FLAGS = "\U0001f1e6-\U0001f1ff"
PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
UNASSIGNED = "\u0378-\u0379\u0530-\u0530\u05eb-\u05ee\u2fe0-\u2fef\ufdd0-\ufdef\uffff-\uffff\U0001fffe-\U0001ffff"
UNASSIGNED += "\U00040000-\U0004ffff\U000e0080-\U000e00ff\U00016000-\U000160ff"
BLANKS = (
    " ",
    " ",
    " ",
    "\n",
    "\r\n",
    "\t",
    "\r",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x0b",
    "\x0c",
    "\x1f",
    "\u0085",
    "\u200b",
)
KEYWORDS = ("if", "for", "return", "def", "class", "self", "const", "let", "void", "int", "std::vector", "fn", "SELECT")
OPERATORS = (
    "=",
    "==",
    "+=",
    "->",
    "=>",
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    ";",
    ",",
    ".",
    "::",
    "//",
    "#",
    "&&",
    "*",
    "/*",
    "$",
)
INDENTS = ("", "    ", "        ", "\t", "\t\t", "  ")


class Draw:
    """A sequence of numbers that is the same everywhere: Knuth's 64-bit linear congruence, its upper half."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, limit: int) -> int:
        """The next number, from 0 to below `limit`."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self.state >> 32) * limit >> 32

    def one(self, choices: Sequence[str]) -> str:
        """One of `choices`."""
        return choices[self.below(len(choices))]

    def word(self, characters: Sequence[str], longest: int) -> str:
        """1 to `longest` of `characters`."""
        return "".join(self.one(characters) for _ in range(1 + self.below(longest)))


@cache
def members(ranges: str) -> str:
    """The characters of `ranges`, as in a regex set of ranges alone."""
    firsts, lasts = ranges[::3], ranges[2::3]
    return "".join(chr(code) for a, b in zip(firsts, lasts, strict=True) for code in range(ord(a), ord(b) + 1))


def sentence(draw: Draw, *scripts: str) -> str:
    """Words of `scripts`, one after the other, with something between and behind them."""
    alphabets = [members(SCRIPTS[script]) for script in scripts]
    words = [draw.word(draw.one(alphabets), 9) + draw.one(BETWEEN) for _ in range(3 + draw.below(9))]
    return "".join(words) + draw.one(ENDS)


def mixed(draw: Draw) -> str:
    """Words of three scripts, mostly with nothing between them."""
    names = [draw.one(tuple(SCRIPTS)) for _ in range(3)]
    words = [draw.word(members(SCRIPTS[draw.one(names)]), 4) for _ in range(12)]
    return "".join(word + draw.one(("", "", " ")) for word in words)


def code(draw: Draw) -> str:
    """A line that looks like source code."""
    parts = []
    for _ in range(2 + draw.below(9)):
        name = draw.word("abcdefghijklmnopqrstuvwxyz_ABCXYZ019", 12)
        parts.append(draw.one((draw.one(KEYWORDS), name, name, f'"{name}"', f"{name}'s", f"0x{draw.below(1 << 32):X}")))
        parts.append(draw.one(("", " ")) + draw.one(OPERATORS) + draw.one(("", " ", " ")))
    return draw.one(INDENTS) + "".join(parts) + draw.one(("", ";", " {", "\n", "\r\n", "  // \u00e9\u6f22"))


def numbers(draw: Draw) -> str:
    """Numbers in several notations and digits."""
    forms = ("{}", "-{}", "{:,}", "{:x}", "{:e}", "{}%", "\u20ac{}", "{:012}", "({})", "#{}")
    return " ".join(draw.one(forms).format(draw.below(10 ** (1 + draw.below(9)))) for _ in range(8)) + _digits(draw)


def _digits(draw: Draw) -> str:
    return draw.word("\u0660\u0661\u0967\u09e8\u0e53\uff14\u2155\u2167\u00b2\u3007\u4e09\U0001d7da\u0bf0", 12)


def address(draw: Draw) -> str:
    """A URL or a path."""
    name = "abcdefghijklmnopqrstuvwxyz0123456789-_.~%\u00fc\u6f22"
    parts = [draw.word(name, 10) + draw.one(("/", "/", "//", "?", "&", "=", "#", "\\", ".")) for _ in range(7)]
    return draw.one(("https://", "ftp://", "C:\\", "~/", "./", "mailto:")) + "".join(parts)


def emoji(draw: Draw) -> str:
    """Emoji with joiners, selectors and skin tones; flags."""
    parts = [draw.one(members(EMOJI)) + draw.one(JOINERS) for _ in range(10)]
    return "".join(parts) + draw.word(members(FLAGS), 5) + draw.one(("", " ", "1\ufe0f\u20e3"))


def marks(draw: Draw) -> str:
    """Letters under stacks of combining marks."""
    stacks = [draw.one(BASES) + draw.word(members(MARKS), 6) for _ in range(8)]
    return draw.one(("", " ", "\u0301")) + "".join(stack + draw.one(("", "", " ", "'s")) for stack in stacks)


def nameless(draw: Draw) -> str:
    """Private-use and unassigned code points, alone and between words."""
    parts = [draw.word(members(draw.one((PRIVATE, UNASSIGNED))), 3) for _ in range(6)]
    return "".join(part + draw.one(("", " ", "a", "9", "\n", "\u6f22")) for part in parts)


def blanks(draw: Draw) -> str:
    """Runs of one blank, up to 200 long, and of several, with or without a word behind them."""
    runs = [draw.one(BLANKS) * (1 + draw.below(1 + draw.below(200))) for _ in range(3)]
    return "".join(run + draw.one(("", "", "x", "!", "7", "\u6f22")) + draw.word(BLANKS, 6) for run in runs)


def repeats(draw: Draw) -> str:
    """A long piece: one or a few characters over and over."""
    unit = draw.word(members(SCRIPTS[draw.one(tuple(SCRIPTS))]) + "-=_*#!", 3)
    return unit * (20 + draw.below(120))


KINDS: tuple[Callable[[Draw], str], ...] = (
    *(mixed, code, code, code, numbers, address, emoji, marks, nameless, blanks, repeats),
)
LINES_PER_KIND = 40


def with_tokens(draw: Draw, tokens: Sequence[str]) -> str:
    """Added tokens and their beginnings, side by side and inside words."""
    parts = []
    for _ in range(6):
        token = draw.one(tokens)
        parts.append(draw.one((token, token, token[:-1], token[1:], f"<{token}>", token + "1", token.upper())))
        parts.append(draw.one(("", "", " ", "\n", "word", "\u6f22", "  ")))
    return "".join(parts)


def lines(tokens: Sequence[str], *, seed: int = 20) -> list[str]:
    """The corpus, with `tokens` inside text. A line may hold newlines, and ends in none of its own."""
    draw = Draw(seed)
    made = list(LINES)
    for script in SCRIPTS:
        made += [sentence(draw, script) for _ in range(LINES_PER_SCRIPT)]
    for kind in KINDS:
        made += [kind(draw) for _ in range(LINES_PER_KIND)]
    return made + [with_tokens(draw, tokens) for _ in range(LINES_PER_KIND * 2)]


def shuffled(texts: Sequence[str], *, together: int, seed: int = 20) -> list[str]:
    """Each of `texts` once, in a drawn order, `together` to a line."""
    draw = Draw(seed)
    order = list(texts)
    for last in range(len(order) - 1, 0, -1):
        other = draw.below(last + 1)
        order[last], order[other] = order[other], order[last]
    return ["".join(order[start : start + together]) for start in range(0, len(order), together)]
