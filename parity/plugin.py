"""pytest hooks of the parity suite: options, one test per (graph, precision, case), records, the summary.

Hooks delegate; what they work on stands in `Session`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UnjudgedError
from harness.records import Record, RecordWriter, Where, clear_records, read_records
from harness.selfcompare import self_compared
from harness.summary import summary
from parity import checks
from parity.attempts import attempted
from parity.checks import PRECISION, Subject
from parity.runners import Port
from parity.verdict import doubts
from parity.workspace import Choice, Workspace, case_names, home, run_command, shape_cases
from references import MODELS


class Session:
    """What one pytest process works on: a workspace per model, one subject at a time, its records."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._subject: tuple[tuple[str, str], Subject] | None = None
        self.ports: dict[str, Any] = {}  # by model, as they are asked for
        self.last_graphs: dict[tuple[str, str], str] = {}  # (model, case) -> last selected graph in execution order
        self.records = RecordWriter(records_folder(config), getattr(config, "workerinput", {}).get("workerid", "main"))

    @cached_property
    def workspaces(self) -> dict[str, Workspace]:
        """The chosen models."""
        option = self.config.getoption
        models = option("--model") or MODELS
        checkpoint = option("--checkpoint")
        return {
            model: Workspace(
                Choice(
                    model,
                    profile=option("--profile"),
                    checkpoint=Path(checkpoint) if checkpoint else None,
                    cases=tuple(option("--case") or ()),
                    build=not option("--no-build"),
                )
            )
            for model in models
        }

    def port(self, model: str) -> Port:
        """The port of a model, its child process shared by all tests of this worker."""
        if model not in self.ports:
            self.ports[model] = Port(self.workspaces[model])
        return self.ports[model]

    def subject(self, model: str, case: str) -> Subject:
        """The subject of a case; only the last one is kept."""
        if self._subject is None or self._subject[0] != (model, case):
            workspace = self.workspaces[model]
            self._subject = None
            port = self.port(model)
            last = self.last_graphs.get((model, case))
            made = Subject.of(workspace, case, port, generate=port.generate, last=last)
            self._subject = (model, case), made
        return self._subject[1]

    def options(self, name: str) -> str:
        """What pytest needs beside an id to judge the same checkpoint."""
        workspace = self.workspaces.get(name.partition("/")[0])
        return workspace.choice.pytest_options() if workspace else ""

    def close(self) -> None:
        """End all child processes."""
        for port in self.ports.values():
            port.close()


SESSION = pytest.StashKey[Session]()
CLAIMS = ("test_graphs.py", "test_stages.py")  # what a run judges of the chosen models and checkpoint


class Judge:
    """Writes the records of a test's claims, and fails the test with the texts of those that are red."""

    def __init__(self, records: RecordWriter, node_id: str, options: Callable[[str], str]) -> None:
        self._records, self._node_id, self._options = records, node_id, options

    def __call__(self, name: str, case: str, claims: Mapping[str, Callable[[], Sequence[Record]]]) -> None:
        """Judge claims by mode; a claim that cannot be computed is red too."""
        rerun = f"pytest '{self._node_id}'{self._options(name)}"
        red = []
        for mode, claim in claims.items():
            records = attempted(claim, Where(name, "-", case, mode, PRECISION), rerun)
            for record in records:
                self._records.write(record)
            red += [record.detail for record in records if record.verdict != "equal"]
        if red:
            pytest.fail("\n\n".join(red), pytrace=False)


