"""`python -m parity bench`: what a run costs on this machine. Speed is measured here, never in tests.

Cold: an empty store. Warm: the same store again. Every figure is a median over runs, with its spread.
"""

import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from harness.resources import processor
from harness.store import atomic_write_text
from parity import vocabularies
from parity.workspace import ROOT, Choice, Workspace, home
from references import corpora
from runtime.graphs import MODES
from runtime.memory import HUGE_PAGES
from runtime.tokenizer import Tokenizer

PACKAGES = ("torch", "transformers", "ncnn", "pnnx", "numpy")
POLL_SECONDS = 0.1
OPTIONS = (
    "whole runs: 2 processes with 1 thread; decode beside torch: 1 thread; engines: 2 threads and huge pages; weight "
    "modes: 2 threads, context 4096"
)


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


def bench(model: str, console: Console, *, runs: int) -> None:
    """Measure a model's default profile, print the table, write bench-MODEL.json."""
    speed = _engines if _package_file(model) else _decode
    figures = [*_whole_runs(model, runs), *speed(model, runs), *_weight_modes(model, runs)]
    tell(model, figures, console, runs, options=OPTIONS)


def bench_tokenizers(console: Console, *, runs: int) -> None:
    """Measure the runtime's tokenizer with the published vocabularies, print the table, write bench-tokenizers.json."""
    tell("tokenizers", list(_tokenizers(runs)), console, runs, options="1 thread")


def tell(
    name: str,
    figures: list[Figure],
    console: Console,
    runs: int,
    *,
    options: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Print a table of figures and write bench-NAME.json, with the details that the table leaves out.

    options: threads and whatever else was chosen for the figures.
    """
    about = {
        "machine": f"{platform.platform()}, {processor()} with {torch.backends.cpu.get_cpu_capability()}",
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "options": options,
        "versions": {name: version(name) for name in PACKAGES},
        "runs": runs,
    }
    table = Table(title=f"{name}, {about['cores']} cores, {runs} runs")
    for heading in ("figure", "median", "spread", "goal"):
        table.add_column(heading)
    for figure in figures:
        table.add_row(figure.name, f"{figure.median:.4g} {figure.unit}", figure.spread, figure.goal)
    console.print(table)
    path = home() / f"bench-{name}.json"
    found = {"figures": [asdict(figure) for figure in figures], "details": details or {}}
    atomic_write_text(path, json.dumps(about | found, indent=1))
    told = f"{about['machine']}, {about['memory_gib']} GiB, {about['versions']}"
    console.print(f"options: {options}; machine: {told}; written to {path}", highlight=False)


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
    return watch(["-m", "parity", "run", model], PARITY_HOME=str(folder))[1]


def watch(arguments: list[str], *, with_files: bool = True, **environment: str) -> tuple[str, float]:
    """Standard output and peak resident memory (MB, of the largest process) of a Python command that must succeed.

    with_files: count pages of files too, which the system takes back when it needs them.
    environment: what is set besides; what this process asks of glibc is not handed down.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        run = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=inherited | environment,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        peak = 0
        while run.poll() is None:
            peak = max(peak, *_resident(run.pid, with_files=with_files), 0)
            time.sleep(POLL_SECONDS)
        if run.returncode != 0:
            raise RuntimeError(f"python {' '.join(arguments)} ended with code {run.returncode}; it is not measured")
        out.seek(0)
        return out.read(), peak / 1e6


def _resident(pid: int, *, with_files: bool) -> list[int]:
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return [0]
    return [_memory(process, with_files=with_files) for process in processes]


def _memory(process: psutil.Process, *, with_files: bool) -> int:
    try:
        found = process.memory_info()
        return int(found.rss) - (0 if with_files else int(getattr(found, "shared", 0)))
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


def _engines(model: str, runs: int) -> Iterator[Figure]:
    """Decode, prefill and memory of every engine, in processes of their own that take turns."""
    workspace = Workspace(Choice(model))
    folders = {"ncnn": workspace.exporter.model_folder(), "transformers": workspace.checkpoint}
    if importlib.util.find_spec("llama_cpp"):
        folders["llama.cpp"] = _f32_file(model).parent
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    for _ in range(runs):
        for name, folder in folders.items():
            # every engine may use huge pages, as `python -m runtime` does
            out, peak = watch(["-m", "parity.rivals", name, str(folder), "2"], GLIBC_TUNABLES=HUGE_PAGES)
            found[name].append(json.loads(out) | {"peak": peak})
    ids = {name: measured[-1]["ids"] for name, measured in found.items()}
    if len({tuple(chosen) for chosen in ids.values()}) != 1:
        raise RuntimeError(f"the engines chose different ids, so their speeds do not compare: {ids}")
    for kind, unit in (("decode", "tokens/s"), ("prefill", "tokens/s"), ("peak", "MB")):
        for name, measured in found.items():
            yield Figure(f"{kind}, {name}", unit, [one[kind] for one in measured])
    for kind in ("decode", "prefill"):
        for name, goal in (("transformers", ">= 1.5"), ("llama.cpp", ">= 0.8")):
            if name in found:
                pairs = zip(found["ncnn"], found[name], strict=True)
                yield Figure(f"{kind}, ncnn / {name}", "x", [ours[kind] / theirs[kind] for ours, theirs in pairs], goal)


def _weight_modes(model: str, runs: int) -> Iterator[Figure]:
    """Peak memory of `python -m runtime` over a short prompt, in each weight mode."""
    arguments = ["-m", "runtime", model, "--model", str(Workspace(Choice(model)).exporter.model_folder())]
    for mode in MODES:
        command = [*arguments, "--prompt", "Name two planets.", "-n", "4", "--mode", mode]
        yield Figure(f"peak memory, {mode}", "MB", [watch(command)[1] for _ in range(runs)])


def _package_file(model: str) -> Callable[[], Path] | None:
    """What finds the GGUF file in which a model's weights are published, for models that have one."""
    source = importlib.import_module(f"references.{model}.source")
    found: Callable[[], Path] | None = getattr(source, "package_file", None)
    return found


def _f32_file(model: str) -> Path:
    """The package's weights as an F32 GGUF file, made once."""
    path = home() / "rivals" / model / "f32.gguf"
    find = _package_file(model)
    if not path.is_file() and find:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        watch(["-m", "parity.rivals", "write-f32", str(find()), str(part)])
        part.replace(path)
    return path


def _tokenizers(runs: int) -> Iterator[Figure]:
    """Load and encode rates of the runtime's tokenizer with the published vocabularies."""
    lines = corpora.lines(["<|im_end|>"])
    for name in vocabularies.PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(json.dumps(vocabularies.PUBLISHED[name]()), encoding="utf-8")
            loads, rates = zip(*(_tokenizer_rates(path, lines) for _ in range(runs)), strict=True)
        yield Figure(f"tokenizer load, {name}", "s", list(loads), "<= 3")
        yield Figure(f"tokenizer encode, {name}", "MB/s", list(rates), ">= 0.5")


def _tokenizer_rates(path: Path, lines: list[str]) -> tuple[float, float]:
    started = time.perf_counter()
    tokenizer = Tokenizer.from_file(path)
    load = time.perf_counter() - started
    started = time.perf_counter()
    for line in lines:
        tokenizer.encode(line)
    return load, sum(len(line.encode()) for line in lines) / 1e6 / (time.perf_counter() - started)
