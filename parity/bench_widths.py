"""`python -m parity.bench_widths`: what layers of the true widths cost, beside torch and the memory's own speed.

A slice of the model with the true widths is exported: LAYERS layers of each tower and the whole vocabulary table. Port
and torch take turns in processes of their own; how cost grows is measured in one process per size.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Plot
from matplotlib.ticker import LogFormatter
from rich.console import Console
from rich.table import Table

from exporters.folders import link_tree
from harness.store import atomic_write_text
from parity.bench import Figure, tell, watch
from parity.widths import PROMPT
from parity.workspace import Choice, Workspace, home
from runtime.decoder import CHUNK
from runtime.memory import HUGE_PAGES

MODEL, PROFILE = "youtu_vl", "full"
LAYERS, FULL_LAYER = 4, 1  # more weights than the processor's caches hold
THREADS = 2
OPTIONS = (
    f"{THREADS} threads, {LAYERS} layers, resident, huge pages, chunks of {CHUNK}, float16 table, "
    f"decode behind {PROMPT} tokens"
)
PARTS = (
    *("model.embed_tokens.weight", "model.norm.weight", "merger.*", "siglip2.vision_model.embeddings.*"),
    "siglip2.vision_model.post_layernorm.*",
    *(
        f"{tower}.{index}.*"
        for tower in ("siglip2.vision_model.encoder.layers", "model.layers")
        for index in range(LAYERS)
    ),
)
MEMORY = {"bytes": "memory, MB", "told": "as told before, MB"}
GROWTH = {
    "prompt": (128, 256, 512, 1024, 2048, 4096),
    "context": (512, 1024, 2048, 4096, 8192),
    "image": (2, 8, 16, 32, 64, 128),
}


def bench(console: Console, *, runs: int) -> None:
    """Measure, print the tables, write bench-widths.json, bench-growth.json and bench-growth.png."""
    workspace = Workspace(Choice(MODEL, PROFILE, only=PARTS))
    folder = slice_folder(workspace, home() / "bench-widths")
    tell("widths", list(_figures(folder, workspace, runs)), console, runs, options=OPTIONS)
    _tell_growth(growth(folder), console)


def slice_folder(workspace: Workspace, target: Path) -> Path:
    """Export the slice: a model folder whose config.json has LAYERS layers in each tower."""
    exporter = copy.copy(workspace.exporter)
    exporter.graphs = {name: graph for name, graph in exporter.graphs.items() if (graph.index or 0) < LAYERS}
    source = exporter.model_folder(table="float16")
    shutil.rmtree(target, ignore_errors=True)
    link_tree(source, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": LAYERS}
    config["vision_config"] |= {"num_hidden_layers": LAYERS, "fullatt_block_indexes": [FULL_LAYER]}
    (target / "config.json").unlink()  # the store's own keeps its name there
    atomic_write_text(target / "config.json", json.dumps(config))
    return target


def _figures(folder: Path, workspace: Workspace, runs: int) -> Iterator[Figure]:
    ours, theirs = [], []
    for _ in range(runs):
        ours.append(_measure("ncnn", folder))
        theirs.append(_measure("torch", workspace.checkpoint))
    weights = _layer_bytes(folder)
    table = (folder / "embed_tokens.bin").stat().st_size
    yield Figure("memory, bytes copied", "GB/s", [one["copy"] / 1e9 for one in ours])
    yield Figure("memory, bytes read", "GB/s", [one["read"] / 1e9 for one in ours])
    yield Figure("weights of a decoder layer", "MB", [weights / 1e6])
    yield Figure("decode per layer, ncnn", "ms", [1e3 * one["decode"] for one in ours])
    yield Figure("decode per layer, torch fp32 eager", "ms", [1e3 * one["decode"] for one in theirs])
    yield from _limits("decode", weights, ours, ">= 80")
    yield _ratio("decode", ours, theirs, ">= 1.5")
    yield Figure("prefill of 348 per layer, ncnn", "ms", [1e3 * one["prefill"] for one in ours])
    yield Figure("prefill of 348 per layer, torch fp32 eager", "ms", [1e3 * one["prefill"] for one in theirs])
    yield _ratio("prefill", ours, theirs, ">= 1.0")
    yield Figure("lm_head over 283,386 rows, float16", "ms", [1e3 * one["head"] for one in ours])
    yield from _limits("head", table, ours, ">= 70")
    yield Figure("Python in a decode step", "%", [100 * _python_share(one) for one in ours], "<= 3")


def _limits(kind: str, size: int, ours: list[Any], goal: str) -> Iterator[Figure]:
    """How near the weights' way through memory is to what memory can do: when it copies, and when it is only read."""
    shares = {limit: [100 * size / one[kind] / one[limit] for one in ours] for limit in ("copy", "read")}
    yield Figure(f"{kind}, weights / copy speed", "%", shares["copy"], goal)
    yield Figure(f"{kind}, weights / read speed", "%", shares["read"])


