"""report.md: a few lines for a pull request."""

from collections.abc import Iterable, Iterator

from parity.report.parts import Content
from parity.report.rows import BADNESS
from parity.report.words import headline, missing_by_case, shown


def render(content: Content) -> str:
    """A few lines for a pull request."""
    counts, red = content["counts"], content["first_red"]
    tally = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in BADNESS if counts[verdict])
    lines = [f"### parity: {content['verdict']}", "", headline(content), ""]
    if red:
        lines += ["```", red["detail"], "```", ""]
        for note in red["notes"]:
            if note["lines"]:
                lines += [f"{note['name']}:", "```", *note["lines"], "```", ""]
    lines += [f"{counts['graphs_seen']} of {counts['graphs']} graphs, {len(counts['cases'])} cases: {tally}", ""]
    lines += ["| tower | worst isolated | worst chained | x floor |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in _tower_cells(content)]
    lines += ["", *_gaps(content)]
    return "\n".join(lines).rstrip() + "\n"


def _gaps(content: Content) -> Iterator[str]:
    for case, claims in missing_by_case(content).items():
        yield f"- without a verdict, case {case}: {len(claims)} claims, such as `{claims[0]}`"
    yield from (f"- {line}" for line in content["unreadable"])
    if content["unknown"]:
        yield f"- unknown ids: {', '.join(content['unknown'][:5])}"


def _tower_cells(content: Content) -> Iterator[list[str]]:
    rows = {row["id"]: row for row in content["rows"]}
    for tower in content["towers"]:
        inside = [rows[graph["id"]] for graph in tower["graphs"] if graph["judged"]]
        yield [tower["title"], *(_worst(inside, key) for key in ("isolated", "chained", "multiple"))]


def _worst(rows: Iterable[Content], key: str) -> str:
    return shown(key, max((float(row[key]) for row in rows if row[key] is not None), default=None))
