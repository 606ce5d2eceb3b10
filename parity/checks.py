"""The claims as functions: each compares something of the port with the reference and gives records.

`Subject` holds one case of one model: its dump, and the port's pipeline over some runner of graphs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.compare import compare_exact, compare_tensor
from harness.diagnosis import diagnose
from harness.dumps import Dump
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.limits import Limits
from harness.records import Record, Where
from parity.chain import Chain
from parity.divergence import explained
from parity.server import forced_or_greedy
from parity.workspace import Choice, tensor_name
from references import PACKAGES
from references.lines import LINES
from runtime.graphs import Arrays, Runner

LIMITS = Limits.read(Path(__file__).with_name("limits.toml"))
PRECISION = "fp32"
SHOWN_HINTS = 2
IDS = "decode.ids"
# What a dump must say it was made with: another release may have other defaults.
MADE_WITH = {"dtype": "float32"} | {name: version(name) for name in PACKAGES}

# case, pictures, ids to force upon the port or None -> its tokens
Generate = Callable[[Any, list[NDArray[np.uint8]], list[int] | None], list[Any]]
# images, roles of the messages -> tokens of the prompt that are neither image nor text
FrameTokens = Callable[[int, list[str]], int]


def hinted(record: Record, actual: Any, expected: Any, spans: Mapping[str, slice]) -> Record:
    """The record of two tensors, its text with what their difference looks like.

    Not in the chain: there an error has gone through other graphs and has their shape.
    """
    tensors = isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray)
    if record.verdict != "different" or record.where.mode == "chained" or not tensors:
        return record
    hints = diagnose(actual, expected, floor=record.floor, spans=spans)[:SHOWN_HINTS]
    text, _, rerun = record.detail.rpartition("\n")
    return replace(record, detail="\n".join([text, *(f"  hint: {h.kind}: {h.evidence}" for h in hints), rerun]))


@dataclass
class Subject:
    """One case of one model, port beside reference."""

    model: str
    choice: Choice  # whose checkpoint is judged
    dump: Dump
    case: Any
    graphs: Mapping[str, Graph]
    pipeline: Any
    runner: Runner
    generate: Generate
    frame_tokens: FrameTokens
    last: str | None = None  # the graph behind which a chained run may stop

    @classmethod
    def of(
        cls, workspace: Any, case: str, port: Any, *, generate: Generate | None = None, last: str | None = None
    ) -> "Subject":
        """A case of a workspace on a port's `pipeline` and `runner`; without `generate` it answers in this process."""

        def in_this_process(asked: Any, pictures: list[NDArray[np.uint8]], forced: list[int] | None) -> list[Any]:
            return list(
                forced_or_greedy(port.pipeline, pictures, asked.prompt, asked.new_tokens, asked.history, forced)
            )

        return cls(
            workspace.model,
            workspace.choice,
            workspace.dump(case),
            workspace.cases.get(case),
            workspace.graphs,
            pipeline=port.pipeline,
            runner=port.runner,
            generate=generate or in_this_process,
            frame_tokens=workspace.description.frame_tokens,
            last=last,
        )

    def rerun(self, name: str) -> str:
        """The command that judges an id again."""
        return f"pytest -k '{name} and {self.dump.case}'{self.choice.pytest_options()}"

    def where(self, name: str, tensor: str, mode: str) -> Where:
        """Where a comparison stands."""
        return Where(name, tensor, self.dump.case, mode, PRECISION)

    # ---- graphs

    def isolated(self, graph: Graph) -> list[Record]:
        """The graph on the reference's own inputs."""
        outputs = self.runner.run(graph.id, inputs_of(graph, self.dump))
        return [self._compare(graph, port.name, outputs[port.name], "isolated") for port in graph.structure.outputs]

    def chained(self, graph: Graph) -> list[Record]:
        """The graph on the port's own inputs, all the way from the pictures."""
        outputs = self.chain.outputs(graph)
        return [self._compare(graph, port.name, outputs[port.name], "chained") for port in graph.structure.outputs]

    @cached_property
    def chain(self) -> Chain:
        """One run of the port's pipeline, advanced as far as is asked for."""
        return Chain(self)

    # ---- stages

    def stage(self, name: str) -> list[Record]:
        """One of the model's stages between and around the graphs, by its name without the model."""
        mode, compute = STAGES[name]
        actual, expected = compute(self)
        where = self.where(f"{self.model}/{name}", name.partition(".")[2], mode)
        rerun = self.rerun(f"{self.model}/{name}")
        if mode == "exact":
            record = compare_exact(actual, expected, where=where, rerun=rerun)
            record = explained(record, self) if name == IDS else record
        else:
            record = compare_tensor(actual, expected, LIMITS.of(where.id, mode), where=where, rerun=rerun)
        return [hinted(record, actual, expected, self.spans)]

    @cached_property
    def pictures(self) -> list[NDArray[np.uint8]]:
        """The case's pictures."""
        return list(self.case.images())

    @cached_property
    def pixels(self) -> list[Any]:
        """The port's preprocessed pictures."""
        return list(self.pipeline.preprocess(self.pictures))

    @property
    def grids(self) -> list[tuple[int, int]]:
        """The reference's patch grids."""
        return [(grid[0], grid[1]) for grid in self.dump.values["grids"]]

    @cached_property
    def prompt(self) -> Any:
        """The port's rendered and encoded prompt."""
        return self.pipeline.prompt(self.case.prompt, self.grids, self.case.history)

    @cached_property
    def tables(self) -> Arrays:
        """The port's tables for the vision graphs."""
        tables: Arrays = self.pipeline.vision_tables(self.grids)
        return tables

    @cached_property
    def tokens(self) -> list[Any]:
        """What the port generates, from pictures and prompt to the last token."""
        return self.generate(self.case, self.pictures, None)

    @property
    def spans(self) -> dict[str, slice]:
        """The rows of the prompt that are the picture's, where there is one."""
        places = self.dump.values.get("image_positions") or []
        return {"image": slice(places[0], places[-1] + 1)} if places else {}

    @property
    def last_hidden(self) -> NDArray[np.float32]:
        """The reference's last row after the last prefill graph."""
        last = [graph for graph in self.graphs.values() if graph.id.endswith(".prefill")][-1]
        row: NDArray[np.float32] = self.dump.tensors[tensor_name(last, "hidden")][-1]
        return row

    def _compare(self, graph: Graph, port: str, actual: NDArray[np.float32], mode: str) -> Record:
        name = tensor_name(graph, port)
        record = compare_tensor(
            actual,
            self.dump.tensors[name],
            LIMITS.of(graph.id, mode),
            where=self.where(graph.id, port, mode),
            floor=self.dump.values["floors"][name],
            rerun=self.rerun(graph.id),
        )
        return hinted(record, actual, self.dump.tensors[name], self.spans)


