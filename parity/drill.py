"""Inside one graph: which ncnn blob is the first that computes something else than the rewritten layer.

Every blob of the exported graph is matched by value with all that the rewritten layer computes on the same inputs, axes
in any order; names play no part. Where a clean graph is at hand, its blobs say which of them match anything at all: a
fused layer's parts need not.
But: a blob is guilty only on the way to an output that is wrong.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters import param
from exporters.param import Layer
from harness.graphs import Graph
from harness.isolation import CrashedError, Isolated
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner
from runtime.mat import to_mat

Floats = NDArray[np.float32]
Options = Mapping[str, bool | int]

ROOT = Path(__file__).parents[1]
MATCHES = 1e-4  # relative L2 below which a blob holds a value
TIMES, LEAST = 30.0, 3e-6  # a blob is wrong above so many times its clean error, or above this
EXACT = 1e-8  # the same in float64
HUGE = 1e6  # masks: such numbers must stand at the same places, and would hide all others in a norm
RECORDED = ("torch.float32", "torch.float64")
SECONDS = 300.0
LOAD = "the load"  # where a run fails that comes to no blob
SILENT = ("Input", "Split")  # they compute nothing


# ---- the child: ncnn, where a crash is told


class Bench:
    """Holds one loaded net; runs in a child process."""

    def __init__(self) -> None:
        self._held: list[Any] = []  # the net and its inputs must outlive the extractor
        self._extractor: Any = None
        self._runners: dict[str, NcnnRunner] = {}

    def load(self, param_path: str, weights: str, options: Options, inputs: Sequence[Floats], whole: bool) -> None:
        """Load a graph and feed it; `whole` keeps every blob. Raises InputError when ncnn refuses a file or input."""
        import ncnn

        self._extractor = None
        net = ncnn.Net()
        for name, value in options.items():
            setattr(net.opt, name, value)
        for path, load in ((param_path, net.load_param), (weights, net.load_model)):
            code = load(path)
            if code != 0:
                raise InputError(f"ncnn refuses to load {Path(path).name} (code {code})")
        extractor = net.create_extractor()
        extractor.set_light_mode(not whole)
        mats = [to_mat(array, rank=array.ndim, where=f"in{number}") for number, array in enumerate(inputs)]
        for number, mat in enumerate(mats):
            code = extractor.input(f"in{number}", mat)
            if code != 0:
                raise InputError(f"ncnn refuses input in{number} (code {code})")
        self._held, self._extractor = [net, *mats], extractor

    def extract(self, name: str) -> Floats:
        """One blob, as many axes as ncnn gives it. Raises InputError where ncnn cannot compute it."""
        code, mat = self._extractor.extract(name)
        if code != 0:
            raise InputError(f"ncnn cannot compute blob {name} (code {code})")
        return np.array(mat)

    def run(self, folder: str, graph_id: str, inputs: Arrays) -> Arrays:
        """One graph of an exported model folder as the runtime runs it, whatever the files' hashes."""
        if folder not in self._runners:
            self._runners[folder] = NcnnRunner(Manifest.read(Path(folder)), verify=False)
        return self._runners[folder].run(graph_id, inputs)


def make() -> Bench:
    """The factory that `Isolated` calls in the child."""
    return Bench()


def start() -> Isolated:
    """A bench in a child process of its own."""
    return Isolated("parity.drill:make", timeout_seconds=SECONDS)


@dataclass(frozen=True)
class Files:
    """A graph's two files, and the options that ncnn runs them with."""

    param: Path
    bin: Path
    options: Options


@dataclass
class Blobs:
    """What ncnn computed: arrays by blob, and the blob at which it gave up, with what it said."""

    arrays: dict[str, Floats] = field(default_factory=dict)
    failed: str = ""
    how: str = ""


def run_blobs(bench: Isolated, files: Files, inputs: Sequence[Floats], names: Sequence[str], *, whole: bool) -> Blobs:
    """Run a graph and take blobs in the order given; a crash or a refusal ends it and is told."""
    blobs = Blobs()
    at = LOAD
    try:
        bench.call("load", str(files.param), str(files.bin), dict(files.options), list(inputs), whole)
        for at in names:
            blobs.arrays[at] = bench.call("extract", at)
    except CrashedError as error:
        blobs.failed, blobs.how = at, error.how
    except InputError as error:
        blobs.failed, blobs.how = at, str(error)
    return blobs


# ---- what the rewritten layer computes


@dataclass(frozen=True)
class Value:
    """One tensor of the rewritten layer: by what and where it was computed, and from which values."""

    number: int
    operation: str
    module: str  # name of the innermost module, "" for the layer itself
    source: str  # file:line
    array: Floats  # with the batch axis
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        places = [f"in {self.module}"] * bool(self.module) + [f"({self.source})"] * bool(self.source)
        return " ".join([self.operation, *places, str(shape_of(self.array))])


