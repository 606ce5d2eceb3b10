"""Graphs in a row as one ncnn net: what one hands to the next never leaves ncnn.

Between two graphs of a decode step lie some kilobytes, but the Python code that carries them finds the processor's
caches filled with weights: 60 graphs run one by one took a quarter longer than the same graphs joined.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ncnn
import numpy as np
from numpy.typing import NDArray

from runtime.errors import EXPORT_AGAIN, InputError
from runtime.graphs import Graph, check_files, check_finite, check_shape, checked, set_fp32_options
from runtime.mat import first_rows, to_mat, view
from runtime.pools import new_extractor
from runtime.weights import load_weights


@dataclass(frozen=True)
class Part:
    """A graph of the row, and per input port its source: an outer name, or `graph id.port` of a part before it."""

    graph: Graph
    sources: Mapping[str, str]


class JoinedNet:
    """The parts as one net. `finite`: refuse outputs that hold NaN or Inf."""

    def __init__(self, folder: Path, parts: Sequence[Part], *, threads: int, verify: bool, finite: bool) -> None:
        self.finite = finite
        self.inputs = {part.sources[port.name]: (part.graph, port) for part in parts for port in part.graph.inputs}
        self.outputs = {
            f"{part.graph.id}.{port.name}": (part.graph, port) for part in parts for port in part.graph.outputs
        }
        for part in parts:
            check_files(folder, part.graph, verify=verify)
        self._net = ncnn.Net()
        set_fp32_options(self._net.opt, threads)
        what = f"{parts[0].graph.id} to {parts[-1].graph.id}: ncnn cannot load"
        checked(self._net.load_param_mem(join(folder, parts)), f"{what} the joined param")
        files = [folder / name for part in parts for name in part.graph.weights]
        load_weights(self._net, files, f"{what} the weights")
        # ncnn looks a name up among all blobs, one by one
        self.indexes: dict[str, int] = dict(zip(self._net.input_names(), self._net.input_indexes(), strict=True))
        self.indexes |= zip(self._net.output_names(), self._net.output_indexes(), strict=True)

    def start(self) -> "Pass":
        """One pass through the net."""
        return Pass(self, new_extractor(self._net))


class Pass:
    """One pass: outer inputs are given when they are known, outputs taken in the order of the parts."""

    def __init__(self, net: JoinedNet, extractor: "ncnn.Extractor") -> None:
        self._net, self._extractor = net, extractor
        self._lengths: dict[str, int] = {}
        self._mats: list[ncnn.Mat] = []  # the extractor does not keep them alive

    def give(self, name: str, array: NDArray[np.float32]) -> None:
        """An outer input. Raises InputError on a shape that does not fit."""
        graph, port = self._net.inputs[name]
        check_shape(graph, port, array.shape, self._lengths)
        self._input(name, to_mat(array, rank=array.ndim, where=f"{graph.id} input {port.name}"))

    def carry(self, output: str, name: str, buffer: NDArray[np.float32], start: int) -> None:
        """An output's rows go into a buffer that `empty` gave, behind its first `start`; all so far become an input.

        The one copy of the new rows is all that is moved.
        """
        new = self.take(output)
        end = start + new.shape[1]
        buffer[:, start:end] = new
        self._input(name, first_rows(buffer, end))

    def _input(self, name: str, mat: ncnn.Mat) -> None:
        self._mats.append(mat)
        code = self._extractor.input(self._net.indexes[name], mat)
        if code != 0:
            graph, port = self._net.inputs[name]
            checked(code, f"{graph.id}: ncnn refused input {port.name}")

    def take(self, name: str) -> NDArray[np.float32]:
        """The output `graph id.port`, in the pass's memory: copy what is kept. Raises InputError on an ncnn error."""
        graph, port = self._net.outputs[name]
        code, mat = self._extractor.extract(self._net.indexes[name])
        checked(code, f"{graph.id}: ncnn could not compute output {port.name}")
        array = view(mat, rank=len(port.shape), where=f"{graph.id} output {port.name}")
        if self._net.finite:
            check_finite(graph, port.name, array)
        return array


def join(folder: Path, parts: Sequence[Part]) -> str:
    """The .param text of all parts. Blobs and layers of part n are named `n:name`, outer ones by their names."""
    readers = Counter(source for part in parts for source in part.sources.values())
    copies = {source: iter(_copies(source, count)) for source, count in readers.items()}
    made = {f"{part.graph.id}.{port.name}" for part in parts for port in part.graph.outputs}
    lines = []
    for source in readers:
        if source not in made:
            lines += [f"Input {source} 0 1 {source}", *_split(source, readers[source])]
    for number, part in enumerate(parts):
        inputs = {f"in{k}": next(copies[part.sources[port.name]]) for k, port in enumerate(part.graph.inputs)}
        outputs = {f"out{k}": f"{part.graph.id}.{port.name}" for k, port in enumerate(part.graph.outputs)}
        lines += _renamed(folder / part.graph.param, number, inputs | outputs)
        for name in outputs.values():
            lines += _split(name, readers[name])
    blobs = sum(int(line.split()[3]) for line in lines)
    return "\n".join(["7767517", f"{len(lines)} {blobs}", *lines]) + "\n"


def _copies(source: str, readers: int) -> list[str]:
    return [source] if readers == 1 else [f"{source}:{number}" for number in range(readers)]


def _split(source: str, readers: int) -> list[str]:
    """A blob may be read once; more readers need a Split."""
    if readers < 2:
        return []
    return [" ".join(["Split", f"split:{source}", "1", str(readers), source, *_copies(source, readers)])]


def _renamed(path: Path, number: int, outer: Mapping[str, str]) -> list[str]:
    try:
        layers = [line.split() for line in path.read_text(encoding="utf-8").splitlines()[2:]]
        return [_layer(number, outer, *fields) for fields in layers if fields[0] != "Input"]
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"{path} is no ncnn param ({error}); {EXPORT_AGAIN}") from error


def _layer(number: int, outer: Mapping[str, str], kind: str, name: str, n_in: str, n_out: str, *rest: str) -> str:
    count = int(n_in) + int(n_out)
    blobs = [outer.get(blob, f"{number}:{blob}") for blob in rest[:count]]
    return " ".join([kind, f"{number}:{name}", n_in, n_out, *blobs, *rest[count:]])
