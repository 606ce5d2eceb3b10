"""Who can tell what a graph computes: the reference, the rewritten layer, pnnx's graph in torch, and ncnn.

Each computes the outputs on the reference's inputs of a case; ncnn does so in a child process.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from exporters import linear, param
from exporters.export import SELF_CHECK
from exporters.folders import join, weight_files
from harness.errors import UnjudgedError
from harness.isolation import Isolated
from parity.blobs import Files, run_blobs
from parity.stages import Question, Witness
from runtime import graphs as runtime_graphs

PNNX_BOUND = 1e-6  # pnnx writes constants with nine digits
REFERENCE, REWRITTEN, PNNX = "transformers' layer", "rewritten layer", "pnnx's graph in torch"
CONSERVATIVE, RUNTIME = "ncnn, conservative", "ncnn, runtime's options"
# Everything that chooses another kernel; what the runtime switches off is off besides.
CAUTIOUS = (
    *("use_packing_layout", "use_sgemm_convolution", "use_winograd_convolution"),
    *("use_winograd23_convolution", "use_winograd43_convolution", "use_winograd63_convolution"),
)


class Witnesses:
    """The witnesses of one question, each asked when its word is wanted."""

    def __init__(self, question: Question, bench: Isolated, work: Path, folder: Path | None) -> None:
        self.question, self.bench, self.work, self.folder = question, bench, work, folder
        self.exporter = question.workspace.exporter
        self.graph = question.graph
        self.fresh_param = ""  # what pnnx writes now, once it has run

    def all(self) -> list[Witness]:
        """In the order of the tool chain."""
        return [self.reference(), self.rewritten(), self.pnnx(), *self.in_ncnn()]

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

        return open_reference(self.question.workspace.model, self.question.workspace.checkpoint)

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
        return {name: tensor[0].numpy() for name, tensor in zip(self.question.ports, found, strict=True)}

    def _tensors(self) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in self.question.inputs.items()}

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
                yield self.run(name, domain, Files(*files, options))

    def run(self, name: str, domain: str, files: Files) -> Witness:
        """What ncnn computes with files and options."""
        names = [f"out{number}" for number in range(len(self.question.ports))]
        blobs = run_blobs(self.bench, files, list(self.question.inputs.values()), names, whole=False)
        if blobs.failed:
            return Witness(name, domain, failed=True, note=f"at {blobs.failed}: {blobs.how}")
        found = {port: blobs.arrays[blob] for port, blob in zip(self.question.ports, names, strict=True)}
        return Witness(name, domain, {port: _without_batch(a, self.question.stored[port]) for port, a in found.items()})

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


def _without_batch(array: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """Drop leading axes of size 1 that the port does not have, as the runtime does."""
    extra = array.ndim - expected.ndim
    fits = extra > 0 and all(size == 1 for size in array.shape[:extra])
    return array.reshape(array.shape[extra:]) if fits else array


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _exported(text: str) -> str:
    """A param as the exporter writes it."""
    return param.write(linear.lay_out(param.tidy(text)))


def _converted(folder: Path) -> Any:
    """The torch module that pnnx wrote beside its own files."""
    source = (folder / "graph_pnnx.py").read_text(encoding="utf-8")
    source = source.replace(
        "'graph.pnnx.bin'", repr(str(folder / "graph.pnnx.bin"))
    )  # it names its file without a folder
    scope: dict[str, Any] = {"__name__": "graph_pnnx"}
    exec(compile(source, "graph_pnnx.py", "exec"), scope)
    return scope["Model"]().eval().requires_grad_(False)
