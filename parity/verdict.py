"""The verdict of a whole run: pytest's word, the records' words, and whether every id has one."""

from collections.abc import Iterable, Sequence

from harness.records import Record, Records
from harness.selfcompare import self_compared
from parity import checks
from parity.workspace import Workspace, case_names, shape_cases

EQUAL, DIFFERENT, UNJUDGED = 0, 1, 2


def exit_code(pytest_code: int, records: Records, missing: Sequence[str]) -> int:
    """0 only when pytest, every record and the count of ids agree; 2 when something could not be judged."""
    verdicts = {record.verdict for record in records.records}
    if "different" in verdicts:
        return DIFFERENT
    if missing or records.unreadable or "unjudged" in verdicts or pytest_code not in (0, 1):
        return UNJUDGED
    if self_compared(records.records):
        return UNJUDGED
    return EQUAL if pytest_code == 0 else DIFFERENT


def missing_verdicts(records: Iterable[Record], workspaces: Iterable[Workspace]) -> list[str]:
    """`id [case, mode]` of every claim that no record answers."""
    answered = {(record.where.id, record.where.case, record.where.mode) for record in records}
    wanted = [claim for workspace in workspaces for claim in claims(workspace)]
    return [f"{name} [{case}, {mode}]" for name, case, mode in wanted if (name, case, mode) not in answered]


def doubts(records: Sequence[Record], workspaces: Iterable[Workspace]) -> dict[str, str]:
    """Why green is not believed, and the command that writes the dumps in question again."""
    arguments = {workspace.model: workspace.choice.arguments() for workspace in workspaces}
    return {
        str(found): f"python -m parity dumps {arguments.get(found.model, found.model)} --again"
        for found in self_compared(records)
    }


def claims(workspace: Workspace) -> Iterable[tuple[str, str, str]]:
    """(id, case, mode) of everything that a whole run must judge."""
    for case in case_names(workspace):
        shapes = case in shape_cases()
        pictures = shapes or bool(workspace.cases[case].pictures)
        for graph in workspace.graphs.values():
            if checks.needs(graph, pictures):
                yield graph.id, case, "isolated"
                if not shapes:
                    yield graph.id, case, "chained"
        if not shapes:
            for name in checks.stages(pictures):
                yield f"{workspace.model}/{name}", case, checks.STAGES[name][0]
