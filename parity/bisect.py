"""Which part of the port is the first to break its end: the port up to a seam, the reference beyond, halved.

A seam is a graph or a stage, in pipeline order. The reference's side of a probe is the model's own `trace` over a
reference whose methods answer with the port's results for every seam before the boundary; the port runs once.
But: graphs are driven one by one, so what only the joined nets of a resident pipeline get wrong is not seen here.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.compare import compare_tensor
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.records import Record
from parity import runners
from parity.checks import LIMITS, Recorder, Subject, around_graphs, inputs_of, needs, stages
from parity.divergence import TIE
from parity.verdict import DIFFERENT, EQUAL
from parity.workspace import Workspace, tensor_name
from references.dumping import one_thread, open_reference
from references.kinds import Tensors
from runtime.graphs import Arrays

Floats = NDArray[np.float32]

STEPS = 2  # the logits of the prompt and of the first decode step
NEIGHBOURS = 4  # seams on each side that are judged first when the found one turns out to be right
# Stages that one value of the pipeline carries across: a picture's pixels and grid, a prompt's text and ids.
TOGETHER = (("image.grid", "image.pixel_values"), ("template.text", "tokenizer.ids"))
BESIDE = ("tokenizer.lines", "tokenizer.length", "decode.")  # claims about the port, no step of it


@dataclass(frozen=True)
class Seam:
    """A place where the pipeline can be cut: behind a graph, or behind stages that only come together."""

    names: tuple[str, ...]  # ids
    graph: Graph | None = None

    @property
    def id(self) -> str:
        """Its last id: the boundary is behind it."""
        return self.names[-1]


@dataclass(frozen=True)
class Probe:
    """One run to the end, the port's results up to `seam` ("" for none of them)."""

    seam: str
    matches: bool
    detail: str


@dataclass(frozen=True)
class Bisection:
    """What was found. `confirmed`: isolated runs agree; `widened`: only after other seams than the found one."""

    guilty: str | None
    probes: tuple[Probe, ...]
    confirmed: bool
    widened: bool
    seconds: float
    model: str
    case: str
    seams: int
    evidence: tuple[str, ...]
    command: str  # what to type next

    @property
    def exit_code(self) -> int:
        """0 nothing guilty, 1 guilty found."""
        return EQUAL if self.guilty is None else DIFFERENT


def bisect_case(workspace: Workspace, case: str) -> Bisection:
    """Bisect the port of a workspace over one of its cases, graphs out of the store. Raises UnjudgedError."""
    port = runners.Port(workspace)
    try:
        subject = Subject.of(workspace, case, port, generate=port.generate)
        return bisect(subject, open_reference(workspace.model, workspace.checkpoint))
    finally:
        port.close()


def bisect(subject: Subject, reference: Any) -> Bisection:
    """The first guilty seam of a subject, in at most ceil(log2 seams) + 2 probes.

    Raises UnjudgedError when the reference alone does not reach the subject's dump, or the port cannot be built.
    """
    begin = time.perf_counter()
    seams = list(seams_of(subject))
    prober = _Prober(subject, reference, seams)
    finish = partial(_finished, prober, begin)
    if prober.matches(len(seams)):
        return finish(None, confirmed=True, widened=False)
    if not prober.matches(0):
        raise UnjudgedError(
            f"the reference alone does not reach the dump of {subject.model}, case {subject.dump.case}: "
            f"{prober.probes[-1].detail}; write the dump again: python -m parity dumps {subject.model}"
        )
    good, bad = 0, len(seams)  # seams that may be the port's, and one more than may
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if prober.matches(middle) else (good, middle)
    return _confirmed(_Witness(subject, reference, seams, prober.port), good, finish)


