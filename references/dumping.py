"""Dumps: run a model's graphs in fp32 in their order, with the float64 noise floor of each output beside it."""

import importlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.dumps import Dump
from harness.graphs import Graph
from harness.metrics import measure
from references import PACKAGES
from references.cases import Case
from references.checkpoint import Checkpoint
from references.kinds import Tensors
from references.shards import EVERYTHING, PARTIAL

Reference = Any  # a model's class of that name: `graphs`, `checkpoint`, `run(graph, inputs, double=...)`


def build(model: str, checkpoint: Path, case: Case) -> Dump:
    """The dump of one case: every tensor that `trace` of the model names."""
    reference = open_reference(model, checkpoint)
    with one_thread():
        tensors, values = importlib.import_module(f"references.{model}.trace").trace(reference, case)
    return Dump(model, case.name, _numpy(tensors), values, provenance(reference.checkpoint, case))


def build_shapes(model: str, checkpoint: Path, length: int) -> Dump:
    """The dump of a shape case: every graph on seeded random inputs, all dynamic sizes derived from `length`."""
    reference = open_reference(model, checkpoint)
    tensors: Tensors = {}
    floors: dict[str, float] = {}
    with one_thread():
        for graph in reference.graphs.values():
            inputs = random_inputs(graph, length)
            tensors |= {f"{local(graph)}.in.{name}": value for name, value in inputs.items()}
            run_graph(reference, graph, inputs, tensors, floors)
    name = f"length_{length}"
    found = {"checkpoint": reference.checkpoint.fingerprint(), "case": name}
    return Dump(model, name, _numpy(tensors), {"floors": floors}, found)


def open_reference(model: str, folder: Path) -> Reference:
    """The model's Reference over a checkpoint whose names and shapes were checked."""
    description = importlib.import_module(f"references.{model}")
    bare = Checkpoint(folder)
    expected = description.tensors(description.read_sizes(bare.config, folder))
    held = bare.json(PARTIAL).get("only", EVERYTHING)
    expected = {name: shape for name, shape in expected.items() if any(fnmatch(name, part) for part in held)}
    module = importlib.import_module(f"references.{model}.model")
    return module.Reference(Checkpoint(folder, expected))


def provenance(checkpoint: Checkpoint, case: Case) -> dict[str, Any]:
    """What a dump was made from."""
    made_with = {name: version(name) for name in PACKAGES} | {
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "dtype": "float32",
    }
    return {"checkpoint": checkpoint.fingerprint(), "case": case.identity(), "made_with": made_with}


def run_graphs(reference: Reference, graphs: Iterable[Graph], tensors: Tensors, floors: dict[str, float]) -> None:
    """Run graphs on what `tensors` holds for them, and add their outputs and floors."""
    for graph in graphs:
        run_graph(reference, graph, gather(graph, tensors), tensors, floors)


def run_graph(
    reference: Reference, graph: Graph, inputs: Mapping[str, Tensor], tensors: Tensors, floors: dict[str, float]
) -> None:
    """Run one graph in fp32 and in float64."""
    outputs = reference.run(graph, inputs)
    exact = reference.run(graph, inputs, double=True)
    for name, value in outputs.items():
        tensors[f"{local(graph)}.{name}"] = value.contiguous()
        floors[f"{local(graph)}.{name}"] = measure(value.numpy(), exact[name].numpy()).rel_l2


def gather(graph: Graph, tensors: Mapping[str, Tensor]) -> Tensors:
    """The inputs of a graph out of a dump's tensors."""
    return {name: torch.cat([tensors[source] for source in sources], dim=-2) for name, sources in graph.sources.items()}


def random_inputs(graph: Graph, length: int) -> Tensors:
    """Seeded inputs: tables of true angles, a mask with one visible column at least, the rest normal."""
    lengths = {name: length + 2 * place for place, name in enumerate(graph.structure.length_names)}
    random = torch.Generator().manual_seed(length)
    inputs = {port.name: torch.randn(port.sizes(lengths), generator=random) for port in graph.structure.inputs}
    if "cos" in inputs:
        half = inputs["cos"].shape[-1] // 2
        angles = inputs["cos"][..., :half].repeat(1, 1, 2)  # each angle serves both halves of a head
        inputs |= {"cos": angles.cos(), "sin": angles.sin()}
    if "mask" in inputs:
        hidden = inputs["mask"] > 0.5
        hidden[..., 0] = False
        inputs["mask"] = torch.where(hidden, -1e9, 0.0)
    return inputs


def local(graph: Graph) -> str:
    """A graph's id without its model: the prefix of its tensors in a dump."""
    return graph.id.partition("/")[2]


def _numpy(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine: two runs give the same bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
