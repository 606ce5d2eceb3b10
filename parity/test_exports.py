"""Claim: an exported graph is the rewritten layer, whole and unbaked, and a faulty one is refused by name."""

import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pnnx as converter
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from exporters import layout, linear, param, pnnx, youtu_vl
from exporters.audit import audit
from exporters.export import Exporter
from exporters.param import Layer
from harness.errors import UnjudgedError
from harness.graphs import Port, Structure
from harness.isolation import Isolated
from harness.store import Store
from parity import server
from parity.runners import StoreRunner
from parity.workspace import Choice, Workspace
from references.youtu_vl import structures
from references.youtu_vl.config import PROFILES, sizes

Layers = list[Layer]
Edit = Callable[["Files"], None]
Mistake = Callable[[Any], None]

# One graph of each structure; no first layer, whose index would also fit a prefix without one.
KINDS = {
    "vision.embed": "youtu_vl/vision.embed",
    "vision.layer": "youtu_vl/vision.layer.05",
    "vision.tail": "youtu_vl/vision.tail",
    "llm.layer.prefill": "youtu_vl/llm.layer.05.prefill",
    "llm.layer.dqkv": "youtu_vl/llm.layer.05.dqkv",
    "llm.layer.dattn": "youtu_vl/llm.layer.05.dattn",
}
FP16_WORD = 0x01306B47

one_of_each = pytest.mark.parametrize("graph_id", KINDS.values())


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice("youtu_vl"))


@pytest.fixture(scope="module")
def exporter(workspace: Workspace) -> Exporter:
    return workspace.exporter


@pytest.fixture(scope="module")
def child() -> Iterator[Isolated]:
    with server.start() as started:
        yield started


@pytest.fixture
def fresh(exporter: Exporter, tmp_path: Path) -> Exporter:
    """An exporter of the same checkpoint over an empty store."""
    return Exporter("youtu_vl", exporter.checkpoint, exporter.fingerprint, Store(tmp_path / "store"))


def built(exporter: Exporter) -> list[str]:
    """Kinds of the artefacts that a store counts as built, and of half-built folders."""
    return sorted(path.parent.name for path in exporter.store.root.glob("*/*") if path.is_dir())


# ---- the audit


@dataclass
class Files:
    """The files of one graph, open to edits."""

    layers: Layers
    weights: bytearray

    def place(self, named: str) -> int:
        return next(place for place, layer in enumerate(self.layers) if layer.name == named)

    def change(self, named: str, **fields: Any) -> None:
        place = self.place(named)
        self.layers[place] = replace(self.layers[place], **fields)

    def set(self, named: str, key: str, value: str) -> None:
        self.change(named, params=self.layers[self.place(named)].params | {key: value})

    def drop(self, named: str, *, readers_take: str) -> None:
        """Remove a layer; what read its outputs reads `readers_take`."""
        gone = self.layers.pop(self.place(named)).outputs
        self.layers = [
            replace(layer, inputs=tuple(readers_take if blob in gone else blob for blob in layer.inputs))
            for layer in self.layers
        ]

    def put(self, layer: str, word: bytes, *, run: int = 0, skip: int = 0) -> None:
        """Overwrite the 4 bytes that are `skip` bytes into a layer's run of weights."""
        blobs = param.blobs(self.layers)
        place = [number for number, blob in enumerate(blobs) if blob.layer == layer][run]
        start = sum(blob.nbytes for blob in blobs[:place]) + skip
        self.weights[start : start + 4] = word


def as_type(name: str, kind: str) -> Edit:
    return lambda files: files.change(name, type=kind)


def rename(name: str, new: str) -> Edit:
    return lambda files: files.change(name, name=new)


def outputs(name: str, *blobs: str) -> Edit:
    return lambda files: files.change(name, outputs=blobs)


def drop(name: str, readers_take: str) -> Edit:
    return lambda files: files.drop(name, readers_take=readers_take)


def value(name: str, key: str, text: str) -> Edit:
    return lambda files: files.set(name, key, text)


def cut(count: int) -> Edit:
    def edit(files: Files) -> None:
        del files.weights[-count:]

    return edit


def lengthen(files: Files) -> None:
    files.weights += bytes(4)


