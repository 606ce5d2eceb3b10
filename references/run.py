"""One case on its way through a reference: each piece is made once and kept, so that a broken run goes on behind it.

A piece is a graph, what the glue between the graphs makes, or one layer of one greedy step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.graphs import Graph
from harness.metrics import measure
from harness.scratch import Scratch
from references.kinds import Tensors

GREEDY = "greedy."  # pieces whose tensors are no part of a dump


@dataclass(frozen=True)
class Progress:
    """How far a case is. Shares are of its work."""

    piece: str  # the last one that was done
    done: int
    pieces: int
    share: float  # done
    kept: float  # done by a run before


Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Tell nobody."""


class Run:
    """What was made of a case so far. `work` says what each piece weighs, for whoever is told of the progress."""

    def __init__(
        self,
        reference: Any,
        scratch: Scratch | None = None,
        work: Mapping[str, float] | None = None,
        tell: Tell = silent,
    ) -> None:
        self.reference, self.scratch = reference, scratch or Scratch()
        self._step = (self.step,) if scratch else ()  # a run that cannot go on keeps no steps
        self._tell, self._work = tell, work or {}
        self._total = sum(self._work.values())
        self._done, self._share, self._kept = 0, 0.0, 0.0

    def __getitem__(self, name: str) -> Tensor:
        # cloned into torch's own memory: its alignment decides the order of sums
        return torch.from_numpy(self.scratch.tensor(name)).clone()

    def keep(self, piece: str, make: Callable[[], Tensors]) -> None:
        """Make a piece of glue, unless it was made; its tensors by their names in the dump."""
        self._piece(piece, lambda: (make(), None))

    def greedy(self, embeds: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """The reference's greedy ids, each with its logits (vocab,)."""
        found: Iterator[tuple[int, Tensor]] = self.reference.greedy(embeds, count, *self._step)
        return found

    def step(self, piece: str, make: Callable[[], Tensors]) -> Tensors:
        """A piece of the greedy decode: what it gave, made or kept."""
        made: Tensors = {}

        def named() -> tuple[Tensors, None]:
            made.update(make())
            return {f"{GREEDY}{piece}.{name}": value for name, value in made.items()}, None

        self._piece(GREEDY + piece, named)
        prefix = f"{GREEDY}{piece}."
        return made or {name.removeprefix(prefix): self[name] for name in self.scratch.names(GREEDY + piece)}

    def graphs(self, graphs: Iterable[Graph]) -> None:
        """Run graphs on what was made for them."""
        for graph in graphs:
            self.graph(graph, partial(self._gather, graph))

    def graph(self, graph: Graph, inputs: Callable[[], Tensors]) -> None:
        """Run one graph in fp32, and in float64 for the noise floor of each output."""

        def run() -> tuple[Tensors, dict[str, float]]:
            given = inputs()
            outputs = self.reference.run(graph, given)
            exact = self.reference.run(graph, given, double=True)
            named = {f"{local(graph)}.{name}": value for name, value in outputs.items()}
            floors = {name: measure(outputs[name].numpy(), exact[name].numpy()).rel_l2 for name in outputs}
            return named, {f"{local(graph)}.{name}": floor for name, floor in floors.items()}

        self._piece(graph.id, run)

    def floors(self) -> dict[str, float]:
        """Noise floors of all graphs that were run, in their order."""
        found: dict[str, float] = {}
        for graph in self.reference.graphs.values():
            found |= self.scratch.value(graph.id) if graph.id in self.scratch else {}
        return found

    def _gather(self, graph: Graph) -> Tensors:
        sources = graph.sources.items()
        return {port: torch.cat([self[name] for name in names], dim=-2) for port, names in sources}

    def _piece(self, piece: str, make: Callable[[], tuple[Tensors, Any]]) -> None:
        kept = piece in self.scratch
        if not kept:
            tensors, value = make()
            self.scratch.put(piece, {name: tensor.numpy() for name, tensor in tensors.items()}, value)
        if piece in self._work:
            share = self._work[piece] / self._total
            self._done, self._share, self._kept = self._done + 1, self._share + share, self._kept + kept * share
            self._tell(Progress(piece, self._done, len(self._work), self._share, self._kept))


def local(graph: Graph) -> str:
    """A graph's id without its model: the prefix of its tensors in a dump."""
    return graph.id.partition("/")[2]
