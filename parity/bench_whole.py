"""A whole model of a profile, graph by graph: how long each takes, how far off it is, and the memory of it all.

`python -m parity.bench_whole MODEL PROFILE` prints one JSON object; `bench` runs that in a process of its own, so that
the memory is the port's and the comparisons' alone. Graphs are streamed, as on a machine that cannot hold them.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from harness.records import Record
from parity import building, checks
from parity.bench import Figure, tell, watch
from parity.checks import Subject
from parity.runners import WHOLE
from parity.widths import Timed
from parity.workspace import Choice, Workspace, case_names
from runtime.graphs import Manifest, NcnnRunner

THREADS = 2


def bench(model: str, profile: str, console: Console) -> None:
    """Export and dump what is missing, measure, print the table, write bench-whole-MODEL.json."""
    building.build_all(Workspace(Choice(model, profile)), console, workers=1)
    told, peak = watch(["-m", "parity.bench_whole", model, profile], with_files=False)
    found = json.loads(told) | {"memory": peak}
    options = f"profile {profile}, {THREADS} threads, graphs streamed, each in one piece, 4 KB pages"
    tell(f"whole-{model}", [*_figures(found)], console, 1, options=options, details=found)


def measure(model: str, profile: str) -> dict[str, Any]:
    """Every graph isolated and chained, and every stage, on the first case: seconds and errors by id."""
    workspace = Workspace(Choice(model, profile))
    manifest = Manifest.read(workspace.exporter.model_folder())
    runner = Timed(NcnnRunner(manifest, mode="streaming", threads=THREADS))
    pipeline = importlib.import_module(f"runtime.{model}").Pipeline(manifest, runner, chunk=WHOLE)
    subject = Subject.of(
        workspace, next(iter(case_names(workspace))), SimpleNamespace(pipeline=pipeline, runner=runner)
    )
    graphs = {
        name: {"chained": _worst(subject.chained(graph)), "isolated": _worst(subject.isolated(graph))}
        | {"run": statistics.median(runner.seconds[name]), "load": statistics.median(runner.loads[name])}
        for name, graph in workspace.graphs.items()
    }
    started = time.perf_counter()
    stages = {stage: subject.stage(stage) for stage in checks.stages(bool(subject.grids))}
    return {
        "graphs": graphs,
        "stages": {stage: _worst(records) for stage, records in stages.items()},
        "red": [stage for stage, records in stages.items() if any(record.verdict != "equal" for record in records)],
        "answer": time.perf_counter() - started,
    }


def _figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    kinds: dict[str, list[Mapping[str, float]]] = {}
    for name, graph in found["graphs"].items():
        words = [word for word in name.partition("/")[2].split(".") if not word.isdecimal()]
        kinds.setdefault(".".join(words), []).append(graph)
    for kind, graphs in kinds.items():
        yield Figure(f"{kind}, time of each of {len(graphs)}", "ms", [1e3 * graph["run"] for graph in graphs])
    for kind, graphs in kinds.items():
        yield Figure(f"{kind}, load", "ms", [1e3 * graph["load"] for graph in graphs])
    for mode in ("isolated", "chained"):
        for kind, graphs in kinds.items():
            yield Figure(f"{kind}, relative L2 {mode}", "", [graph[mode] for graph in graphs], "<= 1e-5")
    yield Figure("stages that differ", "", [float(len(found["red"]))], "0")
    yield Figure("peak memory besides the page cache", "GB", [found["memory"] / 1e3], "<= 4")


def _worst(records: Iterable[Record]) -> float:
    return max((record.metrics.rel_l2 for record in records if record.metrics), default=0.0)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