def half_precision(files: Files) -> None:
    files.put("gemm_3", struct.pack("<I", FP16_WORD))


def without_mask(files: Files) -> None:
    """Drop the mask."""
    for name in ("in3", "isolate_in3"):
        files.layers.pop(files.place(name))
    files.change("sdpa_19", inputs=files.layers[files.place("sdpa_19")].inputs[:3])


def rotary_by_input(files: Files) -> None:
    """A rotation's constant and the sine change places: the counts of layers stay."""
    files.change("matmul_11", inputs=("30", "5"))
    files.change("mul_0", inputs=("32", "15"))


def constant_left_out(files: Files) -> None:
    """A constant becomes an input of the graph."""
    files.change("pnnx_unique_0", type="Input", name="in3", outputs=("in3",), params={})
    files.change("splitncnn_1_u1", inputs=("in3",))
    del files.weights[4 * (64 + 64) : 4 * (64 + 64 + 64)]  # behind the first norm and the other constant


def inner_product(files: Files) -> None:
    """The same bytes, read by another layer type."""
    files.change("gemm_0", type="InnerProduct", params={"0": "40", "1": "0", "2": str(40 * 64)})


# name: graph, edit, the findings (regular expressions, all of them and in this order)
FAULTS: dict[str, tuple[str, Edit, list[str]]] = {
    "expression": (
        "vision.layer",
        as_type("transpose_18", "pnnx.Expression"),
        [r"layer transpose_18 has type pnnx\.Expression, .*"],
    ),
    "unknown type": ("vision.layer", as_type("transpose_18", "Crop"), [r"layer transpose_18 has type Crop, .*"]),
    "RotaryEmbed": (
        "llm.layer.dqkv",
        as_type("mul_0", "RotaryEmbed"),
        [r"layer mul_0 is a fused RotaryEmbed.*"],
    ),
    "SDPA": ("llm.layer.dqkv", as_type("mul_0", "SDPA"), [r"layer mul_0 is a fused SDPA, .*"]),
    "MultiHeadAttention": (
        "vision.layer",
        as_type("mul_0", "MultiHeadAttention"),
        [r"layer mul_0 is a fused MultiHeadAttention, .*"],
    ),
    "two layers of one name": ("vision.layer", rename("mul_1", "mul_0"), [r"2 layers are named mul_0"]),
    "two producers": (
        "vision.layer",
        outputs("splitncnn_6", "43", "44", "43"),
        [r"blob 43 is made by 2 layers, but should be by 1"],
    ),
    "no producer": (
        "vision.layer",
        lambda files: files.change("add_7", inputs=("43", "600")),
        [r"blob 600 is made by 0 layers, .*", r"the outputs are \['48', 'out0'\], but should be \['out0'\]"],
    ),
    "read twice": (
        "vision.layer",
        drop("splitncnn_6", "42"),
        [r"blob 42 is read by 2 layers without a Split"],
    ),
    "input not isolated": (
        "vision.layer",
        drop("isolate_in3", "in3"),
        [r"layer sdpa_19 \(SDPA\) reads input in3 directly .*"],
    ),
    "fixed reshape": (
        "vision.layer",
        value("reshape_9", "2", "6"),
        [r"layer reshape_9 reshapes to fixed sizes only; a length is baked"],
    ),
    "traced length in Reshape": (
        "vision.layer",
        value("reshape_12", "6", '"48,37,0c"'),
        [r"layer reshape_12 \(Reshape\) holds the traced length 37; .*"],
    ),
    "traced length in Slice": (
        "llm.layer.dqkv",
        value("tensor_split_1", "-23300", "2,37,-233"),
        [r"layer tensor_split_1 \(Slice\) holds the traced length 37; .*"],
    ),
    "second traced length in Tile": (
        "llm.layer.dqkv",
        value("repeat_10", "-23302", "3,4,41,1"),
        [r"layer repeat_10 \(Tile\) holds the traced length 41; .*"],
    ),
    "multiple of a traced length": (
        "vision.tail",
        value("reshape_5", "6", '"192,148,0h"'),
        [r"layer reshape_5 \(Reshape\) holds the traced length 148; .*"],
    ),
    "rows of Gemm baked": (
        "vision.layer",
        value("gemm_0", "8", "37"),
        [r"layer gemm_0 \(Gemm\) holds the traced length 37; .*"],
    ),
    "another input": (
        "vision.layer",
        lambda files: (
            files.change("in3", outputs=("in4",)),  # type: ignore[func-returns-value]
            files.change("isolate_in3", inputs=("in4",)),  # type: ignore[func-returns-value]
        )[0],
        [r"the inputs are \['in0', 'in1', 'in2', 'in4'\], but should be .*'in3'\]"],
    ),
    "missing input": (
        "vision.layer",
        without_mask,
        [r"the inputs are \['in0', 'in1', 'in2'\], but should be \['in0', 'in1', 'in2', 'in3'\]"],
    ),
    "missing output": (
        "llm.layer.dqkv",
        outputs("cat_1", "99"),
        [r"the outputs are \['99', 'out0', 'out2'\], but should be \['out0', 'out1', 'out2'\]"],
    ),
    "MatMul": (
        "vision.layer",
        as_type("matmul_13", "BinaryOp"),
        [
            r"the graph holds 1 MatMul, but should hold 2",
            r"the graph holds 1 MatMul of MemoryData, but should hold 2",
        ],
    ),
    "no SDPA": (
        "llm.layer.dattn",
        as_type("sdpa_8", "MatMul"),
        [r"the graph holds 0 SDPA, but should hold 1", r"the graph holds 1 MatMul, but should hold 0"],
    ),
    "rotary MatMul": (
        "llm.layer.dqkv",
        rotary_by_input,
        [r"the graph holds 3 MatMul of MemoryData, but should hold 4"],
    ),
    "MemoryData": (
        "llm.layer.dqkv",
        constant_left_out,
        [
            r"the inputs are .*'in3'\], but should be \['in0', 'in1', 'in2'\]",
            r"the graph holds 1 MemoryData, but should hold 2",
            r"the graph holds 2 MatMul of MemoryData, but should hold 4",
        ],
    ),
    "Gemm": ("llm.layer.dqkv", inner_product, [r"the graph holds 3 Gemm, but should hold 4"]),
    "4 bytes short": ("vision.layer", cut(4), [r"the bin has \d+ bytes, but the param asks for \d+"]),
    "20 bytes short": ("vision.layer", cut(20), [r"the bin has \d+ bytes, but the param asks for \d+"]),
    "1 byte short": ("vision.layer", cut(1), [r"the bin has \d+ bytes, but the param asks for \d+"]),
    "4 bytes long": ("vision.layer", lengthen, [r"the bin has \d+ bytes, but the param asks for \d+"]),
    "half precision": (
        "vision.layer",
        half_precision,
        [r"the weights of layer gemm_3 are not stored as float32 \(storage word 0x01306b47\)"],
    ),
    "a size that is no number": (
        "vision.layer",
        value("gemm_3", "7", "many"),
        [r"the param does not parse: layer gemm_3 has 7=many, but should have a whole number"],
    ),
}


