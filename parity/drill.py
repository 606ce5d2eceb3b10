"""Inside one graph: which ncnn blob is the first that computes something else than the rewritten layer.

Every blob of the exported graph is matched by value with all that the rewritten layer computes on the same inputs, axes
in any order; names play no part. Where a clean graph is at hand, its blobs say which of them match anything at all: a
fused layer's parts need not.
But: a blob is guilty only on the way to an output that is wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.diagnosis import Hint
from harness.graphs import Graph
from harness.isolation import Isolated
from parity.blobs import Blobs, Files, Floats, run_blobs
from parity.hints import of_blob
from parity.matching import MATCHES, Match, Pool, arrangements, distance
from parity.recording import Value, heads_of, record, record_call, shape_of
from parity.wiring import Wiring

TIMES, LEAST = 30.0, 3e-6  # a blob is wrong above so many times its clean error, or above this
EXACT = 1e-8  # MATCHES in float64


@dataclass(frozen=True)
class Guilty:
    """The first blob that computes something else."""

    blob: str
    line: str  # of the param
    what: str
    inputs: tuple[tuple[str, str], ...]  # blob, what it holds or ""
    expected: str  # the torch operation whose result should stand here; "" where none could be told
    error: float  # relative L2 against that result; infinite where the shapes differ
    hints: tuple[Hint, ...] = ()  # what the difference from that result looks like


@dataclass(frozen=True)
class Drilled:
    """A graph seen from inside."""

    graph: str
    matched: int
    total: int
    wrong: Mapping[str, float]  # output -> relative L2 against the rewritten layer, of those that differ
    guilty: Guilty | None
    words: tuple[str, str] = ("blob", "the rewritten layer")  # what is matched with whose values

    def lines(self) -> list[str]:
        """For a person."""
        kind, whose = self.words
        count = f"{self.matched} of {self.total} {kind}s hold a value of {whose}"
        guilty = self.guilty
        if guilty is None:
            wrong = ", ".join(f"{name} (rel_l2 {error:.1e})" for name, error in self.wrong.items())
            state = f"{wrong} differs, but no {kind} could be named" if wrong else "every output matches"
            return [f"{self.graph}: {state}; {count}"]
        lines = [f"{self.graph}: the first wrong {kind} is {guilty.blob}: {guilty.what}; {count}"]
        lines += [f"  {guilty.line}"] * bool(guilty.line)
        lines += [
            f"  its input {name} {'holds ' + held if held else 'holds no value of it'}" for name, held in guilty.inputs
        ]
        if guilty.expected:
            far = f"rel_l2 {guilty.error:.1e}" if np.isfinite(guilty.error) else "no order of axes fits"
            lines.append(f"  should hold {guilty.expected}; {far}")
        lines += [f"  hint: {hint.kind}: {hint.evidence}" for hint in guilty.hints]
        return lines


def drill_rewrite(
    graph: Graph, module: Any, reference: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Floats]
) -> Drilled:
    """Find the first value of a rewritten layer, on the way to a wrong output, that the reference's layer never has.

    reference: tensors by port -> tensors by port, in float64. The first of a rewrite's own steps may be meant, where
    it goes another way than the reference.
    """
    exact = {port.name: inputs[port.name].astype(np.float64) for port in graph.structure.inputs}
    theirs, mine = record_call(reference, exact), record(module.double(), exact)
    module.float()  # to double and back changes no bit
    pool, values = Pool(theirs.values, EXACT), mine.values
    held = {v.number: pool.matches(v.array) for v in values}
    errors = {
        p.name: distance(a, b) for p, a, b in zip(graph.structure.outputs, mine.outputs, theirs.outputs, strict=True)
    }
    wrong = {name: error for name, error in errors.items() if not error <= EXACT}
    arrays = [a for port, a in zip(graph.structure.outputs, mine.outputs, strict=True) if port.name in wrong]
    waiting = [
        v.number for v in values if any(v.array.size == a.size and np.array_equal(v.array[0], a) for a in arrays)
    ]
    found: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number not in found and values[number].inputs and not held[number]:
            found.add(number)
            waiting += values[number].inputs
    guilty = _guilty_value(values[min(found)], values, held) if found else None
    total = [v.number for v in values if v.inputs]
    words = ("value", "the reference's layer")
    return Drilled(graph.id, sum(bool(held[number]) for number in total), len(total), wrong, guilty, words)


def _guilty_value(value: Value, values: Sequence[Value], held: Mapping[int, list[Match]]) -> Guilty:
    inputs = tuple((str(values[n]), str(next(iter(held[n]), ""))) for n in value.inputs if values[n].inputs or held[n])
    return Guilty(str(value), "", "the reference has no such value", inputs, "", np.inf)


@dataclass
class _Run:
    """One run of a graph's blobs."""

    wiring: Wiring
    blobs: Blobs
    matches: dict[str, list[Match]]

    def inputs(self, name: str) -> tuple[tuple[str, str], ...]:
        """What a blob is computed from, and what that holds."""
        sources = self.wiring.inputs(name)
        return tuple((source, str(next(iter(self.matches.get(source, ())), ""))) for source in sources)

    def unmatched(self, reds: Sequence[str]) -> list[str]:
        """Blobs that hold no value, from the red outputs back to where values are held again; in order."""
        found: set[str] = set()
        waiting = list(reds)
        while waiting:
            name = waiting.pop()
            if name not in found and not self.matches.get(name):
                found.add(name)
                waiting += self.wiring.inputs(name)
        return [name for name in self.wiring.names if name in found]


