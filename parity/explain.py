"""Which stage of the tool chain broke a graph: its outputs on the reference's input, computed stage by stage.

The first stage that disagrees with the one before it names the domain. The torch stages are compared in float64, where
equal layers differ by 1e-15; the ncnn stages as multiples of the graph's noise floor. ncnn runs in a child process.
"""

import difflib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from exporters import layout, param
from exporters.export import SELF_CHECK
from exporters.folders import join, weight_files
from harness.dumps import Dump
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.ids import suggest
from harness.isolation import CrashedError, Isolated
from harness.metrics import measure
from parity import checks, drill, runners
from parity.drill import Drilled, Files, Options
from parity.verdict import DIFFERENT, EQUAL, UNJUDGED
from parity.workspace import Workspace, case_names, shape_cases, tensor_name
from runtime import graphs as runtime_graphs
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest

# Domain -> what to do about it.
DOMAINS = {
    "checkpoint or reference": "write the dump again: python -m parity dumps {arguments}",
    "rewrite": "mend the rewritten layer in exporters/{model}.py",
    "converter": "spell the operation out otherwise in exporters/{model}.py, so that pnnx converts it rightly",
    "weights file": "export the graph again: python -m parity export {arguments}",
    "graph file": "export the graph again: python -m parity export {arguments}",
    "ncnn": "python -m parity repro {graph}",
    "ncnn options": "mend set_fp32_options in runtime/graphs.py",
    "upstream": "python -m parity explain {upstream} --case {case}",
    "glue": "mend runtime/{model}.py",
}
AGREES, DIFFERS, FAILED, SILENT = "agrees", "differs", "failed", "no witness"
PNNX_BOUND = 1e-6  # pnnx writes constants with nine digits
FLOORS, LEAST, MOST = 30.0, 3e-6, 1e-4  # an ncnn stage may differ by so many noise floors, within these bounds
ROW_COSINE = 0.9999  # one large activation hides a broken row from the norm
REFERENCE, REWRITTEN, PNNX = "transformers' layer", "rewritten layer", "pnnx's graph in torch"
CONSERVATIVE, RUNTIME, OWN = "ncnn, conservative", "ncnn, runtime's options", "the port's own inputs"
# Everything that chooses another kernel; what the runtime switches off is off besides.
CAUTIOUS = (
    *("use_packing_layout", "use_sgemm_convolution", "use_winograd_convolution"),
    *("use_winograd23_convolution", "use_winograd43_convolution", "use_winograd63_convolution"),
)
DIFF_LINES = 12


@dataclass(frozen=True)
class Stage:
    """One stage of the tool chain."""

    name: str
    before: float | None  # relative L2 against the stage before it, of the worst output
    reference: float | None  # relative L2 against the reference
    verdict: str  # agrees, differs, failed, no witness
    note: str = ""

    def __str__(self) -> str:
        numbers = (f"{'-' if value is None else format(value, '.1e'):>8}" for value in (self.before, self.reference))
        return f"{self.name:<34} {' '.join(numbers)}  {self.verdict:<10} {self.note}".rstrip()


@dataclass(frozen=True)
class Explanation:
    """What was found. `domain` is one of DOMAINS, "" where all stages agree or nothing could be judged."""

    graph: str
    case: str
    stages: list[Stage]
    domain: str
    drill: Drilled | None
    why: str = ""
    evidence: tuple[str, ...] = ()  # tensors that differ, lines of the param
    todo: str = ""

    @property
    def exit_code(self) -> int:
        """0 all agree, 1 a domain is named, 2 a stage of ncnn could not be judged."""
        if self.domain:
            return DIFFERENT
        judged = {stage.name for stage in self.stages if stage.verdict != SILENT}
        return EQUAL if CONSERVATIVE in judged and REWRITTEN in judged else UNJUDGED

    def lines(self) -> list[str]:
        """For a person; the first line names the domain."""
        heads = {
            EQUAL: f"{self.graph}: every stage agrees [{self.case}]",
            DIFFERENT: f"{self.graph}: the fault is in {self.domain}: {self.why} [{self.case}]",
            UNJUDGED: f"{self.graph} could not be judged: {self.why} [{self.case}]",
        }
        lines = [heads[self.exit_code], f"  {'rel_l2 against':<34} {'before':>8} reference"]
        lines += [f"  {stage}" for stage in self.stages]
        lines += [f"  {line}" for line in self.evidence]
        lines += [f"  {line}" for line in (self.drill.lines() if self.drill else ())]
        return [*lines, *([f"  next: {self.todo}"] if self.todo else [])]


