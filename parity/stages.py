"""The stages of the tool chain that a graph goes through, and how their outputs are compared.

The torch stages are compared in float64, where equal layers differ by 1e-15; the ncnn stages as multiples of the
graph's noise floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.diagnosis import Hint
from harness.dumps import Dump
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.ids import suggest
from harness.metrics import measure
from parity import checks
from parity.workspace import Workspace, case_names, tensor_name
from runtime.graphs import Arrays

Placed = tuple[str, Hint]  # where it was seen

AGREES, DIFFERS, FAILED, SILENT = "agrees", "differs", "failed", "no witness"
FLOORS, LEAST, MOST = 30.0, 3e-6, 1e-4  # an ncnn stage may differ by so many noise floors, within these bounds
ROW_COSINE = 0.9999  # one large activation hides a broken row from the norm


@dataclass(frozen=True)
class Stage:
    """One stage of the tool chain."""

    name: str
    before: float | None  # relative L2 against the stage before it, of the worst output
    reference: float | None  # relative L2 against the reference
    verdict: str  # agrees, differs, failed, no witness
    note: str = ""

    def __str__(self) -> str:
        numbers = (f"{'-' if value is None else format(value, '.1e'):>8}" for value in (self.before, self.reference))
        return f"{self.name:<34} {' '.join(numbers)}  {self.verdict:<10} {self.note}".rstrip()


@dataclass
class Witness:
    """A stage's outputs by port: float32, and float64 where torch computed them; or why there are none."""

    name: str
    domain: str  # the fault's, where this stage is the first to disagree
    outputs: Arrays | None = None
    exact: Mapping[str, NDArray[np.float64]] | None = None
    bound: float = 0.0  # for the exact ones
    failed: bool = False
    note: str = ""


@dataclass(frozen=True)
class Cause:
    """What broke a graph: a domain, why it is that one, and what shows it."""

    domain: str
    why: str
    evidence: tuple[str, ...] = ()
    upstream: str = ""
    hints: tuple[Placed, ...] = ()


@dataclass
class Question:
    """One graph on the reference's inputs of one case."""

    workspace: Workspace
    graph: Graph
    case: str
    dump: Dump

    @cached_property
    def inputs(self) -> Arrays:
        """The reference's inputs, in the ports' order."""
        found = checks.inputs_of(self.graph, self.dump)
        return {port.name: found[port.name] for port in self.graph.structure.inputs}

    @property
    def ports(self) -> list[str]:
        """Names of the outputs."""
        return [port.name for port in self.graph.structure.outputs]

    @cached_property
    def stored(self) -> Arrays:
        """The dump's outputs."""
        return {name: self.dump.tensors[tensor_name(self.graph, name)] for name in self.ports}

    def bound(self, port: str) -> float:
        """How far an ncnn stage may be off."""
        floor: float = self.dump.values["floors"][tensor_name(self.graph, port)]
        return min(max(FLOORS * floor, LEAST), MOST)


def ask(workspace: Workspace, graph_id: str, case: str) -> Question:
    """A graph on a case, by default the model's first. Raises UnjudgedError on names that are unknown or do not fit."""
    graph = workspace.graphs.get(graph_id)
    if graph is None:
        near = suggest(graph_id, workspace.graphs)
        raise UnjudgedError(f"graph {graph_id} is unknown; did you mean {near}?")
    known = list(case_names(workspace))
    name = case or known[0]
    if name not in known:
        raise UnjudgedError(f"case {name} is unknown; did you mean {suggest(name, known)}?")
    if name in workspace.cases and not checks.needs(graph, bool(workspace.cases[name].pictures)):
        with_pictures = next(n for n, c in workspace.cases.items() if c.pictures)
        raise UnjudgedError(f"case {name} has no picture, so {graph_id} does not run; type --case {with_pictures}")
    return Question(workspace, graph, name, workspace.dump(name))


def compared(question: Question, witnesses: list[Witness]) -> list[Stage]:
    """Every witness beside the one before it; the first beside the dump."""
    stages = []
    before = Witness("the dump", "", question.stored)
    for witness in witnesses:
        stages.append(_stage(question, witness, before))
        before = witness if witness.outputs is not None else before
    return stages


def _stage(question: Question, witness: Witness, before: Witness) -> Stage:
    if witness.outputs is None:
        return Stage(witness.name, None, None, FAILED if witness.failed else SILENT, witness.note)
    against = max(error_of(witness.outputs[name], expected) for name, expected in question.stored.items())
    assert before.outputs is not None
    if witness.exact is not None and before.exact is not None:
        errors = {name: error_of(a, before.exact[name]) for name, a in witness.exact.items()}
        broken = [name for name, error in errors.items() if not error <= witness.bound]
    else:
        errors = {name: error_of(a, before.outputs[name]) for name, a in witness.outputs.items()}
        broken = [n for n, a in witness.outputs.items() if is_broken(a, before.outputs[n], question.bound(n))]
    note = "; ".join(filter(None, [f"output {', '.join(broken)}" if broken else "", witness.note]))
    return Stage(witness.name, max(errors.values()), against, DIFFERS if broken else AGREES, note)


def error_of(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative L2; infinite for another shape and for numbers that are not finite."""
    metrics = measure(actual, expected)
    return np.inf if metrics.actual_bad.count or not metrics.elements else metrics.rel_l2


def is_broken(actual: NDArray[Any], expected: NDArray[Any], bound: float) -> bool:
    """Whether some output is further off than the bound, or a single row points elsewhere."""
    error = error_of(actual, expected)
    return not (error <= bound and measure(actual, expected).worst_row_cosine >= ROW_COSINE)


def apart(stage: Stage, before: str) -> str:
    """How far a stage is from the one before it, in words."""
    return f"{stage.name} differs from {before} by rel_l2 {stage.before:.1e} ({stage.note})"
