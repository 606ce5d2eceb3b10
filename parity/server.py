"""What runs in the child process: ncnn graphs, one by one or as the whole pipeline. A crash ends only the child."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.isolation import Isolated
from runtime.graphs import Arrays, Manifest, NcnnRunner, read_graph

SECONDS = 600.0
HELD_BYTES = 1 << 30  # of weights that stay for the next claim: all of a narrow model, a few graphs of a wide one


class Server:
    """Runs graphs from their folders in the store, and whole generations from a model folder."""

    def __init__(self) -> None:
        self._runners: dict[str, NcnnRunner] = {}
        self._pipelines: dict[str, Any] = {}

    def run(self, folder: str, entry: Mapping[str, Any], inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs of the one graph that `entry` describes."""
        runner = self._runners.pop(folder, None)
        if runner is None:
            graph = read_graph(entry)
            runner = NcnnRunner(Manifest(Path(folder), "", "", {graph.id: graph}, {}, {}))
        # which has waited longest; while a graph is loaded it takes its size twice
        while self._runners and sum(map(_held_bytes, (runner, runner, *self._runners.values()))) > HELD_BYTES:
            self.forget(next(iter(self._runners)))
        self._runners[folder] = runner
        return runner.run(entry["id"], inputs)

    def forget(self, folder: str) -> None:
        """Let go of a graph's weights."""
        self._runners.pop(folder, None)

    def generate(
        self,
        folder: str,
        pictures: list[NDArray[np.uint8]],
        prompt: str,
        count: int,
        history: Any,
        forced: list[int] | None,
    ) -> list[Any]:
        """Tokens of the whole pipeline over an exported model folder; `forced` ids are taken instead of its own."""
        if folder not in self._pipelines:
            manifest = Manifest.read(Path(folder))
            module = importlib.import_module(f"runtime.{manifest.model}")
            wide = _held_bytes(NcnnRunner(manifest, verify=False)) > HELD_BYTES
            runner = NcnnRunner(manifest, mode="streaming" if wide else "resident")
            self._pipelines[folder] = module.Pipeline(manifest, runner)
        pipeline = self._pipelines[folder]
        tokens = list(forced_or_greedy(pipeline, pictures, prompt, count, history, forced))
        pipeline.release()
        return tokens


def _held_bytes(runner: NcnnRunner) -> int:
    return runner.weight_bytes(runner.manifest.graphs)


def forced_or_greedy(
    pipeline: Any, pictures: Any, prompt: str, count: int, history: Any, forced: list[int] | None
) -> Iterator[Any]:
    """What a pipeline generates, greedily or with ids forced upon it."""
    if forced is None:
        return pipeline.generate(pictures, prompt, count, history)
    following = iter(forced)
    return pipeline.generate(pictures, prompt, len(forced), history, lambda logits, before: next(following))


def make() -> Server:
    """The factory that `Isolated` calls in the child."""
    return Server()


def start() -> Isolated:
    """A server in a child process of its own."""
    return Isolated("parity.server:make", timeout_seconds=SECONDS)
