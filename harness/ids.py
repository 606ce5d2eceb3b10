"""Graph ids: `<model>/<tower>[.<block>[.<NN>]][.<part>]`, of the characters `[a-z0-9_./]` only.

A graph id is also its path, so that tests, dumps, exports and reports all hang on one name:
`youtu_vl/vision.embed`, `youtu_vl/vision.layer.07`, `youtu_vl/llm.layer.12.dattn`.
A stage that is no graph has an id too: `youtu_vl/tokenizer`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from harness.errors import UnjudgedError

_WORD = "[a-z][a-z0-9_]*"
_PATTERN = re.compile(
    rf"(?P<model>{_WORD})/(?P<tower>{_WORD})"
    rf"(?:\.(?P<block>{_WORD})(?:\.(?P<index>[0-9]{{2}}))?(?:\.(?P<part>{_WORD}))?)?"
)
_GRAMMAR = "<model>/<tower>[.<block>[.<NN>]][.<part>] in the characters [a-z0-9_./], NN two digits"


@dataclass(frozen=True)
class GraphId:
    """One graph id, taken apart. A word alone after the tower is a block: `vision.embed` has no part."""

    model: str
    tower: str
    block: str | None = None
    index: int | None = None
    part: str | None = None

    def __post_init__(self) -> None:
        if _fields(str(self)) != astuple(self):
            raise UnjudgedError(f"graph id={str(self)!r}, but should be {_GRAMMAR}")

    def __str__(self) -> str:
        return f"{self.model}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "GraphId":
        """`youtu_vl/llm.layer.12.dattn` -> GraphId("youtu_vl", "llm", "layer", 12, "dattn")."""
        fields = _fields(text)
        if fields is None:
            raise UnjudgedError(f"graph id={text!r}, but should be {_GRAMMAR}")
        return cls(*fields)

    @property
    def name(self) -> str:
        """The id without its model: `llm.layer.12.dattn`."""
        index = None if self.index is None else f"{self.index:02d}"
        return ".".join(word for word in (self.tower, self.block, index, self.part) if word is not None)


def _fields(text: str) -> tuple[str, str, str | None, int | None, str | None] | None:
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    model, tower, block, index, part = match.groups()
    return model, tower, block, None if index is None else int(index), part


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the known id nearest to name, for messages; "" where nothing is known."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)), "")
