"""`python -m parity VERB`: what the make targets call. Exit codes: 0 equal, 1 different, 2 could not be judged."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.errors import UnjudgedError
from harness.ids import GraphId
from harness.records import Records, RecordWriter, clear_records, read_records
from harness.store import atomic_write_text
from parity import building
from parity.plugin import CLAIMS, pipeline_order, records_folder
from parity.verdict import UNJUDGED, doubts, exit_code, missing_verdicts
from parity.workspace import ROOT, Choice, Workspace, home
from references import MODELS
from runtime.memory import use_huge_pages

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)

ModelArgument = Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="models (default: all)")]
Profile = Annotated[str, typer.Option(help="checkpoint of the model's own, such as tiny or full; its default without")]
CheckpointOption = Annotated[Path | None, typer.Option(help="a Hugging Face folder of your own")]
Case = Annotated[list[str] | None, typer.Option(help="case; may be given several times")]
OneCase = Annotated[str, typer.Option(help="case (default: the model's first)")]
Workers = Annotated[int, typer.Option("--workers", "-j", min=1, help="processes")]


@app.command()
def run(
    models: ModelArgument = None,
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    case: Case = None,
    workers: Workers = 2,
    rolling: Annotated[bool, typer.Option("--rolling", help="export, judge and remove graph by graph")] = False,
) -> None:
    """Judge everything: checkpoint, export, dumps, every graph and stage, the greedy decode."""
    chosen = _workspaces(models, profile, checkpoint, case)
    if rolling:
        raise typer.Exit(_run_rolling(chosen, workers))
    for workspace in chosen:
        building.build_all(workspace, console, workers=workers)
    workers = building.processes(chosen, workers, console)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(str(ROOT / "parity" / name) for name in CLAIMS),
        "-n",
        str(workers),
        "-q",
    ]
    command += [part for workspace in chosen for part in ("--model", workspace.model)]
    command += (["--profile", profile] if profile else []) + (
        ["--checkpoint", str(checkpoint.resolve())] if checkpoint else []
    )
    command += [part for name in case or () for part in ("--case", name)]
    finished = subprocess.run(command, cwd=ROOT, check=False).returncode
    records = read_records(records_folder())
    raise typer.Exit(_tell_verdict(chosen, finished, records, missing_verdicts(records.records, chosen)))


@app.command()
def checkpoint(model: str, profile: Profile = "") -> None:
    """Write a synthetic checkpoint and print its folder."""
    print(Workspace(Choice(model, profile)).checkpoint)


@app.command()
def export(
    model: str,
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    table: Annotated[str, typer.Option(help="numbers of the vocabulary table: float32 or float16")] = "float32",
    to: Annotated[Path | None, typer.Option(help="copy the model folder there")] = None,
) -> None:
    """Export every graph and print the model folder that `python -m runtime` reads."""
    folder = building.export(Workspace(Choice(model, profile, checkpoint)), console, table=table)
    print(building.copy_out(folder, to) if to else folder)


@app.command()
def dumps(
    models: ModelArgument = None,
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    case: Case = None,
    workers: Workers = 2,
    commit: Annotated[bool, typer.Option(help="write the default case's dump into the repository")] = False,
    again: Annotated[bool, typer.Option("--again", help="write those that are there as well")] = False,
) -> None:
    """Run the reference for every case that has no dump yet."""
    for workspace in _workspaces(models, profile, checkpoint, case):
        if commit:
            print(building.commit_dump(workspace))
        else:
            building.dumps(workspace, console, workers=workers, again=again)


@app.command()
def bench(
    models: ModelArgument = None,
    profile: Profile = "",
    runs: Annotated[int, typer.Option(min=1, help="runs of every measurement")] = 1,
) -> None:
    """Measure what runs, layers and tokenizers cost, beside other engines; writes bench-*.json.

    With a profile: its export beside direct conversions, and every graph of the whole model. The profile full
    takes half an hour and 34 GB of disk.
    """
    from parity import bench as measures
    from parity import bench_export, bench_whole, bench_widths

    chosen = [workspace.model for workspace in _workspaces(models, profile, None, None)]
    for model in chosen:
        if profile:
            bench_export.bench(model, profile, Console())
            bench_whole.bench(model, profile, Console())
        else:
            measures.bench(model, Console(), runs=runs)
    if bench_widths.MODEL in chosen and not profile:
        bench_widths.bench(Console(), runs=runs)
    if not profile:
        measures.bench_tokenizers(Console(), runs=runs)


@app.command()
def bisect(
    model: str,
    case: OneCase = "",
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
) -> None:
    """Name the first guilty graph or stage: the port up to a seam, the reference beyond, in halves."""
    from parity import bisect as search

    workspace = Workspace(Choice(model, profile, checkpoint, (case,) if case else ()))
    found = search.bisect_case(workspace, case or next(iter(workspace.cases)))
    _tell_and_note("bisect", search.lines(found))
    raise typer.Exit(found.exit_code)


@app.command()
def explain(
    graph_id: str,
    case: OneCase = "",
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    folder: Annotated[Path | None, typer.Option(help="judge this exported model folder, not the store's files")] = None,
) -> None:
    """Name the stage of the tool chain that broke a graph, and the operator inside it."""
    from parity.explain import explain as explained

    found = explained(_workspace_of(graph_id, profile, checkpoint), graph_id, case, folder=folder)
    _tell_and_note("explain", found.lines())
    raise typer.Exit(found.exit_code)


@app.command()
def faults(
    only: Annotated[list[str] | None, typer.Option(help="name of a fault; may be given several times")] = None,
    green: Annotated[int, typer.Option(min=0, help="green runs that must raise no alarm")] = 20,
) -> None:
    """Plant every fault of the corpus alone, find it, and print how well that went."""
    from parity import scoreboard

    raise typer.Exit(scoreboard.run(only or [], Console(), green=green))


@app.command()
def report(
    models: ModelArgument = None,
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    case: Case = None,
) -> None:
    """Write the report of the last run: one page, the same as JSON, a few lines for a pull request."""
    from parity import report as reporting

    written = reporting.write(_workspaces(models or reporting.judged_models(), profile, checkpoint, case))
    _tell(map(str, (written.page, written.json, written.markdown)))
    raise typer.Exit(written.code)


@app.command()
def baseline(
    models: ModelArgument = None,
    compare: Annotated[bool, typer.Option("--compare", help="compare the last run with the one that was kept")] = False,
) -> None:
    """Keep the last run, or compare the last run with the one that was kept."""
    from parity import baseline as kept

    records = read_records(records_folder()).records
    if not compare:
        kept.store(records, kept.baseline_path())
        print(kept.baseline_path())
        return
    before = kept.read(kept.baseline_path())
    found = kept.compare(records, before, pipeline_order(_workspaces(models, "", None, None)))
    _tell(kept.lines(found, before))
    raise typer.Exit(kept.exit_code(found))


@app.command()
def repro(
    graph_id: str,
    case: OneCase = "",
    profile: Profile = "",
    checkpoint: CheckpointOption = None,
    to: Annotated[Path | None, typer.Option(help="the folder to write (default: a name of the graph's)")] = None,
) -> None:
    """Write a folder that shows a graph's difference with numpy and ncnn alone, for a bug report upstream."""
    from parity import repro as bundle

    workspace = _workspace_of(graph_id, profile, checkpoint)
    target = to or Path(graph_id.replace("/", "."))
    folder = bundle.write(workspace, graph_id, case or next(iter(workspace.cases)), target)
    print(f"{folder}\nrun: python {folder / 'repro.py'}")


