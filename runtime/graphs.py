"""Exported graphs: the manifest that lists them, and the one place where ncnn loads and runs them.

Two weight modes: `streaming` holds one graph in memory, `resident` keeps every graph that was used.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import ncnn
import numpy as np
from numpy.typing import NDArray

from runtime.errors import EXPORT_AGAIN, InputError
from runtime.mat import from_mat, to_mat
from runtime.pools import drop_buffers, new_extractor
from runtime.weights import load_weights

Arrays = dict[str, NDArray[np.float32]]

MODES = ("resident", "streaming")
# Everything that would round or replace fp32 arithmetic. Names vary between releases: each must exist.
OFF_IN_FP32 = (
    "use_fp16_packed",
    "use_fp16_storage",
    "use_fp16_arithmetic",
    "use_bf16_packed",
    "use_bf16_storage",
    "use_int8_inference",
    "use_int8_packed",
    "use_int8_storage",
    "use_int8_arithmetic",
    "use_vulkan_compute",
)


@dataclass(frozen=True)
class Port:
    """An input or output: its name, and per axis a size or the name of one."""

    name: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """One graph of the manifest."""

    id: str
    param: str
    weights: tuple[str, ...]  # files that are read one after the other; graphs may share them
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sha256: Mapping[str, str]  # of all these files, by name


@dataclass(frozen=True)
class Manifest:
    """What an exported model folder holds."""

    folder: Path
    model: str
    checkpoint: str  # hash of the checkpoint that it was exported from
    graphs: Mapping[str, Graph]
    files: Mapping[str, str]  # all files but the graphs': name -> sha256
    table: Mapping[str, Any]  # embedding and head: file, dtype, shape

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read manifest.json. Raises InputError naming the file when it is missing or broken."""
        path = folder / "manifest.json"
        if not path.is_file():
            raise InputError(f"{path} is missing; is {folder} a folder that `python -m parity export` wrote?")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            graphs = {entry["id"]: read_graph(entry) for entry in data["graphs"]}
            return cls(folder, data["model"], data["checkpoint"], graphs, data["files"], data["table"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is no manifest of an exported model ({type(error).__name__}: {error}); {EXPORT_AGAIN}"
            ) from error

    def check_files(self) -> None:
        """Compare the files beside the graphs with the manifest; InputError names one that differs."""
        for name, wanted in self.files.items():
            check_file(self.folder / name, wanted, "the model")


class Runner(Protocol):
    """Runs graphs by id, each with so many threads."""

    threads: int

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name."""


class NcnnRunner:
    """Runs the graphs of an exported model folder in this process.

    verify: compare each file with the manifest's hash once; a graph's files when it is first loaded.
    finite: refuse outputs that hold NaN or Inf; ncnn's softmax and clip turn NaN into numbers further down.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        mode: str = "resident",
        threads: int = 1,
        verify: bool = True,
        finite: bool = False,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"weight mode is {mode!r}, but should be one of {', '.join(MODES)}")
        if verify:
            manifest.check_files()
        self.manifest, self.mode, self.threads = manifest, mode, threads
        self.verify, self.finite = verify, finite
        self._nets: dict[str, ncnn.Net] = {}
        self._unverified = set(manifest.graphs) if verify else set()

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name. Raises InputError on inputs of another shape and on every ncnn error code."""
        graph = self.graph(graph_id)
        check_inputs(graph, inputs)
        net = self._net(graph)
        extractor = new_extractor(net)
        # Mats stay named until the run is over: the extractor does not keep them alive.
        mats = self.mats(graph, inputs)
        for number, (port, mat) in enumerate(zip(graph.inputs, mats, strict=True)):
            code = extractor.input(f"in{number}", mat)
            checked(code, f"{graph_id}: ncnn refused input {port.name}")
        outputs = {port.name: _extract(extractor, n, graph, port) for n, port in enumerate(graph.outputs)}
        if self.finite:
            for name, array in outputs.items():
                check_finite(graph, name, array)
        return outputs

    def release(self) -> None:
        """Let go of the buffers of past runs and, streaming, of the graph in memory."""
        if self.mode == "streaming":
            self._nets.clear()
        drop_buffers()

    def load(self, graph_id: str) -> None:
        """Load a graph, where it is not in memory."""
        self._net(self.graph(graph_id))

    def weight_bytes(self, graph_ids: Iterable[str]) -> int:
        """Bytes of memory that the weights of graphs take: of all of them, or streaming of the largest, twice."""
        files = [self.graph(graph_id).weights for graph_id in graph_ids]
        if self.mode == "streaming":  # as they are read, and as ncnn lays them out
            return 2 * max((self._file_bytes(names) for names in files), default=0)
        return self._file_bytes({name for names in files for name in names})

    def _file_bytes(self, names: Iterable[str]) -> int:
        paths = [self.manifest.folder / name for name in names]
        return sum(path.stat().st_size for path in paths if path.is_file())  # a missing one is told when it is loaded

    def streaming(self) -> "NcnnRunner":
        """The same runner, holding one graph at a time."""
        return NcnnRunner(self.manifest, mode="streaming", threads=self.threads, verify=False)

    def mats(self, graph: Graph, inputs: Mapping[str, NDArray[np.float32]]) -> list[ncnn.Mat]:
        """A run's inputs as ncnn is given them."""
        return [_input_mat(graph, port, inputs[port.name]) for port in graph.inputs]

    def graph(self, graph_id: str) -> Graph:
        """A graph of the manifest. Raises InputError when it is not there."""
        graph = self.manifest.graphs.get(graph_id)
        if graph is None:
            raise InputError(f"graph {graph_id} is not in {self.manifest.folder / 'manifest.json'}; {EXPORT_AGAIN}")
        return graph

    def _net(self, graph: Graph) -> ncnn.Net:
        net = self._nets.get(graph.id)
        if net is None:
            if self.mode == "streaming":
                self._nets.clear()
            verify = graph.id in self._unverified
            net = load_net(self.manifest.folder, graph, threads=self.threads, verify=verify)
            self._nets[graph.id] = net
            self._unverified.discard(graph.id)
        return net


