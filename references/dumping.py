"""Dumps: run a model's graphs in fp32 in their order, with the float64 noise floor of each output beside it.

What is made goes into a scratch piece by piece, and from there into the dump: memory holds a layer or two.
"""

import importlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from harness.dumps import Dump
from harness.graphs import Graph
from harness.scratch import Scratch
from references import PACKAGES, plan
from references.cases import Case
from references.checkpoint import Checkpoint
from references.kinds import Tensors
from references.plan import Needs, work
from references.run import GREEDY, Run, Tell, local, silent
from references.shards import EVERYTHING, PARTIAL

Reference = Any  # a model's class of that name: `graphs`, `checkpoint`, `run(graph, inputs, double=...)`


def build(model: str, checkpoint: Path, case: Case, scratch: Scratch | None = None, tell: Tell | None = None) -> Dump:
    """The dump of one case: every tensor that `trace` of the model names. A scratch on disk outlives a broken run."""
    reference, scratch = open_reference(model, checkpoint), scratch or Scratch()
    modules = importlib.import_module(f"references.{model}.trace")
    run = Run(reference, scratch, work(reference, modules.lengths(reference, case), case.new_tokens), tell or silent)
    with one_thread(), reference.reading_ahead():
        _, values = modules.trace(reference, case, run)
    return Dump(model, case.name, scratch.tensors(GREEDY), values, provenance(reference.checkpoint, case))


def build_shapes(
    model: str, checkpoint: Path, length: int, scratch: Scratch | None = None, tell: Tell | None = None
) -> Dump:
    """The dump of a shape case: every graph on seeded random inputs, all dynamic sizes derived from `length`."""
    reference, scratch = open_reference(model, checkpoint), scratch or Scratch()
    run = Run(reference, scratch, work(reference, shape_lengths(length), 0), tell or silent)
    with one_thread(), reference.reading_ahead():
        for graph in reference.graphs.values():
            inputs = random_inputs(graph, length)
            run.keep(f"{graph.id}.in", partial(_as_inputs, graph, inputs))
            run.graph(graph, partial(dict, inputs))
    name = f"length_{length}"
    found = {"checkpoint": reference.checkpoint.fingerprint(), "case": name}
    return Dump(model, name, scratch.tensors(GREEDY), {"floors": run.floors()}, found)


def shape_lengths(length: int) -> dict[str, int]:
    """The sizes of a shape case, near enough to weigh its graphs."""
    return dict.fromkeys(("patches", "cells", "T", "L"), length)


def needs(model: str, checkpoint: Path, cases: Sequence[Case]) -> dict[str, Needs]:
    """What each case takes of the machine."""
    reference = open_reference(model, checkpoint)
    lengths = importlib.import_module(f"references.{model}.trace").lengths
    return {case.name: plan.needs(reference, lengths(reference, case), case.new_tokens) for case in cases}


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


def _as_inputs(graph: Graph, inputs: Tensors) -> Tensors:
    return {f"{local(graph)}.in.{name}": value for name, value in inputs.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine: two runs give the same bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