def files_of(exporter: Exporter, graph_id: str) -> Files:
    text = (exporter.graph(graph_id) / "graph.param").read_text(encoding="utf-8")
    return Files(param.parse(text), bytearray(bytes_of(exporter, graph_id)))


def bytes_of(exporter: Exporter, graph_id: str) -> bytes:
    return b"".join(path.read_bytes() for path in exporter.weights(graph_id))


def findings(exporter: Exporter, graph_id: str, text: str, weights: bytearray, folder: Path) -> list[str]:
    path = folder / "graph.bin"
    path.write_bytes(weights)
    return audit(exporter.graphs[graph_id].structure, text, path)


@pytest.mark.parametrize("name", FAULTS)
def test_audit_names_a_planted_fault(exporter: Exporter, tmp_path: Path, name: str) -> None:
    kind, edit, expected = FAULTS[name]
    files = files_of(exporter, KINDS[kind])
    assert findings(exporter, KINDS[kind], param.write(files.layers), files.weights, tmp_path) == []
    edit(files)
    found = findings(exporter, KINDS[kind], param.write(files.layers), files.weights, tmp_path)
    assert len(found) == len(expected), found
    for finding, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, finding), finding


BROKEN_PARAMS: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", r"line 1 is '', but should be 7767517"),
    "other magic": (lambda text: text.replace("7767517", "7767518"), r"line 1 is '7767518', .*"),
    "no more than magic": (lambda text: text[:7], r"line 2 counts '' layers and blobs, .*"),
    "a layer lost": (lambda text: text[: text.rindex("BinaryOp")], r"line 2 counts '42 51' .* '41 50'"),
    "cut in its last line": (lambda text: text[: text.rindex(" 43 ")], r"line 44 names 0 of its 3 blobs: .*"),
    "a parameter without a key": (lambda text: text.rstrip("\n") + " 7\n", r"line 44 is no layer: .*"),
}


