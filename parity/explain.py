"""Which stage of the tool chain broke a graph: its outputs on the reference's input, computed stage by stage.

The first stage that disagrees with the one before it names the domain. Where ncnn disagrees with torch, its files are
compared with those that the converter and the checkpoint give; where nothing does, the port's own inputs.
"""

import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from exporters.folders import weight_files
from harness.errors import UnjudgedError
from harness.isolation import Isolated
from parity import drill
from parity.blobs import LOAD, Files, start
from parity.drill import Drilled
from parity.feeding import own_inputs
from parity.filediff import Clean, Floats
from parity.hints import of_weights
from parity.recording import Value, record
from parity.stages import (
    AGREES,
    DIFFERS,
    FAILED,
    SILENT,
    Cause,
    Placed,
    Question,
    Stage,
    Witness,
    apart,
    ask,
    compared,
    is_broken,
)
from parity.verdict import DIFFERENT, EQUAL, UNJUDGED
from parity.witnesses import CONSERVATIVE, REWRITTEN, Witnesses, conservative_options, runtime_options
from parity.workspace import Workspace

# Domain -> what to do about it.
DOMAINS = {
    "checkpoint or reference": "write the dump again: python -m parity dumps {arguments}",
    "rewrite": "mend the rewritten layer in exporters/{model}.py",
    "converter": "spell the operation out otherwise in exporters/{model}.py, so that pnnx converts it rightly",
    "weights file": "export the graph again: python -m parity export {arguments}",
    "graph file": "export the graph again: python -m parity export {arguments}",
    "ncnn": "python -m parity repro {graph}{flags}",
    "ncnn options": "mend set_fp32_options in runtime/graphs.py",
    "upstream": "python -m parity explain {upstream} --case {case}{flags}",
    "glue": "mend runtime/{model}.py",
}


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
    tensor_hints: tuple[Placed, ...] = ()  # of weights, inputs and outputs

    @property
    def hints(self) -> tuple[Placed, ...]:
        """What the wrong tensors look like, each with its place, the most specific first; those of the drill last."""
        guilty = self.drill.guilty if self.drill else None
        inside = [(f"blob {guilty.blob}", hint) for hint in guilty.hints] if guilty else []
        return (*self.tensor_hints, *inside)

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
        lines += [f"  hint: {place}: {hint.kind}: {hint.evidence}" for place, hint in self.tensor_hints]
        lines += [f"  {line}" for line in (self.drill.lines() if self.drill else ())]
        return [*lines, *([f"  next: {self.todo}"] if self.todo else [])]


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
    question = ask(workspace, graph_id, case)
    for path in (folder / f"{graph_id}.param", *weight_files(folder, graph_id)) if folder else ():
        if not path.is_file():
            raise UnjudgedError(f"{path} is missing; give a folder that `python -m parity export` wrote")
    with start() as bench, tempfile.TemporaryDirectory() as work:
        return _Chain(question, bench, Path(work), folder, pipeline).explain(with_drill)


