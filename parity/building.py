"""Building ahead of the tests, with a progress display: checkpoint, export, dumps."""

import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
    from exporters.export import TABLE_DTYPES

    if table not in TABLE_DTYPES:
        raise UnjudgedError(f"table is {table!r}, but should be one of {', '.join(TABLE_DTYPES)}")
    with _progress(console) as progress:
        task = progress.add_task(f"export {workspace.choice.arguments()}", total=len(workspace.graphs))
        folder = workspace.exporter.model_folder(table=table, each=lambda graph_id: progress.advance(task), verify=True)
        progress.update(task, completed=len(workspace.graphs))
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


def dumps(workspace: Workspace, console: Console, *, workers: int, again: bool = False) -> None:
    """Make the dumps that are not there, several cases at a time; again: those that are there as well."""
    missing = [name for name in case_names(workspace) if again or not workspace.has_dump(name)]
    if not missing:
        return
    _ = workspace.fingerprint  # the checkpoint is written once, before the processes start
    with (
        _progress(console) as progress,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task(f"reference {workspace.choice.arguments()}", total=len(missing))
        futures = [pool.submit(make_dump, workspace.choice, name, again=again) for name in missing]
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def make_dump(choice: Choice, name: str, *, again: bool = False) -> None:
    """Make one dump, in a process of its own; again: whatever is there."""
    workspace = Workspace(choice)
    if again and workspace.is_committed(name):
        commit_dump(workspace)
    elif again:
        workspace.remove_dump(name)
    workspace.dump(name)


def commit_dump(workspace: Workspace) -> Path:
    """Write the default case's dump into the repository; its tensors' path."""
    name = next(name for name in workspace.cases if workspace.is_committed(name))
    folder = COMMITTED / workspace.model
    write_dump(folder, workspace.make_dump(name))
    return dump_paths(folder, name)[0]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
