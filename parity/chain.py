"""The port's pipeline over one case, run as a chain: every graph on what the port's graphs before it gave."""

import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.errors import UnjudgedError
from harness.graphs import Graph
from parity.attempts import told
from runtime.graphs import Arrays, Runner

if TYPE_CHECKING:  # a subject has a chain
    from parity.checks import Subject

SPOOLED_BYTES = 1 << 20
TOWERS = ("vision", "prefill", "decode")


class Reached(Exception):  # noqa: N818 - no error: the chain has come as far as anyone asks
    """The last graph that is asked for has run."""


class Recorder:
    """A runner that keeps the first outputs of every graph, and the first failure; it stops behind graph `last`."""

    def __init__(self, runner: Runner, last: str | None) -> None:
        self.runner, self.last = runner, last
        self.outputs: dict[str, Arrays] = {}
        self.failure: tuple[str, Exception] | None = None

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Run and keep."""
        try:
            outputs = self.runner.run(graph_id, inputs)
        except Exception as error:
            self.failure = self.failure or (graph_id, error)
            raise
        self.outputs.setdefault(graph_id, {name: spooled(array) for name, array in outputs.items()})
        if graph_id == self.last:
            raise Reached
        return outputs


def spooled(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """The array, a large one in a file that has no name: those of a wide model's chain are 1 GB."""
    if array.nbytes < SPOOLED_BYTES:
        return array
    with tempfile.TemporaryFile() as file:
        array.tofile(file)
        file.flush()
        return np.memmap(file, array.dtype, "r", shape=array.shape)


class Chain:
    """The port's pipeline over one case, run tower by tower; every graph's outputs are kept."""

    def __init__(self, subject: "Subject") -> None:
        self.subject = subject
        self.recorder = Recorder(subject.pipeline.runner, subject.last)
        self._rows: NDArray[np.float32] | None = None
        self._done: set[str] = set()

    def outputs(self, graph: Graph) -> Arrays:
        """Outputs of a graph; the towers before it are run first. Raises what stopped the run before it."""
        for tower in TOWERS:
            self._run(tower)
            if graph.id in self.recorder.outputs:
                return self.recorder.outputs[graph.id]
        if self.recorder.failure is None:
            raise UnjudgedError(
                f"{graph.id} was not run by the pipeline; is it missing in runtime/{self.subject.model}.py?"
            )
        culprit, error = self.recorder.failure
        if culprit == graph.id:
            raise error
        raise UnjudgedError(f"{graph.id} was not reached: {culprit} failed ({told(error)})")

    def _run(self, tower: str) -> None:
        if tower in self._done or self.recorder.failure is not None:
            return
        pipeline, inner = self.subject.pipeline, self.subject.pipeline.runner
        pipeline.runner = self.recorder
        try:
            getattr(self, f"_{tower}")()
        except Reached:
            pass
        except Exception as error:  # of the pipeline, where no graph has failed
            last = next(reversed(self.recorder.outputs), "its start")
            self.recorder.failure = self.recorder.failure or (f"the pipeline behind {last}", error)
        finally:
            pipeline.runner = inner
        self._done.add(tower)

    def _vision(self) -> None:
        if self.subject.grids:
            self._rows = self.subject.pipeline.encode_images(self.subject.pixels)

    def _prefill(self) -> None:
        pipeline = self.subject.pipeline
        pipeline.prefill(pipeline.fuse(self.subject.prompt.ids, self._rows))

    def _decode(self) -> None:
        self.subject.pipeline.step(self.subject.dump.values["ids"][0])
