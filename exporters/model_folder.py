"""The folder that the runtime reads: vocabulary table, final norm, tokenizer, every graph, and their manifest."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from exporters import folders, space
from exporters.folders import MANIFEST, link_or_copy
from exporters.output import Output
from exporters.space import TABLE, TABLE_DTYPES
from harness.errors import UnjudgedError
from harness.graphs import Graph, Port
from harness.store import Hashes, file_sha256, listed_sha256

BIN = "graph.bin"  # in a graph's folder, where its weights are one file
TABLE_FILE = "embed_tokens.bin"
NORM = "model.norm.weight"
BLOCK_BYTES = 1 << 25  # of the table, that are there at once


def write_base(exporter: Any, folder: Path, table: str) -> Hashes:
    """Vocabulary table, final norm, and the files beside the shards."""
    checkpoint = exporter.reference.checkpoint
    hashes = _write_table(checkpoint, folder, table)
    checkpoint.tensor(NORM).numpy().tofile(folder / "norm.bin")
    for path in checkpoint.side_files():
        shutil.copyfile(path, folder / path.name)
    hashes |= {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name not in hashes}
    entry = {"file": TABLE_FILE, "dtype": table, "shape": list(exporter.shapes[TABLE])}
    _write_manifest(exporter, folder, entry, hashes, [])
    return hashes


def _write_table(checkpoint: Any, folder: Path, table: str) -> dict[str, str]:
    """Write the vocabulary table; its hash by its name. Raises UnjudgedError where its numbers do not fit the dtype."""
    dtype = TABLE_DTYPES[table]
    with Output(folder / TABLE_FILE, dtype) as output:
        for block in checkpoint.blocks(TABLE, BLOCK_BYTES):
            with np.errstate(over="ignore"):  # told below
                bad = output.write(block.numpy().astype(dtype, copy=False))
            if bad:
                raise UnjudgedError(f"tensor {TABLE} holds {bad} numbers beyond {table}; pass --table float32")
    return {TABLE_FILE: output.sha256}


def assemble(exporter: Any, folder: Path, table: str, each: Callable[[str], None], verify: bool) -> Hashes:
    """Base and graphs, those of one layer after another; `each` is told every graph that is done."""
    space.check(exporter, table)
    with _converting_ahead(exporter):
        base = exporter.base(table=table, verify=verify)
        for graph_id in by_layer(exporter.graphs.values()):
            exporter.weights(graph_id, verify=verify)
            each(graph_id)
    manifest = json.loads((base / MANIFEST).read_text(encoding="utf-8"))
    hashes: dict[str, str] = manifest["files"]
    for name in hashes:
        link_or_copy(base / name, folder / name)
    names = _names(exporter)
    entries = [_place(exporter, graph, folder, names) for graph in exporter.graphs.values()]
    _write_manifest(exporter, folder, manifest["table"], hashes, entries)
    return hashes | {name: sha256 for entry in entries for name, sha256 in entry["sha256"].items()}


@contextmanager
def _converting_ahead(exporter: Any) -> Iterator[None]:
    """Convert the structures beside what is done meanwhile: pnnx is a process of its own, a third of the time.

    Who needs a structure waits for it in the store, and is told there what is wrong with it.
    """
    structures = {graph.structure.name: graph.structure for graph in exporter.graphs.values()}
    beside = ThreadPoolExecutor(1)
    conversions = [beside.submit(exporter.structure, structure) for structure in structures.values()]
    try:
        yield
        for conversion in conversions:
            conversion.result()
    finally:
        beside.shutdown(cancel_futures=True)


def _write_manifest(
    exporter: Any, folder: Path, table: dict[str, Any], hashes: Hashes, entries: list[dict[str, Any]]
) -> None:
    manifest = {
        "model": exporter.model,
        "checkpoint": exporter.fingerprint,
        "versions": exporter.versions,
        "options": {"fp16": 0, "precision": "fp32"},
        "table": table,
        "files": hashes,
        "graphs": entries,
    }
    folders.write_manifest(folder, manifest)


def entry(exporter: Any, graph: Graph) -> dict[str, Any]:
    """A graph's line of the manifest, for its files where they are in the store."""
    folder, files = exporter.graph(graph.id), exporter.weights(graph.id)
    names = [BIN] if len(files) == 1 else [Path(os.path.relpath(path, folder)).as_posix() for path in files]
    return _entry(exporter, graph, "graph.param", dict(zip(names, files, strict=True)))


def _place(exporter: Any, graph: Graph, folder: Path, names: dict[Path, str]) -> dict[str, Any]:
    """Put a graph's files into a model folder; its line of the manifest."""
    files = {names[path]: path for path in exporter.weights(graph.id)}
    param_name = f"{graph.id}.param"
    link_or_copy(exporter.graph(graph.id) / "graph.param", folder / param_name)
    for name, path in files.items():
        if not (folder / name).exists():  # else another graph has put it there
            link_or_copy(path, folder / name)
    return _entry(exporter, graph, param_name, files)


def _entry(exporter: Any, graph: Graph, param_name: str, files: dict[str, Path]) -> dict[str, Any]:
    hashes = {param_name: listed_sha256(exporter.graph(graph.id), "graph.param")}
    return {
        "id": graph.id,
        "param": param_name,
        "weights": list(files),
        "inputs": _ports(graph.structure.inputs),
        "outputs": _ports(graph.structure.outputs),
        "sha256": hashes | {name: listed_sha256(path.parent, path.name) for name, path in files.items()},
    }


def _names(exporter: Any) -> dict[Path, str]:
    """Every file of weights -> its name in a model folder: that of the graph that it is all of."""
    files = {graph_id: exporter.weights(graph_id) for graph_id in exporter.graphs}
    names: dict[Path, str] = {}
    for graph_id, paths in sorted(files.items(), key=lambda item: len(item[1])):
        for number, path in enumerate(paths):
            names.setdefault(path, f"{graph_id}.bin" if len(paths) == 1 else f"{graph_id}.{number}.bin")
    return names


def by_layer(graphs: Iterable[Graph]) -> list[str]:
    """Graph ids, those of one layer together: they read the same tensors."""
    layers: dict[tuple[str, int | None], list[str]] = {}
    for graph in graphs:
        layer = graph.id if graph.index is None else graph.id.partition(".")[0]
        layers.setdefault((layer, graph.index), []).append(graph.id)
    return [graph_id for layer in layers.values() for graph_id in layer]


def _ports(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
    return [{"name": port.name, "shape": list(port.shape)} for port in ports]
