"""The port's results in the reference's place: the port, run once, and the reference that answers with its results.

The model's own `trace` runs over a hybrid; its methods answer with the port's for every seam before the boundary.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.errors import UnjudgedError
from harness.graphs import Graph
from parity.chain import Recorder
from parity.checks import Subject
from references.kinds import Tensors
from runtime.graphs import Arrays

Floats = NDArray[np.float32]


class PortRecorder(Recorder):
    """Keeps the inputs of every graph too."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.pipeline.runner, None)
        self.inputs: dict[str, Arrays] = {}

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        """Run and keep."""
        self.inputs.setdefault(graph_id, dict(inputs))
        return super().run(graph_id, inputs)

    def found(self, graph_id: str) -> Arrays:
        """Outputs of a graph. Raises what stopped the port in it or before it."""
        if graph_id in self.outputs:
            return self.outputs[graph_id]
        if self.failure:
            raise self.failure[1]
        model = graph_id.partition("/")[0]
        raise UnjudgedError(f"{graph_id} was not run by the pipeline; is it missing in runtime/{model}.py?")


def recorded(subject: Subject) -> PortRecorder:
    """The port from the pictures through one decode step, as far as it comes."""
    recorder, pipeline = PortRecorder(subject), subject.pipeline
    inner, pipeline.runner = pipeline.runner, recorder
    try:
        prompt = pipeline.prompt(subject.case.prompt, [p.grid for p in subject.pixels], subject.case.history)
        rows = pipeline.encode_images(subject.pixels) if subject.pixels else None
        pipeline.prefill(pipeline.fuse(prompt.ids, rows))
        pipeline.step(subject.dump.values["ids"][0])
    except UnjudgedError:
        raise
    except Exception as error:
        recorder.failure = recorder.failure or ("", error)
    finally:
        pipeline.runner = inner
    return recorder


# ---- port and reference in one


class Hybrid:
    """The model's reference, but `taken` ids are the port's. The model's `trace` may run over it."""

    def __init__(self, subject: Subject, reference: Any, port: PortRecorder, taken: set[str]) -> None:
        self.subject, self.reference, self.port = subject, reference, port
        self.pipeline = subject.pipeline
        self.taken = {name.partition("/")[2] for name in taken}
        self.grids: list[tuple[int, int]] = []
        self.ids: list[int] = []
        self.outputs: dict[str, Tensors] = {}
        self.last: Tensors = {}  # outputs of the graph before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reference, name)

    def preprocess(self, picture: NDArray[np.uint8]) -> tuple[Tensor, tuple[int, int]]:
        """uint8 (H, W, 3) -> patch rows (N, d) and grid."""
        if "image.grid" in self.taken:
            (pixels,) = self.pipeline.preprocess([picture])
            rows, grid = torch.from_numpy(pixels.pixel_values), pixels.grid
        else:
            rows, grid = self.reference.preprocess(picture)
        self.grids.append(grid)
        return rows, grid

    def prompt(self, text: str, *rest: Any) -> Any:
        """Rendered and encoded prompt; `rest` is what this model's reference takes."""
        if "template.text" in self.taken:
            found = self.pipeline.prompt(text, self.grids, self.subject.case.history)
        else:
            found = self.reference.prompt(text, *rest)
        self.ids = found.ids
        return found

    def run(self, graph: Graph, inputs: Tensors, *, double: bool = False) -> Tensors:
        """Outputs of one graph; nothing in double, because no noise floor is asked for here."""
        if double:
            return {name: value[:0] for name, value in self.last.items()}
        if _local(graph) in self.taken:
            self.last = as_tensors(self.port.found(graph.id))
        else:
            self.last = self.reference.run(graph, inputs | as_tensors(self._given(graph)))
        self.outputs[_local(graph)] = self.last
        return self.last

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, C) -> (T, vocab)."""
        if "head.logits" in self.taken:
            return torch.from_numpy(np.stack([self.pipeline.logits(row) for row in hidden.numpy()]))
        found: Tensor = self.reference.logits(hidden)
        return found

    def greedy(self, _: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """The ids behind the prompt and behind the first step, each with its logits (vocab,)."""
        prefill = [name for name in self.outputs if name.endswith(".prefill")]
        ends = [self.outputs[prefill[-1]]["hidden"], self.last["hidden"]]
        for hidden in ends[:count]:
            logits = self.logits(hidden[-1:])[0]
            chosen = self.pipeline.choose(logits.numpy()) if "sampling.ids" in self.taken else logits.argmax()
            yield int(chosen), logits

    def _given(self, graph: Graph) -> Arrays:
        """Inputs of a graph that taken stages of the port make."""
        made = {port: GLUE.get(sources[0]) for port, sources in graph.sources.items()}
        return {port: found[1](self) for port, found in made.items() if found and found[0] in self.taken}

    @cached_property
    def tables(self) -> Arrays:
        """The port's tables for the vision graphs."""
        found: Arrays = self.pipeline.vision_tables(self.grids)
        return found

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The port's gather into window order (N,)."""
        found: NDArray[np.int64] = self.pipeline.window_order(self.grids)
        return found


def _rotary(half: int, rows: Callable[[int], slice], hybrid: Hybrid) -> Floats:
    count = len(hybrid.ids)
    table: Floats = hybrid.pipeline.rotary(0, count + 1)[half][:, rows(count)]
    return table


def _fused(hybrid: Hybrid) -> Floats:
    rows = hybrid.outputs.get("vision.tail")
    fused: Floats = hybrid.pipeline.fuse(hybrid.ids, None if rows is None else rows["rows"].numpy())
    return fused


def _prompt_rows(count: int) -> slice:
    return slice(count)


def _next_row(count: int) -> slice:
    return slice(count, None)


# What the glue between the graphs makes, by its name in a dump: the stage that it belongs to, and the port's value.
GLUE: dict[str, tuple[str, Callable[[Hybrid], NDArray[Any]]]] = {
    "vision.permuted": ("positions.window_order", lambda h: h.last["hidden"].numpy()[h.order]),
    "vision.unpermuted": ("positions.window_order", lambda h: h.last["hidden"].numpy()[np.argsort(h.order)]),
    "vision.cos": ("positions.vision_cos", lambda h: h.tables["cos"]),
    "vision.sin": ("positions.vision_sin", lambda h: h.tables["sin"]),
    "vision.window_mask": ("positions.window_mask", lambda h: h.tables["window_mask"]),
    "vision.full_mask": ("positions.full_mask", lambda h: h.tables["full_mask"]),
    "prefill.cos": ("positions.text_cos", partial(_rotary, 0, _prompt_rows)),
    "prefill.sin": ("positions.text_sin", partial(_rotary, 1, _prompt_rows)),
    "prefill.mask": ("positions.causal_mask", lambda h: h.pipeline.causal_mask(len(h.ids))),
    "prefill.embeds": ("fusion.embeds", _fused),
    "decode.cos": ("positions.text_cos", partial(_rotary, 0, _next_row)),
    "decode.sin": ("positions.text_sin", partial(_rotary, 1, _next_row)),
}


# ---- both as mappings


def _local(graph: Graph) -> str:
    return graph.id.partition("/")[2]


def as_tensors(arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    """The same values for the reference."""
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