def drill(
    bench: Isolated,
    graph: Graph,
    module: Any,
    inputs: Mapping[str, Floats],
    files: Files,
    *,
    clean: Files | None = None,
    tolerance: float = MATCHES,
) -> Drilled:
    """Find the first guilty blob of a graph; `clean` are files or options that it is right with, where there are any.

    module: the rewritten layer. inputs: by port in the ports' order, float32, without the batch axis.
    tolerance: relative L2 above which an output is wrong.
    """
    with_names = {port.name: inputs[port.name] for port in graph.structure.inputs}
    recording = record(module, with_names)
    run = _run(bench, files, with_names, Pool(recording.values))
    wrong, reds = {}, []
    for number, (port, expected) in enumerate(zip(graph.structure.outputs, recording.outputs, strict=True)):
        name = run.wiring.origin(f"out{number}")
        error = _fitted(run.blobs.arrays.get(name), expected)
        if not error <= tolerance:
            wrong[port.name] = error
            reds.append(name)
    guilty = None
    if reds:
        known = _run(bench, clean, with_names, Pool(recording.values)) if clean else None
        guilty = _guilty(run, known, recording.values, reds)
    matched = sum(bool(run.matches.get(name)) for name in run.wiring.names)
    return Drilled(graph.id, matched, len(run.wiring.names), wrong, guilty)


def _run(bench: Isolated, files: Files, inputs: Mapping[str, Floats], pool: Pool) -> _Run:
    wiring = Wiring.read(files.param)
    blobs = run_blobs(bench, files, list(inputs.values()), wiring.names, whole=True)
    given = {f"in{number}": array for number, array in enumerate(inputs.values())}
    return _Run(wiring, blobs, {name: pool.matches(array) for name, array in (given | blobs.arrays).items()})


def _guilty(run: _Run, known: _Run | None, values: Sequence[Value], reds: Sequence[str]) -> Guilty | None:
    """The first wrong blob; one that was computed wrong comes before the one that could not be computed."""
    found = (_against(run, known, values, reds) if known else None) or _without(run, values, reds)
    if found is None and run.blobs.failed:
        name = run.blobs.failed
        return Guilty(name, _line(run, name), run.blobs.how, run.inputs(name), "", np.inf)
    return found