def inputs_of(graph: Graph, dump: Dump) -> dict[str, NDArray[np.float32]]:
    """The reference's inputs of a graph."""
    local = graph.id.partition("/")[2]
    if f"{local}.in.{graph.structure.inputs[0].name}" in dump.tensors:  # a shape case
        return {port.name: dump.tensors[f"{local}.in.{port.name}"] for port in graph.structure.inputs}
    return {name: joined(sources, dump) for name, sources in graph.sources.items()}


def joined(sources: tuple[str, ...], dump: Dump) -> NDArray[np.float32]:
    """Tensors of a dump, joined along the row axis."""
    if len(sources) == 1:
        return dump.tensors[sources[0]]
    return np.concatenate([dump.tensors[source] for source in sources], axis=-2)


def needs(graph: Graph, dump_has_pictures: bool) -> bool:
    """Whether a case runs a graph: the vision tower only runs where there are pictures."""
    return dump_has_pictures or "/vision." not in graph.id


Pair = tuple[Any, Any]


def _reference_text_rows(s: Subject) -> Pair:
    rows = s.dump.tensors.get("vision.tail.rows")
    return s.pipeline.fuse(s.dump.values["prompt_ids"], rows), s.dump.tensors["prefill.embeds"]


def _rotary(s: Subject, half: int) -> Pair:
    count = len(s.dump.values["prompt_ids"])
    name = ("cos", "sin")[half]
    table = s.pipeline.rotary(0, count + 1)[half]
    return table, np.concatenate([s.dump.tensors[f"prefill.{name}"], s.dump.tensors[f"decode.{name}"]], axis=1)


