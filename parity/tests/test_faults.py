"""Proof: the end-to-end claim can fail, and a planted fault is named by its place."""

import itertools
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.diagnosis import KINDS
from harness.metrics import measure
from parity.checks import LIMITS, Subject
from parity.faults import FAULTS, Fault, Floats, Port, copy_model, edit_weights
from parity.plugin import Session
from parity.scoreboard import play, reds
from parity.workspace import shape_cases
from runtime.graphs import Manifest, NcnnRunner
from runtime.youtu_vl import Pipeline

pytestmark = pytest.mark.proof

MODEL, CASE = "youtu_vl", "square"
STEPS = 4  # decoded tokens over which a perturbed graph must be seen
JUDGED_HERE = [fault for fault in FAULTS if not fault.tests]
DOZEN = 12


def todays() -> list[Fault]:
    """Another dozen every day: all of the corpus in a week or so."""
    first = date.today().toordinal() * DOZEN
    return [FAULTS[(first + number) % len(FAULTS)] for number in range(DOZEN)]


@pytest.mark.parametrize("fault", todays(), ids=lambda fault: fault.name.replace(" ", "_"))
def test_todays_dozen_is_found_as_a_user_would_find_it(fault: Fault, session: Session, tmp_path: Path) -> None:
    score = play(fault, session.workspaces[fault.model], tmp_path)
    assert score.place == fault.expected
    assert score.domain_right, score.domain
    assert set(score.hints) <= set(KINDS)
    assert score.ids_changed == fault.changes_ids or fault.tests


@pytest.mark.parametrize("fault", JUDGED_HERE, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_is_caught_and_named(fault: Fault, session: Session, tmp_path: Path) -> None:
    port = Port(session.workspaces[fault.model], tmp_path / "model")
    try:
        fault.plant(port)
        subjects = (Subject.of(port.workspace, case, port) for case in (fault.case, *shape_cases()))
        red = next(itertools.chain.from_iterable(map(reds, subjects)), None)
        assert red is not None, f"{fault.name}: nothing is red"
        assert red.where.id == f"{fault.model}/{fault.expected}"
        assert fault.expected in red.detail.splitlines()[0]
    finally:
        port.close()


def test_every_fault_is_another() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 75
    assert sum(fault.changes_ids for fault in FAULTS) >= 40


def test_a_fault_that_changes_ids_is_told_from_a_near_tie(session: Session, tmp_path: Path) -> None:
    port = Port(session.workspaces[MODEL], tmp_path / "model")
    next(fault for fault in FAULTS if fault.name == "second best id chosen").plant(port)
    subject = Subject.of(port.workspace, CASE, port)
    (record,) = subject.stage("decode.ids")
    assert "step 0: the reference's margin is" in record.detail
    assert "a bug, no near-tie" in record.detail
    assert "with the reference's ids forced, 64 of 64 agree\n  rerun: " in record.detail  # the logits are right

    subject.dump.values["margins"][0] = 1e-9  # as if two logits were equal up to noise
    (record,) = subject.stage("decode.ids")
    assert ": a near-tie\n" in record.detail


def test_forced_ids_show_what_else_differs(session: Session, tmp_path: Path) -> None:
    port = Port(session.workspaces[MODEL], tmp_path / "model")
    next(fault for fault in FAULTS if fault.name == "decode position + 1").plant(port)
    (record,) = Subject.of(port.workspace, CASE, port).stage("decode.ids")
    agreeing = re.search(r"forced, (\d+) of 64 agree; not at (\d+)", record.detail)
    assert agreeing is not None, record.detail
    assert 0 < int(agreeing[1]) < 64
    assert record.mismatch is not None
    assert int(agreeing[2]) == record.mismatch.index[0]


def test_ids_are_varied_and_depend_on_the_picture(session: Session) -> None:
    workspace = session.workspaces[MODEL]
    ids = {name: workspace.dump(name).values["ids"] for name in ("square", "banner", "tall")}
    assert all(len(set(found)) >= 12 for found in ids.values())
    assert len({tuple(found) for found in ids.values()}) == len(ids)  # one prompt, three pictures


def perturb(weights: dict[str, Floats]) -> None:
    """Change every weight by 1 % of its size, up or down at random."""
    random = np.random.Generator(np.random.Philox(key=1))
    for name, value in weights.items():
        weights[name] = value * (1 + 0.01 * random.choice([-1, 1], value.shape)).astype(np.float32)


@pytest.mark.parametrize("part", ["vision", "prefill", "dqkv", "dattn"])
def test_logits_leave_their_limits_when_one_graph_is_perturbed(part: str, session: Session, tmp_path: Path) -> None:
    """Each graph of the part alone: 1 % of its weights' size is enough to be seen in the logits."""
    workspace = session.workspaces[MODEL]
    exporter, dump = workspace.exporter, workspace.dump("smallest")
    limits = LIMITS.of(f"{MODEL}/decode.logits", "chained")
    copy_model(exporter.model_folder(), tmp_path / "whole")
    mode = "streaming" if part == "prefill" else "resident"  # a resident prompt goes through dqkv and dattn
    unseen = []
    for graph_id in (name for name in workspace.graphs if part in name):
        path = tmp_path / "whole" / f"{graph_id}.bin"
        whole = path.read_bytes()
        edit_weights(exporter, tmp_path / "whole", graph_id, perturb)
        manifest = Manifest.read(tmp_path / "whole")
        pipeline = Pipeline(manifest, NcnnRunner(manifest, mode=mode, verify=False), context=128)
        logits = logits_over(pipeline, workspace.cases["smallest"], dump.values["ids"][:STEPS])
        metrics = measure(logits, dump.tensors["logits"][: STEPS + 1])
        if all(limit.keeps(metrics) for limit in limits.values()):
            unseen.append(graph_id)
        path.unlink()
        path.write_bytes(whole)
    assert not unseen


def logits_over(pipeline: Pipeline, case: Any, ids: Sequence[int]) -> Floats:
    """Logits after the prompt and after each of the given ids: (1 + ids, vocab)."""
    pixels = pipeline.preprocess(case.images())
    prompt = pipeline.prompt(case.prompt, [picture.grid for picture in pixels])
    hidden = pipeline.prefill(pipeline.fuse(prompt.ids, pipeline.encode_images(pixels)))
    return np.stack([pipeline.logits(hidden), *(pipeline.logits(pipeline.step(token)) for token in ids)])