@pytest.mark.parametrize("name", BROKEN_PARAMS)
def test_audit_names_the_line_that_does_not_parse(exporter: Exporter, tmp_path: Path, name: str) -> None:
    edit, expected = BROKEN_PARAMS[name]
    files = files_of(exporter, KINDS["vision.layer"])
    text = edit(param.write(files.layers))
    (found,) = findings(exporter, KINDS["vision.layer"], text, files.weights, tmp_path)
    assert re.fullmatch(f"the param does not parse: {expected}", found), found


def test_every_graph_passes_its_audit(exporter: Exporter) -> None:
    red = {}
    for graph_id, graph in exporter.graphs.items():
        folder = exporter.graph(graph_id)
        text = (folder / "graph.param").read_text(encoding="utf-8")
        red[graph_id] = audit(graph.structure, text, *exporter.weights(graph_id))
    assert len(red) == 149
    assert {graph_id: found for graph_id, found in red.items() if found} == {}


def test_every_llm_graph_rotates_by_four_products_with_two_constants(exporter: Exporter) -> None:
    found = {}
    for graph_id in exporter.graphs:
        if graph_id.endswith((".prefill", ".dqkv")):
            layers = files_of(exporter, graph_id).layers
            maker = {blob: layer for layer in layers for blob in layer.outputs}
            found[graph_id] = (
                sum(layer.type == "MemoryData" for layer in layers),
                sum(layer.type == "MatMul" and rotates(layer, maker) for layer in layers),
            )
    assert len(found) == 2 * 40
    assert set(found.values()) == {(2, 4)}


def rotates(product: Layer, maker: dict[str, Layer]) -> bool:
    """Whether the second factor is a constant, right away or through a Split."""
    source = maker[product.inputs[1]]
    return "MemoryData" in (source.type, *(maker[blob].type for blob in source.inputs))


# ---- conversion


@one_of_each
def test_learnt_layout_gives_the_bytes_of_a_conversion_with_the_real_weights(
    exporter: Exporter, tmp_path: Path, graph_id: str
) -> None:
    graph, folder = exporter.graphs[graph_id], exporter.graph(graph_id)
    module = exporter.rewritten(graph)
    text, weights = pnnx.convert(module, graph.structure, tmp_path)
    layers = param.tidy(text)
    assert param.write(linear.lay_out(layers)) == (folder / "graph.param").read_text(encoding="utf-8")
    entries = linear.lay_out_entries(layers, layout.learn(weights, param.blobs(layers), module))
    written = BytesIO()
    layout.write(written, entries, layout.tensors(module))
    assert written.getvalue() == bytes_of(exporter, graph_id)


