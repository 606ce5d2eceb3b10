"""The report of the last run, one content written three times: report.html, report.json, report.md.

The page is one file that asks no network: charts stand in it as SVG, pictures as data. The same records and the same
store give the same bytes.
But: nothing is judged or built here; what is not there is told in its place, with the command that makes it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.records import read_records
from harness.store import atomic_write_text
from parity.plugin import records_folder
from parity.report import markdown, page, pictures
from parity.report.content import collect
from parity.report.junit import junit_properties
from parity.workspace import Workspace, home
from references import MODELS

__all__ = ["Written", "judged_models", "junit_properties", "write"]


@dataclass(frozen=True)
class Written:
    """The three files, and the run's exit code: 0 equal, 1 different, 2 could not be judged."""

    page: Path
    json: Path
    markdown: Path
    code: int


def write(workspaces: Sequence[Workspace], *, records: Path | None = None, folder: Path | None = None) -> Written:
    """Report the records of the last run over these workspaces into home()/report.

    records, folder: other places to read from and to write to. Raises UnjudgedError when there are no records.
    """
    records, folder = records or records_folder(), folder or home() / "report"
    workspaces = [w if not w.choice.build else Workspace(replace(w.choice, build=False)) for w in workspaces]
    content = collect(records, workspaces, notes=folder)
    files = Written(folder / "report.html", folder / "report.json", folder / "report.md", content["code"])
    atomic_write_text(files.json, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    atomic_write_text(files.markdown, markdown.render(content))
    atomic_write_text(files.page, page.render(content, pictures.drawn(content, workspaces)))
    return files


def judged_models(records: Path | None = None) -> list[str]:
    """The models that the records speak of, in the order of MODELS; all of them when there are no records."""
    found = {record.where.id.partition("/")[0] for record in read_records(records or records_folder()).records}
    return [model for model in MODELS if model in found] or list(MODELS)