def _ratio(kind: str, ours: list[Any], theirs: list[Any], goal: str) -> Figure:
    pairs = zip(ours, theirs, strict=True)
    return Figure(f"{kind}, torch / ncnn", "x", [b[kind] / a[kind] for a, b in pairs], goal)


def _python_share(one: dict[str, float]) -> float:
    """Of a step of all 40 layers with its head: what is spent outside ncnn and outside the table's rows."""
    layers = 40
    return (layers * one["outside"] + one["norm"]) / (layers * one["decode"] + one["head"])


def _layer_bytes(folder: Path) -> int:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    parts = ("llm.layer.00.dqkv", "llm.layer.00.dattn")
    names = {name for entry in manifest["graphs"] if entry["id"].endswith(parts) for name in entry["weights"]}
    return sum((folder / name).stat().st_size for name in names)


def growth(folder: Path) -> dict[str, dict[int, Any]]:
    """Kind -> size -> what it costs, or why it was refused."""
    return {kind: {size: _measure(kind, folder, size) for size in sizes} for kind, sizes in GROWTH.items()}


def _measure(kind: str, folder: Path, *sizes: int) -> Any:
    """What one process measures."""
    arguments = ["-m", "parity.widths", kind, str(folder), str(THREADS), *map(str, sizes)]
    return json.loads(watch(arguments, GLIBC_TUNABLES=HUGE_PAGES)[0])


def _tell_growth(found: dict[str, dict[int, Any]], console: Console) -> None:
    console.print(f"options: {OPTIONS}, each size once", highlight=False)
    for kind, rows in found.items():
        columns = [name for name in next(iter(rows.values())) if name not in MEMORY]
        table = Table(title=f"{kind}, {THREADS} threads, per layer")
        memory = [name for name in MEMORY if name in next(iter(rows.values()))]
        for heading in (kind, *(f"{name}, ms" for name in columns), *(MEMORY[name] for name in memory)):
            table.add_column(heading)
        for size, row in rows.items():
            if "refused" in row:
                table.add_row(str(size), row["refused"])
            else:
                times = [f"{1e3 * row[name]:.4g}" for name in columns]
                table.add_row(str(size), *times, *(f"{row[name] / 1e6:.4g}" for name in memory))
        console.print(table)
    atomic_write_text(home() / "bench-growth.json", json.dumps(found, indent=1))
    _plot(found).savefig(home() / "bench-growth.png", dpi=120)
    console.print(f"written to {home() / 'bench-growth.json'} and bench-growth.png beside it", highlight=False)


def _plot(found: dict[str, dict[int, Any]]) -> Plot:
    plot = Plot(figsize=(11, 3.6), layout="constrained")
    for axes, (kind, rows) in zip(plot.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        measured = {size: row for size, row in rows.items() if "refused" not in row}
        for name in (name for name in next(iter(measured.values())) if name not in MEMORY):
            axes.plot(list(measured), [1e3 * row[name] for row in measured.values()], "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(rows), [str(size) for size in rows])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))  # over few decades only
        axes.set(title=kind, ylabel="ms per layer", xlabel={"image": "patches per side"}.get(kind, "tokens"))
        axes.grid(alpha=0.3)
        axes.legend()
    return plot


if __name__ == "__main__":
    bench(Console(), runs=3)
