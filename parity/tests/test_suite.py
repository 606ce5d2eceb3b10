"""Claim: the suite behaves as pytest suites do: ids listed once, -k, -n, --lf; a crash is one red test."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.dumps import Dump, write_dump
from harness.metrics import Metrics
from harness.records import Record, Records, RecordWriter, Verdict, Where, read_records
from parity import building, plugin
from parity import workspace as workspace_module
from parity.building import make_dump
from parity.checks import stages
from parity.verdict import claims, doubts, exit_code, missing_verdicts
from parity.workspace import ROOT, Choice, Workspace, case_names, home, shape_cases

MODEL = "youtu_vl"
LISTING = ("--collect-only", "parity/test_graphs.py", "parity/test_stages.py", "--model", MODEL)
GRAPH_TEST = re.compile(r"parity/test_graphs\.py::test_graph\[(?P<id>[a-z0-9_./]+)-(?P<precision>\w+)-(?P<case>\w+)\]")


@dataclass(frozen=True)
class Run:
    """One run of pytest over the suite."""

    code: int
    out: str
    err: str

    @property
    def graph_tests(self) -> list[tuple[str, str, str]]:
        """(graph, precision, case) of every line that is the name of a graph's test."""
        found = map(GRAPH_TEST.fullmatch, self.out.splitlines())
        return [(match["id"], match["precision"], match["case"]) for match in found if match]


class Suite:
    """Runs pytest over the suite with the session's artefacts, but records and cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("store", "fingerprints"):
            (home() / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(home() / name)

    def run(self, *arguments: str) -> Run:
        """`pytest ARGUMENTS`, without colours and with the messages in full."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            f"cache_dir={self.folder / 'cache'}",
            *arguments,
        ]
        surroundings = {"PARITY_HOME": str(self.folder), "PYTHONPATH": str(self.folder), "COLUMNS": "200"}
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=ours | surroundings,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def outcomes(self, *arguments: str) -> tuple[int, dict[str, str]]:
        """Exit code, and passed, failed or another word by the name of the test, as --junitxml tells it."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        run = self.run("parity/test_graphs.py", f"--junitxml={report}", *arguments)
        assert report.is_file(), run.out + run.err
        return run.code, {test.attrib["name"]: _outcome(test) for test in ElementTree.parse(report).iter("testcase")}


def _outcome(test: ElementTree.Element) -> str:
    told = [f"{part.tag}: {part.text}" for part in test if part.tag in ("failure", "error", "skipped")]
    return "\n".join(told) or "passed"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    # what a cold store lacks is built here and not under a time that is measured
    workspace = Workspace(Choice(MODEL))
    for case in ("smallest", "text_only", "length_6", "length_13"):
        workspace.dump(case)
    return Suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def listed(suite: Suite) -> Run:
    return suite.run(*LISTING)


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice(MODEL))


# ---- what is listed


def test_every_graph_is_listed_once_per_case(listed: Run, workspace: Workspace) -> None:
    counts = Counter(listed.graph_tests)
    assert listed.code == 0
    assert set(counts.values()) == {1}
    assert {precision for _, precision, _ in counts} == {"fp32"}
    by_case = {case: [name for name, _, where in counts if where == case] for case in case_names(workspace)}

    assert sum(map(len, by_case.values())) == len(counts)
    for case, names in by_case.items():
        pictures = case in shape_cases() or bool(workspace.cases[case].pictures)
        wanted = [name for name in workspace.graphs if pictures or "/llm." in name]
        assert names == wanted  # in execution order
        assert len(wanted) == (149 if pictures else 120)


def test_there_are_cases_with_and_without_pictures(workspace: Workspace) -> None:
    with_pictures = [case.name for case in workspace.cases.values() if case.pictures]

    assert len(with_pictures) >= 5
    assert len(workspace.cases) - len(with_pictures) >= 5


def test_k_vision_chooses_the_vision_tower(suite: Suite, listed: Run) -> None:
    chosen = suite.run(*LISTING, "-k", "vision").graph_tests

    assert chosen == [test for test in listed.graph_tests if "/vision." in test[0]]
    assert len({name for name, _, _ in chosen}) == 29


def test_k_of_a_layer_chooses_its_three_graphs(suite: Suite, workspace: Workspace) -> None:
    chosen = suite.run(*LISTING, "-k", "llm and layer.12").graph_tests

    assert Counter(name for name, _, _ in chosen) == {
        f"{MODEL}/llm.layer.12.{part}": len(list(case_names(workspace))) for part in ("prefill", "dqkv", "dattn")
    }


# ---- how it runs


def test_n_2_gives_what_one_process_gives(suite: Suite) -> None:
    wanted = ["-k", "(length_6 or length_13) and vision.layer.0"]
    alone = suite.outcomes(*wanted)
    spread = suite.outcomes(*wanted, "-n", "2")

    assert alone == spread
    assert alone[0] == 0
    assert len(alone[1]) == 2 * 10
    assert set(alone[1].values()) == {"passed"}
    workers = sorted(path.name for path in (suite.folder / "records").glob("*gw*"))
    assert workers == ["records-gw0.jsonl", "records-gw1.jsonl"]  # a case each


def test_an_unknown_choice_is_told_without_a_traceback(tmp_path: Path) -> None:
    suite = Suite(tmp_path)  # with a cache of its own: --lf takes all tests of a failed file for failed
    for arguments, said in (
        (["--case", "sqare"], "did you mean square?"),
        (["--model", "youtu"], f"mean {MODEL}?"),
    ):
        run = suite.run("parity/test_graphs.py", *arguments)
        assert said in run.out
        assert "Traceback" not in run.out + run.err
        assert run.code == 2


GUILTY = f"{MODEL}/vision.layer.03"
CRASHING = f"""
import os
import signal