def _against(run: _Run, known: _Run, values: Sequence[Value], reds: Sequence[str]) -> Guilty | None:
    """The first blob upstream of a red output that no longer holds what it holds in the clean run."""
    upstream = run.wiring.upstream(reds)
    for name in run.wiring.names:
        held = known.matches.get(name, [])
        if name not in upstream or name not in run.blobs.arrays:
            continue
        if name not in known.wiring.makers and not run.matches[name]:
            return Guilty(name, _line(run, name), "the clean graph has no such blob", run.inputs(name), "", np.inf)
        if not held:
            continue
        array = run.blobs.arrays[name]
        error, match = min(((_error(array, match), match) for match in held), key=lambda pair: pair[0])
        if not error <= max(TIMES * match.error, LEAST):
            what = "it no longer holds what it holds in the clean graph"
            hints = of_blob(array, known.blobs.arrays[name], heads_of(values, match.value))
            return Guilty(name, _line(run, name), what, run.inputs(name), str(held[0]), error, hints)
    return None


def _without(run: _Run, values: Sequence[Value], reds: Sequence[str]) -> Guilty | None:
    """The first blob between the values that are held and the red outputs; a fused layer's part may be meant."""
    for name in run.unmatched(reds):
        if name in run.blobs.arrays:
            array, expected = run.blobs.arrays[name], _expected(run, name, values)
            error = _fitted(array, expected.array) if expected else np.inf
            hints = _hints(array, expected, values) if expected else ()
            what = "it holds no value of the rewritten layer"
            return Guilty(name, _line(run, name), what, run.inputs(name), str(expected or ""), error, hints)
    return None


def _hints(array: Floats, expected: Value, values: Sequence[Value]) -> tuple[Hint, ...]:
    nearest = _nearest(array, expected.array)
    wanted = expected.array.reshape(shape_of(expected.array)) if nearest is None else nearest
    return of_blob(array, wanted, heads_of(values, expected))


def _expected(run: _Run, name: str, values: Sequence[Value]) -> Value | None:
    """The value meant by a blob that holds none: computed from all that its inputs hold, of its size.

    A fused layer stands for several operations: of those on the first one's line the nearest is taken.
    """
    array = run.blobs.arrays[name]
    found = [value for value in _computed(run, name, values) if value.array.size == array.size]
    same_line = [value for value in found if value.source == found[0].source]
    return min(same_line, key=lambda value: _fitted(array, value.array), default=None)


def _computed(run: _Run, name: str, values: Sequence[Value]) -> Iterator[Value]:
    """Values that no blob holds and that need all of a blob's inputs and nothing else but constants."""
    held = {match.value.number for matches in run.matches.values() for match in matches}
    sources = list(dict.fromkeys(run.wiring.inputs(name)))
    needs = {m.value.number: {source} for source in sources for m in run.matches.get(source, ())}
    for value in values:
        computed = [number for number in value.inputs if values[number].inputs or number in needs]
        if computed and value.number not in held and all(number in needs for number in computed):
            needs[value.number] = set().union(*(needs[number] for number in computed))
            if len(needs[value.number]) == len(sources):
                yield value


def _fitted(array: Floats | None, expected: Floats) -> float:
    """Relative L2 with the axes in the order that fits best; infinite where none does or nothing was computed."""
    if array is None or array.size != expected.size:
        return np.inf
    nearest = _nearest(array, expected)
    return np.inf if nearest is None else distance(array, nearest)


def _nearest(array: Floats, expected: Floats) -> Floats | None:
    """What should stand in an array, as it would stand there; None where its axes do not fit."""
    plain = [a for axes, a in arrangements(expected, array) if axes == tuple(sorted(axes))]
    return min(plain, key=lambda arranged: distance(array, arranged), default=None)


def _error(array: Floats, match: Match) -> float:
    """Relative L2 of a blob against a value, its axes in the order that the clean blob had."""
    fitting = (a for axes, a in arrangements(match.value.array, array) if axes == match.axes)
    return min((distance(array, arranged) for arranged in fitting), default=np.inf)


def _line(run: _Run, name: str) -> str:
    return str(run.wiring.makers[name]) if name in run.wiring.makers else ""
