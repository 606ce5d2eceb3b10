"""Which class a code point belongs to, as the `tokenizers` library sees it.

The classes are data: `unicode_classes.txt`, written by `python -m references.unicode_classes`. A port reads
the same file and needs no Unicode library.
"""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CODE_POINTS = 0x110000
TABLE = Path(__file__).with_name("unicode_classes.txt")

# One bit per class, so that a set of classes is a mask. Every code point has one class; 0 ends a text.
UPPER = 1  # Lu, Lt
LOWER = 2  # Ll
LETTER = 4  # Lm, Lo: letters without case
MARK = 8  # M
NUMBER = 16  # N
SPACE = 32  # whitespace other than CR and LF
NEWLINE = 64  # CR, LF
OTHER = 128

_CLASS_OF = {
    "Lu": UPPER,
    "Lt": UPPER,
    "Ll": LOWER,
    "Lm": LETTER,
    "Lo": LETTER,
    "M": MARK,
    "N": NUMBER,
    "space": SPACE,
}


@cache
def ranges() -> dict[str, list[tuple[int, int]]]:
    """The table by name: ranges of code points, first and last included."""
    table: dict[str, list[tuple[int, int]]] = {}
    for line in TABLE.read_text(encoding="ascii").splitlines():
        name, *spans = line.split()
        if name != "#":
            table.setdefault(name, []).extend(_span(span) for span in spans)
    return table


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first, 16), int(last or first, 16)


@cache
def flags(name: str) -> bytes:
    """1 for each code point in the named set, else 0. 0x110000 bytes."""
    table = np.zeros(CODE_POINTS, dtype=np.uint8)
    for first, last in ranges()[name]:
        table[first : last + 1] = 1
    return table.tobytes()


@cache
def class_table() -> NDArray[np.uint8]:
    """The class of each code point. 0x110000 numbers."""
    table = np.full(CODE_POINTS, OTHER, dtype=np.uint8)
    for name, value in _CLASS_OF.items():
        for first, last in ranges()[name]:
            table[first : last + 1] = value
    table[[ord("\r"), ord("\n")]] = NEWLINE
    return table


def code_points(text: str) -> NDArray[np.uint32]:
    """The code points of `text`, one number per character."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def classes_of(text: str) -> bytes:
    """The class of each character of `text`, then one 0: it stops every run at the end of the text."""
    return class_table()[code_points(text)].tobytes() + b"\0"
