"""Static audit of an exported graph: faults that load without an error and go wrong later or at other sizes.

Each finding is one sentence; an empty list is a clean graph.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exporters import param
from exporters.linear import inner_blobs
from exporters.param import Layer
from exporters.pnnx import traced_sizes
from harness.graphs import Structure

FUSED = ("RotaryEmbed", "SDPA", "MultiHeadAttention")  # unwanted where the census does not ask for them
# Keys that hold sizes of weights, fixed by nature.
_WEIGHT_SIZES = {"Gemm": ("7", "9"), "LayerNorm": ("0",), "RMSNorm": ("0",), "InnerProduct": ("0", "2")}
_WHOLE_NUMBER = re.compile(r"(?<![\w.-])\d+(?![\w.])")


@dataclass(frozen=True)
class Subject:
    """What is audited: one graph's layers and the files of its weights, in a row."""

    structure: Structure
    layers: Sequence[Layer]
    weights: Sequence[Path]


def audit(structure: Structure, param_text: str, *weights: Path) -> list[str]:
    """Findings about one graph, in the order of CHECKS."""
    try:
        subject = Subject(structure, param.parse(param_text), weights)
        return [finding for check in CHECKS for finding in check(subject)]
    except ValueError as error:
        return [f"the param does not parse: {error}"]


def _unknown_layers(subject: Subject) -> Iterator[str]:
    for layer in subject.layers:
        if layer.type in FUSED and not subject.structure.census.get(layer.type):
            yield f"layer {layer.name} is a fused {layer.type}, whose axes may differ; spell it out"
        elif layer.type not in param.WEIGHTS:
            yield f"layer {layer.name} has type {layer.type}, unknown to ncnn or to this audit"


def _names(subject: Subject) -> Iterator[str]:
    for name, count in Counter(layer.name for layer in subject.layers).items():
        if count > 1:
            yield f"{count} layers are named {name}"


def _wiring(subject: Subject) -> Iterator[str]:
    made = Counter(name for layer in subject.layers for name in layer.outputs)
    read = Counter(name for layer in subject.layers for name in layer.inputs)
    for name in sorted(made.keys() | read.keys()):
        if made[name] != 1:
            yield f"blob {name} is made by {made[name]} layers, but should be by 1"
        if read[name] > 1:
            yield f"blob {name} is read by {read[name]} layers without a Split"


def _isolation(subject: Subject) -> Iterator[str]:
    inputs = {layer.outputs[0] for layer in subject.layers if layer.type == "Input"}
    for layer in subject.layers:
        for name in inputs.intersection(layer.inputs):
            if layer.type != "Split":
                reader = f"layer {layer.name} ({layer.type})"
                yield f"{reader} reads input {name} directly and may write to it; put a Split between"


def _ports(subject: Subject) -> Iterator[str]:
    inputs = [layer.outputs[0] for layer in subject.layers if layer.type == "Input"]
    read = {name for layer in subject.layers for name in layer.inputs}
    outputs = sorted(name for layer in subject.layers for name in layer.outputs if name not in read)
    ports = {"in": (inputs, subject.structure.inputs), "out": (outputs, subject.structure.outputs)}
    for kind, (found, declared) in ports.items():
        wanted = [f"{kind}{number}" for number in range(len(declared))]
        if found != wanted:
            yield f"the {kind}puts are {found}, but should be {wanted}"


def _baked_lengths(subject: Subject) -> Iterator[str]:
    traced = traced_sizes(subject.structure)
    for layer in subject.layers:
        if layer.type == "Reshape" and not _is_dynamic(layer):
            yield f"layer {layer.name} reshapes to fixed sizes only; a length is baked"
            continue
        skipped = _WEIGHT_SIZES.get(layer.type, ())
        values = [value for key, value in layer.params.items() if key not in skipped]
        numbers = {int(number) for value in values for number in _WHOLE_NUMBER.findall(value)}
        for length in sorted(numbers & traced):
            yield f"layer {layer.name} ({layer.type}) holds the traced length {length}; it is baked"


def _is_dynamic(layer: Layer) -> bool:
    sizes = [layer.params.get(key, "") for key in ("0", "1", "2", "11")]
    return "-1" in sizes or bool(re.search(r"\d[whdc]|-1\b", layer.params.get("6", "")))


def _census(subject: Subject) -> Iterator[str]:
    count = Counter(layer.type for layer in subject.layers)
    constants = {name for layer in subject.layers if layer.type == "MemoryData" for name in layer.outputs}
    for layer in subject.layers:
        if layer.type == "Split" and constants.intersection(layer.inputs):
            constants.update(layer.outputs)
    count["MatMul of MemoryData"] = sum(
        layer.type == "MatMul" and bool(constants.intersection(layer.inputs)) for layer in subject.layers
    )
    makers = {name: layer for layer in subject.layers for name in layer.outputs}
    sums = [layer for layer in subject.layers if inner_blobs(layer, makers)]  # of panels: the census counts Linears
    count["Gemm"] -= sum(len(layer.inputs) - 1 for layer in sums)
    count["Slice"] -= len(sums)
    for kind, wanted in subject.structure.census.items():
        if count[kind] != wanted:
            yield f"the graph holds {count[kind]} {kind}, but should hold {wanted}"


def _weights(subject: Subject) -> Iterator[str]:
    if any(layer.type not in param.WEIGHTS for layer in subject.layers):
        return  # told by _unknown_layers; what the bin must hold is unknown
    blobs = param.blobs(list(subject.layers))
    wanted, size = sum(blob.nbytes for blob in blobs), sum(path.stat().st_size for path in subject.weights)
    if size != wanted:
        yield f"the bin has {size} bytes, but the param asks for {wanted}"
        return
    start = 0
    for blob in blobs:
        word = _word(subject.weights, start) if blob.flagged else 0
        if word != 0:
            yield f"the weights of layer {blob.layer} are not stored as float32 (storage word {word:#010x})"
        start += blob.nbytes


def _word(files: Sequence[Path], start: int) -> int:
    """The word that begins at a byte of files in a row."""
    while start >= (size := files[0].stat().st_size):
        start, files = start - size, files[1:]
    return int(np.fromfile(files[0], "<u4", 1, offset=start)[0])


CHECKS: tuple[Callable[[Subject], Iterator[str]], ...] = (
    _unknown_layers,
    _names,
    _wiring,
    _isolation,
    _ports,
    _baked_lengths,
    _census,
    _weights,
)
