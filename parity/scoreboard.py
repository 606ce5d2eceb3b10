"""Judging a planted fault as a user's run would, and how well it was found."""

import importlib
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from harness.errors import UnjudgedError
from harness.ids import suggest
from harness.records import Record, read_records
from harness.store import atomic_write_text
from parity import checks, mutating
from parity.attempts import RED, attempted
from parity.bisect import bisect
from parity.checks import IDS, STAGES, Subject
from parity.explain import Explanation, explain
from parity.faults import FAULTS, Fault, Port
from parity.mutating import Outcome
from parity.plugin import CLAIMS
from parity.runners import WHOLE
from parity.workspace import ROOT, Choice, Workspace, home
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
    shapes = subject.case is None  # random inputs: no stages, and no chain
    pictures = shapes or bool(subject.case.pictures)
    taken = () if shapes else checks.stages(pictures)
    before, after = ([name for name in names if name in taken] for names in checks.around_graphs())
    for name in before:
        yield from _stage(subject, name)
    claims = {"isolated": subject.isolated} | ({} if shapes else {"chained": subject.chained})
    for graph in subject.graphs.values():
        if checks.needs(graph, pictures):
            for mode, claim in claims.items():
                where = subject.where(graph.id, "-", mode)
                yield from attempted(partial(claim, graph), where, subject.rerun(graph.id))
    for name in after:
        yield from _stage(subject, name)


def _stage(subject: Subject, name: str) -> list[Record]:
    where = subject.where(f"{subject.model}/{name}", "-", STAGES[name][0])
    return attempted(lambda: subject.stage(name), where, subject.rerun(where.id))


def reds(subject: Subject) -> Iterator[Record]:
    """The records that are not equal, in pipeline order; the first one names the place."""
    return (record for record in records(subject) if record.verdict != "equal")