@dataclass
class Witness:
    """A stage's outputs by port: float32, and float64 where torch computed them; or why there are none."""

    name: str
    domain: str  # the fault's, where this stage is the first to disagree
    outputs: Arrays | None = None
    exact: Mapping[str, NDArray[np.float64]] | None = None
    bound: float = 0.0  # for the exact ones
    failed: bool = False
    note: str = ""


def explain(
    workspace: Workspace,
    graph_id: str,
    case: str = "",
    *,
    folder: Path | None = None,
    pipeline: Any = None,
    with_drill: bool = True,
) -> Explanation:
    """Find the domain of a graph's fault on the reference's inputs of a case (default: the model's first).

    folder: an exported model folder to judge instead of the store's files; its hashes are not asked for.
    pipeline: the port's, whose own inputs of the graph are compared; it is run in this process.
    Raises UnjudgedError on an unknown id or case, a vision graph of a case without pictures, a folder that lacks it.
    """
    subject = _subject(workspace, graph_id, case)
    for path in (folder / f"{graph_id}.param", *weight_files(folder, graph_id)) if folder else ():
        if not path.is_file():
            raise UnjudgedError(f"{path} is missing; give a folder that `python -m parity export` wrote")
    with drill.start() as bench, tempfile.TemporaryDirectory() as work:
        return _Chain(subject, bench, Path(work), folder, pipeline).explain(with_drill)


@dataclass
class _Subject:
    """One graph on the reference's inputs of one case."""

    workspace: Workspace
    graph: Graph
    case: str
    dump: Dump

    @cached_property
    def inputs(self) -> Arrays:
        """The reference's inputs, in the ports' order."""
        found = checks.inputs_of(self.graph, self.dump)
        return {port.name: found[port.name] for port in self.graph.structure.inputs}

    @property
    def ports(self) -> list[str]:
        """Names of the outputs."""
        return [port.name for port in self.graph.structure.outputs]

    @cached_property
    def stored(self) -> Arrays:
        """The dump's outputs."""
        return {name: self.dump.tensors[tensor_name(self.graph, name)] for name in self.ports}

    def bound(self, port: str) -> float:
        """How far an ncnn stage may be off."""
        floor: float = self.dump.values["floors"][tensor_name(self.graph, port)]
        return min(max(FLOORS * floor, LEAST), MOST)


def _subject(workspace: Workspace, graph_id: str, case: str) -> _Subject:
    graph = workspace.graphs.get(graph_id)
    if graph is None:
        near = suggest(graph_id, workspace.graphs)
        raise UnjudgedError(f"graph {graph_id} is unknown; did you mean {near}?")
    known = list(case_names(workspace))
    name = case or known[0]
    if name not in known:
        raise UnjudgedError(f"case {name} is unknown; did you mean {suggest(name, known)}?")
    if name in workspace.cases and not checks.needs(graph, bool(workspace.cases[name].pictures)):
        with_pictures = next(n for n, c in workspace.cases.items() if c.pictures)
        raise UnjudgedError(f"case {name} has no picture, so {graph_id} does not run; type --case {with_pictures}")
    return _Subject(workspace, graph, name, workspace.dump(name))


