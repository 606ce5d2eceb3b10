"""A run for machines without room for the whole export: graph by graph it is exported, judged and removed.

A graph is judged on the reference's inputs of every case while it is there, and in the chain as the pipeline comes by.
But: the greedy decode needs every graph for every token, so the stages `decode.*` are left to an ordinary run.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.isolation import CrashedError, Isolated
from harness.records import Record, Where
from harness.store import Store
from parity import checks, server
from parity.attempts import attempted
from parity.checks import PRECISION, Subject
from parity.runners import WHOLE
from parity.workspace import Workspace, case_names, home, shape_cases
from runtime.graphs import Arrays, Manifest

LEFT_OUT = "decode."

Write = Callable[[Record], None]


class RollingRunner:
    """Exports a graph when it is to run, shows it to `visit` while it is there, and removes it."""

    threads = 1

    def __init__(self, workspace: Workspace, child: Isolated, root: Path) -> None:
        self.exporter, self.child, self.root = workspace.exporter.over(Store(root)), child, root
        self.visit: Callable[[Graph], None] = lambda graph: None
        self._held: tuple[str, tuple[str, dict[str, Any]]] | None = None

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name. Raises CrashedError naming the graph when it kills the child."""
        with self.hold(graph_id) as files:
            try:
                outputs: Arrays = self.child.call("run", *files, dict(inputs))
            except CrashedError as error:
                raise CrashedError(graph_id, error.how) from error
            return outputs

    @contextmanager
    def hold(self, graph_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """A graph's folder and manifest entry; its files are there for as long as the outermost holder wants them."""
        if self._held and self._held[0] == graph_id:
            yield self._held[1]
            return
        try:
            folder = self.exporter.graph(graph_id)
            self.exporter.forget_tensors()  # the next graph's are others, and judging takes memory too
            files = str(folder), self.exporter.entry(self.exporter.graphs[graph_id])
            self._held = graph_id, files
            self.visit(self.exporter.graphs[graph_id])
            yield files
            self.child.call("forget", str(folder))
        finally:
            self._held = None
            for path in self.root.iterdir():
                shutil.rmtree(path)


class RollingPort:
    """The port of a workspace over such a runner."""

    def __init__(self, workspace: Workspace, runner: RollingRunner) -> None:
        folder = workspace.exporter.base()
        table = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["table"]
        manifest = Manifest(folder, workspace.model, workspace.fingerprint, {}, {}, table)
        self.runner = runner
        self.pipeline: Any = import_module(f"runtime.{workspace.model}").Pipeline(manifest, runner, chunk=WHOLE)


def run(workspace: Workspace, write: Write) -> None:
    """Judge every graph and every stage but LEFT_OUT; `write` is given the records as they come."""
    home().mkdir(parents=True, exist_ok=True)
    with server.start() as child, tempfile.TemporaryDirectory(dir=home(), prefix="rolling-") as root:
        runner = RollingRunner(workspace, child, Path(root))
        port = RollingPort(workspace, runner)
        subjects = {case: Subject.of(workspace, case, port, generate=_no_decode) for case in case_names(workspace)}
        visited: set[str] = set()

        def visit(graph: Graph) -> None:
            if graph.id not in visited:
                visited.add(graph.id)
                for case, subject in subjects.items():
                    if _runs(graph, workspace, case):
                        _judge(subject, graph.id, "isolated", partial(subject.isolated, graph), write)

        runner.visit = visit
        for case in workspace.cases:
            _judge_case(workspace, subjects[case], case, write)
        for graph in workspace.graphs.values():  # what no chain came to
            if graph.id not in visited:
                _hold_for_visit(runner, graph, subjects, write)


def is_left_out(claim: str) -> bool:
    """Whether `id [case, mode]` is a claim that a rolling run leaves out."""
    return claim.partition("/")[2].startswith(LEFT_OUT)


def _judge_case(workspace: Workspace, subject: Subject, case: str, write: Write) -> None:
    for graph in workspace.graphs.values():
        if _runs(graph, workspace, case):
            _judge(subject, graph.id, "chained", partial(subject.chained, graph), write)
    for stage in checks.stages(bool(workspace.cases[case].pictures)):
        if not stage.startswith(LEFT_OUT):
            name, mode = f"{workspace.model}/{stage}", checks.STAGES[stage][0]
            _judge(subject, name, mode, partial(subject.stage, stage), write)


def _hold_for_visit(runner: RollingRunner, graph: Graph, subjects: Mapping[str, Subject], write: Write) -> None:
    try:
        with runner.hold(graph.id):
            pass
    except UnjudgedError:  # it cannot be exported: every case says so
        runner.visit(graph)


def _judge(subject: Subject, name: str, mode: str, claim: Callable[[], list[Record]], write: Write) -> None:
    where = Where(name, "-", subject.dump.case, mode, PRECISION)
    for record in attempted(claim, where, subject.rerun(name)):
        write(record)


def _runs(graph: Graph, workspace: Workspace, case: str) -> bool:
    return checks.needs(graph, case in shape_cases() or bool(workspace.cases[case].pictures))


def _no_decode(*_: Any) -> list[Any]:
    raise UnjudgedError("a rolling run does not decode")
