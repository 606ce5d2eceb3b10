"""Building ahead of the tests, with a progress display: checkpoint, export, dumps."""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.dumps import dump_paths, write_dump
from harness.errors import UnjudgedError
from harness.resources import Mode, require
from harness.store import atomic_write_text
from parity.workspace import COMMITTED, Choice, Workspace, case_names, home

MEMORY_BYTES = 4_000_000_000  # what the references of several cases may take together
DEFAULT_BYTES = (200_000_000, 1_500_000_000)  # disk and memory of the default profile's dumps
WIDE_BYTES = 4_000_000_000  # of a model's weights, from which on one process judges, behind one that has exported
TELL_SECONDS = 0.2
REFERENCE_COLUMNS = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("cases", "piece", "left")]


def build_all(workspace: Workspace, console: Console, *, workers: int) -> None:
    """Everything that the tests of a workspace need."""
    if is_wide(workspace):
        export_apart(workspace)
    else:
        export(workspace, console)
    dumps(workspace, console, workers=workers)


def export_apart(workspace: Workspace) -> None:
    """Export in a process of its own: its memory, the numbers of a few layers, goes back when it ends."""
    command = [sys.executable, "-m", "parity", "export", workspace.model, *shlex.split(workspace.choice.flags())]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        raise UnjudgedError(f"the export ended with exit code {code}; what it said stands above: {shlex.join(command)}")


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


def processes(workspaces: Sequence[Workspace], workers: int, console: Console) -> int:
    """How many processes judge at a time: one where models are so wide that two would hold twice their memory."""
    wide = [workspace.model for workspace in workspaces if is_wide(workspace)]
    if wide and workers > 1:
        console.print(f"{', '.join(wide)}: judged by one process, within 4 GB of memory", highlight=False)
    return 1 if wide else workers


def is_wide(workspace: Workspace) -> bool:
    """Whether a model's weights are so many that memory is thought of."""
    from exporters import space

    return space.weight_bytes(workspace.exporter) > WIDE_BYTES


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
    """Make the dumps that are not there, several cases at a time where memory allows it; again: all of them."""
    missing = [name for name in case_names(workspace) if again or not workspace.has_dump(name)]
    if not missing:
        return
    workers = room_for(workspace, missing, workers)  # the checkpoint is written once, before the processes start
    context = get_context("spawn")
    with (
        _progress(console, *REFERENCE_COLUMNS) as progress,
        context.Manager() as manager,
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        told, stop = manager.Queue(), manager.Event()
        display = _Display(progress, f"reference {workspace.choice.arguments()}", len(missing))
        waiting = {
            pool.submit(make_dump, workspace.choice, name, _Teller(name, told, stop), again=again) for name in missing
        }
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=TELL_SECONDS, return_when=FIRST_COMPLETED)
                display.show(told)
                for future in done:
                    display.finish(future.result())
        except BaseException:
            stop.set()  # what is made so far is kept, and the next call goes on from there
            pool.shutdown(cancel_futures=True)
            raise


def room_for(workspace: Workspace, missing: Sequence[str], workers: int) -> int:
    """How many cases at a time. Raises UnjudgedError where disk or memory do not suffice for one."""
    from references import dumping

    cases = [workspace.cases[name] for name in missing if name in workspace.cases] or list(workspace.cases.values())
    found = dumping.needs(workspace.model, workspace.checkpoint, cases).values()
    largest = sorted((needs.memory for needs in found), reverse=True)  # that may come together
    fitting = [n for n in range(1, min(workers, len(largest)) + 1) if sum(largest[:n]) <= MEMORY_BYTES]
    workers = max(fitting, default=1)
    kept = sum(path.stat().st_size for path in (home() / "unfinished").glob("*"))  # of runs that go on
    disk = max(0, sum(needs.disk for needs in found) - kept)
    command = f"python -m parity dumps {workspace.choice.arguments()}"
    modes = [Mode(f"{command} --workers {n}", disk, sum(largest[:n])) for n in (workers, 1)]
    default = [] if workspace.is_default else [Mode(f"python -m parity dumps {workspace.model}", *DEFAULT_BYTES)]
    require(modes[0], [*modes[1:], *default], workspace.store.root)
    return workers


def make_dump(choice: Choice, name: str, tell: "_Teller | None" = None, *, again: bool = False) -> str:
    """Make one dump, in a process of its own, again: whatever is there; its case's name."""
    if tell:
        tell.check()
    workspace = Workspace(choice)
    if again and workspace.is_committed(name):
        commit_dump(workspace)
    elif again:
        workspace.remove_dump(name)
    workspace.dump(name, tell)
    return name


class _Teller:
    """Tells the first process how far a case is, and ends the case where that process was stopped."""

    def __init__(self, name: str, told: Any, stop: Any) -> None:
        self._name, self._told, self._stop = name, told, stop
        self._next = 0.0

    def check(self) -> None:
        """End the case where the first process was stopped."""
        if self._stop.is_set():
            raise KeyboardInterrupt

    def __call__(self, progress: Any) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + TELL_SECONDS
        self.check()
        self._told.put((self._name, progress))


class _Display:
    """One line: cases, the case's pieces, the last piece, the time that is left by the work that is left."""

    def __init__(self, progress: Progress, description: str, cases: int) -> None:
        self._progress, self._cases = progress, cases
        self._shares: dict[str, float] = {}
        self._kept: dict[str, float] = {}
        self._start = time.monotonic()
        self._task = progress.add_task(description, total=cases, cases=f"0/{cases} cases", piece="", left="")

    def show(self, told: Any) -> None:
        """Take in what the processes told."""
        while not told.empty():
            name, found = told.get()
            self._shares[name], self._kept[name] = found.share, found.kept
            piece = f"{name} {found.done}/{found.pieces} {found.piece}"
            self._progress.update(self._task, completed=self._share, piece=piece, left=self._left())

    def finish(self, name: str) -> None:
        """A case is done."""
        self._shares[name] = 1.0
        done = sum(share == 1.0 for share in self._shares.values())
        cases = f"{done}/{self._cases} cases"
        self._progress.update(self._task, completed=self._share, cases=cases, left=self._left())

    @property
    def _share(self) -> float:
        return sum(self._shares.values())

    def _left(self) -> str:
        made = self._share - sum(self._kept.values())  # what was kept from a run before took no time now
        if made <= 0:
            return ""
        seconds = (time.monotonic() - self._start) * (self._cases - self._share) / made
        return f"{timedelta(seconds=round(seconds))} left"


def commit_dump(workspace: Workspace) -> Path:
    """Write the default case's dump into the repository; its tensors' path."""
    name = next(name for name in workspace.cases if workspace.is_committed(name))
    folder = COMMITTED / workspace.model
    write_dump(folder, workspace.make_dump(name))
    return dump_paths(folder, name)[0]


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    """A display of what is done, ending in the given columns."""
    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(), console=console)
