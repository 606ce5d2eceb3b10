"""Claim: every graph computes what the fp32 reference computes, on the reference's input and on the port's own."""

from parity.plugin import Judge, Session
from parity.workspace import Workspace, shape_cases


def test_graph(graph_case: tuple[Workspace, str, str], session: Session, judge: Judge) -> None:
    workspace, name, case = graph_case
    graph = workspace.graphs[name]
    claims = {"isolated": lambda: session.subject(workspace.model, case).isolated(graph)}
    if case not in shape_cases():
        claims["chained"] = lambda: session.subject(workspace.model, case).chained(graph)
    judge(name, case, claims)