def _prompt_length(s: Subject) -> Pair:
    """The frame of the template, the image tokens and the text's own tokens must add up to the whole."""
    turns = [*s.case.history, ("user", s.case.prompt)]
    text = sum(len(s.pipeline.tokenizer.encode(content)) for _, content in turns)
    cells = sum(height * width // 4 for height, width in s.grids)
    return s.frame_tokens(len(s.grids), [role for role, _ in turns]) + cells + text, len(s.dump.values["prompt_ids"])


def _chosen(s: Subject) -> Pair:
    rows = s.dump.tensors["logits"]
    return [s.pipeline.choose(row) for row in rows], s.dump.values["ids"][: len(rows)]


def _decode_logits(s: Subject) -> Pair:
    rows = s.dump.tensors["logits"]
    return np.stack([token.logits for token in s.tokens[: len(rows)]]), rows


def _made_with(s: Subject) -> Pair:
    """The dtype and the packages that a dump was made with, beside those that it should be made with."""
    told = s.dump.provenance["made_with"]
    stale = [
        f"{name} {told.get(name)}, but should be {wanted}"
        for name, wanted in MADE_WITH.items()
        if told.get(name) != wanted
    ]
    if stale:
        raise UnjudgedError(
            f"the reference was made with {'; '.join(stale)}; make it again: python -m parity dumps {s.model}, "
            f"and with --commit for the dump of {s.dump.case} if that is the committed one"
        )
    return sorted(MADE_WITH), sorted(MADE_WITH)


# In pipeline order: name -> (mode, the pair (actual, expected)).
END = "\n"  # behind an answer, whose text may be none
STAGES: dict[str, tuple[str, Callable[[Subject], Pair]]] = {
    "reference.made_with": ("exact", _made_with),
    "image.grid": ("exact", lambda s: ([list(p.grid) for p in s.pixels], s.dump.values["grids"])),
    "image.pixel_values": (
        "exact",
        lambda s: (np.concatenate([p.pixel_values for p in s.pixels]), s.dump.tensors["pixel_values"]),
    ),
    "template.text": ("exact", lambda s: (s.prompt.text, s.dump.values["prompt"])),
    "tokenizer.ids": ("exact", lambda s: (s.prompt.ids, s.dump.values["prompt_ids"])),
    "tokenizer.lines": (
        "exact",
        lambda s: ([s.pipeline.tokenizer.encode(line) for line in LINES], s.dump.values["line_ids"]),
    ),
    "tokenizer.length": ("exact", _prompt_length),
    "positions.window_order": (
        "exact",
        lambda s: (s.pipeline.window_order(s.grids), s.dump.tensors["vision.order"]),
    ),
    "positions.vision_cos": ("isolated", lambda s: (s.tables["cos"], s.dump.tensors["vision.cos"])),
    "positions.vision_sin": ("isolated", lambda s: (s.tables["sin"], s.dump.tensors["vision.sin"])),
    "positions.window_mask": (
        "exact",
        lambda s: (s.tables["window_mask"], s.dump.tensors["vision.window_mask"]),
    ),
    "positions.full_mask": ("exact", lambda s: (s.tables["full_mask"], s.dump.tensors["vision.full_mask"])),
    "positions.text_cos": ("isolated", lambda s: _rotary(s, 0)),
    "positions.text_sin": ("isolated", lambda s: _rotary(s, 1)),
    "positions.causal_mask": (
        "exact",
        lambda s: (s.pipeline.causal_mask(len(s.dump.values["prompt_ids"])), s.dump.tensors["prefill.mask"]),
    ),
    "fusion.embeds": ("exact", _reference_text_rows),
    "head.logits": ("isolated", lambda s: (s.pipeline.logits(s.last_hidden), s.dump.tensors["logits"][0])),
    "sampling.ids": ("exact", _chosen),
    IDS: ("exact", lambda s: ([token.id for token in s.tokens], s.dump.values["ids"])),
    "decode.text": ("exact", lambda s: ("".join(token.text for token in s.tokens) + END, s.dump.values["text"] + END)),
    "decode.logits": ("chained", _decode_logits),
}
VISION_STAGES = ("image.", "positions.window", "positions.vision", "positions.full")


GRAPHS_COME_BEFORE = "head.logits"


def around_graphs() -> tuple[list[str], list[str]]:
    """Stage names before and after the graphs."""
    names = list(STAGES)
    place = names.index(GRAPHS_COME_BEFORE)
    return names[:place], names[place:]


def stages(has_pictures: bool) -> list[str]:
    """Names of the stages that a case goes through."""
    return [name for name in STAGES if has_pictures or not name.startswith(VISION_STAGES)]