class _Chain:
    """The stages of one subject, each computed when it is asked for."""

    def __init__(self, subject: _Subject, bench: Isolated, work: Path, folder: Path | None, pipeline: Any) -> None:
        self.subject, self.bench, self.work = subject, bench, work
        self.folder, self.pipeline = folder, pipeline
        self.exporter = subject.workspace.exporter
        self.graph = subject.graph
        self.fresh_param = ""  # what pnnx writes now, once it has run

    def explain(self, with_drill: bool) -> Explanation:
        """All stages, the first that disagrees, its cause."""
        witnesses = [self.reference(), self.rewritten(), self.pnnx(), *self.in_ncnn()]
        stages = _compared(self.subject, witnesses)
        first = next((i for i, stage in enumerate(stages) if stage.verdict in (DIFFERS, FAILED)), None)
        if first is None:
            unjudged = isinstance(self.files, str)
            return self._explanation(stages, _Cause("", ""), None) if unjudged else self._own_inputs(stages)
        found = self._cause(stages, witnesses, first)
        drilled = self._drill(found.domain) if with_drill else None
        return self._explanation(stages, found, drilled)

    # ---- torch

    def reference(self) -> Witness:
        """The layer that the dump was made with, run again."""
        from references.dumping import one_thread

        inputs = self._tensors()
        with one_thread():
            outputs = self.layer.run(self.graph, inputs)
            exact = self.layer.run(self.graph, inputs, double=True)
        return Witness(REFERENCE, "checkpoint or reference", _arrays(outputs), _arrays(exact))

    def rewritten(self) -> Witness:
        """The layer that is exported."""
        return self._torch(REWRITTEN, "rewrite", self.module, SELF_CHECK)

    def pnnx(self) -> Witness:
        """The graph that pnnx makes of it, run by torch."""
        from exporters import pnnx

        witness = Witness(PNNX, "converter")
        try:
            text, _ = pnnx.convert(self.module, self.graph.structure, self.work)
        except UnjudgedError as error:
            witness.note = str(error).splitlines()[0]
            return witness
        self.fresh_param = _exported(text)
        try:
            return self._torch(PNNX, "converter", _converted(self.work), PNNX_BOUND)
        except Exception as error:  # generated code may fail in any way: then it bears no witness
            witness.note = f"its python does not run: {type(error).__name__}: {error}".splitlines()[0]
            return witness

    @cached_property
    def module(self) -> Any:
        """The rewritten layer with the checkpoint's weights."""
        return self.exporter.rewritten(self.graph)

    @cached_property
    def layer(self) -> Any:
        """The reference."""
        from references.dumping import open_reference

        return open_reference(self.subject.workspace.model, self.subject.workspace.checkpoint)

    def _torch(self, name: str, domain: str, module: Any, bound: float) -> Witness:
        import torch

        inputs = [tensor[None] for tensor in self._tensors().values()]
        with torch.no_grad():
            outputs = module(*inputs)
            exact = module.double()(*(tensor.double() for tensor in inputs))
        module.float()  # to double and back changes no bit
        return Witness(name, domain, self._named(outputs), self._named(exact), bound)

    def _named(self, outputs: Any) -> dict[str, Any]:
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        return {name: tensor[0].numpy() for name, tensor in zip(self.subject.ports, found, strict=True)}

    def _tensors(self) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in self.subject.inputs.items()}

    # ---- ncnn

    def in_ncnn(self) -> Iterator[Witness]:
        """The exported files, with conservative options and with the runtime's."""
        files = self.files
        settings = [(CONSERVATIVE, "ncnn", conservative_options())]
        settings += [(f"{RUNTIME}, {n} thread{'s' * (n > 1)}", "ncnn options", runtime_options(n)) for n in (1, 2)]
        for name, domain, options in settings:
            if isinstance(files, str):
                yield Witness(name, domain, note=files if name == CONSERVATIVE else "")
            else:
                yield self._ncnn(name, domain, Files(*files, options))

    def _ncnn(self, name: str, domain: str, files: Files) -> Witness:
        names = [f"out{number}" for number in range(len(self.subject.ports))]
        blobs = drill.run_blobs(self.bench, files, list(self.subject.inputs.values()), names, whole=False)
        if blobs.failed:
            return Witness(name, domain, failed=True, note=f"at {blobs.failed}: {blobs.how}")
        found = {port: blobs.arrays[blob] for port, blob in zip(self.subject.ports, names, strict=True)}
        return Witness(name, domain, {port: _without_batch(a, self.subject.stored[port]) for port, a in found.items()})

    @cached_property
    def files(self) -> tuple[Path, Path] | str:
        """The param and bin that are judged; or why the graph cannot be exported."""
        if self.folder is not None:
            files = weight_files(self.folder, self.graph.id)
            return self.folder / f"{self.graph.id}.param", join(files, self.work / "judged.bin")
        try:
            folder = self.exporter.graph(self.graph.id)
        except UnjudgedError as error:
            return f"the graph cannot be exported: {str(error).splitlines()[0]}"
        return folder / "graph.param", join(self.exporter.weights(self.graph.id), self.work / "judged.bin")

    @cached_property
    def clean(self) -> tuple[Path, Path] | None:
        """Files as the converter writes them, with the rewritten layer's weights; None where it cannot."""
        try:
            structure = self.exporter.structure(self.graph.structure)
        except UnjudgedError:
            return None
        text = self.fresh_param or (structure / "graph.param").read_text(encoding="utf-8")
        files = self.work / "clean.param", self.work / "clean.bin"
        files[0].write_text(text, encoding="utf-8", newline="\n")
        with files[1].open("wb") as file:
            layout.write(file, self._entries(structure), layout.tensors(self.module))
        return files

    def _entries(self, structure: Path) -> list[layout.Entry]:
        return [layout.Entry(**entry) for entry in json.loads((structure / "layout.json").read_text(encoding="utf-8"))]

    # ---- causes

    def _cause(self, stages: list[Stage], witnesses: list[Witness], first: int) -> "_Cause":
        stage, domain = stages[first], witnesses[first].domain
        before = next((s.name for s in stages[:first][::-1] if s.verdict != SILENT), "the dump")
        why = f"{stage.name} {stage.verdict}: {stage.note}" if stage.verdict == FAILED else _apart(stage, before)
        if domain != "ncnn":
            return _Cause(domain, why)
        return self._file_cause(why) or self._kernel_cause(stages[first:], why)

    def _file_cause(self, why: str) -> "_Cause | None":
        """Whether the files are not what the converter and the checkpoint give."""
        if self.clean is None or isinstance(self.files, str):
            return None
        lines = _param_diff(self.clean[0], self.files[0])
        tensors = self._tensor_diff()
        if not lines and not tensors:
            return None
        if lines and tensors and self._agrees(Files(self.files[0], self.clean[1], conservative_options())):
            lines = []  # they differ, but it is the weights that do harm
        if lines:
            return _Cause("graph file", f"{why}; its param is not what the converter writes", tuple(lines))
        return _Cause("weights file", f"{why}; its bin does not hold the checkpoint's weights", tuple(tensors))

    def _kernel_cause(self, stages: list[Stage], why: str) -> "_Cause":
        """The files are right: two sets of kernels that agree on other numbers mean another graph."""
        later = [stage.verdict for stage in stages[1:]]
        if stages[0].verdict == DIFFERS and all(verdict == AGREES for verdict in later):
            return _Cause("converter", f"{why}, with all options alike: what pnnx wrote for ncnn is another graph")
        return _Cause("ncnn", why)

    def _agrees(self, files: Files) -> bool:
        witness = self._ncnn("", "", files)
        if witness.outputs is None:
            return False
        return not any(_broken(witness.outputs[n], a, self.subject.bound(n)) for n, a in self.subject.stored.items())

    def _tensor_diff(self) -> list[str]:
        """Tensors whose numbers in the bin are not the checkpoint's, each with what they are instead."""
        assert self.clean is not None
        assert not isinstance(self.files, str)
        wanted, actual = (np.fromfile(path, np.float32) for path in (self.clean[1], self.files[1]))
        if wanted.size != actual.size:
            return [f"the bin holds {4 * actual.size} bytes, but should hold {4 * wanted.size}"]
        structure = self.exporter.structure(self.graph.structure)
        blobs = param.blobs(param.parse((structure / "graph.param").read_text(encoding="utf-8")))
        known, lines, position = layout.tensors(self.module), [], 0
        for entry, blob in zip(self._entries(structure), blobs, strict=True):
            start = position + blob.flagged
            position = start + blob.count
            ours, theirs = actual[start:position], wanted[start:position]
            if ours.tobytes() != theirs.tobytes():
                lines.append(f"{entry.tensor} ({blob.layer}): {_weights(ours, theirs, entry, known)}")
        return lines

    def _drill(self, domain: str) -> Drilled | None:
        """Inside the layer or the exported graph, beside the files or options that are right."""
        if domain == "rewrite":
            whole = partial(self.layer.run, self.graph, double=True)
            return drill.drill_rewrite(self.graph, self.module, whole, self.subject.inputs)
        if isinstance(self.files, str) or domain == "checkpoint or reference":
            return None
        options: Options = runtime_options(1) if domain == "ncnn options" else conservative_options()
        clean = None
        if domain == "ncnn options":
            clean = Files(*self.files, conservative_options())
        elif domain in ("graph file", "weights file") and self.clean is not None:
            clean = Files(*self.clean, conservative_options())
        tolerance = min(map(self.subject.bound, self.subject.ports))
        files = Files(*self.files, options)
        given = (self.bench, self.graph, self.module, self.subject.inputs, files)
        try:
            drilled = drill.drill(*given, clean=clean, tolerance=tolerance)
        except ValueError:  # the param is no text of layers; its lines are shown
            return None
        nowhere = drilled.guilty is not None and drilled.guilty.blob == drill.LOAD
        return None if nowhere else drilled

    # ---- the port around the graph

    def _own_inputs(self, stages: list[Stage]) -> Explanation:
        stage, found = self._chained()
        return self._explanation([*stages, stage], found, None)

    def _chained(self) -> tuple[Stage, "_Cause"]:
        """Run the pipeline up to the graph, and compare what it feeds it and what comes out."""
        name = self.subject.case
        if name in shape_cases():
            return Stage(OWN, None, None, SILENT, "a shape case has no pipeline"), _Cause("", "")
        port = None if self.pipeline is not None or self.folder is not None else runners.Port(self.subject.workspace)
        try:
            pipeline = self.pipeline or (port.pipeline if port else self._pipeline())
            return _fed(self.subject, pipeline)
        except (CrashedError, InputError, UnjudgedError) as error:
            return Stage(OWN, None, None, FAILED, str(error)), _Cause("glue", f"the pipeline fails: {error}")
        finally:
            if port:
                port.close()

    def _pipeline(self) -> Any:
        """The runtime's pipeline over the given folder, its graphs run in the child."""
        import importlib

        assert self.folder is not None
        module = importlib.import_module(f"runtime.{self.subject.workspace.model}")
        return module.Pipeline(Manifest.read(self.folder), _FolderRunner(self.bench, self.folder))

    def _explanation(self, stages: list[Stage], found: "_Cause", drilled: Drilled | None) -> Explanation:
        workspace = self.subject.workspace
        todo = DOMAINS.get(found.domain, "").format(
            model=workspace.model,
            arguments=workspace.choice.arguments(),
            graph=self.graph.id,
            case=self.subject.case,
            upstream=found.upstream,
        )
        why = found.why or "; ".join(dict.fromkeys(s.note for s in stages if s.verdict == SILENT and s.note))
        return Explanation(self.graph.id, self.subject.case, stages, found.domain, drilled, why, found.evidence, todo)


