"""Faults of the way to ncnn: options, memory, the order of calls."""

from collections.abc import Mapping

import ncnn
import numpy as np

from parity.faults.port import Fault, Floats, Port
from runtime import graphs
from runtime.graphs import Arrays, NcnnRunner, set_fp32_options
from runtime.mat import to_mat


def _loaded(port: Port, graph_id: str, options: dict[str, bool]) -> None:
    """One net of the port is loaded with other options."""
    graph = port.runner.graph(graph_id)
    net = ncnn.Net()
    set_fp32_options(net.opt, 1)
    for name, value in options.items():
        setattr(net.opt, name, value)
    net.load_param(str(port.folder / graph.param))
    net.load_model(str(port.folder / graph.weights[0]))
    port.runner._nets[graph.id] = net


def _half_precision_on(port: Port) -> None:
    """One net keeps its numbers in bfloat16."""
    _loaded(port, "youtu_vl/vision.layer.11", {"use_bf16_storage": True})


SCRATCH = np.empty(1 << 20, np.float32)


def _borrowed(array: Floats, *, rank: int, where: str) -> ncnn.Mat:
    """For one graph, a Mat on a buffer that its next input overwrites."""
    if "vision.layer.00" not in where:
        return to_mat(array, rank=rank, where=where)
    buffer = SCRATCH[: array.size].reshape(array.shape)
    buffer[...] = array
    return ncnn.Mat(buffer)


def _memory_borrowed(runner: NcnnRunner) -> None:
    vars(graphs)["to_mat"] = _borrowed  # in the child alone


def _intermediate_asked_late(runner: NcnnRunner) -> None:
    """Behind the output of one graph an intermediate blob is asked for, which ncnn has freed by then."""
    run = runner.run

    def faulty(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        if graph_id.endswith("vision.layer.18"):
            graph = runner.graph(graph_id)
            extractor = runner._net(graph).create_extractor()
            mats = [ncnn.Mat(np.ascontiguousarray(inputs[port.name])).clone() for port in graph.inputs]
            for number, mat in enumerate(mats):
                extractor.input(f"in{number}", mat)
            extractor.extract("out0")
            extractor.extract("17")
        return run(graph_id, inputs)

    runner.run = faulty  # type: ignore[method-assign]


FAULTS = (
    Fault("bfloat16 left on", "vision.layer.11", _half_precision_on, hints=("small everywhere", "rounding")),
    Fault("memory borrowed", "vision.layer.00", lambda port: port.serve(_memory_borrowed)),
    Fault("intermediate asked for late", "vision.layer.18", lambda port: port.serve(_intermediate_asked_late)),
)
