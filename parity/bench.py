"""`python -m parity bench`: what a run costs on this machine. Speed is measured here, never in tests.

Cold: an empty store. Warm: the same store again. Every figure is a median over runs, with its spread.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from harness.store import atomic_write_text
from parity.workspace import ROOT, Choice, Workspace, home

PACKAGES = ("torch", "transformers", "ncnn", "pnnx", "numpy")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Figure:
    """One measured quantity."""

    name: str
    unit: str
    values: list[float]
    goal: str = ""

    @property
    def median(self) -> float:
        """Median of the runs."""
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        """Smallest to largest run."""
        return f"{min(self.values):.3g} to {max(self.values):.3g}" if len(self.values) > 1 else "one run"


def bench(model: str, console: Console, *, runs: int) -> list[Figure]:
    """Measure a model's default profile, print the table, write bench.json."""
    figures = [*_whole_runs(model, runs), *_decode(model, runs)]
    about = {
        "machine": platform.platform(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": "2 processes, 1 thread each; decode: 1 thread",
        "versions": {name: version(name) for name in PACKAGES},
        "runs": runs,
    }
    table = Table(title=f"{model}, default profile, {about['cores']} cores, {runs} runs")
    for heading in ("figure", "median", "spread", "goal"):
        table.add_column(heading)
    for figure in figures:
        table.add_row(figure.name, f"{figure.median:.4g} {figure.unit}", figure.spread, figure.goal)
    console.print(table)
    path = home() / "bench.json"
    atomic_write_text(path, json.dumps(about | {"figures": [asdict(f) for f in figures]}, indent=1))
    console.print(f"written to {path}; machine: {about['machine']}, {about['versions']}", highlight=False)
    return figures


def _whole_runs(model: str, runs: int) -> Iterator[Figure]:
    cold: list[float] = []
    warm: list[float] = []
    memory: list[float] = []
    conversions: list[float] = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for seconds in (cold, warm):
                started = time.perf_counter()
                memory.append(_run_and_watch(model, Path(folder)))
                seconds.append(time.perf_counter() - started)
            conversions.append(float(len(list((Path(folder) / "store" / "structure").glob("*/complete.json")))))
    yield Figure("cold run", "s", cold, "<= 240")
    yield Figure("warm run", "s", warm, "<= 45")
    yield Figure("pnnx conversions", "", conversions, "6, not 149")
    yield Figure("peak memory of a process", "MB", memory, "<= 2500")


def _run_and_watch(model: str, folder: Path) -> float:
    """Run `parity run` with an own store; peak resident memory of its largest process, MB."""
    command = [sys.executable, "-m", "parity", "run", model]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PARITY_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0
    while run.poll() is None:
        peak = max(peak, *_resident(run.pid), 0)
        time.sleep(POLL_SECONDS)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with code {run.returncode}; a red run is not measured")
    return peak / 1e6


def _resident(pid: int) -> list[int]:
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return [0]
    return [_memory(process) for process in processes]


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


def _decode(model: str, runs: int) -> Iterator[Figure]:
    """Tokens per second of the port and of the torch reference, same case, one thread each."""
    workspace = Workspace(Choice(model))
    case = next(iter(workspace.cases.values()))
    ours, theirs = _port_decoder(workspace, case), _reference_decoder(workspace, case)
    rates: dict[str, list[float]] = {"ncnn": [], "torch": []}
    for _ in range(runs):
        for name, decode in (("ncnn", ours), ("torch", theirs)):
            rates[name].append(decode())
    yield Figure("decode, ncnn runtime", "tokens/s", rates["ncnn"])
    yield Figure("decode, torch fp32 eager", "tokens/s", rates["torch"])
    ratios = [a / b for a, b in zip(rates["ncnn"], rates["torch"], strict=True)]
    yield Figure("decode, ncnn / torch", "x", ratios)


def _port_decoder(workspace: Workspace, case: Any) -> Callable[[], float]:
    import importlib

    from runtime.graphs import Manifest, NcnnRunner

    manifest = Manifest.read(workspace.exporter.model_folder())
    pipeline = importlib.import_module(f"runtime.{workspace.model}").Pipeline(manifest, NcnnRunner(manifest))
    return lambda: _rate(pipeline.generate(case.images(), case.prompt, case.new_tokens))


def _reference_decoder(workspace: Workspace, case: Any) -> Callable[[], float]:
    import torch

    from references import dumping

    reference = dumping.open_reference(workspace.model, workspace.checkpoint)
    embeds = torch.from_numpy(workspace.dump(case.name).tensors["prefill.embeds"])

    def decode() -> float:
        with dumping.one_thread():
            return _rate(reference.greedy(embeds, case.new_tokens))

    return decode


def _rate(tokens: Iterator[Any]) -> float:
    """Tokens per second after the first one, which pays for the prompt."""
    next(tokens)
    started = time.perf_counter()
    count = sum(1 for _ in tokens)
    return count / (time.perf_counter() - started)
