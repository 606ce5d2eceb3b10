"""Proof: the first wrong blob of a graph is named by value, and a green graph names none."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exporters import linear
from exporters.param import Layer
from harness.graphs import Graph
from parity.blobs import Files, start
from parity.checks import inputs_of
from parity.drill import drill, drill_rewrite
from parity.faults import Port
from parity.matching import Pool, arrangements, distance
from parity.plugin import Session
from parity.recording import Value, record
from parity.wiring import Wiring
from parity.witnesses import conservative_options, runtime_options
from references.dumping import open_reference

pytestmark = pytest.mark.proof

CASES = {"youtu_vl": "square", "smollm2": "capital"}
STRUCTURES = (
    *("youtu_vl/vision.embed", "youtu_vl/vision.layer.08", "youtu_vl/vision.tail"),
    *("youtu_vl/llm.layer.05.prefill", "youtu_vl/llm.layer.05.dqkv", "youtu_vl/llm.layer.05.dattn"),
    *("smollm2/llm.layer.05.prefill", "smollm2/llm.layer.05.dqkv", "smollm2/llm.layer.05.dattn"),
)
VISION, PREFILL, SMOL = "youtu_vl/vision.layer.08", "youtu_vl/llm.layer.05.prefill", "smollm2/llm.layer.05.prefill"


def subject(session: Session, name: str, tmp_path: Path) -> tuple[Graph, Any, dict[str, Any], Path]:
    """A graph, its rewritten layer, the reference's inputs, and a folder with its files."""
    workspace = session.workspaces[name.partition("/")[0]]
    graph = workspace.graphs[name]
    inputs = inputs_of(graph, workspace.dump(CASES[workspace.model]))
    workspace.exporter.copy_graph(name, tmp_path / "exported")
    return graph, workspace.exporter.rewritten(graph), inputs, tmp_path / "exported"


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("threads", [1, 2])
def test_green_graph_names_no_blob(name: str, threads: int, session: Session, tmp_path: Path) -> None:
    graph, module, inputs, folder = subject(session, name, tmp_path)
    files = Files(folder / "graph.param", folder / "graph.bin", runtime_options(threads))
    with start() as bench:
        found = drill(bench, graph, module, inputs, files, tolerance=3e-6)
    assert found.guilty is None
    assert not found.wrong
    assert found.matched == found.total
    assert "every output matches" in found.lines()[0]


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "holds"),
    [
        (
            VISION,
            "6=0.288675129",
            "6=0.3",
            "SDPA +sdpa_19",
            r"scaled_dot_product_attention .*\(exporters/youtu_vl\.py:\d+\)",
        ),
        (VISION, "24 23 25 0=0", "24 23 25 0=1", "BinaryOp +add_2", "add in self_attn"),
        (VISION, "15 16", "16 15", "", ""),  # a Split's copies are alike: no fault
        (PREFILL, "39 47 48", "47 39 48", "Concat +cat_0", "cat in self_attn"),
        (PREFILL, "24 25 26 -23300=2,32,-233", "24 26 25 -23300=2,8,-233", "Slice +tensor_split_0", "getitem"),
        (PREFILL, "50 out2 52", "50 52 out2", "", ""),
        (SMOL, "5=1 6=0.125", "5=1 6=0.25", "SDPA +sdpa_18", "scaled_dot_product_attention"),
        (SMOL, "3 1 16 5 8 17", "3 1 16 8 5 17", "RotaryEmbed +rope_0", "add "),
        (SMOL, "1 1 2 10 0=576 1=1.000000e-5", "1 1 2 10 0=576 1=1.000000e-1", "RMSNorm +rmsn_8", "mul in input_lay"),
    ],
)
@pytest.mark.parametrize("with_clean", [True, False])
def test_edit_of_the_param_is_named(
    name: str, old: str, new: str, line: str, holds: str, with_clean: bool, session: Session, tmp_path: Path
) -> None:
    graph, module, inputs, folder = subject(session, name, tmp_path)
    text = (folder / "graph.param").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "graph.param").write_text(text.replace(old, new), encoding="utf-8")
    options = conservative_options()
    files = Files(tmp_path / "graph.param", folder / "graph.bin", options)
    clean = Files(folder / "graph.param", folder / "graph.bin", options) if with_clean else None
    with start() as bench:
        found = drill(bench, graph, module, inputs, files, clean=clean)
    if not line:
        assert found.guilty is None
        return
    assert found.guilty is not None, found.lines()
    assert re.match(line, found.guilty.line), found.lines()
    assert re.match(holds, found.guilty.expected), found.lines()
    assert all(held for _, held in found.guilty.inputs), found.lines()
    assert found.lines()[0].startswith(f"{name}: the first wrong blob is ")


def test_half_precision_is_named_beside_the_clean_run(session: Session, tmp_path: Path) -> None:
    graph, module, inputs, folder = subject(session, SMOL, tmp_path)
    paths = folder / "graph.param", folder / "graph.bin"
    rounded = runtime_options(1) | {"use_bf16_storage": True, "use_bf16_packed": True}
    with start() as bench:
        found = drill(bench, graph, module, inputs, Files(*paths, rounded), clean=Files(*paths, conservative_options()))
    assert found.guilty is not None
    assert found.guilty.error > 1e-4


def test_faulty_weight_is_named_beside_the_clean_bin(session: Session, tmp_path: Path) -> None:
    graph, module, inputs, folder = subject(session, PREFILL, tmp_path)
    port = Port(session.workspaces["youtu_vl"], tmp_path / "model")

    def change(weights: dict[str, Any]) -> None:
        weights["self_attn.kv_a_layernorm.weight"][3] *= np.float32(1.01)

    port.edit(PREFILL, change)
    files = Files(port.folder / f"{PREFILL}.param", port.folder / f"{PREFILL}.bin", conservative_options())
    clean = Files(folder / "graph.param", folder / "graph.bin", conservative_options())
    with start() as bench:
        found = drill(bench, graph, module, inputs, files, clean=clean)
    assert found.guilty is not None
    assert re.match("RMSNorm +rmsn_11", found.guilty.line)
    assert found.guilty.expected.startswith("mul in self_attn.kv_a_layernorm (exporters/layers.py:")