@app.command()
def graphs(model: str, profile: Profile = "", checkpoint: CheckpointOption = None) -> None:
    """List the graph ids of a model in execution order."""
    for name in Workspace(Choice(model, profile, checkpoint)).graphs:
        print(name)


def _run_rolling(chosen: list[Workspace], workers: int) -> int:
    """Judge what can be judged graph by graph, and say what is left out; the exit code."""
    from parity import rolling

    clear_records(records_folder())
    writer = RecordWriter(records_folder(), "main")
    for workspace in chosen:
        building.dumps(workspace, console, workers=workers)
        rolling.run(workspace, writer.write)
    records = read_records(records_folder())
    missing = missing_verdicts(records.records, chosen)
    left_out = [line for line in missing if rolling.is_left_out(line)]
    console.print(f"left out, since they decode with the whole export: {', '.join(left_out)}", markup=False)
    return _tell_verdict(chosen, 0, records, [line for line in missing if line not in left_out])


def _tell_verdict(chosen: list[Workspace], finished: int, records: Records, missing: list[str]) -> int:
    """Print the verdict of a run that ended with the code `finished`; the exit code."""
    for line in missing[:5]:
        console.print(f"without a verdict: {line}", markup=False)
    for doubt, command_to_type in doubts(records.records, chosen).items():
        console.print(f"could not be judged: {doubt}; write the dumps again: {command_to_type}", markup=False)
    code = exit_code(finished, records, missing)
    order = pipeline_order(chosen)
    words = {0: "equal", 1: "different", 2: "could not be judged"}
    console.print(
        f"parity: {words[code]} ({len(records.records)} comparisons over {len(order)} ids, "
        f"{len(missing)} without a verdict)"
    )
    return code


def _workspace_of(graph_id: str, profile: str, checkpoint: Path | None) -> Workspace:
    """The workspace of a graph's model."""
    return Workspace(Choice(GraphId.parse(graph_id).model, profile, checkpoint))


def _tell_and_note(verb: str, lines: Iterable[str]) -> None:
    """Print lines, and keep them for the report."""
    text = "\n".join(lines)
    print(text)
    atomic_write_text(home() / "report" / f"{verb}.txt", text + "\n")


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _workspaces(
    models: list[str] | None, profile: str, checkpoint: Path | None, case: list[str] | None
) -> list[Workspace]:
    """The chosen workspaces; a wrong name is told before anything is built."""
    chosen = [Workspace(Choice(model, profile, checkpoint, tuple(case or ()))) for model in models or MODELS]
    for workspace in chosen:
        _ = workspace.graphs, workspace.cases
    return chosen


def main() -> int:
    """Run a verb; errors are told without a traceback. typer ends the process with its own code."""
    try:
        app()
    except UnjudgedError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
    return UNJUDGED


if __name__ == "__main__":
    if sys.argv[1:2] in (["export"], ["bench"]):
        use_huge_pages()
    sys.exit(main())