def lines(found: Bisection) -> Iterator[str]:
    """What a person reads: the guilty id, the evidence, the probes, what to type next."""
    count = len(found.probes)
    cost = f"{count} probe{'s' if count > 1 else ''} over {found.seams} seams, {found.seconds:.1f} s"
    if found.guilty is None:
        yield f"nothing is guilty [{found.model}, {found.case}]: the end matches: {found.probes[0].detail}; {cost}"
    else:
        word = "confirmed by isolated runs" if found.confirmed else "not confirmed"
        wider = ", in a wider search" if found.widened else ""
        yield f"{found.guilty} is the first guilty one [{found.case}]: {word}{wider}"
        yield from (f"  {line}" for line in found.evidence)
        yield f"{cost}; with the port up to and including"
        yield from _table(found.probes)
    yield f"next: {found.command}"


def _table(probes: Sequence[Probe]) -> Iterator[str]:
    names = [probe.seam or "nothing" for probe in probes]
    width = max(map(len, names))
    for name, probe in zip(names, probes, strict=True):
        yield f"  {name:{width}}  the end {'matches' if probe.matches else 'differs'}: {probe.detail}"


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


# ---- the port, run once


class _Recorder(Recorder):
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


def _recorded(subject: Subject) -> _Recorder:
    """The port from the pictures through one decode step, as far as it comes."""
    recorder, pipeline = _Recorder(subject), subject.pipeline
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


class _Hybrid:
    """The model's reference, but `taken` ids are the port's. The model's `trace` may run over it."""

    def __init__(self, subject: Subject, reference: Any, port: _Recorder, taken: set[str]) -> None:
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
            self.last = _tensors(self.port.found(graph.id))
        else:
            self.last = self.reference.run(graph, inputs | _tensors(self._given(graph)))
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


def _rotary(half: int, rows: Callable[[int], slice], hybrid: _Hybrid) -> Floats:
    count = len(hybrid.ids)
    table: Floats = hybrid.pipeline.rotary(0, count + 1)[half][:, rows(count)]
    return table


def _fused(hybrid: _Hybrid) -> Floats:
    rows = hybrid.outputs.get("vision.tail")
    fused: Floats = hybrid.pipeline.fuse(hybrid.ids, None if rows is None else rows["rows"].numpy())
    return fused


def _prompt_rows(count: int) -> slice:
    return slice(count)


def _next_row(count: int) -> slice:
    return slice(count, None)


