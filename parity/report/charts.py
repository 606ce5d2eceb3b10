"""Charts of the report: one SVG per tower."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity.report.parts import Content

ISOLATED, CHAINED, FLOOR, RED = "#1f6fb4", "#d9822b", "#8a8f98", "#c62828"
COLOURS = {"isolated": ISOLATED, "chained": CHAINED}
STYLE: Any = {  # matplotlib's own type lists three hundred names
    "svg.hashsalt": "parity",
    "svg.fonttype": "none",  # the browser's own letters: they can be searched
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FLOOR,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
LOWEST = 1e-8  # foot of the charts: fp32 noise is ten times as large


def charts(content: Content) -> Iterator[str]:
    """One SVG per tower: the errors of its graphs in execution order, with floor and limits."""
    rows = {row["id"]: row for row in content["rows"]}
    for tower in content["towers"]:
        if any(graph["judged"] for graph in tower["graphs"]):
            yield chart(tower["title"], tower["graphs"], rows)


def chart(title: str, graphs: Sequence[Content], rows: Mapping[str, Content]) -> str:
    """Relative L2 on a log axis, one place per graph; each point links to the graph's row."""
    places = [(place, rows[graph["id"]]) for place, graph in enumerate(graphs) if graph["judged"]]
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 2.7))
        axes = figure.add_axes((0.055, 0.1, 0.8, 0.8))
        axes.set_yscale("log")
        axes.set_ylim(LOWEST, _highest(places))
        axes.set_xlim(-0.7, len(graphs) - 0.3)
        for mode, colour in COLOURS.items():
            _steps(axes, [(place, row["bounds"][mode]) for place, row in places], colour, f"limit, {mode}", ls="--")
        _steps(axes, [(place, row["floor"]) for place, row in places], FLOOR, "noise floor")
        for mode, colour in COLOURS.items():
            _points(axes, places, mode, colour)
        gaps = [place for place, graph in enumerate(graphs) if not graph["judged"]]
        if gaps:
            axes.plot(gaps, [LOWEST * 1.5] * len(gaps), "x", color=RED, label="no verdict")
        _label(axes, title, graphs)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    svg = buffer.getvalue().replace(' target="_blank"', "")  # the row is in the same page
    return svg[svg.index("<svg") :]


def _highest(places: Sequence[tuple[int, Content]]) -> float:
    """Head of the axis: above every limit and every finite error."""
    drawn = [row[mode] for _, row in places for mode in COLOURS if isinstance(row[mode], float)]
    drawn += [bound for _, row in places for bound in row["bounds"].values() if bound is not None]
    return 4 * float(max(drawn, default=1.0))


def _steps(axes: Axes, values: Iterable[tuple[int, float | None]], colour: str, label: str, ls: str = "-") -> None:
    known = [(place, value) for place, value in values if value is not None]
    if known:
        axes.step(*zip(*known, strict=True), where="mid", color=colour, lw=1.1, ls=ls, label=label)


def _points(axes: Axes, places: Sequence[tuple[int, Content]], mode: str, colour: str) -> None:
    """Points within the axis: an error of 0 at its foot, one that is no number at its head."""
    points = [(place, row) for place, row in places if row[mode] is not None]
    if not points:
        return
    foot, head = axes.get_ylim()
    at = [place for place, _ in points]
    errors = [min(max(float(row[mode]), foot * 1.5), head / 1.5) for _, row in points]
    red = [any(line["verdict"] != "equal" for line in row["lines"] if line["mode"] == mode) for _, row in points]
    axes.plot(at, errors, color=colour, lw=1, alpha=0.5)
    sizes, faces = [46 if r else 14 for r in red], [RED if r else colour for r in red]
    marks = axes.scatter(at, errors, sizes, faces, edgecolors=colour, linewidths=1.5, zorder=3)
    marks.set_urls([f"#{row['id']}" for _, row in points])
    axes.plot([], [], "o-", ms=4, color=colour, label=mode)


def _label(axes: Axes, title: str, graphs: Sequence[Content]) -> None:
    ticks = [place for place, graph in enumerate(graphs) if graph["tick"]]
    axes.set_xticks(ticks, [graphs[place]["label"] for place in ticks])
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel("relative L2")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