def records_folder(config: pytest.Config | None = None) -> Path:
    """Where the records of a run are; without it, those of the last one that had no folder of its own."""
    own = config.getoption("--records") if config else ""
    return Path(own) if own else home() / "records"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that choose what is judged."""
    group = parser.getgroup("parity")
    group.addoption("--model", action="append", metavar="NAME", help="model to judge (default: all)")
    group.addoption(
        "--profile", default="", metavar="NAME", help="the model's own checkpoint of this profile (default: its first)"
    )
    group.addoption("--checkpoint", metavar="DIR", help="judge this checkpoint folder instead of a synthetic one")
    group.addoption("--case", action="append", metavar="NAME", help="case to judge; may be given several times")
    group.addoption("--records", default="", metavar="DIR", help="write the records there, not over the last run's")
    group.addoption(
        "--no-build", action="store_true", help="fail where a dump or graph is missing instead of making it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """One session per process; the records of the run before are dropped once, by the first process."""
    if not hasattr(config, "workerinput"):
        clear_records(records_folder(config))
    config.stash[SESSION] = Session(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """No child outlives the run."""
    config.stash[SESSION].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Graph tests and stage tests: ids are `<id>-<precision>-<case>`."""
    session = metafunc.config.stash[SESSION]
    for fixture, rows in (("graph_case", _graph_cases), ("stage_case", _stage_cases)):
        if fixture in metafunc.fixturenames:
            try:
                found = list(rows(session))
            except UnjudgedError as error:
                raise pytest.UsageError(str(error)) from error
            metafunc.parametrize(fixture, found, ids=[f"{name}-{PRECISION}-{case}" for _, name, case in found])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note how far each case's chain must run for the selected tests."""
    selected = [item.callspec.params.get("graph_case") for item in session.items if hasattr(item, "callspec")]
    session.config.stash[SESSION].last_graphs = last_graphs(filter(None, selected))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one case go to one worker: it runs the pipeline once for all of them."""
    from parity.scheduling import CaseScheduling

    return CaseScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A port compared with itself is not green; the run's worst errors go into the JUnit file, where one is written."""
    from _pytest.junitxml import xml_key  # pytest has no public way to it outside of a fixture

    if hasattr(session.config, "workerinput"):
        return
    records = read_records(records_folder(session.config)).records
    if session.exitstatus == pytest.ExitCode.OK and self_compared(records):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    xml = session.config.stash.get(xml_key, None)
    if xml is None:
        return
    from parity.report import junit_properties  # loads matplotlib

    for name, value in junit_properties(records).items():
        xml.add_global_property(name, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was judged, how far off it was, and what to type next."""
    found = read_records(records_folder(config))
    if not found.records:
        return
    seen = {record.where.id for record in found.records}
    session = config.stash[SESSION]
    everything = pipeline_order(session.workspaces.values())
    order = [name for name in everything if name in seen]
    chosen = [workspace.choice for workspace in session.workspaces.values()]
    whole = run_command(chosen)
    terminalreporter.section("parity")
    for line in summary(
        found.records,
        order,
        rerun=lambda name: f"pytest -k '{name}'{session.options(name)}",
        rerun_all=whole,
        when_green="git commit" if order == everything else whole if chosen[0].flags() else "make parity",
        graphs=[name for name in order if any(name in workspace.graphs for workspace in session.workspaces.values())],
        unreadable=found.unreadable,
        notes=list(_margins(session, found.records)),
        doubts=doubts(found.records, session.workspaces.values()),
    ):
        terminalreporter.write_line(line)


def _margins(session: Session, records: Sequence[Record]) -> Iterator[str]:
    """Per model: where the reference's first and second id were nearest, among the answers that were judged."""
    judged = {(r.where.id, r.where.case) for r in records if r.where.id.endswith(checks.IDS) and r.verdict == "equal"}
    for model, workspace in session.workspaces.items():
        cases = [case for case in workspace.cases if (f"{model}/{checks.IDS}", case) in judged]
        margins = {case: workspace.dump(case).values["margins"] for case in cases}
        if margins:
            case = min(margins, key=lambda name: min(margins[name]))
            least = min(margins[case])
            count, step = sum(map(len, margins.values())), margins[case].index(least)
            yield f"{model}: {count} greedy ids equal; smallest margin {least:.2g} at step {step} of {case}"


def pipeline_order(workspaces: Any) -> list[str]:
    """Every id in the order of the pipeline: stages before the graphs, graphs, stages after."""
    order = []
    for workspace in workspaces:
        taken = checks.stages(any(case.pictures for case in workspace.cases.values()))
        before, after = ([name for name in names if name in taken] for names in checks.around_graphs())
        order += [f"{workspace.model}/{name}" for name in before]
        order += list(workspace.graphs)
        order += [f"{workspace.model}/{name}" for name in after]
    return order


def last_graphs(selected: Iterable[tuple[Workspace, str, str]]) -> dict[tuple[str, str], str]:
    """(model, case) -> its last graph in execution order, whatever order the tests come in."""
    last: dict[tuple[str, str], str] = {}
    for workspace, name, case in selected:
        place = list(workspace.graphs).index
        before = last.setdefault((workspace.model, case), name)
        last[workspace.model, case] = max(before, name, key=place)
    return last


def _graph_cases(session: Session) -> Iterator[tuple[Workspace, str, str]]:
    for workspace in session.workspaces.values():
        for case in case_names(workspace):
            pictures = case in shape_cases() or bool(workspace.cases[case].pictures)
            for graph in workspace.graphs.values():
                if checks.needs(graph, pictures):
                    yield workspace, graph.id, case


def _stage_cases(session: Session) -> Iterator[tuple[Workspace, str, str]]:
    for workspace in session.workspaces.values():
        for case in workspace.cases.values():
            for name in checks.stages(bool(case.pictures)):
                yield workspace, f"{workspace.model}/{name}", case.name


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    """Judges claims and keeps their records."""
    session = request.config.stash[SESSION]
    return Judge(session.records, request.node.nodeid, session.options)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Session:
    """What this process works on."""
    return request.config.stash[SESSION]
