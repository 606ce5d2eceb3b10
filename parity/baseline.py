"""A run kept to be compared with: which errors grew since, although every limit is still kept.

Floors make it one question for all graphs: an error may grow by GROWTH times the noise floor, and no more.
But: nothing is judged again; a claim that a later run left out is the business of `parity.verdict`.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from harness.errors import UnjudgedError
from harness.records import Record, Verdict
from harness.store import atomic_write_text
from parity.verdict import DIFFERENT, EQUAL, UNJUDGED
from parity.workspace import home

GROWTH = 10.0
FLOOR = 2.0**-23  # of stages, whose floor nobody measures: one rounding of fp32
PACKAGES = ("torch", "transformers", "ncnn", "pnnx", "numpy")
COMMAND = "python -m parity run, then python -m parity baseline"

Kind = Literal["grew", "verdict", "vanished", "appeared"]
_SHOWN = 5  # regressions of one kind that are listed before "and N more"
_TITLES: Mapping[Kind, str] = {
    "grew": f"grew by more than {GROWTH:g} noise floors",
    "verdict": "have another verdict",
    "vanished": "are no longer compared",
    "appeared": "were not compared before",
}


@dataclass(frozen=True)
class Entry:
    """What is kept of one record; rel_l2 is None where nothing was measured, as of exact comparisons."""

    id: str
    tensor: str
    case: str
    mode: str
    rel_l2: float | None
    floor: float | None
    verdict: Verdict
    rerun: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The comparison that this is the outcome of."""
        return self.id, self.tensor, self.case, self.mode

    @property
    def claim(self) -> str:
        """The comparison whatever its case: a run over fewer cases makes the same claims."""
        return f"{self.id} {self.tensor} [{self.mode}]"


@dataclass(frozen=True)
class Baseline:
    """A kept run, and the versions that it was made with."""

    versions: Mapping[str, str]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Regression:
    """One difference between a run and the baseline; floors is by how many of them the error grew."""

    kind: Kind
    entry: Entry  # as it is now; of what vanished, as it was
    text: str
    floors: float | None = None

    @property
    def code(self) -> int:
        """Exit code that this difference alone would give."""
        if self.kind == "grew":
            return DIFFERENT
        if self.kind == "vanished":
            return UNJUDGED
        return _CODES[self.entry.verdict] if self.kind == "verdict" else EQUAL


_CODES: Mapping[Verdict, int] = {"equal": EQUAL, "different": DIFFERENT, "unjudged": UNJUDGED}


def baseline_path() -> Path:
    """Where the kept run is unless told otherwise."""
    return home() / "baseline.json"


def store(records: Sequence[Record], path: Path) -> None:
    """Keep a run. Raises UnjudgedError when it holds no record."""
    if not records:
        raise UnjudgedError(f"there are no records to keep in {path}; make them: {COMMAND}")
    head = json.dumps({name: version(name) for name in PACKAGES})
    lines = ",\n".join(json.dumps(asdict(_entry(record)), allow_nan=False) for record in records)
    atomic_write_text(path, f'{{"versions": {head}, "records": [\n{lines}\n]}}\n')


def read(path: Path) -> Baseline:
    """Read what `store` wrote. Raises UnjudgedError with the command to type when there is none, or half of one."""
    if not path.is_file():
        raise UnjudgedError(f"baseline {path} is missing; keep a run: {COMMAND}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Baseline(dict(data["versions"]), tuple(Entry(**fields) for fields in data["records"]))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UnjudgedError(f"baseline {path} is broken ({what}); keep a run again: {COMMAND}") from error


def compare(records: Iterable[Record], baseline: Baseline, order: Sequence[str] = ()) -> list[Regression]:
    """Every difference between a run and the baseline, in pipeline order where `order` gives it."""
    before = {entry.key: entry for entry in baseline.entries}
    now = {entry.key: entry for entry in map(_entry, records)}
    found = [other for key, entry in now.items() if key in before and (other := _changed(before[key], entry))]
    found += _absent(before.values(), now.values(), "vanished", "compared in the baseline, not in this run")
    found += _absent(now.values(), before.values(), "appeared", "compared in this run, not in the baseline")
    place = {name: number for number, name in enumerate(order)}
    return sorted(found, key=lambda regression: place.get(regression.entry.id, len(place)))


def exit_code(regressions: Iterable[Regression]) -> int:
    """1 when an error grew or something turned different, 2 when something could not be judged, else 0."""
    codes = {regression.code for regression in regressions}
    return next((code for code in (DIFFERENT, UNJUDGED) if code in codes), EQUAL)


def lines(regressions: Sequence[Regression], baseline: Baseline) -> Iterator[str]:
    """What a person reads about them; the last line is the command to type next."""
    for name in PACKAGES:
        if baseline.versions.get(name) != version(name):
            yield f"{name} {version(name)}, but the baseline was made with {baseline.versions.get(name)}"
    if not regressions:
        yield f"no error grew by more than {GROWTH:g} noise floors since the baseline"
    for kind, title in _TITLES.items():
        same = [regression for regression in regressions if regression.kind == kind]
        if same:
            yield f"{len(same)} comparisons {title}:"
            yield from (f"  {regression.text}" for regression in same[:_SHOWN])
            yield from [f"  and {len(same) - _SHOWN} more"] if len(same) > _SHOWN else []
    first = next((regression for regression in regressions if regression.code), None)
    if first:
        yield f"next: {first.entry.rerun or COMMAND}"


def _entry(record: Record) -> Entry:
    where, metrics = record.where, record.metrics
    error = metrics.rel_l2 if metrics and math.isfinite(metrics.rel_l2) else None
    return Entry(where.id, where.tensor, where.case, where.mode, error, record.floor, record.verdict, record.rerun)


def _changed(before: Entry, now: Entry) -> Regression | None:
    where = f"{now.id} {now.tensor} [{now.case}, {now.mode}]"
    if before.verdict != now.verdict:
        return Regression("verdict", now, f"{where}: {now.verdict}, but was {before.verdict}")
    if before.rel_l2 is None or now.rel_l2 is None:
        return None
    floor = now.floor or before.floor or FLOOR
    floors = (now.rel_l2 - before.rel_l2) / floor
    if floors <= GROWTH:
        return None
    text = f"{where}: rel_l2 {now.rel_l2:.2e}, but was {before.rel_l2:.2e}: {floors:.3g} floors of {floor:.1e} more"
    return Regression("grew", now, text, floors)


def _absent(here: Iterable[Entry], there: Iterable[Entry], kind: Kind, text: str) -> list[Regression]:
    """One regression for each claim of `here` that `there` does not make."""
    known = {entry.claim for entry in there}
    claims = {entry.claim: entry for entry in here if entry.claim not in known}
    return [Regression(kind, entry, f"{claim}: {text}") for claim, entry in claims.items()]