class _Chain:
    """The stages of one question, each computed when it is asked for."""

    def __init__(self, question: Question, bench: Isolated, work: Path, folder: Path | None, pipeline: Any) -> None:
        self.question, self.bench, self.work = question, bench, work
        self.folder, self.pipeline = folder, pipeline
        self.witnesses = Witnesses(question, bench, work, folder)

    def explain(self, with_drill: bool) -> Explanation:
        """All stages, the first that disagrees, its cause."""
        witnesses = self.witnesses.all()
        stages = compared(self.question, witnesses)
        first = next((i for i, stage in enumerate(stages) if stage.verdict in (DIFFERS, FAILED)), None)
        if first is None:
            unjudged = isinstance(self.witnesses.files, str)
            return self._explanation(stages, Cause("", ""), None) if unjudged else self._own_inputs(stages)
        found = self._cause(stages, witnesses, first)
        drilled = self._drill(found.domain) if with_drill else None
        return self._explanation(stages, found, drilled)

    # ---- causes

    def _cause(self, stages: list[Stage], witnesses: list[Witness], first: int) -> Cause:
        stage, domain = stages[first], witnesses[first].domain
        before = next((s.name for s in stages[:first][::-1] if s.verdict != SILENT), "the dump")
        why = f"{stage.name} {stage.verdict}: {stage.note}" if stage.verdict == FAILED else apart(stage, before)
        if domain != "ncnn":
            return Cause(domain, why)
        return self._file_cause(why) or self._kernel_cause(stages[first:], why)

    def _file_cause(self, why: str) -> Cause | None:
        """Whether the files are not what the converter and the checkpoint give."""
        clean, files = self.clean, self.witnesses.files
        if clean is None or isinstance(files, str):
            return None
        lines = clean.changed_lines(files[0])
        wrong_size = clean.wrong_size(files[1])
        changed = [] if wrong_size else clean.changed(files[1], self._holder)
        tensors = [wrong_size] if wrong_size else [str(each) for each in changed]
        if not lines and not tensors:
            return None
        if lines and tensors and self._agrees(Files(files[0], clean.bin, conservative_options())):
            lines = []  # they differ, but it is the weights that do harm
        if lines:
            return Cause("graph file", f"{why}; its param is not what the converter writes", tuple(lines))
        why = f"{why}; its bin does not hold the checkpoint's weights"
        return Cause("weights file", why, tuple(tensors), hints=of_weights(changed, self._values()))

    def _holder(self, numbers: Floats) -> str | None:
        """The checkpoint's tensor that holds these numbers."""
        import torch

        found: str | None = self.witnesses.layer.checkpoint.holder(torch.from_numpy(np.ascontiguousarray(numbers)))
        return found

    def _values(self) -> list[Value]:
        return record(self.witnesses.module, self.question.inputs).values

    def _kernel_cause(self, stages: list[Stage], why: str) -> Cause:
        """The files are right: two sets of kernels that agree on other numbers mean another graph."""
        later = [stage.verdict for stage in stages[1:]]
        if stages[0].verdict == DIFFERS and all(verdict == AGREES for verdict in later):
            return Cause("converter", f"{why}, with all options alike: what pnnx wrote for ncnn is another graph")
        return Cause("ncnn", why)

    @cached_property
    def clean(self) -> Clean | None:
        """What the converter and the checkpoint give."""
        said = self.witnesses
        return Clean.write(said.exporter, said.graph, said.module, said.fresh_param, self.work)

    def _agrees(self, files: Files) -> bool:
        witness = self.witnesses.run("", "", files)
        if witness.outputs is None:
            return False
        return not any(
            is_broken(witness.outputs[n], a, self.question.bound(n)) for n, a in self.question.stored.items()
        )

    def _drill(self, domain: str) -> Drilled | None:
        """Inside the layer or the exported graph, beside the files or options that are right."""
        said = self.witnesses
        if domain == "rewrite":
            whole = partial(said.layer.run, said.graph, double=True)
            return drill.drill_rewrite(said.graph, said.module, whole, self.question.inputs)
        if isinstance(said.files, str) or domain == "checkpoint or reference":
            return None
        options = runtime_options(1) if domain == "ncnn options" else conservative_options()
        clean = None
        if domain == "ncnn options":
            clean = Files(*said.files, conservative_options())
        elif domain in ("graph file", "weights file") and self.clean is not None:
            clean = Files(self.clean.param, self.clean.bin, conservative_options())
        tolerance = min(map(self.question.bound, self.question.ports))
        given = (self.bench, said.graph, said.module, self.question.inputs, Files(*said.files, options))
        try:
            drilled = drill.drill(*given, clean=clean, tolerance=tolerance)
        except ValueError:  # the param is no text of layers; its lines are shown
            return None
        nowhere = drilled.guilty is not None and drilled.guilty.blob == LOAD
        return None if nowhere else drilled

    def _own_inputs(self, stages: list[Stage]) -> Explanation:
        stage, found = own_inputs(self.question, self.bench, self.folder, self.pipeline)
        return self._explanation([*stages, stage], found, None)

    def _explanation(self, stages: list[Stage], found: Cause, drilled: Drilled | None) -> Explanation:
        workspace, graph_id, case = self.question.workspace, self.question.graph.id, self.question.case
        todo = DOMAINS.get(found.domain, "").format(
            model=workspace.model,
            arguments=workspace.choice.arguments(),
            graph=graph_id,
            case=case,
            upstream=found.upstream,
            flags=workspace.choice.flags(),
        )
        why = found.why or "; ".join(dict.fromkeys(s.note for s in stages if s.verdict == SILENT and s.note))
        given = (graph_id, case, stages, found.domain, drilled, why, found.evidence, todo)
        return Explanation(*given, tensor_hints=found.hints)
