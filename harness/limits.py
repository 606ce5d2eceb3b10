"""Limits as data: rows of a TOML file, glob on the id x mode -> the numbers a comparison must keep.

For each key the last matching row decides, and the limit remembers the line that did.
"""

import fnmatch
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UnjudgedError
from harness.ids import suggest
from harness.metrics import Metrics

# key -> the metric it bounds. `_min` and `_max` bound it from one side, `_tol` from both sides of TARGETS.
METRICS: Mapping[str, Callable[[Metrics], float]] = {
    "cosine_min": lambda metrics: metrics.cosine,
    "worst_row_cosine_min": lambda metrics: metrics.worst_row_cosine,
    "rel_l2_max": lambda metrics: metrics.rel_l2,
    "scale_tol": lambda metrics: metrics.scale,
    "offset_tol": lambda metrics: metrics.offset / metrics.rms if metrics.rms else metrics.offset,
    "max_abs_over_rms_max": lambda metrics: metrics.max_abs_over_rms,
    "lsb_max": lambda metrics: metrics.max_abs,  # of integers
    "differing_max": lambda metrics: metrics.differing,
    "nan_max": lambda metrics: metrics.actual_bad.nan,
    "inf_max": lambda metrics: metrics.actual_bad.inf,
}
TARGETS: Mapping[str, float] = {"scale_tol": 1.0, "offset_tol": 0.0}

_HEADER = re.compile(r"\s*\[\[\s*limits\s*\]\]")
_WORDS = ("ids", "mode", "reason")


@dataclass(frozen=True)
class Limit:
    """One number to keep, and who says so: `line` is file:line, `glob` the row's."""

    key: str
    bound: float
    line: str
    glob: str

    def keeps(self, metrics: Metrics) -> bool:
        """Whether the metrics are within this limit; NaN never is."""
        return self._admits(METRICS[self.key](metrics))

    def complaint(self, metrics: Metrics) -> str:
        """`rel_l2 3.1e-02, but should be <= 1e-03   (parity/limits.toml:14  */llm.layer.*.prefill)`."""
        return f"{self._name} {self._digits(metrics)}, but should be {self._range}   ({self.line}  {self.glob})"

    def _admits(self, value: float) -> bool:
        if self.key in TARGETS:
            return abs(value - TARGETS[self.key]) <= self.bound
        return value >= self.bound if self.key.endswith("_min") else value <= self.bound

    @property
    def _name(self) -> str:
        name = self.key.rpartition("_")[0]
        return "offset/rms" if name == "offset" else name

    @property
    def _range(self) -> str:
        if self.key in TARGETS:
            return f"within {_short(self.bound)} of {TARGETS[self.key]:g}"
        return f"{'>=' if self.key.endswith('_min') else '<='} {_short(self.bound)}"

    def _digits(self, metrics: Metrics) -> str:
        """Print the value with as few digits as still show it to be outside."""
        value = float(METRICS[self.key](metrics))
        form = "e" if self._name in ("rel_l2", "max_abs_over_rms", "offset/rms") else "g"
        texts = (f"{value:.{digits}{form}}" for digits in range(1 if form == "e" else 4, 17))
        return next((text for text in texts if not self._admits(float(text))), repr(value))


@dataclass(frozen=True)
class Row:
    """One [[limits]] row of the file."""

    ids: str
    mode: str
    line: str
    limits: tuple[Limit, ...]

    def matches(self, name: str, mode: str) -> bool:
        """Whether this row speaks of the id in the mode."""
        return fnmatch.fnmatchcase(name, self.ids) and fnmatch.fnmatchcase(mode, self.mode)


@dataclass(frozen=True)
class Limits:
    """All rows of one file."""

    source: str
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path) -> "Limits":
        """Read the file; messages call it by its last two names, `parity/limits.toml`."""
        source = "/".join(path.parts[-2:])
        try:
            text = path.read_text(encoding="utf-8")
            rows = tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise UnjudgedError(f"{source} cannot be read: {error}") from error
        if set(rows) != {"limits"} or not isinstance(rows["limits"], list):
            raise UnjudgedError(f"{source} has {sorted(rows)}, but should be [[limits]] rows and nothing else")
        lines = _row_lines(text)
        if len(lines) != len(rows["limits"]):
            raise UnjudgedError(f"{source}: each row should begin with [[limits]] on a line of its own")
        return cls(source, tuple(_row(source, *pair) for pair in zip(rows["limits"], lines, strict=True)))

    def of(self, name: str, mode: str) -> Mapping[str, Limit]:
        """Return the limits of an id in a mode, by key; an id that nobody limits cannot be judged."""
        matching = [row for row in self.rows if row.matches(name, mode)]
        if not matching:
            raise UnjudgedError(f"{self.source} has no row for {name} in mode {mode!r}: add one with a reason")
        return {limit.key: limit for row in matching for limit in row.limits}

    def unmatched(self, known: Iterable[str]) -> list[str]:
        """One message for each row whose glob matches no known id."""
        known = list(known)
        stale = (row for row in self.rows if not any(fnmatch.fnmatchcase(name, row.ids) for name in known))
        return [
            f"{row.line}: ids={row.ids!r} matches no known id; the nearest is {suggest(row.ids, known)!r}"
            for row in stale
        ]


def fixed(**bounds: float) -> Mapping[str, Limit]:
    """Limits given by the caller rather than by a file: `fixed(rel_l2_max=1e-6)`."""
    for key in bounds:
        _known_key(key, "limits")
    return {key: Limit(key, bound, "given", "*") for key, bound in bounds.items()}


def _row_lines(text: str) -> list[dict[str, int]]:
    """For each row, the line of its header under "" and of each of its keys."""
    rows: list[dict[str, int]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if _HEADER.match(line):
            rows.append({"": number})
        elif rows and "=" in line:
            rows[-1].setdefault(line.partition("=")[0].strip(), number)
    return rows


def _row(source: str, row: Mapping[str, object], lines: Mapping[str, int]) -> Row:
    where = f"{source}:{lines['']}"
    ids, mode, _reason = (_word(row, key, where) for key in _WORDS)
    limits = []
    for key, bound in row.items():
        if key not in _WORDS:
            line = f"{source}:{lines.get(key, lines[''])}"
            limits.append(Limit(_known_key(key, line), _number(bound, key, line), line, ids))
    return Row(ids, mode, where, tuple(limits))


def _word(row: Mapping[str, object], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UnjudgedError(f"{where}: {key}={value!r}, but should be a text: every row says ids, mode, reason")
    return value


def _known_key(key: str, where: str) -> str:
    if key not in METRICS:
        raise UnjudgedError(f"{where}: {key} is no limit; did you mean {suggest(key, METRICS)}?")
    return key


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UnjudgedError(f"{where}: {key}={value!r}, but should be a finite number >= 0")
    return float(value)


def _short(bound: float) -> str:
    text = f"{bound:.0e}"
    return text if 0 < bound < 0.1 and float(text) == bound else f"{bound:.9g}"