@dataclass(frozen=True)
class _Cause:
    domain: str
    why: str
    evidence: tuple[str, ...] = ()
    upstream: str = ""


def runtime_options(threads: int) -> dict[str, bool | int]:
    """ncnn's options as the runtime sets them, by name."""
    option = ncnn.Option()
    runtime_graphs.set_fp32_options(option, threads)
    return _options(option)


def conservative_options() -> dict[str, bool | int]:
    """No packing, no sgemm or Winograd, nothing but fp32, one thread; independent of what the runtime sets."""
    option = _options(ncnn.Option())
    off = dict.fromkeys((*CAUTIOUS, *(name for name in option if "16" in name or "int8" in name)), False)
    return option | off | {"use_vulkan_compute": False, "num_threads": 1}


def _options(option: Any) -> dict[str, bool | int]:
    return {name: getattr(option, name) for name in dir(option) if name.startswith(("use_", "num_threads"))}


# ---- comparing stages


def _compared(subject: _Subject, witnesses: list[Witness]) -> list[Stage]:
    """Every witness beside the one before it; the first beside the dump."""
    stages = []
    before = Witness("the dump", "", subject.stored)
    for witness in witnesses:
        stages.append(_stage(subject, witness, before))
        before = witness if witness.outputs is not None else before
    return stages


