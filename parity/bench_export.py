"""`python -m parity.bench_export [MODEL] [PROFILE]`: the export beside converting every graph directly.

One graph of each structure is converted with its own weights and timed, and the times are multiplied by the counts;
then the whole model is exported in the same run, on huge pages as well: into the store where nothing of it is there
yet, else into an empty one that is removed behind it.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from exporters import param, pnnx, space
from exporters.export import Exporter
from harness.graphs import Graph
from harness.resources import peak_memory_bytes
from harness.store import Store
from parity.bench import Figure, tell
from parity.workspace import Choice, Workspace, home
from runtime.memory import use_huge_pages

GOAL, BYTES_GOAL = ">= 8", "<= 1.03"


def bench(model: str, profile: str, console: Console) -> None:
    """Measure, print the table, write bench-export-MODEL.json."""
    workspace = Workspace(Choice(model, profile))
    root = home() / "bench-export"
    shutil.rmtree(root, ignore_errors=True)
    exporter = workspace.exporter
    if any(map(exporter.holds, exporter.graphs.values())):
        exporter = Exporter(model, workspace.checkpoint, workspace.fingerprint, Store(root))
    try:
        options = f"profile {profile}, table float32, torch's own number of threads, huge pages"
        tell(f"export-{model}", [*_figures(exporter, console)], console, 1, options=options)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _figures(exporter: Exporter, console: Console) -> Iterator[Figure]:
    space.check(exporter, "float32")
    counts = Counter(graph.structure.name for graph in exporter.graphs.values())
    sample = {graph.structure.name: graph for graph in exporter.graphs.values()}
    direct = 0.0
    for name, graph in sample.items():
        seconds = _direct(exporter, graph)
        console.print(f"direct conversion of {graph.id}: {seconds:.1f} s", highlight=False)
        direct += seconds * counts[name]
        yield Figure(f"direct conversion, {name} (of {counts[name]})", "s", [seconds])
    seconds, written = _whole(exporter, console)
    yield Figure(f"{len(exporter.graphs)} direct conversions, extrapolated", "s", [direct])
    yield Figure(f"whole export, {len(exporter.graphs)} graphs and the table", "s", [seconds])
    yield Figure("direct conversions / export", "x", [direct / seconds], GOAL)
    yield Figure("written", "GB", [written / 1e9])
    yield Figure("written / unique float32 weights", "x", [written / space.weight_bytes(exporter)], BYTES_GOAL)
    yield Figure("peak memory, that of the direct conversions included", "GB", [peak_memory_bytes() / 1e9])


def _direct(exporter: Exporter, graph: Graph) -> float:
    """Seconds from the checkpoint to a param and a bin of one graph's own, without check, audit or hashes."""
    with tempfile.TemporaryDirectory(dir=home()) as folder:
        started = time.perf_counter()
        text, _ = pnnx.convert(exporter.rewritten(graph), graph.structure, Path(folder))
        param.write(param.tidy(text))
        return time.perf_counter() - started


def _whole(exporter: Exporter, console: Console) -> tuple[float, int]:
    """Seconds and bytes of an export into the empty store, conversions of the structures included."""
    started = time.perf_counter()

    def told(graph_id: str) -> None:
        console.print(f"{time.perf_counter() - started:7.1f} s  {graph_id}", highlight=False)

    before = _sizes(exporter.store.root)
    exporter.model_folder(each=told)
    seconds = time.perf_counter() - started
    return seconds, sum(size for file, size in _sizes(exporter.store.root).items() if file not in before)


def _sizes(folder: Path) -> dict[tuple[int, int], int]:
    """Sizes of the files in a folder, a file with several names once."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {(file.st_dev, file.st_ino): file.st_size for file in found}


if __name__ == "__main__":
    use_huge_pages()
    asked = dict(enumerate(sys.argv[1:]))
    bench(asked.get(0, "youtu_vl"), asked.get(1, "full"), Console())