def load_net(folder: Path, graph: Graph, *, threads: int, verify: bool) -> ncnn.Net:
    """Load one graph for fp32 arithmetic. Raises InputError when a file is missing, altered or refused."""
    check_files(folder, graph, verify=verify)
    param, files = folder / graph.param, [folder / name for name in graph.weights]
    net = ncnn.Net()
    set_fp32_options(net.opt, threads)
    checked(net.load_param(str(param)), f"{graph.id}: ncnn cannot load {param}")
    load_weights(net, files, f"{graph.id}: ncnn cannot load {' + '.join(map(str, files))}")
    _check_names(graph, "in", net.input_names(), graph.inputs)
    _check_names(graph, "out", net.output_names(), graph.outputs)
    return net


def set_fp32_options(option: Any, threads: int) -> None:
    """Switch off packed layouts and all but fp32 arithmetic. Raises InputError when this ncnn lacks a switch."""
    for name in OFF_IN_FP32:
        if not hasattr(option, name):
            raise InputError(f"this ncnn has no option {name}; install the release that pyproject.toml pins")
        setattr(option, name, False)
    option.use_packing_layout = False  # else a Split packs the caches and SDPA unpacks them: 2 of a layer's 20 ms
    option.num_threads = threads


def check_inputs(graph: Graph, inputs: Mapping[str, NDArray[np.float32]]) -> None:
    """Compare inputs with the graph's ports. Raises InputError naming the first that does not fit."""
    if len(inputs) != len(graph.inputs) or not all(port.name in inputs for port in graph.inputs):
        wanted = [port.name for port in graph.inputs]
        raise InputError(f"{graph.id} was given the inputs {sorted(inputs)}, but takes {wanted}")
    lengths: dict[str, int] = {}
    for port in graph.inputs:
        check_shape(graph, port, inputs[port.name].shape, lengths)


