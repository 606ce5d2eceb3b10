"""Judging a planted fault as a user's run would, and how well it was found."""

import importlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from harness.diagnosis import diagnose
from harness.errors import UnjudgedError
from harness.ids import suggest
from harness.records import Record
from harness.store import atomic_write_text
from parity import checks
from parity.bisect import bisect
from parity.checks import RED, STAGES, Subject, inputs_of
from parity.explain import explain
from parity.faults import FAULTS, Fault, Port
from parity.workspace import Choice, Workspace, home, tensor_name
from references import MODELS
from references.dumping import open_reference
from runtime.graphs import MODES, Manifest, NcnnRunner

# What the corpus is judged by: share of the faults for which it holds, and the least share.
GOALS = (
    ("detected", 1.0),
    ("right place first", 0.95),
    ("right domain", 0.9),
    ("right kind of hint", 0.7),
    ("found within 30 s", 1.0),
)
MOST_SECONDS = 30.0
MOST_TOKENS = 64  # of a case in a green run
COSINE = 0.9999


def records(subject: Subject) -> Iterator[Record]:
    """All records of a subject in pipeline order, those that could not be judged among them."""
    pictures = bool(subject.case.pictures)
    taken = checks.stages(pictures)
    before, after = ([name for name in names if name in taken] for names in checks.around_graphs())
    for name in before:
        yield from _stage(subject, name)
    for graph in subject.graphs.values():
        if checks.needs(graph, pictures):
            for mode, claim in (("isolated", subject.isolated), ("chained", subject.chained)):
                where = subject.where(graph.id, "-", mode)
                yield from checks.attempted(partial(claim, graph), where, subject.rerun(graph.id))
    for name in after:
        yield from _stage(subject, name)


def _stage(subject: Subject, name: str) -> list[Record]:
    where = subject.where(f"{subject.model}/{name}", "-", STAGES[name][0])
    return checks.attempted(lambda: subject.stage(name), where, subject.rerun(where.id))


def reds(subject: Subject) -> Iterator[Record]:
    """The records that are not equal, in pipeline order; the first one names the place."""
    return (record for record in records(subject) if record.verdict != "equal")


def ids_of(subject: Subject) -> list[int] | None:
    """The ids that the port generates; None where it fails."""
    try:
        return [token.id for token in subject.tokens]
    except RED:
        return None


@dataclass(frozen=True)
class Score:
    """How one planted fault was found. A place is an id without its model; "" where nothing was named."""

    name: str
    expected: str
    place: str  # of the first red record
    bisected: str  # what bisect names
    probes: int
    domain: str
    domain_right: bool
    hint: str  # first kind of the diagnosis
    hint_right: bool | None  # None where no tensor is wrong, so that there is nothing to diagnose
    ids_changed: bool
    cosine_sees: bool  # some cosine is below 0.9999
    seconds: float  # until place, domain and hint were known

    @property
    def place_right(self) -> bool:
        """Whether the first red record names the place."""
        return self.place == self.expected


