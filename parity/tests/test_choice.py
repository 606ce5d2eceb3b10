"""Claim: what is printed to be typed next judges the checkpoint that was judged."""

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import UnjudgedError
from harness.records import Record, read_records
from parity.checks import Subject
from parity.plugin import Judge, Session
from parity.workspace import ROOT, Choice, run_command

MODEL, CASE = "youtu_vl", "square"
GRAPH = f"{MODEL}/vision.layer.07"
MINE = Path("my models/one")


@pytest.mark.parametrize(
    ("choice", "arguments", "for_pytest"),
    [
        (Choice(MODEL), MODEL, ""),
        (Choice(MODEL, cases=(CASE,)), MODEL, ""),  # all cases of the default are known
        (Choice(MODEL, "full"), f"{MODEL} --profile full", f" --model {MODEL} --profile full"),
        (
            Choice(MODEL, checkpoint=MINE, cases=(CASE, "wide")),
            f"{MODEL} --checkpoint 'my models/one'",
            f" --model {MODEL} --checkpoint 'my models/one' --case {CASE} --case wide",
        ),
    ],
    ids=["default", "case", "profile", "checkpoint"],
)
def test_a_choice_for_the_command_line(choice: Choice, arguments: str, for_pytest: str) -> None:
    assert choice.arguments() == arguments
    assert choice.pytest_options() == for_pytest


def test_the_command_for_several_models() -> None:
    choices = [Choice(model, "tiny", cases=(CASE,)) for model in ("a", "b")]
    assert run_command(choices) == f"python -m parity run a b --profile tiny --case {CASE}"


def test_the_printed_command_is_taken_by_pytest() -> None:
    subject: Any = SimpleNamespace(dump=SimpleNamespace(case=CASE), choice=Choice(MODEL, "full", cases=(CASE,)))
    command = Subject.rerun(subject, GRAPH)
    assert command == f"pytest -k '{GRAPH} and {CASE}' --model {MODEL} --profile full --case {CASE}"

    words = [sys.executable, "-m", *shlex.split(command), "parity/test_graphs.py", "--collect-only", "-q", "--no-build"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    assert listed.splitlines()[0] == f"parity/test_graphs.py::test_graph[{GRAPH}-fp32-{CASE}]"


def test_a_claim_that_cannot_be_computed_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim() -> list[Record]:
        raise UnjudgedError("no dump")

    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    given = {"--model": [MODEL], "--profile": "full", "--checkpoint": None, "--case": None, "--no-build": True}
    given["--records"] = ""
    config: Any = SimpleNamespace(getoption=given.__getitem__)
    session = Session(config)
    with pytest.raises(pytest.fail.Exception, match=r"rerun: pytest 'a\.py::test' --model youtu_vl --profile full$"):
        Judge(session.records, "a.py::test", session.options)(GRAPH, CASE, {"isolated": claim})
    (record,) = read_records(tmp_path / "records").records
    assert record.rerun == f"pytest 'a.py::test' --model {MODEL} --profile full"