def check_shape(graph: Graph, port: Port, shape: Sequence[int], lengths: dict[str, int]) -> None:
    """Compare one input's shape with its port and the `lengths` so far, to which it adds. Raises InputError."""
    if not _fits(port.shape, shape, lengths):
        known = "".join(f" {name}={length}" for name, length in lengths.items())
        raise InputError(f"{graph.id} input {port.name} has shape {shape}, but should be {port.shape}{known}")


def _fits(dims: Sequence[int | str], shape: Sequence[int], lengths: dict[str, int]) -> bool:
    if len(dims) != len(shape):
        return False
    for dim, size in zip(dims, shape, strict=True):
        if dim == size:
            continue
        if isinstance(dim, int):
            return False
        factor, name = _dynamic(dim)
        length, rest = divmod(size, factor)
        if rest or lengths.setdefault(name, length) != length:
            return False
    return True


@lru_cache
def _dynamic(dim: str) -> tuple[int, str]:
    """Factor and name of a dynamic axis: "T" or "4*cells"."""
    factor, _, name = dim.rpartition("*")
    return int(factor or 1), name


def read_graph(entry: Mapping[str, Any]) -> Graph:
    """A graph's entry of the manifest."""
    inputs, outputs = (tuple(Port(p["name"], tuple(p["shape"])) for p in entry[key]) for key in ("inputs", "outputs"))
    weights = tuple(map(str, entry["weights"]))
    sha256 = {name: str(entry["sha256"][name]) for name in (entry["param"], *weights)}
    return Graph(entry["id"], entry["param"], weights, inputs, outputs, sha256)


def _input_mat(graph: Graph, port: Port, array: NDArray[np.float32]) -> ncnn.Mat:
    return to_mat(array, rank=len(port.shape), where=f"{graph.id} input {port.name}")


def _extract(extractor: Any, number: int, graph: Graph, port: Port) -> NDArray[np.float32]:
    code, mat = extractor.extract(f"out{number}")
    checked(code, f"{graph.id}: ncnn could not compute output {port.name}")
    return from_mat(mat, rank=len(port.shape), where=f"{graph.id} output {port.name}")


def check_finite(graph: Graph, name: str, array: NDArray[np.float32]) -> None:
    """Raise InputError when an output holds NaN or Inf."""
    finite = np.isfinite(array)
    if not finite.all():
        model = graph.id.partition("/")[0]
        raise InputError(
            f"{graph.id} output {name} holds {array.size - int(finite.sum())} NaN or Inf; "
            f"find the cause: python -m parity run {model}"
        )


def _check_names(graph: Graph, kind: str, names: Sequence[str], ports: Sequence[Port]) -> None:
    wanted = [f"{kind}{number}" for number in range(len(ports))]
    if sorted(names) != sorted(wanted):
        raise InputError(
            f"{graph.id}: the {kind}puts of {graph.param} are {sorted(names)}, but should be {wanted}; {EXPORT_AGAIN}"
        )


def check_files(folder: Path, graph: Graph, *, verify: bool) -> None:
    """Raise InputError when a file of a graph is missing or, with `verify`, has another hash than the manifest's."""
    for name in (graph.param, *graph.weights):
        check_file(folder / name, graph.sha256[name] if verify else None, graph.id)


def check_file(path: Path, sha256: str | None, what: str) -> None:
    """Raise InputError when a file of `what` is missing, or has another hash than the one given."""
    if not path.is_file():
        raise InputError(f"{what}: {path} is missing; {EXPORT_AGAIN}")
    if sha256 is not None and _sha256(path) != sha256:
        raise InputError(f"{what}: {path} is not the file that manifest.json lists (other hash); {EXPORT_AGAIN}")


def checked(code: int, what: str) -> None:
    """Raise InputError on an error code of ncnn."""
    if code != 0:
        raise InputError(f"{what} (code {code}); {EXPORT_AGAIN}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
