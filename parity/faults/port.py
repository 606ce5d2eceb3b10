"""Where faults are planted, a port with a model folder of its own, and what a fault is."""

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters import layout
from exporters.export import Exporter
from exporters.folders import link_tree, own_weights
from exporters.weights import read_entries
from harness.dumps import Dump
from harness.isolation import CrashedError, Isolated
from harness.store import Store
from parity.runners import WHOLE
from parity.server import forced_or_greedy
from parity.workspace import Workspace
from runtime.graphs import Arrays, Manifest, NcnnRunner

Floats = NDArray[np.float32]


class Port:
    """A port to plant faults in: a model folder of its own, and the pipeline over it, in this process."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.workspace = copy.copy(workspace)
        self.folder = folder
        copy_model(workspace.exporter.model_folder(), folder)
        manifest = Manifest.read(folder)
        self.runner: Any = NcnnRunner(manifest, verify=False)
        self.pipeline: Any = importlib.import_module(f"runtime.{workspace.model}").Pipeline(
            manifest, self.runner, chunk=WHOLE
        )
        self.child: Isolated | None = None

    def edit(self, graph_id: str, change: Callable[[dict[str, Floats]], None]) -> None:
        """Change the weights of a graph by their names."""
        edit_weights(self.workspace.exporter, self.folder, graph_id, change)

    def edit_param(self, graph_id: str, change: Callable[[str], str]) -> None:
        """Change the text of a graph's param. Raises LookupError when the change changes nothing."""
        path = self.folder / f"{graph_id}.param"
        before = path.read_text(encoding="utf-8")
        after = change(before)
        if after == before:
            raise LookupError(f"{path.name} is as before: the fault does not apply any more")
        replace(path, after.encode())

    def serve(self, plant: Callable[[NcnnRunner], None]) -> None:
        """Run the graphs in a child process, and plant there what may kill it."""
        self.child = Isolated("parity.faults.port:NativeServer", args=(str(self.folder), plant))
        self.runner = self.pipeline.runner = NativeRunner(self.child)

    def export_again(self, graph_id: str, plant: Callable[[Exporter], None]) -> None:
        """Export a graph anew when it is first run, by an exporter in which something is planted."""
        before = self.workspace.exporter
        exporter = Exporter(before.model, before.checkpoint, before.fingerprint, Store(self.folder / "store"))
        plant(exporter)
        self.workspace.exporter = exporter
        run = self.runner.run

        def exported_first(asked: str, inputs: Mapping[str, Floats]) -> Arrays:
            if asked == graph_id:
                built = exporter.graph(graph_id)
                replace(self.folder / f"{graph_id}.param", (built / "graph.param").read_bytes())
                weights = b"".join(path.read_bytes() for path in exporter.weights(graph_id))
                replace(self.folder / f"{graph_id}.bin", weights)
            outputs: Arrays = run(asked, inputs)
            return outputs

        self.runner.run = exported_first

    def change_dump(self, change: Callable[[Dump], Dump]) -> None:
        """Change what the reference says."""
        dump = self.workspace.dump

        def changed(name: str, tell: Callable[[Any], None] | None = None) -> Dump:
            return change(dump(name, tell))

        self.workspace.dump = changed  # type: ignore[method-assign]

    def generate(self, case: Any, pictures: list[NDArray[np.uint8]], forced: list[int] | None) -> list[Any]:
        """Tokens of the pipeline; greedy without `forced`."""
        return list(forced_or_greedy(self.pipeline, pictures, case.prompt, case.new_tokens, case.history, forced))

    def close(self) -> None:
        """End the child, where there is one."""
        if self.child:
            self.child.close()


class NativeServer:
    """In the child: graphs of a model folder, a fault planted into their runner."""

    def __init__(self, folder: str, plant: Callable[[NcnnRunner], None]) -> None:
        self.runner = NcnnRunner(Manifest.read(Path(folder)), verify=False)
        plant(self.runner)

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        """Outputs by port name."""
        return self.runner.run(graph_id, inputs)


class NativeRunner:
    """Runs graphs in that child; its death is an error that names the graph."""

    threads = 1

    def __init__(self, child: Isolated) -> None:
        self.child = child

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        """Outputs by port name. Raises CrashedError naming the graph when it kills the child."""
        try:
            outputs: Arrays = self.child.call("run", graph_id, dict(inputs))
        except CrashedError as error:
            raise CrashedError(graph_id, error.how) from error
        return outputs


@dataclass(frozen=True)
class Fault:
    """One kind of mistake."""

    name: str
    expected: str  # id, without the model, that must be named
    plant: Callable[[Port], None]
    changes_ids: bool = True  # within 64 tokens
    model: str = "youtu_vl"
    case: str = "square"
    domain: str = "glue"  # what explain must say of the place
    hints: tuple[str, ...] = ()  # kinds of harness.diagnosis, any of which is right; () where no tensor is wrong
    tests: str = ""  # the file of the suite that judges it, where no graph or stage does; `expected` is a test then


def copy_model(source: Path, target: Path) -> None:
    """A copy of a model folder that shares the files' bytes; files are replaced in it, never written to."""
    link_tree(source, target)
    own_weights(target)


def edit_weights(exporter: Exporter, folder: Path, graph_id: str, change: Callable[[dict[str, Floats]], None]) -> None:
    """Change the weights in a graph's bin by their names in the rewritten layer."""
    graph = exporter.graphs[graph_id]
    entries = read_entries(exporter.structure(graph.structure))
    path = folder / f"{graph_id}.bin"
    module = exporter.new_module(graph.structure)
    tensors = layout.read(path, entries, layout.tensors(module))
    weights = {name: tensors[name] for name in module.state_dict()}  # constants are no weights
    before = {name: value.copy() for name, value in weights.items()}
    change(weights)
    if all(np.array_equal(before[name], weights[name]) for name in before):
        raise LookupError(f"{graph_id}: the fault changed no weight: it does not apply any more")
    changed = BytesIO()
    layout.write(changed, entries, tensors | weights)
    replace(path, changed.getvalue())


def replace(path: Path, data: bytes) -> None:
    """New bytes for a file; its other names keep the old ones."""
    path.unlink()
    path.write_bytes(data)


def replaced(old: str, new: str) -> Callable[[str], str]:
    """The change of a text: one part of it by another."""
    return lambda text: text.replace(old, new)


def after(method: str, change: Callable[..., Any]) -> Callable[[Port], None]:
    """Replace a method of the pipeline by `change` of its result (and, behind it, its arguments)."""

    def plant(port: Port) -> None:
        inner = getattr(port.pipeline, method)
        setattr(port.pipeline, method, lambda *args: change(inner(*args), *args))

    return plant


def fed(graph_id: str, change: Callable[[Mapping[str, Floats]], Mapping[str, Floats]]) -> Callable[[Port], None]:
    """Change what one graph is fed."""

    def plant(port: Port) -> None:
        run = port.runner.run
        port.runner.run = lambda asked, inputs: run(asked, change(inputs) if asked == graph_id else inputs)

    return plant


def given(graph_id: str, change: Callable[[Floats], Floats]) -> Callable[[Port], None]:
    """Change what one graph gives."""

    def plant(port: Port) -> None:
        run = port.runner.run

        def faulty(asked: str, inputs: Mapping[str, Floats]) -> Arrays:
            outputs: Arrays = run(asked, inputs)
            return {name: change(value) for name, value in outputs.items()} if asked == graph_id else outputs

        port.runner.run = faulty

    return plant
