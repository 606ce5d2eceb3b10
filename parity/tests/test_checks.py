"""Claim: a graph and a stage are judged against the reference, each by its own run, and what fails leaves a record."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.dumps import Dump
from harness.errors import UnjudgedError
from harness.graphs import Graph, Port, Structure
from harness.isolation import CrashedError
from harness.records import Record, RecordWriter, Verdict, Where, read_records
from parity.attempts import RED, attempted
from parity.checks import STAGES, Subject
from parity.plugin import Judge, Session
from parity.runners import StoreRunner
from parity.workspace import Choice

ROWS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
STRUCTURE = Structure("layer", (Port("x", ("T", 4)),), (Port("hidden", ("T", 4)), Port("key", ("T", 4))), {})
GRAPH = Graph("m/llm.layer.00.prefill", STRUCTURE, 0, {"x": ("embeds",)})
MADE_WITH = "reference.made_with"  # judges the dump alone: on another one it raises
WHERE = Where(GRAPH.id, "-", "square", "isolated")


class Runner:
    """Gives the input twice and three times as large."""

    threads = 1

    def run(self, graph_id: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"hidden": 2 * inputs["x"], "key": 3 * inputs["x"]}


def subject() -> Subject:
    """A reference that gives its input once; in the chain the port gives it four and five times."""
    tensors = {"embeds": ROWS, "llm.layer.00.prefill.hidden": ROWS, "llm.layer.00.prefill.key": ROWS}
    values = {"floors": dict.fromkeys(tensors, 1e-7), "prompt": "reference"}
    made = Subject(
        "m",
        Choice("m"),
        Dump("m", "square", tensors, values),
        case=None,
        graphs={GRAPH.id: GRAPH},
        pipeline=SimpleNamespace(),
        runner=Runner(),
        generate=lambda *_: [],
        frame_tokens=lambda *_: 0,
    )
    chain: Any = SimpleNamespace(outputs=lambda graph: {"hidden": 4 * ROWS, "key": 5 * ROWS})
    made.__dict__.update(chain=chain, prompt=SimpleNamespace(text="port"))
    return made


def scales(records: Sequence[Record]) -> list[tuple[str, str, float]]:
    return [(r.where.tensor, r.where.mode, round(r.metrics.scale, 3)) for r in records if r.metrics]


def test_a_graph_is_judged_against_the_reference() -> None:
    assert scales(subject().isolated(GRAPH)) == [("hidden", "isolated", 2.0), ("key", "isolated", 3.0)]
    assert scales(subject().chained(GRAPH)) == [("hidden", "chained", 4.0), ("key", "chained", 5.0)]


def test_a_stage_is_judged_against_the_reference() -> None:
    (record,) = subject().stage("template.text")
    assert "the first at 0: 'p' in 'port', but should be 'r' in 'refe'" in record.detail


def altered(dump: Dump) -> Iterator[Dump]:
    """The dump with one value or one tensor changed at its beginning; the graphs' own tensors are left out."""
    for name, value in dump.values.items():
        if isinstance(value, list | str) and value:
            first: Any = value[:1]
            yield replace(dump, values={**dump.values, name: first + value})
    for name, tensor in dump.tensors.items():
        if ".layer." not in name:
            other = tensor.copy()
            other.flat[0] += 1
            yield replace(dump, tensors={**dump.tensors, name: other})


def turns_red(subject: Subject, stage: str, dump: Dump) -> bool:
    """Whether the same port is red on another dump; a dump on which nothing can be computed shows nothing."""
    try:
        (record,) = replace_dump(subject, dump).stage(stage)
    except (*RED, ValueError, IndexError, TypeError):
        return False
    return record.verdict == "different"


def replace_dump(subject: Subject, dump: Dump) -> Subject:
    """The subject with another dump, and all that the port has computed already."""
    other = copy(subject)
    other.dump = dump
    return other


@pytest.mark.proof
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != MADE_WITH])
def test_every_stage_is_red_on_another_reference(stage: str, session: Session) -> None:
    """A stage that compared the port with itself would be green on any."""
    subject = session.subject("youtu_vl", "smallest")
    (record,) = subject.stage(stage)
    assert record.verdict == "equal"
    assert any(turns_red(subject, stage, dump) for dump in altered(subject.dump))


@pytest.mark.parametrize(("name", "other"), [("dtype", "bfloat16"), ("transformers", "5.0.0"), ("torch", None)])
def test_a_reference_made_with_something_else_is_none(name: str, other: str | None, session: Session) -> None:
    dump = session.subject("youtu_vl", "smallest").dump
    made_with = {**dump.provenance["made_with"], name: other}
    changed = replace(dump, provenance={**dump.provenance, "made_with": made_with})
    with pytest.raises(UnjudgedError, match=f"made with {name} {other}, but should be .*; make it again: python -m"):
        replace_dump(session.subject("youtu_vl", "smallest"), changed).stage(MADE_WITH)


def test_a_stage_that_compares_the_port_with_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> bool:
        return any(turns_red(subject(), "template.text", dump) for dump in altered(subject().dump))

    assert seen()
    monkeypatch.setitem(STAGES, "template.text", ("exact", lambda s: (s.prompt.text, s.prompt.text)))
    assert not seen()


@pytest.mark.parametrize("error", [UnjudgedError("no dump"), CrashedError(GRAPH.id, "SIGSEGV")])
def test_a_claim_that_cannot_be_computed_is_red(error: Exception) -> None:
    def claim() -> list[Record]:
        raise error

    (record,) = attempted(claim, WHERE, "pytest -k it")
    assert (record.where, record.verdict) == (WHERE, "unjudged")
    assert record.detail == f"{GRAPH.id} could not be judged {WHERE.setting}: {error}\n  rerun: pytest -k it"


@pytest.mark.parametrize(
    ("isolated", "chained", "red"),
    [
        ("equal", "equal", []),
        ("equal", "different", ["chained"]),
        ("unjudged", "equal", ["isolated"]),
        ("different", "unjudged", ["isolated", "chained"]),
    ],
)
def test_a_test_fails_where_a_claim_is_red(isolated: Verdict, chained: Verdict, red: list[str], tmp_path: Path) -> None:
    def claimed(mode: str, verdict: Verdict) -> list[Record]:
        return [Record(Where(GRAPH.id, "hidden", "square", mode), verdict, detail=f"red {mode}")]

    judge = Judge(RecordWriter(tmp_path, "main"), "test", lambda name: "")
    claims = {"isolated": lambda: claimed("isolated", isolated), "chained": lambda: claimed("chained", chained)}
    said = ""
    try:
        judge(GRAPH.id, "square", claims)
    except pytest.fail.Exception as failure:
        said = str(failure)
    assert said == "\n\n".join(f"red {mode}" for mode in red)
    assert len(read_records(tmp_path).records) == 2


def test_a_graph_that_kills_the_child_is_named() -> None:
    def call(*_: Any) -> Any:
        raise CrashedError("server run", "SIGSEGV")

    exporter = SimpleNamespace(graph=lambda name: Path(name), graphs={GRAPH.id: GRAPH}, entry=lambda graph: {})
    workspace: Any = SimpleNamespace(exporter=exporter)
    child: Any = SimpleNamespace(call=call)
    with pytest.raises(CrashedError, match=f"{GRAPH.id}: SIGSEGV"):
        StoreRunner(workspace, child).run(GRAPH.id, {"x": ROWS})
