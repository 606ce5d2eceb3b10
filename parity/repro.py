"""A folder that shows a graph's difference with numpy and ncnn alone: what one attaches to a bug report upstream."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UnjudgedError
from harness.ids import suggest
from parity.checks import LIMITS, inputs_of
from parity.workspace import Workspace, shape_cases, tensor_name

SCRIPT = Path(__file__).with_name("repro_script.py")
PACKAGES = ("ncnn", "pnnx", "numpy", "torch", "transformers")


def write(workspace: Workspace, graph_id: str, case: str, target: Path) -> Path:
    """Write param, bin, inputs, expected outputs, versions and the script; the folder.

    Raises UnjudgedError on an unknown graph, on a case that does not run it, and where something stands at `target`.
    """
    graph = workspace.graphs.get(graph_id)
    if graph is None:
        raise UnjudgedError(f"graph {graph_id} is unknown; did you mean {suggest(graph_id, workspace.graphs)}?")
    dump = workspace.dump(case)
    outputs = {port.name: tensor_name(graph, port.name) for port in graph.structure.outputs}
    if not all(name in dump.tensors for name in outputs.values()):
        raise UnjudgedError(f"case {case} does not run {graph_id}; pass --case with one of {', '.join(shape_cases())}")
    if target.exists():
        raise UnjudgedError(f"{target} is there already; remove it, or name another folder after --to")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    workspace.exporter.copy_graph(graph_id, unfinished)
    inputs = inputs_of(graph, dump)
    ordered: dict[str, Any] = {port.name: np.ascontiguousarray(inputs[port.name]) for port in graph.structure.inputs}
    np.savez(unfinished / "inputs.npz", **ordered)
    expected: dict[str, Any] = {port: dump.tensors[name] for port, name in outputs.items()}
    np.savez(unfinished / "expected.npz", **expected)
    shutil.copy(SCRIPT, unfinished / "repro.py")
    limit = LIMITS.of(graph_id, "isolated")["rel_l2_max"].bound
    about = {"graph": graph_id, "case": case, "rel_l2_max": limit}
    about["versions"] = {name: version(name) for name in PACKAGES}
    (unfinished / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    unfinished.replace(target)
    return target
