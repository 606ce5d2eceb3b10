"""Linears as exported graphs hold them: the same sums as torch's, the weights where the layout says, less rounding."""

from dataclasses import replace
from pathlib import Path

import ncnn
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from exporters import layout, linear, param
from exporters.audit import audit
from exporters.layout import Entry
from exporters.param import Layer
from harness.graphs import Port, Structure
from runtime.graphs import checked, set_fp32_options
from runtime.mat import from_mat, to_mat

OUTPUTS = 24


def pnnx_linear(inputs: int, bias: bool) -> list[Layer]:
    """A Linear as pnnx writes it."""
    params = {"10": "4" if bias else "-1", "2": "0", "3": "1", "4": "0", "5": "1", "6": "1", "7": "0"}
    sizes = {"8": str(OUTPUTS), "9": str(inputs)}
    return [
        Layer("Input", "in0", (), ("in0",), {}),
        Layer("Gemm", "gemm_0", ("in0",), ("out0",), params | sizes),
    ]


def pnnx_entries(bias: bool) -> list[Entry]:
    weight = Entry("weight", False, True, begins=True)
    return [weight, Entry("bias", False, True)] if bias else [weight]


def run(
    layers: list[Layer], weights: Path, x: NDArray[np.float32], blob: str = "out0", rank: int = 2
) -> NDArray[np.float32]:
    net = ncnn.Net()
    set_fp32_options(net.opt, 1)
    checked(net.load_param_mem(param.write(layers)), "param")
    checked(net.load_model(str(weights)), "weights")
    extractor = net.create_extractor()
    mat = to_mat(x, rank=2, where="x")
    checked(extractor.input("in0", mat), "input")
    code, out = extractor.extract(blob)
    checked(code, blob)
    return from_mat(out, rank=rank, where=blob)


def written(folder: Path, layers: list[Layer], module: nn.Linear) -> Path:
    """The .bin of a Linear laid out anew."""
    path = folder / "linear.bin"
    entries = linear.lay_out_entries(layers, pnnx_entries(module.bias is not None))
    with path.open("wb") as file:
        layout.write(file, entries, layout.tensors(module))
    assert path.stat().st_size == sum(blob.nbytes for blob in param.blobs(linear.lay_out(layers)))
    for name, value in layout.read(path, entries, layout.tensors(module)).items():
        assert np.array_equal(value, layout.tensors(module)[name])
    return path


@given(st.integers(1, 40_000))
def test_panels_are_even_whole_registers_and_all_of_the_inputs(inputs: int) -> None:
    widths = linear.panels(inputs)
    assert sum(widths) == inputs
    assert max(widths) <= linear.PANEL
    assert max(widths) - min(widths) < 2 * linear.STEP
    assert all(width % linear.STEP == 0 for width in widths[:-1])


@given(st.integers(1, 40_000))
def test_tiles_of_a_weight_are_even_in_number_and_fit_the_cache(outputs: int) -> None:
    (_, gemm) = pnnx_linear(64, bias=False)
    params = linear.lay_out([replace(gemm, params=gemm.params | {"8": str(outputs)})])[0].params
    tile = int(params["20"])
    count = -(-outputs // tile)
    assert tile <= linear.TILE_OUTPUTS
    assert tile % linear.STEP == 0
    assert count % 2 == 0 or count > 16 or outputs <= linear.STEP
    assert 4 * int(params["22"]) * (int(params["21"]) + linear.STEP) <= 32 << 10  # of both factors, in the first cache


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [7, linear.PANEL, linear.PANEL + 1, 2560])
def test_a_linear_laid_out_anew_gives_torchs_sums(tmp_path: Path, inputs: int, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(inputs, OUTPUTS, bias=bias), torch.randn(rows, inputs)
    layers = pnnx_linear(inputs, bias)
    actual = run(linear.lay_out(layers), written(tmp_path, layers, module), x.numpy())
    expected = module.double()(x.double()).detach().numpy()
    assert np.linalg.norm(actual - expected) <= 1e-6 * np.linalg.norm(expected)


def test_panels_halve_the_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = 4 * linear.PANEL
    module, x = nn.Linear(inputs, OUTPUTS, bias=False), torch.randn(64, inputs)
    layers = pnnx_linear(inputs, bias=False)
    expected = (x.double() @ module.weight.double().T).detach().numpy()

    def error(actual: NDArray[np.float32]) -> float:
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))

    panelled = error(run(linear.lay_out(layers), written(tmp_path, layers, module), x.numpy()))
    (tmp_path / "whole.bin").write_bytes(bytes(4) + module.weight.detach().numpy().tobytes())
    whole = error(run(layers, tmp_path / "whole.bin", x.numpy()))
    assert panelled < 0.6 * whole