def test_only_six_structures_are_converted(fresh: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = Counter[str]()
    convert = pnnx.convert

    def counted(module: nn.Module, structure: Structure, folder: Path) -> tuple[str, Path]:
        converted[structure.name] += 1
        return convert(module, structure, folder)

    monkeypatch.setattr(pnnx, "convert", counted)
    chosen = [graph_id for graph_id, graph in fresh.graphs.items() if graph.index in (None, 3, 26)]
    for graph_id in chosen:
        fresh.graph(graph_id)
    assert len(chosen) == 2 + 2 * 4
    assert converted == dict.fromkeys(KINDS, 1)
    assert Counter(built(fresh)) == {"structure": 6, "graph": 10, "weights": 8}
    assert len(fresh.graphs) == 149
    assert {graph.structure.name for graph in fresh.graphs.values()} == set(KINDS)


@pytest.mark.parametrize(
    ("expression", "params"),
    [
        ('"64,9,0h"', {"0": "64", "1": "9", "2": "-1"}),
        ('"576,0c"', {"0": "576", "1": "-1"}),
        ('"64,*(3,0h),3"', {"0": "64", "1": "-1", "2": "3"}),
        ('"0w,1,2,3"', {"0": "-1", "1": "1", "11": "2", "2": "3"}),
        ('"0w,0h,3"', {"6": '"0w,0h,3"'}),  # two dynamic parts stay
        ('"64,9"', {"6": '"64,9"'}),
    ],
)
def test_one_dynamic_part_of_a_reshape_is_written_plainly(expression: str, params: dict[str, str]) -> None:
    layer = param.Layer("Reshape", "r", ("a",), ("b",), {"6": expression})
    other = param.Layer("Gemm", "g", ("b",), ("c",), {"6": expression})
    plain = param.plain_reshapes([layer, other])
    assert (plain[0].params, plain[1]) == (params, other)


@one_of_each
@pytest.mark.parametrize("length", [1, 5, 40])
def test_graph_runs_at_any_length(workspace: Workspace, child: Isolated, graph_id: str, length: int) -> None:
    structure = workspace.graphs[graph_id].structure
    lengths = {name: length + 2 * place for place, name in enumerate(structure.length_names)}
    found = StoreRunner(workspace, child).run(graph_id, random_arrays(structure, lengths))
    assert {name: array.shape for name, array in found.items()} == {
        port.name: port.sizes(lengths) for port in structure.outputs
    }
    assert all(np.isfinite(array).all() for array in found.values())


def random_arrays(structure: Structure, lengths: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)
    return {port.name: random.standard_normal(port.sizes(lengths)).astype(np.float32) for port in structure.inputs}


class WithRepeatInterleave(youtu_vl.VisionEmbed):
    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values).repeat_interleave(2, dim=1)[:, ::2]


class WithMaskedFill(youtu_vl.VisionEmbed):
    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = super().forward(pixel_values)
        return hidden.masked_fill(hidden > 1e9, 0)


class WithExpand(youtu_vl.VisionEmbed):
    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = super().forward(pixel_values)
        return hidden + torch.zeros(1, 1, 1).expand(1, hidden.shape[1], 1)


class WithBakedLength(youtu_vl.VisionEmbed):
    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = super().forward(pixel_values)
        return hidden.reshape(1, int(hidden.shape[1]), 48)