@dataclass(frozen=True)
class Score:
    """How one planted fault was found. A place is an id without its model; "" where nothing was named."""

    name: str
    expected: str
    place: str  # that the first line of the summary names
    seconds: float  # until place, domain and hint were known
    bisected: str = "no graph"  # what bisect names
    probes: int = 0
    domain: str = "glue"
    domain_right: bool = True
    hints: tuple[str, ...] = ()  # the kinds that were printed, a right one first
    hint_right: bool | None = None  # None where no tensor is wrong, so that there is nothing to diagnose
    ids_changed: bool = False
    cosine_sees: bool = False  # some cosine is below 0.9999

    @property
    def place_right(self) -> bool:
        """Whether the summary's first line names the place."""
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
            scores.append(play(fault, workspaces[fault.model], Path(folder)))
        console.print(_line(scores[-1]), markup=False, highlight=False, soft_wrap=True)
    alarms = [alarm for workspace in workspaces.values() for alarm in false_alarms(workspace, green // len(workspaces))]
    harness = [] if only else mutating.play_all()
    text = _scoreboard(scores, green, alarms, harness)
    path = home() / "faults" / "scoreboard.md"
    atomic_write_text(path, text)
    console.print(f"{text}\nwritten to {path}", markup=False, highlight=False, soft_wrap=True)
    met = all(part >= goal for part, goal in _parts(scores))
    return 0 if met and not alarms and all(outcome.seen for outcome in harness) else 1


def false_alarms(workspace: Workspace, count: int) -> Iterator[str]:
    """Red records of green runs: cases, threads and weight modes in turn."""
    manifest = Manifest.read(workspace.exporter.model_folder())
    pipeline = importlib.import_module(f"runtime.{workspace.model}").Pipeline
    cases = itertools.cycle(name for name in workspace.cases if len(workspace.dump(name).values["ids"]) <= MOST_TOKENS)
    for number, case in zip(range(count), cases, strict=False):
        runner = NcnnRunner(manifest, threads=1 + number % 2, mode=MODES[number // 2 % 2], verify=False)
        port = SimpleNamespace(pipeline=pipeline(manifest, runner, chunk=WHOLE), runner=runner)
        for record in reds(Subject.of(workspace, case, port)):
            yield f"{record.where.id} {record.where.setting}, {runner.threads} threads, {runner.mode}"


def _line(score: Score) -> str:
    first = next(iter(score.hints), "none")
    hint = {None: "no tensor", True: first, False: f"{first} (wrong)"}[score.hint_right]
    place = score.place if score.place_right else f"{score.place or 'nothing'} instead of {score.expected}"
    domain = score.domain if score.domain_right else f"{score.domain or 'none'} (wrong)"
    cosine = "seen" if score.cosine_sees else "missed"
    bisected = f"{score.bisected} in {score.probes}" if score.probes else score.bisected
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


def _scoreboard(scores: Sequence[Score], green: int, alarms: Sequence[str], harness: Sequence[Outcome]) -> str:
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
    return "\n".join([*lines, *map(_line, scores), *_harness(harness)]) + "\n"


def _harness(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The second table: mistakes planted into the harness itself, each of which must turn its tests red."""
    if outcomes:
        seen = sum(outcome.seen for outcome in outcomes)
        yield from ("", f"Mistakes planted into the harness itself: {seen} of {len(outcomes)} seen.", "")
        yield from ("| mistake | seen | seconds |", "|---|---|---|")
    for outcome in outcomes:
        yield f"| {outcome.name} | {'yes' if outcome.seen else 'NO'} | {outcome.seconds:.1f} |"


def play(fault: Fault, workspace: Workspace, folder: Path) -> Score:
    """Plant a fault into a copy of the port, run the suite and the tools as a user would, and tell what they say.

    Raises LookupError when the fault does not apply any more.
    """
    began = time.perf_counter()
    printed, found = _run_suite(fault, folder / "records")
    if fault.tests:
        failed = re.search(r"^FAILED \S+::(\w+)", printed, re.MULTILINE)
        return Score(fault.name, fault.expected, place=failed[1] if failed else "", seconds=time.perf_counter() - began)
    named = re.search(r"^origin: .*?(\S+/[^\s;]+)", printed, re.MULTILINE)
    place = named[1] if named else ""
    red = [record for record in found if record.where.id == place and record.verdict != "equal"]
    port = Port(workspace, folder / "model")
    try:
        fault.plant(port)
        explained = _explained(port, red) if place in workspace.graphs else None
        seconds = time.perf_counter() - began
        bisected, probes = _bisected(port, fault.case)
    finally:
        port.close()
    hints = re.findall(r"^  hint: ([a-z -]+): ", "\n".join(record.detail for record in red), re.MULTILINE)
    hints += [hint.kind for _, hint in explained.hints] if explained else []
    domain = explained.domain if explained else "glue"
    tensor = bool(fault.hints) or any(record.metrics for record in red)
    return Score(
        name=fault.name,
        expected=fault.expected,
        place=place.partition("/")[2],
        bisected=bisected,
        probes=probes,
        domain=domain if place else "",
        domain_right=bool(place) and domain == fault.domain,
        hints=tuple(sorted(hints, key=lambda hint: hint not in fault.hints)),
        hint_right=bool(set(hints) & set(fault.hints)) if tensor else None,
        ids_changed=any(record.where.id.endswith(IDS) and record.verdict != "equal" for record in found),
        cosine_sees=any(record.metrics and not record.metrics.cosine >= COSINE for record in found),
        seconds=seconds,
    )


def _run_suite(fault: Fault, records: Path) -> tuple[str, tuple[Record, ...]]:
    """What pytest prints of a case with the fault planted, and its records."""
    tests = [str(ROOT / "parity" / name) for name in ([fault.tests] if fault.tests else CLAIMS)]
    planted = ["-p", "no:cacheprovider", "-p", "parity.planting", "--fault", fault.name, "--records", str(records)]
    command = [sys.executable, "-m", "pytest", *tests, "-q", *planted, "--model", fault.model, "--case", fault.case]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode not in (0, 1):
        raise LookupError(f"the suite did not run with {fault.name} planted:\n{finished.stdout}{finished.stderr}")
    return finished.stdout, read_records(records).records


def _bisected(port: Port, case: str) -> tuple[str, int]:
    """What bisect names, and its probes."""
    workspace = port.workspace
    try:
        found = bisect(Subject.of(workspace, case, port), open_reference(workspace.model, workspace.checkpoint))
    except RED:  # it tells why, as the suite has done
        return "refused", 0
    return (found.guilty or "").partition("/")[2] or "the end matches", len(found.probes)


def _explained(port: Port, red: Sequence[Record]) -> Explanation:
    where = red[0].where
    return explain(port.workspace, where.id, where.case, folder=port.folder, pipeline=port.pipeline)
