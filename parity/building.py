"""Building ahead of the tests, with a progress display: checkpoint, export, dumps."""

import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.dumps import dump_paths, write_dump
from harness.errors import UnjudgedError
from harness.store import atomic_write_text
from parity.workspace import COMMITTED, Choice, Workspace, case_names, home


def build_all(workspace: Workspace, console: Console, *, workers: int) -> None:
    """Everything that the tests of a workspace need."""
    export(workspace, console)
    dumps(workspace, console, workers=workers)


def export(workspace: Workspace, console: Console, *, table: str = "float32") -> Path:
    """Export every graph; the model folder."""
    from exporters import space

    if table not in space.TABLE_DTYPES:
        raise UnjudgedError(f"table is {table!r}, but should be one of {', '.join(space.TABLE_DTYPES)}")
    exporter = workspace.exporter
    sizes = {graph_id: space.graph_bytes(exporter, graph) for graph_id, graph in exporter.graphs.items()}
    with _progress(console, DownloadColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(f"export {workspace.choice.arguments()}", total=sum(sizes.values()))
        folder = exporter.model_folder(table=table, each=lambda name: progress.advance(task, sizes[name]), verify=True)
        progress.update(task, completed=sum(sizes.values()))
    # where `python -m runtime` looks when it is given no folder
    atomic_write_text(home() / "exported" / f"{workspace.model}.txt", str(folder))
    return folder


def copy_out(folder: Path, target: Path) -> Path:
    """Copy a model folder out of the store, whole or not at all. Raises UnjudgedError where something is there."""
    if target.exists():
        raise UnjudgedError(f"{target} is there already; remove it, or name another folder after --to")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns("complete.json"))
    unfinished.replace(target)
    return target


def dumps(workspace: Workspace, console: Console, *, workers: int) -> None:
    """Make the dumps that are not there, several cases at a time."""
    missing = [name for name in case_names(workspace) if not workspace.has_dump(name)]
    if not missing:
        return
    _ = workspace.fingerprint  # the checkpoint is written once, before the processes start
    with (
        _progress(console, MofNCompleteColumn()) as progress,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task(f"reference {workspace.choice.arguments()}", total=len(missing))
        futures = [pool.submit(make_dump, workspace.choice, name) for name in missing]
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def make_dump(choice: Choice, name: str) -> None:
    """Make one dump, in a process of its own."""
    Workspace(choice).dump(name)


def commit_dump(workspace: Workspace) -> Path:
    """Write the default case's dump into the repository; its tensors' path."""
    name = next(name for name in workspace.cases if workspace.is_committed(name))
    folder = COMMITTED / workspace.model
    write_dump(folder, workspace.make_dump(name))
    return dump_paths(folder, name)[0]


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    """A display of what is done, ending in the given columns."""
    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(), console=console)