INPUTS, INNER = 700, 1300  # two panels, three panels


def gemm(name: str, source: str, product: str, inputs: int, outputs: int) -> Layer:
    params = {"10": "4", "2": "0", "3": "1", "4": "0", "5": "1", "6": "1", "7": "0"}
    return Layer("Gemm", name, (source,), (product,), params | {"8": str(outputs), "9": str(inputs)})


def mlp() -> list[Layer]:
    """A gated MLP as pnnx writes it."""
    return [
        Layer("Input", "in0", (), ("in0",), {}),
        Layer("Split", "split", ("in0",), ("a", "b"), {}),
        gemm("gate", "a", "1", INPUTS, INNER),
        Layer("Swish", "silu", ("1",), ("2",), {}),
        gemm("up", "b", "3", INPUTS, INNER),
        Layer("BinaryOp", "mul", ("2", "3"), ("4",), {"0": "2"}),
        gemm("down", "4", "out0", INNER, OUTPUTS),
    ]


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_between_the_linears_of_an_mlp_rows_stand_as_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    torch.manual_seed(rows)
    modules = {"gate": nn.Linear(INPUTS, INNER), "up": nn.Linear(INPUTS, INNER), "down": nn.Linear(INNER, OUTPUTS)}
    layers = mlp()
    entries = [Entry(f"{name}.{part}", False, True) for name in modules for part in ("weight", "bias")]
    values = layout.tensors(nn.ModuleDict(modules))
    path = tmp_path / "mlp.bin"
    with path.open("wb") as file:
        layout.write(file, linear.lay_out_entries(layers, entries), values)
    x = torch.randn(rows, INPUTS)
    turned = run(linear.lay_out(layers), path, x.numpy())
    assert linear._turned(layers) == {"1", "2", "3", "4"}
    assert run(linear.lay_out(layers), path, x.numpy(), "4", rank=3).shape == (INNER, 1, rows)  # channels
    monkeypatch.setattr(linear, "_turned", lambda layers: set())
    plain = run(linear.lay_out(layers), path, x.numpy())
    assert np.linalg.norm(turned - plain) < 1e-6 * np.linalg.norm(plain)  # the last numbers of a row round otherwise
    with torch.no_grad():
        expected = modules["down"](nn.functional.silu(modules["gate"](x)) * modules["up"](x))
    assert np.linalg.norm(turned - expected.numpy()) < 2e-6 * expected.norm()


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_where_rows_are_split_into_heads_each_is_a_channel(tmp_path: Path, rows: int) -> None:
    torch.manual_seed(rows)
    module = nn.Linear(INPUTS, OUTPUTS)
    source, gemm = pnnx_linear(INPUTS, bias=True)
    reshape = Layer("Reshape", "heads", ("1",), ("2",), {"0": "6", "1": "4", "2": "-1"})
    flat = Layer("Reshape", "flat", ("2",), ("out0",), {"0": str(OUTPUTS), "1": "-1"})
    layers = [source, replace(gemm, outputs=("1",)), reshape, flat]
    path, x = written(tmp_path, layers, module), torch.randn(rows, INPUTS)
    assert run(linear.lay_out(layers), path, x.numpy(), "1", rank=3).shape == (rows, 1, OUTPUTS)
    assert run(linear.lay_out(layers), path, x.numpy(), "2", rank=3).shape == (rows, 4, 6)
    actual = run(linear.lay_out(layers), path, x.numpy())
    expected = module(x).detach().numpy()
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)


