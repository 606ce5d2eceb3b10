"""Disk and memory that an export needs, told before the work starts."""

from math import prod
from typing import Any

import numpy as np

from harness.graphs import Graph
from harness.resources import Mode, require

TABLE = "model.embed_tokens.weight"
TABLE_DTYPES = {"float32": np.float32, "float16": np.float16}
# Params, manifests and the constants of rotations come on top of the checkpoint's tensors; at true widths 0.1 %.
MARGIN = 1.01
# Memory, as measured: torch, and pnnx beside it; and what is there at once of the largest graph's weights: in float32,
# twice in float64 for the self-check, and on their way to the disk.
LIBRARIES, COPIES = 900_000_000, 6


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
    """Raise UnjudgedError with all figures, and with the mode that fits, where disk or memory do not suffice."""
    largest = max(graph_bytes(exporter, graph) for graph in exporter.graphs.values())
    memory = LIBRARIES + COPIES * largest
    whole = Mode(f"python -m parity export {exporter.arguments}", missing_bytes(exporter, table), memory)
    rolling = Mode(f"python -m parity run {exporter.arguments} --rolling", largest, memory)
    require(whole, [rolling], exporter.graphs_store.root)
