"""ncnn's blobs of one graph, computed in a child process, where a crash is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.isolation import CrashedError, Isolated
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner
from runtime.mat import to_mat

Floats = NDArray[np.float32]
Options = Mapping[str, bool | int]

SECONDS = 300.0
LOAD = "the load"  # where a run fails that comes to no blob


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
    return Isolated("parity.blobs:make", timeout_seconds=SECONDS)


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
