"""The outcome of one comparison, and its way through JSON lines from several workers to one report.

Each worker writes a file of its own, so that no two processes share a line.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from harness.errors import UnjudgedError
from harness.ids import GraphId
from harness.limits import Limit
from harness.metrics import Metrics, NonFinite

Verdict = Literal["equal", "different", "unjudged"]


@dataclass(frozen=True)
class Where:
    """What was compared: the tensor of an id, for a case, in a precision and a mode."""

    id: str
    tensor: str
    case: str
    mode: str  # isolated, chained, exact, ...
    precision: str = "fp32"

    def __post_init__(self) -> None:
        GraphId.parse(self.id)

    @property
    def setting(self) -> str:
        """`[fp32, receipt, isolated]`."""
        return f"[{self.precision}, {self.case}, {self.mode}]"


@dataclass(frozen=True)
class Mismatch:
    """How two exact values differ: how often, and where first, each side shown with its neighbours."""

    differing: int
    index: tuple[int, ...]
    actual: str
    expected: str


@dataclass(frozen=True)
class Record:
    """One comparison; `detail` is the whole failure text, "" where equal."""

    where: Where
    verdict: Verdict
    metrics: Metrics | None = None
    mismatch: Mismatch | None = None
    limits: tuple[Limit, ...] = ()
    failed: tuple[str, ...] = ()  # the keys of the limits that were not kept
    floor: float | None = None  # relative L2 of fp32 torch against float64 torch
    detail: str = ""
    rerun: str = ""  # the command that makes this comparison again

    @property
    def floor_multiple(self) -> float | None:
        """The error as a multiple of the noise floor, where both are known."""
        if self.metrics is None or not self.floor or not math.isfinite(self.metrics.rel_l2):
            return None
        return self.metrics.rel_l2 / self.floor

    def to_json(self) -> str:
        """One line of strict JSON; NaN and the infinities become strings."""
        return json.dumps(_plain(asdict(self)), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Read what to_json wrote."""
        fields = json.loads(line)
        mismatch, floor = fields["mismatch"], fields["floor"]
        return cls(
            where=Where(**fields["where"]),
            verdict=cast(Verdict, fields["verdict"]),
            metrics=_metrics(fields["metrics"]),
            mismatch=mismatch and Mismatch(**_tuples(mismatch)),
            limits=tuple(Limit(**limit) for limit in fields["limits"]),
            failed=tuple(fields["failed"]),
            floor=None if floor is None else _number(floor),
            detail=fields["detail"],
            rerun=fields["rerun"],
        )


class RecordWriter:
    """Appends the records of one worker to a file of its own; every line is on its way when write returns."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"records-{worker}.jsonl"

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(record.to_json() + "\n")


@dataclass(frozen=True)
class Records:
    """What all workers wrote, and one message for each line that could not be read."""

    records: tuple[Record, ...]
    unreadable: tuple[str, ...]


def read_records(folder: Path) -> Records:
    """Merge the files of all workers; half a line, left by a killed run, is reported and not fatal."""
    records, unreadable = [], []
    for path in sorted(folder.glob("records-*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                records.append(Record.from_json(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError, UnjudgedError):
                unreadable.append(f"{path.name}:{number} is no whole record: was the run killed?")
    return Records(tuple(records), tuple(unreadable))


def clear_records(folder: Path) -> None:
    """Remove the records of the run before, so that none of them counts for this one."""
    for path in folder.glob("records-*.jsonl"):
        path.unlink()


def _plain(value: object) -> object:
    """Whatever asdict gives, in strict JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _metrics(fields: Mapping[str, Any] | None) -> Metrics | None:
    if fields is None:
        return None
    bad = {key: NonFinite(**_tuples(fields[key])) for key in ("actual_bad", "expected_bad")}
    numbers = {key: _number(value) if isinstance(value, str) else value for key, value in fields.items()}
    return Metrics(**{**_tuples(numbers), **bad})


def _number(value: float | str) -> float:
    """A number, NaN always as the one object: equality of dataclasses looks at identity first."""
    number = float(value)
    return math.nan if math.isnan(number) else number


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