def run(only: Sequence[str], console: Console, *, green: int) -> int:
    """Play the corpus, print the scoreboard and write it. 0 when it meets its GOALS, else 1.

    Raises UnjudgedError on an unknown name.
    """
    known = {fault.name: fault for fault in FAULTS}
    for name in only:
        if name not in known:
            raise UnjudgedError(f"fault {name} is unknown; did you mean {suggest(name, known)}?")
    chosen = [known[name] for name in only] or list(FAULTS)
    workspaces = {model: Workspace(Choice(model)) for model in MODELS}
    scores = []
    for fault in chosen:
        with tempfile.TemporaryDirectory() as folder:
            scores.append(play(fault, workspaces[fault.model], Path(folder) / "model"))
        console.print(_line(scores[-1]), markup=False, highlight=False, soft_wrap=True)
    alarms = [alarm for workspace in workspaces.values() for alarm in false_alarms(workspace, green // len(workspaces))]
    text = _scoreboard(scores, green, alarms)
    path = home() / "faults" / "scoreboard.md"
    atomic_write_text(path, text)
    console.print(f"{text}\nwritten to {path}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(part >= goal for part, goal in _parts(scores)) and not alarms else 1


def false_alarms(workspace: Workspace, count: int) -> Iterator[str]:
    """Red records of green runs: cases, threads and weight modes in turn."""
    manifest = Manifest.read(workspace.exporter.model_folder())
    pipeline = importlib.import_module(f"runtime.{workspace.model}").Pipeline
    cases = itertools.cycle(name for name in workspace.cases if len(workspace.dump(name).values["ids"]) <= MOST_TOKENS)
    for number, case in zip(range(count), cases, strict=False):
        runner = NcnnRunner(manifest, threads=1 + number % 2, mode=MODES[number // 2 % 2], verify=False)
        port = SimpleNamespace(pipeline=pipeline(manifest, runner), runner=runner)
        for record in reds(Subject.of(workspace, case, port)):
            yield f"{record.where.id} {record.where.setting}, {runner.threads} threads, {runner.mode}"


def _line(score: Score) -> str:
    hint = {None: "no tensor", True: score.hint, False: f"{score.hint or 'none'} (wrong)"}[score.hint_right]
    place = score.place if score.place_right else f"{score.place or 'nothing'} instead of {score.expected}"
    domain = score.domain if score.domain_right else f"{score.domain or 'none'} (wrong)"
    cosine = "seen" if score.cosine_sees else "missed"
    bisected = f"{score.bisected or 'the end matches'} in {score.probes}"
    cells = (score.name, place, bisected, domain, hint, cosine, f"{score.seconds:.1f}")
    return f"| {' | '.join(cells)} |"


def _parts(scores: Sequence[Score]) -> Iterator[tuple[float, float]]:
    for (_, goal), right in zip(GOALS, zip(*map(_marks, scores), strict=True), strict=True):
        judged = [mark for mark in right if mark is not None]
        yield (sum(judged) / len(judged) if judged else 1.0), goal


def _marks(score: Score) -> tuple[bool | None, ...]:
    fast = score.seconds <= MOST_SECONDS
    return bool(score.place), score.place_right, score.domain_right, score.hint_right, fast


def _seen(score: Score) -> tuple[bool, bool]:
    return score.cosine_sees, score.ids_changed


def _scoreboard(scores: Sequence[Score], green: int, alarms: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("ncnn", "pnnx", "torch", "transformers", "numpy"))
    lines = ["# Fault corpus", "", f"{datetime.now(UTC):%Y-%m-%d}, {versions}; {len(scores)} faults, each alone.", ""]
    for (what, goal), (part, _) in zip(GOALS, _parts(scores), strict=True):
        lines.append(f"- {what}: {part:.0%} (goal {goal:.0%})")
    lines.append(
        f"- missed by cosine >= 0.9999 alone: {sum(not score.cosine_sees for score in scores)} of {len(scores)}"
    )
    lines.append(f"- greedy ids unchanged: {sum(not score.ids_changed for score in scores)} of {len(scores)}")
    lines += [f"- false alarms in {green} green runs: {len(alarms)}", *(f"  - {alarm}" for alarm in alarms), ""]
    lines += ["| fault | place | bisect | domain | hint | cosine | seconds |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, scores)]) + "\n"


def play(fault: Fault, workspace: Workspace, folder: Path) -> Score:
    """Plant a fault into a copy of the port, judge it as a run does, and find it. Raises LookupError if it is gone."""
    port = Port(workspace.exporter, folder)
    fault.plant(port)
    began = time.perf_counter()
    subject = Subject.of(workspace, fault.case, port)
    red = next(reds(subject), None)
    name = red.where.id if red else ""
    pair = pair_of(subject, red) if red else None
    hints = diagnose(*pair, spans=subject.spans) if pair else []
    domain = _domain(workspace, port, name, fault.case) if name in workspace.graphs else ("glue" if red else "")
    seconds = time.perf_counter() - began
    found = bisect(subject, open_reference(workspace.model, workspace.checkpoint))
    measured = [record.metrics for record in records(subject) if record.metrics]
    return Score(
        name=fault.name,
        expected=fault.expected,
        place=name.partition("/")[2],
        bisected=(found.guilty or "").partition("/")[2],
        probes=len(found.probes),
        domain=domain,
        domain_right=domain == fault.domain,
        hint=hints[0].kind if hints else "",
        hint_right=None if pair is None else any(hint.kind in fault.hints for hint in hints),
        ids_changed=ids_of(subject) != subject.dump.values["ids"],
        cosine_sees=any(not metrics.cosine >= COSINE for metrics in measured),
        seconds=seconds,
    )


def pair_of(subject: Subject, record: Record) -> tuple[Any, Any] | None:
    """The two tensors behind a record, actual and expected; None where they are no tensors."""
    graph = subject.graphs.get(record.where.id)
    if graph is None:
        actual, expected = STAGES[record.where.id.partition("/")[2]][1](subject)
        return (actual, expected) if isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray) else None
    if record.where.tensor == "-":  # it could not be computed
        return None
    isolated = record.where.mode == "isolated"
    outputs = subject.runner.run(graph.id, inputs_of(graph, subject.dump)) if isolated else subject.chain.outputs(graph)
    return outputs[record.where.tensor], subject.dump.tensors[tensor_name(graph, record.where.tensor)]


def _domain(workspace: Workspace, port: Port, graph_id: str, case: str) -> str:
    return explain(workspace, graph_id, case, folder=port.folder, pipeline=port.pipeline, with_drill=False).domain