def test_only_wrong_outputs_are_followed(session: Session, tmp_path: Path) -> None:
    """A fault behind the projections leaves key and value right, and is named on the way to hidden alone."""
    graph, module, inputs, folder = subject(session, PREFILL, tmp_path)
    text = (folder / "graph.param").read_text(encoding="utf-8")
    (tmp_path / "graph.param").write_text(text.replace("6=0.204124153", "6=0.2"), encoding="utf-8")
    files = Files(tmp_path / "graph.param", folder / "graph.bin", conservative_options())
    with start() as bench:
        found = drill(bench, graph, module, inputs, files)
    assert set(found.wrong) == {"hidden"}
    assert found.guilty is not None
    assert re.match("SDPA +sdpa_25", found.guilty.line)


@pytest.mark.parametrize("name", STRUCTURES)
def test_green_rewrite_names_no_value(name: str, session: Session, tmp_path: Path) -> None:
    graph, module, inputs, _ = subject(session, name, tmp_path)
    model = name.partition("/")[0]
    reference = open_reference(model, session.workspaces[model].checkpoint)
    found = drill_rewrite(graph, module, lambda given: reference.run(graph, given, double=True), inputs)
    assert found.guilty is None
    assert not found.wrong


# ---- matching


def values_of(*arrays: np.ndarray) -> list[Value]:
    return [Value(number, "made", "", "", array, ()) for number, array in enumerate(arrays)]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_any_order_of_axes_matches() -> None:
    value = random(1, 3, 4, 5)
    pool = Pool(values_of(value))
    for axes in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        (match, *_) = pool.matches(np.ascontiguousarray(value[0].transpose(axes)))
        assert match.axes == axes
        assert match.is_plain == (axes == (0, 1, 2))


def test_merged_neighbours_match_and_mixed_ones_do_not() -> None:
    value = random(1, 3, 4, 5)
    pool = Pool(values_of(value))
    assert pool.matches(value.reshape(12, 5))
    assert pool.matches(value.reshape(60))
    assert not pool.matches(value.reshape(5, 12))
    assert not pool.matches(value.reshape(4, 3, 5))  # the numbers as they lie, under another shape


def test_values_apart_by_more_than_the_tolerance_do_not_match() -> None:
    value = random(6, 7)
    pool = Pool(values_of(value))
    assert pool.matches(value * np.float32(1 + 5e-5))
    assert not pool.matches(value * np.float32(1 + 2e-4))
    assert not pool.matches(np.full_like(value, np.nan))


def test_a_mask_does_not_hide_what_it_is_added_to() -> None:
    value = random(6, 6)
    mask = np.triu(np.full((6, 6), -1e9, np.float32), 1)
    assert distance(value + mask, value + mask) == 0
    assert distance(2 * value + mask, value + mask) > 0.1
    assert distance(value + mask.T, value + mask) == np.inf


def test_arrangements_of_one_axis() -> None:
    assert [axes for axes, _ in arrangements(random(1, 7), random(7))] == [(0,)]


def test_recording_names_operation_module_and_inputs() -> None:
    layer = nn.Sequential(nn.Linear(4, 5), nn.SiLU())
    found = record(layer.requires_grad_(False), {"x": random(3, 4)})
    given, weight, bias, linear, silu = found.values
    assert [v.operation for v in (given, weight, bias)] == ["input x", "tensor 0.weight", "tensor 0.bias"]
    assert (linear.operation, linear.module, linear.inputs) == ("linear", "0", (0, 1, 2))
    assert (silu.operation, silu.module, silu.inputs) == ("silu", "1", (3,))
    assert torch.equal(torch.from_numpy(found.outputs[0]), torch.from_numpy(silu.array[0]))


def test_splits_stand_for_their_input(tmp_path: Path) -> None:
    path = tmp_path / "graph.param"
    lines = ["Input a 0 1 in0", "Split b 1 2 in0 1 2", "BinaryOp c 2 1 1 2 3 0=0", "Split d 1 2 3 out0 out1"]
    path.write_text("\n".join(["7767517", "4 6", *lines]), encoding="utf-8")
    wiring = Wiring.read(path)
    assert wiring.names == ["3"]
    assert wiring.inputs("3") == ["in0", "in0"]
    assert wiring.origin("out1") == "3"
    assert wiring.upstream(["3"]) == {"3", "in0"}


def test_a_linear_in_panels_is_one_layer() -> None:
    given = Layer("Input", "x", (), ("in0",), {})
    gemm = Layer("Gemm", "gemm_0", ("in0",), ("1",), {"3": "1", "5": "1", "6": "1", "8": "4", "9": "1500"})
    swish = Layer("Swish", "silu_0", ("1",), ("out0",), {})
    whole, panelled = Wiring([given, gemm, swish]), Wiring(linear.lay_out([given, gemm, swish]))
    assert len(panelled.makers) > len(whole.makers)
    assert panelled.names == whole.names == ["1", "out0"]
    assert panelled.inputs("1") == ["in0"]
    assert panelled.upstream(["out0"]) == {"out0", "1", "in0"}
    sum_ = Layer("Eltwise", "sum", ("1", "out0"), ("2",), {"0": "1"})  # of other layers
    assert Wiring([given, gemm, swish, sum_]).names == ["1", "out0", "2"]