def pytest_configure():
    import parity.server
    from harness.isolation import Isolated

    parity.server.start = lambda: Isolated("crashing:make", timeout_seconds=60)


def make():
    from parity.server import Server

    class Crashing(Server):
        def run(self, folder, entry, inputs):
            if entry["id"] == {GUILTY!r}:
                os.kill(os.getpid(), signal.SIGSEGV)
            return super().run(folder, entry, inputs)

    return Crashing()
"""


@pytest.mark.proof
@pytest.mark.skipif(sys.platform == "win32", reason="no signals to die of")
def test_a_crash_is_the_red_test_of_its_graph_and_lf_finds_it(suite: Suite) -> None:
    (suite.folder / "crashing.py").write_text(CRASHING, encoding="utf-8")
    code, outcomes = suite.outcomes("-p", "crashing", "-k", "(smallest or length_6) and vision.layer.0")

    assert code == pytest.ExitCode.TESTS_FAILED
    assert len(outcomes) == 2 * 10  # the run went on to its end
    for number in range(10):
        alone = outcomes[f"test_graph[{MODEL}/vision.layer.0{number}-fp32-length_6]"]
        behind = outcomes[f"test_graph[{MODEL}/vision.layer.0{number}-fp32-smallest]"]
        if number < 3:
            assert (alone, behind) == ("passed", "passed")
        elif number == 3:
            assert f"{GUILTY}: the child process died: SIGSEGV" in alone
            assert behind.count(f"{GUILTY}: the child process died: SIGSEGV") == 2  # isolated and chained
        else:
            assert alone == "passed"
            assert f"was not reached: {GUILTY} failed" in behind
            assert behind.count("could not be judged") == 1  # isolated, it is green

    code, outcomes = suite.outcomes("--lf")
    assert set(outcomes) == {
        f"test_graph[{GUILTY}-fp32-length_6]",
        *(f"test_graph[{MODEL}/vision.layer.0{number}-fp32-smallest]" for number in range(3, 10)),
    }
    assert (code, set(outcomes.values())) == (0, {"passed"})  # without the crash


ONE_FILE = """
def pytest_configure():
    from parity.checks import Subject
    from parity.workspace import tensor_name

    compare = Subject._compare

    def with_itself(self, graph, port, actual, mode):
        return compare(self, graph, port, self.dump.tensors[tensor_name(graph, port)], mode)

    Subject._compare = with_itself