# What the glue between the graphs makes, by its name in a dump: the stage that it belongs to, and the port's value.
GLUE: dict[str, tuple[str, Callable[[_Hybrid], NDArray[Any]]]] = {
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


class _Prober:
    """Runs hybrids to the end and keeps what came of each."""

    def __init__(self, subject: Subject, reference: Any, seams: Sequence[Seam]) -> None:
        self.subject, self.reference, self.seams = subject, reference, seams
        self.port = _recorded(subject)
        self.trace = importlib.import_module(f"references.{subject.model}.trace").trace
        self.case = replace(subject.case, new_tokens=min(STEPS, len(subject.dump.values["ids"])))
        self.probes: list[Probe] = []

    def matches(self, count: int) -> bool:
        """Whether the end matches when the first `count` seams are the port's."""
        taken = {name for seam in self.seams[:count] for name in seam.names}
        try:
            with one_thread():
                tensors, values = self.trace(_Hybrid(self.subject, self.reference, self.port, taken), self.case)
            matches, detail = _judged(self.subject, tensors["logits"].numpy(), values["ids"])
        except UnjudgedError:
            raise
        except Exception as error:
            matches, detail = False, f"the run breaks: {_first_line(error)}"
        self.probes.append(Probe(self.seams[count - 1].id if count else "", matches, detail))
        return matches


def _judged(subject: Subject, logits: Floats, ids: list[int]) -> tuple[bool, str]:
    """Whether logits (steps, vocab) and ids are the dump's, and the numbers."""
    rows, wanted = subject.dump.tensors["logits"][: len(ids)], subject.dump.values["ids"][: len(ids)]
    name = f"{subject.model}/decode.logits"
    record = compare_tensor(logits, rows, LIMITS.of(name, "chained"), where=subject.where(name, "logits", "chained"))
    if record.verdict != "equal":
        same = "the ids are the same" if ids == wanted else f"ids {ids}, but should be {wanted}"
        return False, f"logits {_reason(record).partition('   (')[0]}; {same}"  # without the line of the limit
    numbers = f"logits rel_l2 {_rel_l2(record)}, ids {ids}"
    if ids == wanted:
        return True, numbers
    tie = _is_tie(subject, logits, rows, ids)
    return tie, f"{numbers}, but should be {wanted}{': a near-tie' if tie else ''}"


def _is_tie(subject: Subject, logits: Floats, rows: Floats, ids: list[int]) -> bool:
    """Whether the first other id is the largest logit, and noise enough to have made it so."""
    place = next(place for place, (row, i) in enumerate(zip(rows, ids, strict=True)) if int(row.argmax()) != i)
    noise = float(np.abs(logits - rows).max())
    return ids[place] == int(logits[place].argmax()) and subject.dump.values["margins"][place] <= TIE * noise


# ---- isolated runs around the found seam


class _Witness:
    """Judges seams alone."""

    def __init__(self, subject: Subject, reference: Any, seams: Sequence[Seam], port: _Recorder) -> None:
        self.subject, self.reference, self.seams, self.port = subject, reference, seams, port
        self.said: dict[int, tuple[str, str]] = {}  # place -> the red id or "", and the line for a person

    def red(self, place: int) -> bool:
        """Whether a seam is red on the reference's own inputs."""
        if place not in self.said:
            self.said[place] = self._judge(self.seams[place])
        return bool(self.said[place][0])

    def name(self, place: int) -> str:
        """The id to name: the first red one of the seam, the seam itself where none is."""
        return (place in self.said and self.said[place][0]) or self.seams[place].id

    def line(self, place: int) -> str:
        """What its isolated run says; "" where there was none."""
        return self.said[place][1] if place in self.said else ""

    def on_own_inputs(self, place: int) -> str:
        """What is wrong in front of or in a graph that is right on the reference's inputs; "" where nothing is."""
        graph = self.seams[place].graph
        if graph is None:
            return ""
        if graph.id not in self.port.outputs and self.port.failure:
            return f"but the port's own run breaks there: {_first_line(self.port.failure[1])}"
        return self._handed_over(graph) or self._computed(graph)

    def _judge(self, seam: Seam) -> tuple[str, str]:
        for name in seam.names:
            try:
                records = (
                    self.subject.isolated(seam.graph) if seam.graph else self.subject.stage(name.partition("/")[2])
                )
            except UnjudgedError:
                raise
            except Exception as error:
                return name, f"{name} alone breaks: {_first_line(error)}"
            red = next((record for record in records if record.verdict != "equal"), None)
            if red is not None:
                return name, f"{name} alone differs: {red.where.tensor} {_reason(red)}"
        return "", f"{seam.id} alone is equal{_worst(records)}"

    def _alone(self, name: str, graph: Graph | None) -> list[Record]:
        return self.subject.isolated(graph) if graph else self.subject.stage(name.partition("/")[2])

    def _handed_over(self, graph: Graph) -> str:
        """The first input that is not what the port's graphs before, or the reference's glue, would give."""
        recorded = {
            tensor_name(before, port): value
            for name, before in self.subject.graphs.items()
            for port, value in self.port.outputs.get(name, {}).items()
        }
        before = replace(self.subject.dump, tensors={**self.subject.dump.tensors, **recorded})
        records = self._compare(graph, self.port.inputs[graph.id], inputs_of(graph, before), "chained")
        red = next((record for record in records if record.verdict != "equal"), None)
        if red is None:
            return ""
        return f"but the runtime hands it another {red.where.tensor}: {_reason(red)}"

    def _computed(self, graph: Graph) -> str:
        """Whether the graph is wrong on the port's inputs only."""
        with one_thread():
            outputs = self.reference.run(graph, _tensors(self.port.inputs[graph.id]))
        expected = {name: value.numpy() for name, value in outputs.items()}
        records = self._compare(graph, self.port.outputs[graph.id], expected, "isolated")
        red = next((record for record in records if record.verdict != "equal"), None)
        return "" if red is None else f"but on the port's own inputs it differs: {red.where.tensor} {_reason(red)}"

    def _compare(self, graph: Graph, actual: Arrays, expected: Arrays, mode: str) -> Iterator[Record]:
        limits = LIMITS.of(graph.id, mode)
        for name, value in actual.items():
            yield compare_tensor(value, expected[name], limits, where=self.subject.where(graph.id, name, mode))


def _confirmed(witness: _Witness, found: int, finish: Callable[..., Bisection]) -> Bisection:
    """Isolated runs at the found seam and before it; a wider search where they disagree with the probes."""
    why = "" if witness.red(found) else witness.on_own_inputs(found)
    if not witness.red(found) and not why:
        return _searched_wider(witness, found, finish)
    first = found
    while first > 0 and witness.red(first - 1):
        first -= 1
    said = {place: witness.line(place) for place in (first, found, first - 1) if place >= 0}
    said[found] += f", {why}" if why else ""
    return finish(witness.name(first), confirmed=True, widened=first != found, evidence=list(said.values()))


def _searched_wider(witness: _Witness, found: int, finish: Callable[..., Bisection]) -> Bisection:
    evidence = [f"the end changes at {witness.name(found)}, but {witness.line(found)}"]
    red = next((place for place in _outward(found, len(witness.seams)) if witness.red(place)), None)
    if red is None:
        evidence.append(f"and so are all {len(witness.seams)}")
        return finish(witness.name(found), confirmed=False, widened=True, evidence=evidence)
    return finish(witness.name(red), confirmed=True, widened=True, evidence=[witness.line(red), *evidence])


def _outward(found: int, count: int) -> Iterator[int]:
    """Neighbours by their distance, then all others in pipeline order; without the found place itself."""
    near = [place for step in range(1, NEIGHBOURS + 1) for place in (found - step, found + step)]
    near = [place for place in near if 0 <= place < count]
    return chain(near, (place for place in range(count) if place != found and place not in near))


def _finished(
    prober: _Prober,
    begin: float,
    guilty: str | None,
    *,
    confirmed: bool,
    widened: bool,
    evidence: Sequence[str] = (),
) -> Bisection:
    subject = prober.subject
    return Bisection(
        guilty,
        tuple(prober.probes),
        confirmed,
        widened,
        time.perf_counter() - begin,
        model=subject.model,
        case=subject.dump.case,
        seams=len(prober.seams),
        evidence=tuple(evidence),
        command=_command(subject, guilty),
    )


def _command(subject: Subject, guilty: str | None) -> str:
    if guilty is None:
        return f"python -m parity run {subject.model} --case {subject.dump.case}"
    if guilty in subject.graphs:
        return f"python -m parity explain {guilty} --case {subject.dump.case}"
    return subject.rerun(guilty)


# ---- words


def _reason(record: Record) -> str:
    """The record's first complaint, in short."""
    if record.mismatch is None:
        return record.detail.splitlines()[1].strip()
    differing, index, ours, theirs = astuple(record.mismatch)
    ours, theirs = (text.partition(" in ")[0] for text in (ours, theirs))  # without their neighbours
    return f"{differing} differ, the first at {', '.join(map(str, index))}: {ours}, but should be {theirs}"


def _rel_l2(record: Record) -> str:
    return f"{record.metrics.rel_l2:.1e}" if record.metrics else "-"


def _worst(records: Sequence[Record]) -> str:
    errors = [record.metrics.rel_l2 for record in records if record.metrics]
    return f" (rel_l2 {max(errors):.1e})" if errors else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def _local(graph: Graph) -> str:
    return graph.id.partition("/")[2]


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
