"""Proof: the scoreboard tells a fault that was found from one that was not, and hears false alarms."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.errors import UnjudgedError
from parity import scoreboard
from parity.faults import FAULTS, Fault, Port
from parity.workspace import Choice, Workspace
from runtime.youtu_vl import Pipeline

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice("youtu_vl"))


def fault_of(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def test_a_fault_is_played(workspace: Workspace, tmp_path: Path) -> None:
    score = scoreboard.play(fault_of("merger output doubled"), workspace, tmp_path)
    assert score.place == score.bisected == "vision.tail"
    assert (score.domain, score.hints[0]) == ("weights file", "scale")
    assert score.place_right
    assert score.domain_right
    assert score.hint_right
    assert score.ids_changed
    assert 1 < score.probes <= 10


def test_a_wrong_expectation_lowers_the_marks(workspace: Workspace, tmp_path: Path) -> None:
    wrong = replace(fault_of("blue channel first"), expected="vision.embed", domain="converter", hints=("sign",))
    score = scoreboard.play(wrong, workspace, tmp_path)
    assert (score.place_right, score.domain_right, score.hint_right) == (False, False, False)
    assert [part for part, _ in scoreboard._parts([score])] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert "image.pixel_values instead of vision.embed" in scoreboard._line(score)


def test_a_fault_that_no_longer_applies_is_red(workspace: Workspace, tmp_path: Path) -> None:
    port = Port(workspace, tmp_path / "model")
    with pytest.raises(LookupError, match="the fault does not apply any more"):
        port.edit_param("youtu_vl/vision.layer.03", lambda text: text.replace("1=7e-6", "1=1"))
    with pytest.raises(LookupError, match="the fault changed no weight: it does not apply any more"):
        port.edit("youtu_vl/vision.layer.03", lambda weights: None)


def test_a_suite_that_does_not_run_is_no_green_one(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="fault blue is not in the corpus"):
        scoreboard.play(replace(fault_of("blue channel first"), name="blue"), workspace, tmp_path)


def test_an_unknown_fault_is_told() -> None:
    with pytest.raises(UnjudgedError, match="fault blue channel is unknown; did you mean blue channel first"):
        scoreboard.run(["blue channel"], Console(quiet=True), green=0)


def test_false_alarms_are_heard(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(scoreboard.false_alarms(workspace, 1)) == []
    monkeypatch.setattr(Pipeline, "choose", lambda self, logits: 0)
    alarms = list(scoreboard.false_alarms(workspace, 1))
    assert alarms[0] == "youtu_vl/sampling.ids [fp32, square, exact], 1 threads, resident"