def edited(name: str, **fields: object) -> list[Layer]:
    return [replace(layer, **fields) if layer.name == name else layer for layer in mlp()]  # type: ignore[arg-type]


def outer(layers: list[Layer]) -> list[Layer]:
    return [Layer("Input", "in1", (), ("in1",), {}), *layers]


@pytest.mark.parametrize(
    ("layers", "turned"),
    [
        pytest.param(mlp()[:-1], set(), id="the product is the graph's output"),
        pytest.param(edited("down", type="RMSNorm"), set(), id="a norm reads the product"),
        pytest.param(outer(edited("mul", inputs=("2", "in1"))), set(), id="an input takes part"),
        pytest.param(edited("silu", type="Softmax"), set(), id="the activation is not element-wise"),
        pytest.param([*mlp()[:-1], Layer("Split", "two", ("4",), ("x", "y"), {})], set(), id="a Split reads it"),
        pytest.param(edited("silu", type="GELU"), {"1", "2", "3", "4"}, id="GELU"),
        pytest.param(
            [mlp()[0], gemm("fc1", "in0", "1", 8, 8), gemm("fc2", "1", "out0", 8, 8)], {"1"}, id="two Linears in a row"
        ),
    ],
)
def test_only_what_lies_between_linears_is_turned(layers: list[Layer], turned: set[str]) -> None:
    assert linear._turned(layers) == turned


def test_a_file_begins_with_the_first_panel_alone() -> None:
    entries = linear.lay_out_entries(pnnx_linear(1500, bias=True), pnnx_entries(bias=True))
    assert [(entry.tensor, entry.begins, entry.columns) for entry in entries] == [
        ("weight", True, (0, 512)),
        ("bias", False, None),
        ("weight", False, (512, 1008)),
        ("weight", False, (1008, 1500)),
    ]


@pytest.mark.parametrize("key", ["2", "3", "4", "5", "6"])
def test_another_gemm_stays_as_it_is(key: str) -> None:
    source, gemm = pnnx_linear(2560, bias=False)
    other = Layer("Gemm", "gemm_0", gemm.inputs, gemm.outputs, gemm.params | {key: str(1 - int(gemm.params[key]))})
    assert linear.lay_out([source, other]) == [source, other]
    narrow = Layer("MatMul", "matmul_0", ("a", "b"), ("c",), {})
    assert linear.lay_out([narrow]) == [narrow]


@pytest.mark.parametrize("missing", ["Slice", "Gemm"])
def test_a_sum_of_other_blobs_is_no_linear(missing: str) -> None:
    laid_out = linear.lay_out(pnnx_linear(1500, bias=True))
    makers = {name: layer for layer in laid_out for name in layer.outputs}
    inner = linear.inner_blobs(laid_out[-1], makers)
    assert sorted(inner) == sorted(makers.keys() - {"in0", "out0"})
    assert linear.inner_blobs(laid_out[1], makers) == []
    makers |= {name: replace(layer, type="Swish") for name, layer in makers.items() if layer.type == missing}
    assert linear.inner_blobs(laid_out[-1], makers) == []
    assert linear.inner_blobs(laid_out[-1], {}) == []


def test_the_census_counts_linears(tmp_path: Path) -> None:
    module = nn.Linear(2560, OUTPUTS)
    layers = pnnx_linear(2560, bias=True)
    split = Layer("Split", "split", ("in0",), ("x",), {})
    layers = [layers[0], split, replace(layers[1], inputs=("x",))]
    weights = written(tmp_path, layers, module)
    ports = {"inputs": (Port("x", ("T", 2560)),), "outputs": (Port("y", ("T", OUTPUTS)),)}
    text = param.write(linear.lay_out(layers))
    assert audit(Structure("linear", **ports, census={"Gemm": 1, "Slice": 0}), text, weights) == []
    assert audit(Structure("linear", **ports, census={"Gemm": 2, "Slice": 1}), text, weights) == [
        "the graph holds 1 Gemm, but should hold 2",
        "the graph holds 0 Slice, but should hold 1",
    ]