class WithFixedShape(youtu_vl.VisionEmbed):
    """Right at the self-check's length; the trace cannot even run."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values).reshape(1, 6, 48)


REFUSED: dict[type[nn.Module], str] = {
    WithRepeatInterleave: r"pnnx wrote a layer of type 'torch\.repeat_interleave', which is not known",
    WithMaskedFill: r"pnnx wrote a layer of type '.*', which is not known",
    WithExpand: r"pnnx wrote a layer of type '.*', which is not known",
    WithBakedLength: r"torch cannot trace .* TracerWarning: Converting a tensor to a Python integer",
    WithFixedShape: r"torch cannot trace .* RuntimeError: shape '\[1, 6, 48\]' is invalid",
}


@pytest.mark.parametrize("rewrite", REFUSED)
def test_what_the_converter_cannot_do_is_refused(
    fresh: Exporter, monkeypatch: pytest.MonkeyPatch, rewrite: type[nn.Module]
) -> None:
    monkeypatch.setitem(youtu_vl.REWRITES, "vision.embed", rewrite)
    with pytest.raises(UnjudgedError, match=f"vision.embed: {REFUSED[rewrite]}") as refusal:
        fresh.graph(KINDS["vision.embed"])
    assert rewrite.__name__ in str(refusal.value)
    assert built(fresh) == []


CONVERTERS: dict[str, tuple[str, str]] = {
    "nonzero exit": (
        "echo some log; echo its reason >&2; exit 3",
        r"pnnx failed with exit code 3:\nsome log\nits reason",
    ),
    "crash": ("echo before; kill -SEGV $$", r"pnnx failed with exit code -11:\nbefore"),
    "no output": ("echo nothing written", r"pnnx failed with exit code 0:\nnothing written"),
    "no weights": ("touch graph.ncnn.param; echo half", r"pnnx failed with exit code 0:\nhalf"),
    "hang": ("exec sleep 60", r"pnnx did not finish in 0\.3 s"),
    "no param": (
        "touch graph.ncnn.param graph.ncnn.bin",
        r"line 1 is '', but should be 7767517; rewrite VisionEmbed in exporters/youtu_vl.py",
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the converter is a shell script")
@pytest.mark.parametrize("name", CONVERTERS)
def test_a_failing_converter_is_told_with_its_log(
    fresh: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script, expected = CONVERTERS[name]
    path = tmp_path / "converter"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(converter, "EXEC_PATH", str(path))
    monkeypatch.setattr(pnnx, "TIMEOUT_SECONDS", 0.3 if name == "hang" else 60)
    with pytest.raises(UnjudgedError, match=f"vision.embed: {expected}"):
        fresh.graph(KINDS["vision.embed"])
    assert built(fresh) == []


# ---- the self-check


def negated_rotation(module: Any) -> None:
    module.self_attn.rotate_half = -module.self_attn.rotate_half


def erf_gelu(module: Any) -> None:
    mlp = module.mlp
    mlp.forward = lambda x: mlp.fc2(F.gelu(mlp.fc1(x)))


def tanh_gelu(module: Any) -> None:
    module.merger.mlp[1] = nn.GELU(approximate="tanh")


def eps(*path: str) -> Mistake:
    def plant(module: Any) -> None:
        norm = module.get_submodule(".".join(path))
        assert norm.eps == 1e-6
        norm.eps = 1e-5

    return plant


def scale(module: Any) -> None:
    """The scores are a millionth too large."""
    rotate = module.self_attn.rotate
    module.self_attn.rotate = lambda *inputs: rotate(*inputs) * (1 + 0.5e-6)


def rotation_in_halves(module: Any) -> None:
    """The pairs are left where they are."""
    width = len(module.self_attn.deinterleave)
    module.self_attn.deinterleave = torch.eye(width)
    module.self_attn.deinterleave_rotate_half = youtu_vl.rotate_half_matrix(width)


def gate_for_up(module: Any) -> None:
    mlp = module.mlp
    mlp.forward = lambda x: mlp.down_proj(F.silu(mlp.up_proj(x)) * mlp.gate_proj(x))


def gate_without_swish(module: Any) -> None:
    mlp = module.mlp
    mlp.forward = lambda x: mlp.down_proj(torch.sigmoid(mlp.gate_proj(x)) * mlp.up_proj(x))


def mask_forgotten(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *inputs: forward(*inputs[:-1], torch.zeros_like(inputs[-1]))


# structure, output, mistake
MISTAKES: dict[str, tuple[str, str, Mistake]] = {
    "erf for tanh": ("vision.layer", "hidden", erf_gelu),
    "eps of norm1": ("vision.layer", "hidden", eps("layer_norm1")),
    "eps of norm2": ("vision.layer", "hidden", eps("layer_norm2")),
    "sign of the rotation": ("vision.layer", "hidden", negated_rotation),
    "scale of the scores": ("vision.layer", "hidden", scale),
    "vision mask": ("vision.layer", "hidden", mask_forgotten),
    "tanh for erf": ("vision.tail", "rows", tanh_gelu),
    "eps of the merger": ("vision.tail", "rows", eps("merger", "ln_q")),
    "rotation in halves": ("llm.layer.prefill", "hidden", rotation_in_halves),
    "gate for up": ("llm.layer.dattn", "hidden", gate_for_up),
    "gate without swish": ("llm.layer.prefill", "hidden", gate_without_swish),
    # the query's own norm takes the scale away again
    "eps of the first norm": ("llm.layer.dqkv", "key", eps("input_layernorm")),
    "eps of the query": ("llm.layer.dqkv", "query", eps("self_attn", "q_a_layernorm")),
    "eps of the latent": ("llm.layer.dqkv", "key", eps("self_attn", "kv_a_layernorm")),
    "eps of the second norm": ("llm.layer.dattn", "hidden", eps("post_attention_layernorm")),
    "decode mask": ("llm.layer.dattn", "hidden", mask_forgotten),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_rewrite_is_refused(fresh: Exporter, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    structure, output, mistake = MISTAKES[name]
    rewrite: Any = youtu_vl.REWRITES[structure]

    class Mistaken(rewrite):
        def __init__(self, sizes: Any) -> None:
            super().__init__(sizes)
            mistake(self)

    monkeypatch.setitem(youtu_vl.REWRITES, structure, Mistaken)
    with pytest.raises(UnjudgedError) as refusal:
        fresh.graph(KINDS[structure])
    message = str(refusal.value)
    assert re.fullmatch(
        rf"{KINDS[structure]}: output {output} of the rewritten layer differs from the reference's: "
        r"rel_l2 \d\.\de[+-]\d\d, but should be <= 1e-09; mend Mistaken in exporters/youtu_vl\.py",
        message,
    ), message
    assert built(fresh) == []


def test_a_tensor_that_no_prefix_fits_is_told(fresh: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(youtu_vl.VisionTail, "PREFIXES", {"merger.": "merger."})
    with pytest.raises(UnjudgedError, match=r"vision.tail: no prefix of VisionTail.PREFIXES fits .* post_lay"):
        fresh.graph(KINDS["vision.tail"])


# ---- the param text


@one_of_each
def test_param_text_survives_a_round_trip(exporter: Exporter, graph_id: str) -> None:
    text = (exporter.graph(graph_id) / "graph.param").read_text(encoding="utf-8")
    layers = param.parse(text)
    assert param.write(layers) == text
    assert param.parse(param.write(layers)) == layers


def split(name: str, source: str, *outputs: str) -> Layer:
    return Layer("Split", name, (source,), outputs, {})


def test_unique_names_renames_the_later_ones_only() -> None:
    layers = [split(name, "x", "y") for name in ("a", "b", "a", "a_u1", "a", "b")]
    names = [layer.name for layer in param.unique_names(layers)]
    assert names == ["a", "b", "a_u2", "a_u1", "a_u3", "b_u1"]
    assert [replace(layer, name="") for layer in param.unique_names(layers)] == [
        replace(layer, name="") for layer in layers
    ]


def test_isolate_inputs_puts_a_split_behind_each_bare_input_once() -> None:
    layers = [
        Layer("Input", "in0", (), ("in0",), {}),
        Layer("Input", "in1", (), ("in1",), {}),
        split("s", "in1", "a", "b"),
        Layer("BinaryOp", "add", ("in0", "a"), ("c",), {}),
        Layer("BinaryOp", "mul", ("c", "b"), ("out0",), {}),
    ]
    isolated = param.isolate_inputs(layers)
    assert isolated[1] == split("isolate_in0", "in0", "in0_isolated")
    assert isolated[4] == replace(layers[3], inputs=("in0_isolated", "a"))
    assert [*isolated[:1], *isolated[2:4], *isolated[5:]] == [*layers[:3], *layers[4:]]
    assert param.isolate_inputs(isolated) == isolated


def test_blobs_names_a_type_that_it_does_not_know() -> None:
    with pytest.raises(KeyError, match="Convolution"):
        param.blobs([Layer("Convolution", "c", (), (), {})])


# ---- the layout


def probe(folder: Path, change: Callable[[list[np.ndarray]], None]) -> tuple[Path, nn.Module]:
    """The .bin of one Linear as pnnx writes it, changed."""
    module = nn.Linear(3, 2)
    layout.set_probe_weights(module)
    runs = [np.zeros(1, np.float32), module.weight.detach().numpy().copy().ravel()]
    runs += [np.zeros(1, np.float32), module.bias.detach().numpy().copy()]
    change(runs)
    path = folder / "probe.bin"
    path.write_bytes(b"".join(run.tobytes() for run in runs))
    return path, module


GEMM = param.blobs([Layer("Gemm", "gemm_0", (), (), {"5": "1", "6": "1", "8": "2", "9": "3", "10": "4"})])


def test_learn_finds_every_tensor(tmp_path: Path) -> None:
    path, module = probe(tmp_path, lambda runs: None)
    weight, bias = layout.learn(path, GEMM, module)
    assert (weight.tensor, weight.transposed, weight.flagged) == ("weight", False, True)
    assert (bias.tensor, bias.transposed, bias.flagged) == ("bias", False, True)


def transpose(runs: list[np.ndarray]) -> None:
    runs[1] = runs[1].reshape(2, 3).T.ravel()


def test_learn_finds_a_transposed_tensor_and_writes_it_so(tmp_path: Path) -> None:
    path, module = probe(tmp_path, transpose)
    entries = layout.learn(path, GEMM, module)
    assert [entry.transposed for entry in entries] == [True, False]
    with (tmp_path / "written.bin").open("wb") as file:
        layout.write(file, entries, layout.tensors(module))
    assert (tmp_path / "written.bin").read_bytes() == path.read_bytes()


def scale_weight(runs: list[np.ndarray]) -> None:
    runs[1] *= 2


def one_bit(runs: list[np.ndarray]) -> None:
    runs[3].view(np.uint32)[1] ^= 1


def one_number_more(runs: list[np.ndarray]) -> None:
    runs.append(np.zeros(1, np.float32))


def half_a_number_more(runs: list[np.ndarray]) -> None:
    runs.append(np.zeros(1, np.float16))


def bias_left_out(runs: list[np.ndarray]) -> None:
    del runs[2:]


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        (scale_weight, 2, "the 6 numbers of ncnn layer gemm_0 equal no tensor of the rewritten layer"),
        (one_bit, 2, "the 2 numbers of ncnn layer gemm_0 equal no tensor of the rewritten layer"),
        (one_number_more, 2, "pnnx wrote 44 bytes of weights, but its param asks for 40"),
        (half_a_number_more, 2, "pnnx wrote 42 bytes of weights, but its param asks for 40"),
        (bias_left_out, 2, "pnnx wrote 28 bytes of weights, but its param asks for 40"),
        (bias_left_out, 1, r"pnnx left out the tensors \['bias'\]"),
    ],
)
def test_learn_refuses(tmp_path: Path, change: Callable[[list[np.ndarray]], None], count: int, message: str) -> None:
    path, module = probe(tmp_path, change)
    with pytest.raises(UnjudgedError, match=message):
        layout.learn(path, GEMM[:count], module)


def test_probe_weights_are_all_different(exporter: Exporter) -> None:
    for graph_id in KINDS.values():
        module = exporter.new_module(exporter.graphs[graph_id].structure)
        layout.set_probe_weights(module)
        # Single numbers may meet by chance; runs of them may not.
        values = [array.tobytes() for array in layout.tensors(module).values()]
        assert len(set(values)) == len(values)


# ---- the lengths of the traces

dims = st.one_of(
    st.integers(1, 300), st.sampled_from(["T", "L", "cells", "4*cells", "4*T", "2*L"]).map(lambda name: name)
)
ports = st.lists(dims, min_size=1, max_size=4).map(lambda shape: Port("x", tuple(shape)))
every_structure = [structure for profile in PROFILES.values() for structure in structures(sizes(profile)).values()]


def check_lengths(structure: Structure) -> None:
    first, second = pnnx.trace_lengths(structure)
    assert set(first) == set(second) == set(structure.length_names)
    shape = {dim for port in structure.inputs + structure.outputs for dim in port.shape}
    dynamic = Port("", tuple(dim for dim in shape if isinstance(dim, str)))
    found = [*dynamic.sizes(first), *dynamic.sizes(second)]
    assert len(set(found)) == len(found)
    assert not {dim for dim in shape if isinstance(dim, int)} & set(found)
    assert pnnx.traced_sizes(structure) == set(found)


@pytest.mark.parametrize("structure", every_structure, ids=lambda structure: structure.name)
def test_traces_tell_every_length_from_every_size(structure: Structure) -> None:
    check_lengths(structure)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(ports, min_size=1, max_size=5))
def test_traces_tell_every_length_from_every_size_of_any_structure(inputs: list[Port]) -> None:
    check_lengths(Structure("any", tuple(inputs), (), {}))