"""


@pytest.mark.proof
def test_both_sides_from_one_file_pass_every_test_and_are_not_green(suite: Suite) -> None:
    (suite.folder / "one_file.py").write_text(ONE_FILE, encoding="utf-8")
    run = suite.run("parity/test_graphs.py", "-p", "one_file", "-k", "length_6 and vision.layer.0")

    assert "10 passed" in run.out
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert f"could not be judged: {MODEL} [length_6]: 10 of 10 isolated comparisons are equal" in run.out
    assert f"next: python -m parity dumps {MODEL} --again\n" in run.out


# ---- the verdict of a whole run


def _record(verdict: Verdict, claim: tuple[str, str, str] = (f"{MODEL}/vision.embed", "square", "isolated")) -> Record:
    name, case, mode = claim
    return Record(Where(name, "hidden", case, mode), verdict)


@pytest.mark.parametrize(
    ("pytest_code", "verdicts", "unreadable", "missing", "code"),
    [
        (0, ["equal", "equal"], (), (), 0),
        (1, ["equal", "different"], (), (), 1),
        (0, ["equal", "different"], (), (), 1),  # whatever pytest says
        (1, ["equal"], (), (), 1),  # a test without records is red
        (0, ["equal"], (), ("youtu_vl/vision.embed [square, isolated]",), 2),
        (0, ["equal"], ("records-main.jsonl:3 is no whole record",), (), 2),
        (1, ["equal", "unjudged"], (), (), 2),
        (1, ["unjudged", "different"], (), ("youtu_vl/vision.embed [square, isolated]",), 1),
        *((pytest_code, ["equal"], (), (), 2) for pytest_code in (2, 3, 4, 5, -11)),
    ],
)
def test_the_exit_code_is_0_only_where_all_agree(
    pytest_code: int,
    verdicts: Sequence[Verdict],
    unreadable: tuple[str, ...],
    missing: tuple[str, ...],
    code: int,
) -> None:
    records = Records(tuple(map(_record, verdicts)), unreadable)

    assert exit_code(pytest_code, records, missing) == code


def _same(case: str) -> list[Record]:
    metrics = Metrics((1,), (1,), elements=1, max_abs=0.0, rel_l2=0.0)
    places = [Where(f"{MODEL}/vision.layer.{number:02d}", "hidden", case, "isolated") for number in range(9)]
    return [Record(where, "equal", metrics, floor=1e-7) for where in places]


def test_a_port_compared_with_itself_is_not_green() -> None:
    same = Records(tuple(_same("square")), ())
    assert exit_code(0, same, ()) == 2
    assert exit_code(0, Records((*same.records, _record("different")), ()), ()) == 1
    found = doubts(same.records, [Workspace(Choice(MODEL, "full"))])
    assert [*found.values()] == [f"python -m parity dumps {MODEL} --profile full --again"]
    assert all(f"{MODEL} [square]: 9 of 9 isolated comparisons" in text for text in found)


def test_records_of_an_older_run_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    RecordWriter(plugin.records_folder(), "gw7").write(_record("equal"))
    worker: Any = SimpleNamespace(stash=pytest.Stash(), workerinput={"workerid": "gw0"}, getoption=lambda name: "")
    plugin.pytest_configure(worker)
    assert len(read_records(plugin.records_folder()).records) == 1  # a worker may come late

    first: Any = SimpleNamespace(stash=pytest.Stash(), getoption=lambda name: "")
    plugin.pytest_configure(first)
    assert read_records(plugin.records_folder()).records == ()


@pytest.mark.parametrize(("code", "after"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_a_session_that_compared_a_port_with_itself_fails(
    code: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    config = SimpleNamespace(stash=pytest.Stash(), getoption=lambda name: "")
    session: Any = SimpleNamespace(exitstatus=code, config=config)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == code

    for record in _same("square"):
        RecordWriter(tmp_path / "records", "main").write(record)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == after


def test_dumps_are_written_again_though_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(workspace: Workspace, name: str, *_: Any) -> Dump:
        return Dump(MODEL, name, {"x": np.ones(3)})

    workspace = Workspace(Choice(MODEL))
    monkeypatch.setattr(Workspace, "make_dump", reference)
    monkeypatch.setattr(Workspace, "fingerprint", "f" * 64)
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    make_dump(workspace.choice, "tall")
    (path,) = tmp_path.glob("store/dump/*/tall.safetensors")
    good = path.read_bytes()
    write_dump(path.parent, Dump(MODEL, "tall", {"x": np.zeros(3)}))  # the port's output over the reference's

    make_dump(workspace.choice, "tall")
    assert path.read_bytes() != good
    make_dump(workspace.choice, "tall", again=True)
    assert path.read_bytes() == good

    monkeypatch.setattr(workspace_module, "COMMITTED", tmp_path)
    monkeypatch.setattr(building, "COMMITTED", tmp_path)
    monkeypatch.setattr(Workspace, "dump", lambda *_: None)  # the real hash is not that of the provenance
    make_dump(workspace.choice, "square", again=True)
    assert (tmp_path / MODEL / "square.safetensors").is_file()


def test_a_run_answers_every_claim_or_says_which_not() -> None:
    workspaces = [Workspace(Choice(MODEL, cases=("smallest", "text_only")))]
    wanted = list(claims(workspaces[0]))
    records = [_record("equal", claim) for claim in wanted]

    assert len(set(wanted)) == len(wanted)
    assert Counter((case, mode) for name, case, mode in wanted if ".layer." in name or "/vision." in name) == {
        **{("smallest", mode): 149 for mode in ("isolated", "chained")},
        **{("text_only", mode): 120 for mode in ("isolated", "chained")},
        **{(case, "isolated"): 149 for case in shape_cases()},
    }
    graphs = {name for name, _, _ in wanted} & set(workspaces[0].graphs)
    around = [(name.partition("/")[2], case) for name, case, _ in wanted if name not in graphs]
    assert around == [(name, "smallest") for name in stages(True)] + [(name, "text_only") for name in stages(False)]
    assert missing_verdicts(records, workspaces) == []
    for place in (0, 200, len(wanted) - 1):
        name, case, mode = wanted[place]
        kept = records[:place] + records[place + 1 :]
        assert missing_verdicts(kept, workspaces) == [f"{name} [{case}, {mode}]"]
    assert len(missing_verdicts([], workspaces)) == len(wanted)
