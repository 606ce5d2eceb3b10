"""How tests run graphs: each from the store, built when first asked for, in a child process."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.isolation import CrashedError, Isolated
from parity import server
from parity.workspace import Workspace
from runtime.graphs import Arrays, Manifest

# Rows at once: in a chain every graph is compared with the reference over all rows. Answers keep the runtime's chunks.
WHOLE = 2**20


class StoreRunner:
    """Runs the graphs of a workspace; only those that are asked for are exported."""

    threads = 1

    def __init__(self, workspace: Workspace, child: Isolated) -> None:
        self.workspace, self.child = workspace, child
        self._graphs: dict[str, tuple[str, dict[str, Any]]] = {}

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name. Raises CrashedError naming the graph when it kills the child."""
        if graph_id not in self._graphs:
            exporter = self.workspace.exporter
            folder = exporter.graph(graph_id)
            self._graphs[graph_id] = str(folder), exporter.entry(exporter.graphs[graph_id])
        try:
            outputs: Arrays = self.child.call("run", *self._graphs[graph_id], dict(inputs))
        except CrashedError as error:
            raise CrashedError(graph_id, error.how) from error
        return outputs


class Port:
    """The port of a workspace: its runner, its pipeline over that runner, and whole generations in the child."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.child = server.start()
        self.runner = StoreRunner(workspace, self.child)

    @cached_property
    def pipeline(self) -> Any:
        """The runtime's pipeline, its graphs run one by one through the store."""
        import importlib

        folder = self.workspace.exporter.base()
        table = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["table"]
        manifest = Manifest(folder, self.workspace.model, self.workspace.fingerprint, {}, {}, table)
        return importlib.import_module(f"runtime.{self.workspace.model}").Pipeline(manifest, self.runner, chunk=WHOLE)

    def generate(self, case: Any, pictures: list[NDArray[np.uint8]], forced: list[int] | None) -> list[Any]:
        """Tokens of the pipeline over the exported model folder, all of it in the child; greedy without `forced`."""
        folder = self.workspace.exporter.model_folder()
        arguments = (str(folder), pictures, case.prompt, case.new_tokens, case.history, forced)
        tokens: list[Any] = self.child.call("generate", *arguments)
        return tokens

    def close(self) -> None:
        """End the child."""
        self.child.close()
