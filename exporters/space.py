"""Disk that an export needs, told before the work starts."""

import shutil
from math import prod
from typing import Any

import numpy as np

from harness.errors import UnjudgedError
from harness.graphs import Graph

TABLE = "model.embed_tokens.weight"
TABLE_DTYPES = {"float32": np.float32, "float16": np.float16}
# Params, manifests and the constants of rotations come on top of the checkpoint's tensors; at true widths 0.1 %.
MARGIN = 1.01


def weight_bytes(exporter: Any) -> int:
    """Bytes of all tensors that a port of the checkpoint needs, each once, in float32."""
    return sum(4 * prod(shape) for shape in exporter.shapes.values())


def missing_bytes(exporter: Any, table: str = "float32") -> int:
    """Bytes that an export is going to write: what the store has already is not written again."""
    missing = [graph for graph in exporter.graphs.values() if not exporter.holds(graph)]
    names = {name for graph in missing for name in exporter.sources(graph)}
    size = sum(4 * prod(exporter.shapes[name]) for name in names)
    if not exporter.holds_base(table):
        size += np.dtype(TABLE_DTYPES[table]).itemsize * prod(exporter.shapes[TABLE])
    return int(size * MARGIN)


def graph_bytes(exporter: Any, graph: Graph) -> int:
    """Bytes of one graph's tensors, those that it shares with others among them."""
    return sum(4 * prod(exporter.shapes[name]) for name in exporter.sources(graph))


def check(exporter: Any, table: str) -> None:
    """Raise UnjudgedError with both figures, and with the mode that fits, when the disk is too small."""
    root = exporter.graphs_store.root
    there = next(path for path in (root, *root.parents) if path.exists())
    needed, free = missing_bytes(exporter, table), shutil.disk_usage(there).free
    if needed > free:
        largest = max(graph_bytes(exporter, graph) for graph in exporter.graphs.values())
        raise UnjudgedError(
            f"{exporter.model}: the export needs {needed:,} bytes, but {free:,} are free on the disk of {there}; free "
            f"some, or judge it graph by graph in {largest:,} bytes: "
            f"python -m parity run {exporter.arguments} --rolling"
        )