def _stage(subject: _Subject, witness: Witness, before: Witness) -> Stage:
    if witness.outputs is None:
        return Stage(witness.name, None, None, FAILED if witness.failed else SILENT, witness.note)
    against = max(_error(witness.outputs[name], expected) for name, expected in subject.stored.items())
    assert before.outputs is not None
    if witness.exact is not None and before.exact is not None:
        errors = {name: _error(a, before.exact[name]) for name, a in witness.exact.items()}
        broken = [name for name, error in errors.items() if not error <= witness.bound]
    else:
        errors = {name: _error(a, before.outputs[name]) for name, a in witness.outputs.items()}
        broken = [n for n, a in witness.outputs.items() if _broken(a, before.outputs[n], subject.bound(n))]
    note = "; ".join(filter(None, [f"output {', '.join(broken)}" if broken else "", witness.note]))
    return Stage(witness.name, max(errors.values()), against, DIFFERS if broken else AGREES, note)


def _error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative L2; infinite for another shape and for numbers that are not finite."""
    metrics = measure(actual, expected)
    return np.inf if metrics.actual_bad.count or not metrics.elements else metrics.rel_l2


def _broken(actual: NDArray[Any], expected: NDArray[Any], bound: float) -> bool:
    error = _error(actual, expected)
    return not (error <= bound and measure(actual, expected).worst_row_cosine >= ROW_COSINE)


def _apart(stage: Stage, before: str) -> str:
    return f"{stage.name} differs from {before} by rel_l2 {stage.before:.1e} ({stage.note})"


def _without_batch(array: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """Drop leading axes of size 1 that the port does not have, as the runtime does."""
    extra = array.ndim - expected.ndim
    fits = extra > 0 and all(size == 1 for size in array.shape[:extra])
    return array.reshape(array.shape[extra:]) if fits else array


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


# ---- pnnx


def _exported(text: str) -> str:
    """A param as the exporter writes it."""
    return param.write(param.plain_reshapes(param.isolate_inputs(param.unique_names(param.parse(text)))))


def _converted(folder: Path) -> Any:
    """The torch module that pnnx wrote beside its own files."""
    source = (folder / "graph_pnnx.py").read_text(encoding="utf-8")
    source = source.replace(
        "'graph.pnnx.bin'", repr(str(folder / "graph.pnnx.bin"))
    )  # it names its file without a folder
    scope: dict[str, Any] = {"__name__": "graph_pnnx"}
    exec(compile(source, "graph_pnnx.py", "exec"), scope)
    return scope["Model"]().eval().requires_grad_(False)


# ---- files


def _param_diff(wanted: Path, actual: Path) -> list[str]:
    """Lines of a param that differ, spaces aside: `-` as the converter writes it, `+` as it is."""
    ours, theirs = ([" ".join(line.split()) for line in path.read_text().splitlines()] for path in (actual, wanted))
    lines = [line for line in difflib.unified_diff(theirs, ours, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    lines = [line for line in lines if not line.startswith("@@")]
    more = [f"... and {len(lines) - DIFF_LINES} lines more"] if len(lines) > DIFF_LINES else []
    return lines[:DIFF_LINES] + more


def _weights(ours: NDArray[Any], theirs: NDArray[Any], entry: layout.Entry, known: Mapping[str, NDArray[Any]]) -> str:
    """What stands there instead of a tensor."""
    for name, value in known.items():
        if value.size == ours.size:
            for flipped in (False, True):
                numbers = (value.T if flipped != entry.transposed else value).ravel()
                if np.array_equal(numbers, ours):
                    whose = "its own" if name == entry.tensor else f"{name}'s"
                    return f"the numbers are {whose} {'transposed' if flipped else 'in its place'}"
    differing = int((ours != theirs).sum())
    zeros = int(((ours == 0) & (theirs != 0)).sum())
    text = f"{differing} of {ours.size} numbers differ, rel_l2 {_error(ours[None], theirs[None]):.1e}"
    return f"{text}, {zeros} are 0" if zeros else text


# ---- the port's own inputs


class _FolderRunner:
    """Runs the graphs of a model folder in the child."""

    threads = 1

    def __init__(self, bench: Isolated, folder: Path) -> None:
        self.bench, self.folder = bench, folder

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Outputs by port name. Raises CrashedError naming the graph when it kills the child."""
        try:
            outputs: Arrays = self.bench.call("run", str(self.folder), graph_id, dict(inputs))
        except CrashedError as error:
            raise CrashedError(graph_id, error.how) from error
        return outputs


