"""Proof: a planted fault is explained by its domain, and a green graph by none."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from exporters import pnnx
from exporters import youtu_vl as rewrites
from harness.errors import UnjudgedError
from harness.isolation import Isolated
from parity import explain as explaining
from parity import witnesses
from parity.blobs import Bench
from parity.explain import DOMAINS, Explanation, explain
from parity.faults import FAULTS, Floats, Port
from parity.faults.port import replaced
from parity.plugin import Session
from parity.verdict import DIFFERENT, EQUAL, UNJUDGED
from parity.witnesses import conservative_options, runtime_options
from runtime import graphs as runtime_graphs

pytestmark = pytest.mark.proof

MODEL, CASE = "youtu_vl", "square"
VISION, PREFILL, DATTN = "youtu_vl/vision.layer.03", "youtu_vl/llm.layer.20.prefill", "youtu_vl/llm.layer.20.dattn"
GREEN = {
    "youtu_vl": ("vision.embed", "vision.layer.07", "vision.tail", "llm.layer.20.prefill", "llm.layer.20.dqkv"),
    "smollm2": ("llm.layer.12.prefill", "llm.layer.12.dqkv", "llm.layer.12.dattn"),
}


def text_of(found: Explanation) -> str:
    return "\n".join(found.lines())


@dataclass(frozen=True)
class Planted:
    """A fault of the files, and what must be said of it."""

    name: str
    graph: str
    plant: Callable[[Port], None]
    domain: str
    evidence: str
    line: str  # of the guilty layer
    expected: str  # its torch operation


def known(name: str) -> Callable[[Port], None]:
    return next(fault.plant for fault in FAULTS if fault.name == name)


def text(graph: str, old: str, new: str) -> Callable[[Port], None]:
    return lambda port: port.edit_param(graph, replaced(old, new))


def scaled(port: Port) -> None:
    def change(weights: dict[str, Floats]) -> None:
        weights["mlp.down_proj.weight"] *= np.float32(1.001)

    port.edit(DATTN, change)


FILES = (
    Planted(
        "o_proj transposed",
        PREFILL,
        known("o_proj transposed"),
        "weights file",
        r"self_attn\.o_proj\.weight \(gemm_4\): the numbers are its own transposed",
        "Gemm +gemm_4",
        r"linear in self_attn\.o_proj",
    ),
    Planted(
        "gate and up swapped",
        "youtu_vl/llm.layer.12.dattn",
        known("gate_proj and up_proj swapped"),
        "weights file",
        r"mlp\.gate_proj\.weight \(gemm_1\): the numbers are model\.layers\.12\.mlp\.up_proj\.weight's in its place",
        "Gemm +gemm_1",
        r"linear in mlp\.gate_proj",
    ),
    Planted(
        "head zeroed",
        "youtu_vl/vision.layer.13",
        known("one head of vision layer 13 zeroed"),
        "weights file",
        r"self_attn\.v_proj\.weight \(gemm_2\): 576 of 2304 numbers differ, .*576 are 0",
        "Gemm +gemm_2",
        r"linear in self_attn\.v_proj \(exporters/youtu_vl\.py:\d+\)",
    ),
    Planted(
        "a weight scaled by 0.1 %",
        DATTN,
        scaled,
        "weights file",
        r"mlp\.down_proj\.weight \(gemm_3\): \d+ of 9728 numbers differ, rel_l2 1\.0e-03",
        "Gemm +gemm_3",
        r"linear in mlp\.down_proj",
    ),
    Planted(
        "norm epsilon",
        VISION,
        known("norm epsilon of a vision layer"),
        "graph file",
        r"\+LayerNorm ln_7 .* 1=1\.000000e-2",
        "LayerNorm +ln_7",
        r"layer_norm in layer_norm1",
    ),
    Planted(
        "scale removed",
        PREFILL,
        text(PREFILL, "6=0.204124153", "6=1.0"),
        "graph file",
        r"-SDPA sdpa_25 .*6=0\.204124153",
        "SDPA +sdpa_25",
        r"scaled_dot_product_attention \(exporters/youtu_vl\.py:\d+\)",
    ),
    Planted(
        "order of a Permute",
        VISION,
        text(VISION, "18 19 0=2", "18 19 0=4"),
        "graph file",
        r"\+Permute transpose_15 .* 0=4",
        "Permute +transpose_15",
        r"transpose .*\(4, \d+, 12\)",
    ),
    Planted(
        "minus for plus",
        VISION,
        text(VISION, "24 23 25 0=0", "24 23 25 0=1"),
        "graph file",
        r"\+BinaryOp add_2 .* 0=1",
        "BinaryOp +add_2",
        r"add in self_attn",
    ),
    Planted(
        "erf for tanh",
        VISION,
        text(VISION, "46 47 0=1", "46 47 0=0"),
        "graph file",
        r"-GELU gelu_6 .*0=1",
        "GELU +gelu_6",
        r"gelu in mlp",
    ),
)


@pytest.mark.parametrize("fault", FILES, ids=[fault.name.replace(" ", "_") for fault in FILES])
def test_fault_of_the_files_is_explained_and_drilled(fault: Planted, session: Session, tmp_path: Path) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    fault.plant(port)
    found = explain(workspace, fault.graph, CASE, folder=port.folder)
    assert found.domain == fault.domain, text_of(found)
    assert found.exit_code == DIFFERENT
    assert found.lines()[0].startswith(f"{fault.graph}: the fault is in {fault.domain}: ")
    assert any(re.fullmatch(f"{fault.evidence}.*", line) for line in found.evidence), text_of(found)
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert re.match(fault.line, found.drill.guilty.line), text_of(found)
    assert re.match(fault.expected, found.drill.guilty.expected), text_of(found)
    assert all(held for _, held in found.drill.guilty.inputs), text_of(found)


def test_layer_that_the_converter_did_not_write(session: Session, tmp_path: Path) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    line = next(line for line in (port.folder / f"{VISION}.param").read_text().splitlines() if line.startswith("GELU"))
    between = "BinaryOp between 1 1 46 46x 0=2 1=1 2=1.01\n"
    port.edit_param(VISION, replaced("\n42 51\n", "\n43 52\n"))
    port.edit_param(VISION, replaced(line, between + line.replace("46 47", "46x 47")))
    found = explain(workspace, VISION, CASE, folder=port.folder)
    assert found.domain == "graph file", text_of(found)
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert found.drill.guilty.line.startswith("BinaryOp                 between")


@pytest.mark.parametrize(
    ("change", "domain", "told"),
    [
        (lambda folder: cut(folder / f"{VISION}.bin"), "weights file", "bytes, but should hold"),
        (lambda folder: garble(folder / f"{VISION}.param"), "graph file", "+GELU gelu_6 x 1"),
    ],
    ids=["cut_short", "malformed"],
)
def test_file_that_does_not_load(
    change: Callable[[Path], None], domain: str, told: str, session: Session, tmp_path: Path
) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    change(port.folder)
    found = explain(workspace, VISION, CASE, folder=port.folder)
    assert found.domain == domain, text_of(found)
    assert told in text_of(found)
    assert found.drill is None


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # its other name keeps the bytes
    path.write_bytes(data[:-400])


def garble(path: Path) -> None:
    words = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(re.sub(r"GELU +gelu_6 +1 1", "GELU gelu_6 x 1", words), encoding="utf-8")


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, names in GREEN.items() for name in names])
def test_green_graph_has_no_domain(model: str, name: str, session: Session) -> None:
    found = explain(session.workspaces[model], f"{model}/{name}")
    assert found.exit_code == EQUAL, text_of(found)
    assert not found.domain
    assert not found.hints
    assert [stage.verdict for stage in found.stages] == ["agrees"] * 7
    assert found.lines()[0].startswith(f"{model}/{name}: every stage agrees")


def test_green_graph_of_a_model_folder(session: Session) -> None:
    workspace = session.workspaces[MODEL]
    found = explain(workspace, "youtu_vl/llm.layer.02.dattn", CASE, folder=workspace.exporter.model_folder())
    assert found.exit_code == EQUAL, text_of(found)


def test_shape_case_has_no_pipeline(session: Session) -> None:
    found = explain(session.workspaces[MODEL], DATTN, "length_6")
    assert found.exit_code == EQUAL
    assert found.stages[-1].note == "a shape case has no pipeline"


# ---- the rewrite


class ErfMLP(rewrites.VisionMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ErfLayer(rewrites.VisionLayer):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.mlp = ErfMLP(sizes)


class WrongRotation(rewrites.VisionLayer):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.self_attn.rotate_half = self.self_attn.rotate_half.T.contiguous()


@pytest.mark.parametrize(
    ("rewrite", "value"), [(ErfLayer, "gelu in mlp "), (WrongRotation, "matmul in self_attn .exporters/youtu_vl.py")]
)
def test_fault_of_the_rewrite(
    rewrite: type[nn.Module], value: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter refuses such a layer, so that ncnn bears no witness."""
    workspace = session.workspaces[MODEL]
    workspace = type(workspace)(workspace.choice)  # an exporter of its own
    monkeypatch.setitem(rewrites.REWRITES, "vision.layer", rewrite)
    found = explain(workspace, VISION, CASE)
    assert found.domain == "rewrite", text_of(found)
    assert found.stages[1].verdict == "differs"
    assert "cannot be exported" in found.stages[3].note
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert re.match(value, found.drill.guilty.blob)