@dataclass(frozen=True)
class Recording:
    """All values of one run of a layer, in order; and its outputs, without the batch axis."""

    values: list[Value]
    outputs: list[Floats]


class _Tape:
    """Collects values; a tensor is known by its id, so all of them are kept alive."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.modules: list[str] = []  # the innermost last
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def add(self, tensor: Any, operation: str, source: str = "", given: Any = ()) -> None:
        if id(tensor) in self._numbers or tensor.is_meta or str(tensor.dtype) not in RECORDED:
            return
        inputs = tuple(self._numbers[id(t)] for t in _tensors(given) if id(t) in self._numbers)
        module = self.modules[-1] if self.modules else ""
        array = tensor.detach().numpy()
        self.values.append(Value(len(self.values), operation, module, source, array, inputs))
        self._numbers[id(tensor)] = len(self._alive)
        self._alive.append(tensor)

    def play(self, call: Callable[[], Any]) -> Any:
        """Run and record every operation's results."""
        import torch
        from torch.overrides import TorchFunctionMode

        tape = self

        class Recorder(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for tensor in _tensors(result):
                    tape.add(tensor, str(getattr(func, "__name__", func)).strip("_"), _source(), (args, kwargs))
                return result

        with torch.no_grad(), Recorder():
            return call()


def record(module: Any, inputs: Mapping[str, NDArray[Any]]) -> Recording:
    """Everything that a rewritten layer computes: its inputs, its own tensors, every operation's results.

    inputs: by name, without the batch axis, in the order of the layer's arguments and of its dtype.
    """
    import torch

    tape = _Tape()
    tensors = [torch.from_numpy(np.ascontiguousarray(array))[None] for array in inputs.values()]
    for name, tensor in zip(inputs, tensors, strict=True):
        tape.add(tensor, f"input {name}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tape.add(tensor, f"tensor {name}")
    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: tape.modules.append(name)))
        hooks.append(part.register_forward_hook(lambda *_: _drop_last(tape.modules)))
    try:
        outputs = tape.play(lambda: module(*tensors))
    finally:
        for hook in hooks:
            hook.remove()
    return Recording(tape.values, [tensor[0].numpy() for tensor in _tensors(outputs)])


def record_call(call: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, NDArray[Any]]) -> Recording:
    """Everything that a function of tensors by name computes; modules are not named."""
    import torch

    tape = _Tape()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
    for name, tensor in tensors.items():
        tape.add(tensor, f"input {name}")
    outputs = tape.play(lambda: call(tensors))
    return Recording(tape.values, [tensor.numpy() for tensor in _tensors(outputs)])


def _drop_last(modules: list[str]) -> None:
    modules.pop()


def _tensors(nested: Any) -> Iterator[Any]:
    import torch

    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(list(nested.values()))
    elif isinstance(nested, tuple | list):
        for item in nested:
            yield from _tensors(item)


def _source() -> str:
    """file:line of the innermost frame in a file of ours other than this one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path != Path(__file__) and path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# ---- matching by value


@dataclass(frozen=True)
class Match:
    """A blob holds a value, its axes in the order `axes` of the value's own."""

    value: Value
    axes: tuple[int, ...]
    error: float  # relative L2

    @property
    def is_plain(self) -> bool:
        """Whether the axes stand in the value's own order."""
        return self.axes == tuple(sorted(self.axes))

    def __str__(self) -> str:
        return str(self.value) if self.is_plain else f"{self.value} with its axes as {self.axes}"


class Pool:
    """Values to match with, sorted by what no order of axes changes: their count and their norm."""

    def __init__(self, values: Sequence[Value], tolerance: float = MATCHES) -> None:
        self.tolerance = tolerance
        self._of_size: dict[int, list[tuple[float, Value]]] = {}
        for value in values:
            self._of_size.setdefault(value.array.size, []).append((_norm(value.array), value))

    def matches(self, blob: Floats) -> list[Match]:
        """Values that a blob holds; those with plain axes first, then those of its own shape."""
        norm = _norm(blob)
        near = [
            value
            for other, value in self._of_size.get(blob.size, ())
            if abs(norm - other) <= 2 * self.tolerance * max(norm, other)
        ]
        found = [
            Match(value, axes, distance(blob, arranged))
            for value in near
            for axes, arranged in arrangements(value.array, blob)
        ]
        held = [match for match in found if match.error <= self.tolerance]
        return sorted(held, key=lambda m: (not m.is_plain, shape_of(m.value.array) != shape_of(blob)))


