"""Claim: what stands around the graphs equals the reference: image, template, ids, positions, fusion, head, decode."""

from parity.checks import STAGES
from parity.plugin import Judge, Session
from parity.workspace import Workspace


def test_stage(stage_case: tuple[Workspace, str, str], session: Session, judge: Judge) -> None:
    workspace, name, case = stage_case
    stage = name.partition("/")[2]
    mode, _ = STAGES[stage]
    judge(name, case, {mode: lambda: session.subject(workspace.model, case).stage(stage)})
