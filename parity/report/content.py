"""What is reported: everything that the three files say, as JSON."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import UnjudgedError
from harness.ids import GraphId
from harness.records import Record, Records, read_records
from parity.plugin import pipeline_order
from parity.report.parts import Content, attempt
from parity.report.pictures import compared_picture, has_pictures
from parity.report.provenance import LICENCES, machine, provenance
from parity.report.rows import BADNESS, rows_of
from parity.report.tokens import strips
from parity.verdict import exit_code, missing_verdicts
from parity.workspace import Workspace, case_names, run_command

WORDS = ("equal", "different", "could not be judged")  # by exit code
# What other commands leave beside the report about the first red: file name -> the command that writes it.
NOTES = (
    ("bisect", "python -m parity bisect {model} --case {case}{flags}"),
    ("explain", "python -m parity explain {id} --case {case}{flags}"),
)


def collect(records: Path, workspaces: Sequence[Workspace], *, notes: Path) -> Content:
    """Everything that the report says about the records in a folder. Raises UnjudgedError when it holds none."""
    order, command = pipeline_order(workspaces), run_command([workspace.choice for workspace in workspaces])
    found = _chosen(read_records(records), workspaces, order)
    if not found.records and not found.unreadable:
        models = " ".join(workspace.model for workspace in workspaces)
        raise UnjudgedError(f"{records} holds no record of {models}; judge first: {command}")
    missing = missing_verdicts(found.records, workspaces)
    code = exit_code(0, found, missing)
    rows = rows_of(found.records, order)
    red = next((record for record in found.records if record.verdict != "equal"), None)
    graphs = [name for workspace in workspaces for name in workspace.graphs]
    return {
        "verdict": WORDS[code],
        "code": code,
        "ended": _ended(records),
        "command": command,
        "models": [workspace.model for workspace in workspaces],
        "counts": _counts(found.records, graphs),
        "origins": [row["id"] for row in rows if row["word"] == "origin"],
        "first_red": red and _first_red(red, workspaces, notes, records),
        "missing": missing,
        "unreadable": list(found.unreadable),
        "unknown": sorted({record.where.id for record in found.records} - set(order)),
        "towers": _towers(graphs, rows),
        "rows": rows,
        "tokens": [strip for workspace in workspaces for strip in strips(workspace, found.records)],
        "pictures": [attempt(compared_picture, workspace) for workspace in workspaces if has_pictures(workspace)],
        "provenance": [machine(), *[part for workspace in workspaces for part in provenance(workspace)]],
        "licences": [list(row) for row in LICENCES],
    }


def _chosen(found: Records, workspaces: Sequence[Workspace], order: Sequence[str]) -> Records:
    """The records of the chosen models in pipeline order, unknown ids last; of one id, isolated ones first.

    Workers write in any order: the first red must not depend on it.
    """
    models = {workspace.model for workspace in workspaces}
    cases = list(dict.fromkeys(name for workspace in workspaces for name in case_names(workspace)))
    place, turn = ({name: number for number, name in enumerate(names)} for names in (order, cases))

    def rank(record: Record) -> tuple[int, bool, int, str]:
        where = record.where
        case = turn.get(where.case, len(turn))
        return place.get(where.id, len(place)), where.mode == "chained", case, where.tensor

    ours = [record for record in found.records if record.where.id.partition("/")[0] in models]
    return replace(found, records=tuple(sorted(ours, key=rank)))


def _ended(records: Path) -> str:
    seconds = max(path.stat().st_mtime for path in records.glob("records-*.jsonl"))
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _counts(records: Sequence[Record], graphs: Sequence[str]) -> Content:
    seen = {record.where.id for record in records}
    counts: Content = {verdict: sum(record.verdict == verdict for record in records) for verdict in BADNESS}
    cases = list(dict.fromkeys(record.where.case for record in records))
    return counts | {"graphs": len(graphs), "graphs_seen": len(seen & set(graphs)), "cases": cases}


def _first_red(red: Record, workspaces: Sequence[Workspace], notes: Path, records: Path) -> Content:
    where = red.where
    workspace = next(workspace for workspace in workspaces if workspace.model == where.id.partition("/")[0])
    names = NOTES if where.id in workspace.graphs else NOTES[:1]
    words = {"model": workspace.model, "case": where.case, "id": where.id, "flags": workspace.choice.flags()}
    return {
        "id": where.id,
        "setting": where.setting,
        "detail": red.detail or f"{where.id} {where.tensor} is {red.verdict} {where.setting}",
        "rerun": red.rerun,
        "notes": [
            {"name": name, "command": command.format(**words), "lines": _note(notes / f"{name}.txt", records)}
            for name, command in names
        ],
    }


def _note(path: Path, records: Path) -> list[str] | None:
    """The lines that another command left, unless they are of an earlier run."""
    newest = max((file.stat().st_mtime for file in records.glob("records-*.jsonl")), default=0.0)
    if not path.is_file() or path.stat().st_mtime < newest:
        return None
    return path.read_text(encoding="utf-8").splitlines()


def _towers(graphs: Sequence[str], rows: Sequence[Content]) -> list[Content]:
    """Graphs that follow one another, in execution order: a tower, or one part of a tower's layers."""
    known = {row["id"]: row for row in rows}
    towers: dict[str, list[Content]] = {}
    for name in graphs:
        graph = GraphId.parse(name)
        title = " ".join(filter(None, (graph.model, graph.tower, graph.part)))
        label = graph.block if graph.index is None else f"{graph.index:02d}"
        tick = not towers.get(title) or graph.index is None or (graph.index > 0 and graph.index % 5 == 0)
        towers.setdefault(title, []).append({"id": name, "label": label, "tick": tick, "judged": name in known})
    return [{"title": title, "graphs": members} for title, members in towers.items()]
