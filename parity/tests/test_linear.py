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


def run(layers: list[Layer], weights: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    net = ncnn.Net()
    set_fp32_options(net.opt, 1)
    checked(net.load_param_mem(param.write(layers)), "param")
    checked(net.load_model(str(weights)), "weights")
    extractor = net.create_extractor()
    mat = to_mat(x, rank=2, where="x")
    checked(extractor.input("in0", mat), "input")
    code, out = extractor.extract("out0")
    checked(code, "output")
    return from_mat(out, rank=2, where="out")


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