def arrangements(array: Floats, blob: Floats) -> Iterator[tuple[tuple[int, ...], Floats]]:
    """An array in every order of axes that fits the blob's shape; axes of size 1 aside, neighbours may be merged."""
    wanted, squeezed = shape_of(blob), array.reshape(shape_of(array))
    for axes in itertools.permutations(range(squeezed.ndim)):
        shape = tuple(squeezed.shape[axis] for axis in axes)
        if _merges(shape, wanted) or _merges(wanted, shape):
            yield axes, squeezed.transpose(axes).reshape(blob.shape)


def shape_of(array: Floats) -> tuple[int, ...]:
    """Shape without axes of size 1."""
    return tuple(size for size in array.shape if size != 1)


def distance(actual: Floats, expected: Floats) -> float:
    """Relative L2; infinite where numbers are not finite, or huge ones stand at other places."""
    huge = np.abs(expected) > HUGE
    if not np.array_equal(np.abs(actual) > HUGE, huge) or not np.isfinite(actual).all():
        return np.inf
    ours, theirs = (np.where(huge, 0, array).astype(np.float64) for array in (actual, expected))
    error, norm = float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs))
    return error / norm if norm else (0.0 if error == 0 else np.inf)


def _norm(array: Floats) -> float:
    return float(np.linalg.norm(np.where(np.abs(array) > HUGE, 0, array).astype(np.float64)))


def _merges(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether merging neighbours of `fine` gives `coarse`."""
    left = list(fine)
    for size in coarse:
        product = 1
        while left and product < size:
            product *= left.pop(0)
        if product != size:
            return False
    return not left


# ---- the graph's wiring


class Wiring:
    """Which blob comes from which; a Split's outputs stand for its input."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.makers = {name: layer for layer in layers for name in layer.outputs}
        self.names = [name for layer in layers if layer.type not in SILENT for name in layer.outputs]

    @classmethod
    def read(cls, path: Path) -> "Wiring":
        """Of a param file; wrong counts on its second line are no reason to refuse it."""
        text = path.read_text(encoding="utf-8")
        magic, _, *lines = text.split("\n")
        kept = [line for line in lines if line.strip()]
        outputs = sum(int(line.split()[3]) for line in kept)
        return cls(param.parse("\n".join([magic, f"{len(kept)} {outputs}", *kept])))

    def origin(self, name: str) -> str:
        """The blob itself, or the one that Splits copied it from."""
        while name in self.makers and self.makers[name].type == "Split":
            name = self.makers[name].inputs[0]
        return name

    def inputs(self, name: str) -> list[str]:
        """What a blob is computed from."""
        layer = self.makers.get(name)
        return [self.origin(source) for source in layer.inputs] if layer else []

    def upstream(self, names: Sequence[str]) -> set[str]:
        """These blobs and all that they are computed from."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.inputs(name)
        return found


# ---- the verdict


@dataclass(frozen=True)
class Guilty:
    """The first blob that computes something else."""

    blob: str
    line: str  # of the param
    what: str
    inputs: tuple[tuple[str, str], ...]  # blob, what it holds or ""
    expected: str  # the torch operation whose result should stand here; "" where none could be told
    error: float  # relative L2 against that result; infinite where the shapes differ


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
    found = (_against(run, known, reds) if known else None) or _without(run, values, reds)
    if found is None and run.blobs.failed:
        name = run.blobs.failed
        return Guilty(name, _line(run, name), run.blobs.how, run.inputs(name), "", np.inf)
    return found


def _against(run: _Run, known: _Run, reds: Sequence[str]) -> Guilty | None:
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
            return Guilty(name, _line(run, name), what, run.inputs(name), str(held[0]), error)
    return None


def _without(run: _Run, values: Sequence[Value], reds: Sequence[str]) -> Guilty | None:
    """The first blob between the values that are held and the red outputs; a fused layer's part may be meant."""
    for name in run.unmatched(reds):
        if name in run.blobs.arrays:
            expected = _expected(run, name, values)
            error = _fitted(run.blobs.arrays[name], expected.array) if expected else np.inf
            what = "it holds no value of the rewritten layer"
            return Guilty(name, _line(run, name), what, run.inputs(name), str(expected or ""), error)
    return None


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
    plain = [a for axes, a in arrangements(expected, array) if axes == tuple(sorted(axes))]
    return min((distance(array, arranged) for arranged in plain), default=np.inf)


def _error(array: Floats, match: Match) -> float:
    """Relative L2 of a blob against a value, its axes in the order that the clean blob had."""
    fitting = (a for axes, a in arrangements(match.value.array, array) if axes == match.axes)
    return min((distance(array, arranged) for arranged in fitting), default=np.inf)


def _line(run: _Run, name: str) -> str:
    return str(run.wiring.makers[name]) if name in run.wiring.makers else ""
