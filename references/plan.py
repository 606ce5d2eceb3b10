"""What a case takes, told before it is run from its sizes alone: work of each piece, disk and memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from harness.graphs import Graph, Port
from references.run import GREEDY, local

Lengths = Mapping[str, int]  # the dynamic sizes of a case's graphs: T, L, patches, cells

EMPTY_PROCESS = 600_000_000  # torch, transformers and a tokenizer, nothing loaded
TABLE_BLOCKS = 300_000_000  # of the vocabulary's table, widened
READING_ROWS = 80  # reading and widening a layer takes as long as this many rows through it
EXACT = 3  # float32, and float64 at half its speed
ALIVE = 4  # tensors of the widest shape at one time, while a layer runs in float64


@dataclass(frozen=True)
class Needs:
    """Bytes that one case takes while it is run."""

    disk: int
    memory: int


def work(reference: Any, lengths: Lengths, new_tokens: int) -> dict[str, float]:
    """The pieces of a case and what they weigh against each other."""
    pieces: dict[str, float] = {}
    for graph in _graphs(reference, lengths):
        rows = _rows(graph, lengths)
        pieces[graph.id] = layer_bytes(reference, graph) * (EXACT * rows + READING_ROWS)
    decoder = [graph for graph in reference.graphs.values() if _in_decode(graph)][-1]
    for step in range(new_tokens):
        past, rows = (lengths["T"] + step - 1, 1) if step else (0, lengths["T"])
        weight = layer_bytes(reference, decoder) * (rows + READING_ROWS)
        pieces |= {f"{GREEDY}{past:06d}.{index:02d}": weight for index in range((decoder.index or 0) + 1)}
    return pieces


def needs(reference: Any, lengths: Lengths, new_tokens: int) -> Needs:
    """Disk for the scratch and for the dump that is written from it, and memory."""
    graphs = list(_graphs(reference, lengths))
    # what the glue makes is an input without a graph before it
    made = {
        source: (graph, port)
        for graph in graphs
        for port in graph.structure.inputs
        for source in graph.sources[port.name]
    }
    made |= {f"{local(graph)}.{port.name}": (graph, port) for graph in graphs for port in graph.structure.outputs}
    vocabulary = 4 * reference.decoder_sizes.vocab_size * new_tokens
    dump = sum(_nbytes(graph, port, lengths) for graph, port in made.values()) + vocabulary
    prefills = [graph for graph in graphs if graph.id.endswith(".prefill")]
    cache = sum(_nbytes(graph, port, lengths) for graph in prefills for port in graph.structure.outputs)
    cache += cache * new_tokens // lengths["T"]
    return Needs(2 * dump + cache, EMPTY_PROCESS + TABLE_BLOCKS + max(_held(reference, g, lengths) for g in graphs))


def layer_bytes(reference: Any, graph: Graph) -> int:
    """Weights of a graph's layer in float32."""
    module: nn.Module = reference.empty(*reference.key(graph))
    return sum(4 * parameter.numel() for parameter in module.parameters())


def _held(reference: Any, graph: Graph, lengths: Lengths) -> int:
    """Layers in memory while a graph runs, and in float64 its attention's scores and rows of its widest projection."""
    own = layer_bytes(reference, graph)
    layers = reference.layers_bytes if reference.fits else 2 * own  # with the one that is read ahead
    widening = 2 * own  # its float64 numbers
    sizes = getattr(reference.sizes, graph.structure.name.partition(".")[0], reference.decoder_sizes)
    masks = [math.prod(port.sizes(_own(graph, lengths))) for port in graph.structure.inputs if port.name == "mask"]
    module: nn.Module = reference.empty(*reference.key(graph))
    widest = max(part.out_features for part in module.modules() if isinstance(part, nn.Linear))
    running = 8 * ALIVE * (sizes.num_attention_heads * sum(masks) + _rows(graph, lengths) * widest)
    return layers + widening + running


def _graphs(reference: Any, lengths: Lengths) -> Iterator[Graph]:
    """The graphs that run: without pictures the vision tower does not."""
    return (graph for graph in reference.graphs.values() if all(lengths[n] for n in graph.structure.length_names))


def _rows(graph: Graph, lengths: Lengths) -> int:
    return graph.structure.inputs[0].sizes(_own(graph, lengths))[0]


def _nbytes(graph: Graph, port: Port, lengths: Lengths) -> int:
    return 4 * math.prod(port.sizes(_own(graph, lengths)))


def _own(graph: Graph, lengths: Lengths) -> Lengths:
    return {**lengths, "T": 1} if _in_decode(graph) else lengths


def _in_decode(graph: Graph) -> bool:
    return graph.id.endswith((".dqkv", ".dattn"))