class _Listening:
    """A runner that keeps what the first run of one graph is given."""

    def __init__(self, runner: Any, graph_id: str) -> None:
        self.runner, self.graph_id = runner, graph_id
        self.heard: Arrays = {}

    def run(self, graph_id: str, inputs: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Run as the runner does."""
        if graph_id == self.graph_id and not self.heard:
            self.heard = {name: np.array(array) for name, array in inputs.items()}
        outputs: Arrays = self.runner.run(graph_id, inputs)
        return outputs


def _fed(subject: _Subject, pipeline: Any) -> tuple[Stage, _Cause]:
    """What the pipeline feeds the graph beside what the reference does, and then what comes out."""
    workspace, graph = subject.workspace, subject.graph
    inner = pipeline.runner
    pipeline.runner = listening = _Listening(inner, graph.id)
    port = SimpleNamespace(pipeline=pipeline, runner=inner)
    judged = checks.Subject.of(workspace, subject.case, port, last=graph.id)
    try:
        outputs = judged.chain.outputs(graph)
    finally:
        pipeline.runner = inner
    limit = checks.LIMITS.of(graph.id, "chained")["rel_l2_max"].bound
    errors = {name: _error(listening.heard[name], wanted) for name, wanted in subject.inputs.items()}
    off = [name for name, error in errors.items() if not error <= limit]
    after = max(_error(outputs[name], wanted) for name, wanted in subject.stored.items())
    worst = max(errors.values())
    if off:
        cause = _source_of(subject, off[0], errors[off[0]], judged.chain.recorder.outputs, limit)
        return Stage(OWN, worst, after, DIFFERS, f"input {', '.join(off)}"), cause
    if not after <= limit:
        why = f"the port's inputs are right, but its runner gives other outputs than the graph (rel_l2 {after:.1e})"
        return Stage(OWN, worst, after, DIFFERS, "outputs"), _Cause("glue", why)
    return Stage(OWN, worst, after, AGREES), _Cause("", "")


def _source_of(subject: _Subject, name: str, error: float, outputs: Mapping[str, Arrays], limit: float) -> _Cause:
    """Whether a wrong input comes out of a graph before this one, or is made between the graphs."""
    what = f"the port's own input {name} differs from the reference's by rel_l2 {error:.1e}"
    graphs = [graph for graph in subject.workspace.graphs.values() if graph.id in outputs]
    graphs = graphs[: graphs.index(subject.graph)]
    errors = {
        tensor_name(graph, port): (graph.id, _error(array, subject.dump.tensors[tensor_name(graph, port)]))
        for graph in graphs
        for port, array in outputs[graph.id].items()
    }
    wrong = {tensor: found for tensor, found in errors.items() if not found[1] <= limit}
    sources = [source for source in subject.graph.sources[name] if source in errors]
    feeding = sources or [tensor for tensor, (graph_id, _) in errors.items() if graph_id == graphs[-1].id]
    if not wrong or not set(feeding) & set(wrong):
        return _Cause("glue", f"{what}, and no graph that feeds it is wrong")
    tensor, (graph_id, off) = next(iter(wrong.items()))
    why = f"{what}; the first wrong output before it is {tensor} (rel_l2 {off:.1e})"
    return _Cause("upstream", why, upstream=graph_id)
