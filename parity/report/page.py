"""report.html: one page, from the template beside this file."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from harness.limits import METRICS
from harness.origin import MEANINGS
from parity.report.charts import RED, charts
from parity.report.parts import Content
from parity.report.words import headline, missing_by_case, shown

MARGINS = (0.001, 0.01, 0.1, 1.0)  # between these the colours of the token strip change


def render(content: Content, drawn: Sequence[Content]) -> str:
    """report.html: the content, its charts and its pictures in one file."""
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    rooms = jinja2.Environment(
        loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return rooms.get_template("report.html.jinja").render(
        content,
        headline=headline(content),
        charts=list(charts(content)),
        drawn=drawn,
        metric_names={key: key.rpartition("_")[0] for key in METRICS},
        missing_cases=missing_by_case(content),
        shown=shown,
        margin_class=margin_class,
        margin_steps=MARGINS,
        red=RED,
        meanings=MEANINGS,
    )


def margin_class(margin: float) -> str:
    """`m0`, the closest decisions, to `m4`."""
    return f"m{sum(margin >= step for step in MARGINS)}"