def test_fault_of_the_rewrite_beside_files_that_are_right(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = session.workspaces[MODEL]
    right = workspace.exporter.rewritten
    folder = workspace.exporter.model_folder()

    def rewritten(graph: Any) -> Any:
        module = right(graph)
        module.layer_norm1.eps = 1e-5
        return module

    monkeypatch.setattr(workspace.exporter, "rewritten", rewritten)
    found = explain(workspace, VISION, CASE, folder=folder)
    assert found.domain == "rewrite", text_of(found)
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert found.drill.guilty.blob.startswith("layer_norm in layer_norm1")


# ---- the converter


def test_fault_of_the_converter_seen_in_its_torch_graph(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = pnnx.convert

    def faulty(module: Any, structure: Any, folder: Path) -> Any:
        result = convert(module, structure, folder)
        path = folder / "graph_pnnx.py"
        source = path.read_text(encoding="utf-8")
        assert "scale=0.288675" in source
        path.write_text(source.replace("scale=0.288675", "scale=0.5"), encoding="utf-8")
        return result

    monkeypatch.setattr(pnnx, "convert", faulty)
    found = explain(session.workspaces[MODEL], "youtu_vl/vision.layer.03", CASE)
    assert found.domain == "converter", text_of(found)
    assert found.stages[2].verdict == "differs"


def test_fault_of_the_converter_in_what_it_writes_for_ncnn(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files are what the converter writes, and still another graph: both sets of kernels agree on it."""
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    port.edit_param(VISION, replaced("6=0.288675129", "6=0.5"))
    convert = pnnx.convert

    def faulty(module: Any, structure: Any, folder: Path) -> Any:
        written, weights = convert(module, structure, folder)
        return written.replace("6=2.886751e-01", "6=0.5").replace("6=0.288675129", "6=0.5"), weights

    monkeypatch.setattr(pnnx, "convert", faulty)
    found = explain(workspace, VISION, CASE, folder=port.folder)
    assert found.domain == "converter", text_of(found)
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert re.match("SDPA +sdpa_19", found.drill.guilty.line)
    assert re.match(r"scaled_dot_product_attention in self_attn \(exporters/youtu_vl\.py", found.drill.guilty.expected)


def test_converter_whose_python_does_not_run_bears_no_witness(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> Any:
        raise NameError("name 'pnnx_op' is not defined")

    monkeypatch.setattr(witnesses, "_converted", fails)
    found = explain(session.workspaces[MODEL], DATTN, CASE)
    assert found.exit_code == EQUAL
    assert found.stages[2].verdict == "no witness"
    assert "NameError" in found.stages[2].note


# ---- ncnn


def test_fault_of_the_options(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime leaves half-precision storage on."""
    right = runtime_graphs.set_fp32_options

    def faulty(option: Any, threads: int) -> None:
        right(option, threads)
        option.use_bf16_storage = option.use_bf16_packed = True

    monkeypatch.setattr(runtime_graphs, "set_fp32_options", faulty)
    assert runtime_options(1)["use_bf16_storage"]
    found = explain(session.workspaces[MODEL], PREFILL, CASE)
    assert found.domain == "ncnn options", text_of(found)
    assert found.stages[3].verdict == "agrees"
    assert found.drill is not None
    assert found.drill.guilty is not None, text_of(found)


def test_conservative_options_do_not_depend_on_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    before = conservative_options()
    monkeypatch.setattr(runtime_graphs, "set_fp32_options", None)
    assert conservative_options() == before
    assert not any(value for name, value in before.items() if "16" in name or "int8" in name or "winograd" in name)


def test_fault_of_ncnn_itself(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are right, and only some kernels are wrong."""
    run = witnesses.run_blobs

    def faulty(bench: Any, files: Any, inputs: Any, names: Any, *, whole: bool) -> Any:
        blobs = run(bench, files, inputs, names, whole=whole)
        if not files.options["use_sgemm_convolution"]:
            blobs.arrays["out0"] = blobs.arrays["out0"] * np.float32(1.01)
        return blobs

    monkeypatch.setattr(witnesses, "run_blobs", faulty)
    found = explain(session.workspaces[MODEL], DATTN, CASE)
    assert found.domain == "ncnn", text_of(found)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("GELU  ", "GALU  ", "refuses to load"),
        ("0=12 1=4 2=-1", "0=12 1=400000 2=1", "failed"),
    ],
)
def test_graph_that_cannot_run_is_told(old: str, new: str, told: str, session: Session, tmp_path: Path) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    port.edit_param(VISION, replaced(old, new))
    found = explain(workspace, VISION, CASE, folder=port.folder)
    assert found.domain == "graph file", text_of(found)
    assert told in text_of(found)


def test_native_crash_is_told_not_suffered(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "start", lambda: Isolated(f"{__name__}:crashing"))
    found = explain(session.workspaces[MODEL], DATTN, CASE)
    assert found.domain == "ncnn", text_of(found)
    assert "SIGSEGV" in found.lines()[0]
    assert found.drill is not None
    assert found.drill.guilty is not None
    assert found.drill.guilty.blob == "17"


class Crashing(Bench):
    """Dies at the first MatMul with the values, and at the output."""

    def extract(self, name: str) -> Floats:
        if name in ("17", "out0"):
            import signal

            signal.raise_signal(signal.SIGSEGV)
        return super().extract(name)


def crashing() -> Bench:
    return Crashing()


# ---- the port around the graph


@pytest.mark.parametrize(
    ("name", "graph", "domain", "told"),
    [
        ("rotary base of the text", "youtu_vl/llm.layer.00.prefill", "glue", "own input cos"),
        ("full layer 7 windowed", "youtu_vl/vision.layer.07", "glue", "own input mask"),
        ("decode position + 1", "youtu_vl/llm.layer.00.dqkv", "glue", "own input cos"),
        ("cache row lost", "youtu_vl/llm.layer.00.dattn", "glue", "own input key"),
        ("window order not undone", "youtu_vl/vision.tail", "glue", "its runner gives other outputs"),
        ("decode position + 1", "youtu_vl/llm.layer.00.dattn", "upstream", "llm.layer.00.dqkv.query"),
        ("full layer 7 windowed", "youtu_vl/vision.layer.09", "upstream", "vision.layer.07.hidden"),
    ],
)
def test_fault_around_the_graph(
    name: str, graph: str, domain: str, told: str, session: Session, tmp_path: Path
) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    known(name)(port)
    found = explain(workspace, graph, CASE, folder=port.folder, pipeline=port.pipeline)
    assert found.domain == domain, text_of(found)
    assert told in found.lines()[0]
    assert found.exit_code == DIFFERENT


def test_fault_of_a_file_before_the_graph_is_upstream(session: Session, tmp_path: Path) -> None:
    workspace = session.workspaces[MODEL]
    port = Port(workspace, tmp_path / "model")
    known("o_proj transposed")(port)
    found = explain(workspace, "youtu_vl/llm.layer.21.prefill", CASE, folder=port.folder)
    assert found.domain == "upstream", text_of(found)
    assert found.todo == "python -m parity explain youtu_vl/llm.layer.20.prefill --case square"


# ---- the reference, and what cannot be judged


def test_dump_of_another_checkpoint(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = session.workspaces[MODEL]
    dump = workspace.dump(CASE)
    tensors = dict(dump.tensors) | {"llm.layer.20.dattn.hidden": dump.tensors["llm.layer.20.dattn.hidden"] * 1.001}
    monkeypatch.setattr(workspace, "dump", lambda name: type(dump)(dump.model, name, tensors, dump.values))
    found = explain(workspace, DATTN, CASE)
    assert found.domain == "checkpoint or reference", text_of(found)
    assert found.todo == "write the dump again: python -m parity dumps youtu_vl"


def test_graph_that_cannot_be_exported_is_not_judged(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = session.workspaces[MODEL]

    def refuses(graph_id: str) -> Path:
        raise UnjudgedError(f"{graph_id}: the exported graph fails its audit")

    monkeypatch.setattr(workspace.exporter, "graph", refuses)
    found = explain(workspace, DATTN, CASE)
    assert found.exit_code == UNJUDGED
    assert "fails its audit" in found.lines()[0]


@pytest.mark.parametrize(
    ("graph", "case", "told"),
    [
        ("youtu_vl/llm.layer.99.dattn", CASE, "did you mean youtu_vl/llm.layer"),
        (DATTN, "squared", "case squared is unknown; did you mean square?"),
    ],
)
def test_wrong_names(graph: str, case: str, told: str, session: Session) -> None:
    with pytest.raises(UnjudgedError, match=re.escape(told)):
        explain(session.workspaces[MODEL], graph, case)


def test_folder_without_the_graph(session: Session, tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"20\.dattn\.param is missing; give a folder"):
        explain(session.workspaces[MODEL], DATTN, CASE, folder=tmp_path)


def test_vision_graph_of_a_case_without_pictures(session: Session) -> None:
    workspace = session.workspaces[MODEL]
    name = next(name for name, case in workspace.cases.items() if not case.pictures)
    with pytest.raises(UnjudgedError, match=f"case {name} has no picture, .*; type --case square"):
        explain(workspace, VISION, name)


def test_every_domain_says_what_to_do() -> None:
    assert all(DOMAINS.values())
