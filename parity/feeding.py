"""What the port's pipeline feeds a graph, beside what the reference does."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UnjudgedError
from harness.isolation import CrashedError, Isolated
from parity import checks, runners
from parity.hints import of_ports
from parity.stages import AGREES, DIFFERS, FAILED, SILENT, Cause, Question, Stage, error_of
from parity.workspace import Workspace, shape_cases, tensor_name
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner

OWN = "the port's own inputs"


def own_inputs(question: Question, bench: Isolated, folder: Path | None, pipeline: Any) -> tuple[Stage, Cause]:
    """Run the pipeline up to the graph, and compare what it feeds it and what comes out.

    pipeline: of a port, run in this process; None means the runtime's own over the folder or the store's files.
    """
    if question.case in shape_cases():
        return Stage(OWN, None, None, SILENT, "a shape case has no pipeline"), Cause("", "")
    port = None if pipeline is not None or folder is not None else runners.Port(question.workspace)
    try:
        return _fed(question, pipeline or (port.pipeline if port else _pipeline(question.workspace, bench, folder)))
    except (CrashedError, InputError, UnjudgedError) as error:
        return Stage(OWN, None, None, FAILED, str(error)), Cause("glue", f"the pipeline fails: {error}")
    finally:
        if port:
            port.close()


def _pipeline(workspace: Workspace, bench: Isolated, folder: Path | None) -> Any:
    """The runtime's pipeline over a model folder, its graphs run in the child."""
    assert folder is not None
    module = importlib.import_module(f"runtime.{workspace.model}")
    return module.Pipeline(Manifest.read(folder), _FolderRunner(bench, folder), chunk=runners.WHOLE)


class _FolderRunner:
    """Runs the graphs of a model folder in the child."""

    threads = 1

    def __init__(self, bench: Isolated, folder: Path) -> None:
        self.bench, self.folder = bench, folder

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name. Raises CrashedError naming the graph when it kills the child."""
        try:
            outputs: Arrays = self.bench.call("run", str(self.folder), graph_id, dict(inputs))
        except CrashedError as error:
            raise CrashedError(graph_id, error.how) from error
        return outputs


class _Listening:
    """A runner that keeps what the first run of one graph is given, and what of it reaches ncnn in this process."""

    def __init__(self, runner: Any, graph_id: str) -> None:
        self.runner, self.graph_id = runner, graph_id
        self.heard: Arrays = {}
        self.reached: Arrays = {}

    @contextmanager
    def at_the_net(self) -> Iterator[None]:
        """Listen where a runner of this process makes Mats, behind all that may be laid around its `run`."""
        if not isinstance(self.runner, NcnnRunner):
            yield
            return
        mats = self.runner.mats

        def listening(graph: Any, inputs: Mapping[str, NDArray[np.float32]]) -> list[Any]:
            if graph.id == self.graph_id and not self.reached:
                self.reached = {name: np.array(array) for name, array in inputs.items()}
            return mats(graph, inputs)

        self.runner.mats = listening  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.runner.mats = mats  # type: ignore[method-assign]

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Run as the runner does."""
        if graph_id == self.graph_id and not self.heard:
            self.heard = {name: np.array(array) for name, array in inputs.items()}
        outputs: Arrays = self.runner.run(graph_id, inputs)
        return outputs


def _fed(question: Question, pipeline: Any) -> tuple[Stage, Cause]:
    """What the pipeline feeds the graph beside what the reference does, and then what comes out."""
    graph = question.graph
    inner = pipeline.runner
    pipeline.runner = listening = _Listening(inner, graph.id)
    port = SimpleNamespace(pipeline=pipeline, runner=inner)
    judged = checks.Subject.of(question.workspace, question.case, port, last=graph.id)
    try:
        with listening.at_the_net():
            outputs = judged.chain.outputs(graph)
    finally:
        pipeline.runner = inner
    limit = checks.LIMITS.of(graph.id, "chained")["rel_l2_max"].bound
    spans = judged.spans if graph.id.endswith(".prefill") else {}  # they are rows of the prompt
    errors = {name: error_of(listening.heard[name], wanted) for name, wanted in question.inputs.items()}
    off = [name for name, error in errors.items() if not error <= limit]
    after = max(error_of(outputs[name], wanted) for name, wanted in question.stored.items())
    worst = max(errors.values())
    if off:
        cause = _source_of(question, off[0], errors[off[0]], judged.chain.recorder.outputs, limit)
        if cause.domain == "glue":  # an error that comes out of other graphs has their shape
            cause = replace(cause, hints=of_ports("input", listening.heard, question.inputs, off, spans))
        return Stage(OWN, worst, after, DIFFERS, f"input {', '.join(off)}"), cause
    if not after <= limit:
        cause = _runner_cause(question, listening.reached, outputs, limit, spans)
        return Stage(OWN, worst, after, DIFFERS, "outputs"), cause
    return Stage(OWN, worst, after, AGREES), Cause("", "")


def _runner_cause(
    question: Question, reached: Arrays, outputs: Arrays, limit: float, spans: Mapping[str, slice]
) -> Cause:
    """The runner changes what it is given, or what comes out."""
    stored, inputs = question.stored, question.inputs
    after = max(error_of(outputs[name], wanted) for name, wanted in stored.items())
    why = f"the port's inputs are right, but its runner gives other outputs than the graph (rel_l2 {after:.1e})"
    changed = [name for name, array in reached.items() if not error_of(array, inputs[name]) <= limit]
    if changed:
        why = f"{why}: it changes input {', '.join(changed)}"
        return Cause("glue", why, hints=of_ports("input", reached, inputs, changed, spans))
    return Cause("glue", why, hints=of_ports("output", outputs, stored, list(stored), spans))


def _source_of(question: Question, name: str, error: float, outputs: Mapping[str, Arrays], limit: float) -> Cause:
    """Whether a wrong input comes out of a graph before this one, or is made between the graphs."""
    what = f"the port's own input {name} differs from the reference's by rel_l2 {error:.1e}"
    graphs = [graph for graph in question.workspace.graphs.values() if graph.id in outputs]
    graphs = graphs[: graphs.index(question.graph)]
    errors = {
        tensor_name(graph, port): (graph.id, error_of(array, question.dump.tensors[tensor_name(graph, port)]))
        for graph in graphs
        for port, array in outputs[graph.id].items()
    }
    wrong = {tensor: found for tensor, found in errors.items() if not found[1] <= limit}
    sources = [source for source in question.graph.sources[name] if source in errors]
    feeding = sources or [tensor for tensor, (graph_id, _) in errors.items() if graph_id == graphs[-1].id]
    if not wrong or not set(feeding) & set(wrong):
        return Cause("glue", f"{what}, and no graph that feeds it is wrong")
    tensor, (graph_id, off) = next(iter(wrong.items()))
    why = f"{what}; the first wrong output before it is {tensor} (rel_l2 {off:.1e})"
    return Cause("upstream", why, upstream=graph_id)
