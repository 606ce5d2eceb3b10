"""Judging a planted fault as a user's run would, and how well it was found."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from harness.records import Record
from parity import checks
from parity.checks import RED, STAGES, Subject
from parity.faults import Port
from parity.server import forced_or_greedy
from parity.workspace import Workspace


def subject_of(workspace: Workspace, port: Port, case: str) -> Subject:
    """A case of the workspace, judged on a port with a fault in it."""

    def generate(asked: Any, pictures: list[Any], forced: list[int] | None) -> list[Any]:
        return list(forced_or_greedy(port.pipeline, pictures, asked.prompt, asked.new_tokens, asked.history, forced))

    return Subject(
        workspace.model,
        workspace.dump(case),
        workspace.cases[case],
        workspace.graphs,
        pipeline=port.pipeline,
        runner=port.runner,
        generate=generate,
        frame_tokens=workspace.description.frame_tokens,
    )


def records(subject: Subject) -> Iterator[Record]:
    """All records of a subject in pipeline order, those that could not be judged among them."""
    pictures = bool(subject.case.pictures)
    taken = checks.stages(pictures)
    before, after = ([name for name in names if name in taken] for names in checks.around_graphs())
    for name in before:
        yield from _stage(subject, name)
    for graph in subject.graphs.values():
        if checks.needs(graph, pictures):
            for mode, claim in (("isolated", subject.isolated), ("chained", subject.chained)):
                where = subject.where(graph.id, "-", mode)
                yield from checks.attempted(partial(claim, graph), where, subject.rerun(graph.id))
    for name in after:
        yield from _stage(subject, name)


def _stage(subject: Subject, name: str) -> list[Record]:
    where = subject.where(f"{subject.model}/{name}", "-", STAGES[name][0])
    return checks.attempted(lambda: subject.stage(name), where, subject.rerun(where.id))


def reds(subject: Subject) -> Iterator[Record]:
    """The records that are not equal, in pipeline order; the first one names the place."""
    return (record for record in records(subject) if record.verdict != "equal")


def ids_of(subject: Subject) -> list[int] | None:
    """The ids that the port generates; None where it fails."""
    try:
        return [token.id for token in subject.tokens]
    except RED:
        return None
