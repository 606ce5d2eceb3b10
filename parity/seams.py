"""Where the pipeline can be cut: behind its graphs and stages, in its order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.graphs import Graph
from parity.checks import Subject, around_graphs, needs, stages

# Stages that one value of the pipeline carries across: a picture's pixels and grid, a prompt's text and ids.
TOGETHER = (("image.grid", "image.pixel_values"), ("template.text", "tokenizer.ids"))
BESIDE = ("reference.", "tokenizer.lines", "tokenizer.length", "decode.")  # claims about the port, no step of it


@dataclass(frozen=True)
class Seam:
    """A place where the pipeline can be cut: behind a graph, or behind stages that only come together."""

    names: tuple[str, ...]  # ids
    graph: Graph | None = None

    @property
    def id(self) -> str:
        """Its last id: the boundary is behind it."""
        return self.names[-1]


def seams_of(subject: Subject) -> Iterator[Seam]:
    """Every seam of the subject's case in pipeline order."""
    pictures = bool(subject.grids)
    taken = [name for name in stages(pictures) if not name.startswith(BESIDE)]
    before, after = ([name for name in names if name in taken] for names in around_graphs())
    yield from _stage_seams(subject.model, before)
    yield from (Seam((graph.id,), graph) for graph in subject.graphs.values() if needs(graph, pictures))
    yield from _stage_seams(subject.model, after)


def _stage_seams(model: str, names: Sequence[str]) -> Iterator[Seam]:
    whole = {name: group for group in TOGETHER for name in group}
    for group in dict.fromkeys(whole.get(name, (name,)) for name in names):
        yield Seam(tuple(f"{model}/{name}" for name in group))
