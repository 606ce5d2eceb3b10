"""Claim: each part of the runtime keeps its word: memory, loading, weight modes, caches, stopping, text."""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ncnn
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from harness.metrics import measure
from parity.workspace import Choice, Workspace
from references.youtu_vl.source import CHAT_TEMPLATE
from runtime import table as runtime_table
from runtime.chat import ChatTemplate
from runtime.errors import InputError
from runtime.graphs import (
    MODES,
    OFF_IN_FP32,
    Arrays,
    Graph,
    Manifest,
    NcnnRunner,
    Port,
    check_inputs,
    load_net,
    set_fp32_options,
)
from runtime.kv_cache import KVCache
from runtime.mat import empty, first_rows, from_mat, to_mat
from runtime.rope import rotary_tables
from runtime.table import Table
from runtime.youtu_vl import Pipeline

Floats = NDArray[np.float32]
PROMPT = "Write one sentence about numbers."


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.read(Workspace(Choice("youtu_vl")).exporter.model_folder())


@pytest.fixture(scope="module")
def runner(manifest: Manifest) -> NcnnRunner:
    return NcnnRunner(manifest)


@pytest.fixture
def pipeline(manifest: Manifest, runner: NcnnRunner) -> Pipeline:
    return Pipeline(manifest, runner, context=256)


@pytest.fixture
def own(manifest: Manifest, tmp_path: Path) -> Manifest:
    """A copy of the folder without its graphs, to be altered."""
    for path in manifest.folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return replace(manifest, folder=tmp_path, files={})


class Watched:
    """A runner that tells what it is given."""

    def __init__(self, runner: NcnnRunner) -> None:
        self.runner, self.threads = runner, runner.threads
        self.shapes: list[tuple[str, dict[str, tuple[int, ...]]]] = []
        self.nets: set[int] = set()

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        self.shapes.append((graph_id, {name: array.shape for name, array in inputs.items()}))
        outputs = self.runner.run(graph_id, inputs)
        self.nets.add(len(self.runner._nets))
        return outputs


class Untouchable:
    """A runner that must not be asked."""

    threads = 1

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        raise AssertionError(f"{graph_id} was run")


# ---- Mats


def _array(*shape: int) -> Floats:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (_array(2, 3).astype(np.float64), "dtype float64, but should be float32"),
        (_array(2, 3).astype(np.float16), "dtype float16, but should be float32"),
        (_array(2, 3).astype(np.int64), "dtype int64, but should be float32"),
        (_array(6), r"shape \(6,\), but should have 2 axes"),
        (_array(1, 2, 3), r"shape \(1, 2, 3\), but should have 2 axes"),
        (_array(2, 3).T, "not contiguous; pass numpy.ascontiguousarray"),
        (_array(2, 6)[:, ::2], "not contiguous"),
        (_array(0, 3), "empty"),
    ],
)
def test_an_array_that_ncnn_would_misread_is_refused(array: NDArray[Any], said: str) -> None:
    with pytest.raises(InputError, match=f"^some input .*{said}"):
        to_mat(array, rank=2, where="some input")


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1), (2, 3, 4), (4, 1, 7)])
def test_numbers_come_back_as_they_went(shape: tuple[int, ...]) -> None:
    back = from_mat(to_mat(_array(*shape), rank=len(shape), where="in"), rank=len(shape), where="out")

    assert back.dtype == np.float32
    assert np.array_equal(back, _array(*shape))


def test_a_mat_owns_its_memory() -> None:
    array = _array(64, 64)
    mat = to_mat(array, rank=2, where="in")
    array[:] = -1
    freed = to_mat(_array(64, 64), rank=2, where="in")
    gc.collect()
    _junk = [np.full((64, 64), 7, np.float32) for _ in range(64)]

    assert np.array_equal(from_mat(mat, rank=2, where="out"), _array(64, 64))
    assert np.array_equal(from_mat(freed, rank=2, where="out"), _array(64, 64))


def test_an_array_owns_its_memory() -> None:
    mat = to_mat(_array(2, 3), rank=2, where="in")
    array = from_mat(mat, rank=2, where="out")
    mat.fill(0.0)
    del mat

    assert np.array_equal(array, _array(2, 3))


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 16, 35, 36])
def test_an_array_of_ncnns_memory_goes_in_without_a_copy_and_stays_as_it_is(rows: int, tmp_path: Path) -> None:
    array = empty(2, rows, 12)
    array[:] = -1
    (tmp_path / "p").write_text("7767517\n2 2\nInput in0 0 1 in0\nReLU r 1 1 in0 out0\n", encoding="utf-8")
    net = ncnn.Net()
    assert net.load_param(str(tmp_path / "p")) == 0
    extractor = net.create_extractor()
    mat = to_mat(array, rank=3, where="in")
    assert np.shares_memory(np.asarray(mat), array)
    assert extractor.input("in0", mat) == 0
    code, out = extractor.extract("out0")  # ReLU writes in place where it may

    assert code == 0
    assert (np.asarray(out) == 0).all()
    assert (array == -1).all()


def test_the_first_rows_of_a_buffer_are_its_memory() -> None:
    array = empty(2, 5, 3)
    array[:] = _array(2, 5, 3)
    back = from_mat(first_rows(array, 4), rank=3, where="out")

    assert np.array_equal(back, array[:, :4])
    assert np.shares_memory(np.asarray(first_rows(array, 4)), array)


def test_leading_axes_of_one_are_dropped_and_others_refused() -> None:
    mat = to_mat(_array(1, 2, 3), rank=3, where="in")

    assert from_mat(mat, rank=2, where="out").shape == (2, 3)
    with pytest.raises(InputError, match=r"some output has shape \(1, 2, 3\), but should have 1 axes"):
        from_mat(mat, rank=1, where="some output")
    with pytest.raises(InputError, match="but should have 4 axes"):
        from_mat(mat, rank=4, where="some output")


# ---- options and loading


def test_every_switch_that_leaves_fp32_is_off() -> None:
    option = ncnn.Net().opt
    for name in OFF_IN_FP32:
        setattr(option, name, True)
    set_fp32_options(option, threads=1)
    rounding = [name for name in dir(option) if name.startswith(("use_fp16", "use_bf16", "use_int8"))]

    assert option.num_threads == 1
    assert len(rounding) >= 9
    assert [name for name in [*rounding, *OFF_IN_FP32] if getattr(option, name)] == []


def test_a_net_is_loaded_with_the_switches_off(manifest: Manifest) -> None:
    graph = manifest.graphs["youtu_vl/vision.embed"]
    net = load_net(manifest.folder, graph, threads=1, verify=True)

    assert [name for name in OFF_IN_FP32 if getattr(net.opt, name)] == []


def test_an_ncnn_without_one_of_the_switches_is_refused() -> None:
    option = SimpleNamespace(**dict.fromkeys(OFF_IN_FP32[1:], True))
    with pytest.raises(InputError, match=f"no option {OFF_IN_FP32[0]}; install the release"):
        set_fp32_options(option, threads=1)


@pytest.fixture
def embed(manifest: Manifest, tmp_path: Path) -> tuple[Path, Graph]:
    """A copy of one graph's files, to be damaged."""
    graph = manifest.graphs["youtu_vl/vision.embed"]
    for name in (graph.param, *graph.weights):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((manifest.folder / name).read_bytes())
    return tmp_path, graph


@pytest.mark.parametrize("suffix", ["param", "bin"])
def test_a_missing_file_of_a_graph_is_refused(embed: tuple[Path, Graph], suffix: str) -> None:
    folder, graph = embed
    path = folder / f"{graph.id}.{suffix}"
    path.unlink()
    with pytest.raises(InputError, match=rf"{graph.id}: .*vision.embed.{suffix} is missing; export the model"):
        load_net(folder, graph, threads=1, verify=False)


@pytest.mark.parametrize("suffix", ["param", "bin"])
@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + b"\0" * 4], ids=["cut", "longer"])
def test_a_file_of_another_hash_is_refused(embed: tuple[Path, Graph], suffix: str, change: Any) -> None:
    folder, graph = embed
    path = folder / f"{graph.id}.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=rf"vision.embed.{suffix} is not the file that manifest.json lists"):
        load_net(folder, graph, threads=1, verify=True)


def test_a_short_bin_is_refused_by_its_return_code(embed: tuple[Path, Graph]) -> None:
    folder, graph = embed
    path = folder / graph.weights[0]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"ncnn cannot load .*vision.embed.bin \(code -\d+\); export the model again"):
        load_net(folder, graph, threads=1, verify=False)


@pytest.mark.parametrize("text", ["", "garbage\n", "7767517\n1 1\nNoSuchLayer a 0 1 in0\n"])
def test_a_garbage_param_is_refused_by_its_return_code(embed: tuple[Path, Graph], text: str) -> None:
    folder, graph = embed
    (folder / graph.param).write_text(text, encoding="utf-8")
    with pytest.raises(
        InputError, match=r"ncnn cannot load .*vision.embed.param \(code -\d+\); export the model again"
    ):
        load_net(folder, graph, threads=1, verify=False)


@pytest.mark.parametrize(("old", "kind"), [("in0", "in"), ("out0", "out")])
def test_a_param_with_other_blob_names_is_refused(embed: tuple[Path, Graph], old: str, kind: str) -> None:
    folder, graph = embed
    path = folder / graph.param
    path.write_text(path.read_text(encoding="utf-8").replace(old, f"{kind}7"), encoding="utf-8")
    with pytest.raises(InputError, match=rf"the {kind}puts of .* are \['{kind}7'\], but should be \['{kind}0'\]"):
        load_net(folder, graph, threads=1, verify=False)


def _one_layer(folder: Path, layer: str, ports: int = 1) -> NcnnRunner:
    """A runner over one graph of one layer without weights: in0 (rows, 4) -> out0."""
    (folder / "g.param").write_text(f"7767517\n2 2\nInput in0 0 1 in0\n{layer} 1 1 in0 out0\n", encoding="utf-8")
    (folder / "g.bin").write_bytes(b"")
    outputs = tuple(Port(f"out{number}", ("rows", 4)) for number in range(ports))
    graph = Graph("made/up", "g.param", ("g.bin",), (Port("x", ("rows", 4)),), outputs, {})
    return NcnnRunner(Manifest(folder, "made", "", {graph.id: graph}, {}, {}), verify=False)


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 35])
def test_an_in_place_layer_on_an_input_leaves_the_callers_array_alone(tmp_path: Path, rows: int) -> None:
    given = _array(rows, 4) - 3
    kept = given.copy()
    outputs = _one_layer(tmp_path, "ReLU relu").run("made/up", {"x": given})

    assert np.array_equal(outputs["out0"], np.maximum(kept, 0))
    assert np.array_equal(given, kept)


def test_nan_in_an_output_is_refused_where_that_is_asked(tmp_path: Path) -> None:
    runner = _one_layer(tmp_path, "BinaryOp add")
    given = _array(2, 4)
    given[1, 2] = np.nan

    (tmp_path / "g.param").write_text("7767517\n2 2\nInput in0 0 1 in0\nBinaryOp a 1 1 in0 out0 0=0 1=1 2=1.0\n")
    assert np.isnan(runner.run("made/up", {"x": given})["out0"]).sum() == 1
    runner.finite = True
    with pytest.raises(InputError, match=r"made/up output out0 holds 1 NaN or Inf; find the cause: python -m parity"):
        runner.run("made/up", {"x": given})


def test_an_unknown_graph_is_refused(runner: NcnnRunner) -> None:
    with pytest.raises(InputError, match=r"graph youtu_vl/nothing is not in .*manifest.json"):
        runner.run("youtu_vl/nothing", {})


def test_an_unknown_weight_mode_is_refused(manifest: Manifest) -> None:
    with pytest.raises(InputError, match="weight mode is 'nonsense', but should be one of resident, streaming"):
        NcnnRunner(manifest, mode="nonsense")


def test_a_file_beside_the_graphs_that_was_altered_is_refused(manifest: Manifest, own: Manifest) -> None:
    for name in manifest.files:
        (own.folder / name).write_bytes(b"")
        with pytest.raises(InputError, match=rf"{name} is not the file that manifest.json lists \(other hash\)"):
            NcnnRunner(replace(own, files={name: manifest.files[name]}))
        (own.folder / name).unlink()
        with pytest.raises(InputError, match=rf"{name} is missing; export the model again"):
            NcnnRunner(replace(own, files={name: manifest.files[name]}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"graphs": [{}]}', '{"graphs": 1}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"manifest.json is no manifest of an exported model .*export the model again"):
        Manifest.read(tmp_path)


# ---- inputs


GRAPH = Graph(
    "made/up",
    "",
    (),
    (Port("a", ("T", 4)), Port("b", (1, "T", "L")), Port("c", ("4*T", 2))),
    (),
    {},
)


def _inputs(**shapes: tuple[int, ...]) -> Arrays:
    fitting = {"a": (3, 4), "b": (1, 3, 7), "c": (12, 2)}
    return {name: np.zeros(shape, np.float32) for name, shape in (fitting | shapes).items()}


def test_fitting_inputs_pass() -> None:
    check_inputs(GRAPH, _inputs())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"a": (3, 5)}, r"input a has shape \(3, 5\), but should be \('T', 4\)"),
        ({"a": (3,)}, r"input a has shape \(3,\)"),
        ({"a": (1, 3, 4)}, r"input a has shape \(1, 3, 4\)"),
        ({"b": (1, 2, 7)}, r"input b has shape \(1, 2, 7\), but should be \(1, 'T', 'L'\) T=3"),
        ({"b": (2, 3, 7)}, r"input b has shape \(2, 3, 7\)"),
        ({"c": (13, 2)}, r"input c has shape \(13, 2\), but should be \('4\*T', 2\)"),
        ({"c": (16, 2)}, r"input c has shape \(16, 2\), but should be \('4\*T', 2\) T=3"),
        ({"d": (1,)}, r"was given the inputs \['a', 'b', 'c', 'd'\], but takes \['a', 'b', 'c'\]"),
    ],
)
def test_inputs_of_another_shape_are_refused(wrong: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(InputError, match=f"^made/up {said}"):
        check_inputs(GRAPH, _inputs(**wrong))


def test_an_empty_input_is_refused(runner: NcnnRunner) -> None:
    with pytest.raises(InputError, match=r"vision.embed input pixel_values has shape \(0, 768\): it is empty"):
        runner.run("youtu_vl/vision.embed", {"pixel_values": np.zeros((0, 768), np.float32)})


# ---- weight modes


def test_streaming_gives_the_bits_of_resident_and_holds_one_net(manifest: Manifest) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)
    made, held = {}, {}
    for mode in MODES:
        watched = Watched(NcnnRunner(manifest, mode=mode))
        tokens = list(Pipeline(manifest, watched, context=256).generate([picture], PROMPT, 2))
        made[mode] = np.stack([token.logits for token in tokens])
        held[mode] = max(watched.nets)

    assert made["streaming"].tobytes() == made["resident"].tobytes()
    assert held == {"streaming": 1, "resident": 149}


def test_a_graphs_files_are_hashed_once(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = NcnnRunner(manifest, mode="streaming")
    asked: list[tuple[str, bool]] = []

    def load(folder: Path, graph: Graph, *, threads: int, verify: bool) -> ncnn.Net:
        asked.append((graph.id[-5:], verify))
        return load_net(folder, graph, threads=threads, verify=verify)

    monkeypatch.setattr("runtime.graphs.load_net", load)
    for graph_id in ("youtu_vl/vision.embed", "youtu_vl/vision.tail", "youtu_vl/vision.embed"):
        (port,) = manifest.graphs[graph_id].inputs
        runner.run(graph_id, {port.name: np.ones((4, int(port.shape[1])), np.float32)})

    assert asked == [("embed", True), (".tail", True), ("embed", False)]


# ---- the decode step as one net


def _prompt_rows(count: int, width: int) -> Floats:
    return np.random.default_rng(2).standard_normal((count, width), np.float32) / np.float32(5)


def test_a_joined_net_gives_the_bits_of_its_graphs(manifest: Manifest, runner: NcnnRunner) -> None:
    joined = Pipeline(manifest, runner, context=64)
    single = Pipeline(manifest, Watched(runner), context=64)  # not joined, as it is no NcnnRunner
    rows = _prompt_rows(11, joined.table.width)
    joined.prefill(rows)
    single.clear_caches()
    single.extend(rows)
    for token in (3, 4):
        assert joined.step(token).tobytes() == single.step(token).tobytes()
    for ours, theirs in zip(joined.caches, single.caches, strict=True):
        assert [a.tobytes() for a in ours.rows()] == [a.tobytes() for a in theirs.rows()]


def test_a_prompt_in_chunks_is_the_prompt(manifest: Manifest, runner: NcnnRunner) -> None:
    pipeline = Pipeline(manifest, runner, context=64)
    rows = _prompt_rows(50, pipeline.table.width)
    whole = pipeline.prefill(rows)
    pipeline.chunk = 16
    chunked = pipeline.prefill(rows)

    assert measure(chunked, whole).rel_l2 < 1e-4
    assert measure(np.roll(chunked, 1), whole).rel_l2 > 1e-4


def test_a_joined_net_refuses_shapes_and_nan(manifest: Manifest) -> None:
    pipeline = Pipeline(manifest, NcnnRunner(manifest, finite=True), context=16)
    assert pipeline.joined is not None
    run = pipeline.joined.start()
    run.give("hidden", _prompt_rows(3, pipeline.table.width))
    with pytest.raises(InputError, match=r"layer.*input cos has shape \(1, 2, 8\), but should be .*T=3"):
        run.give("cos", np.zeros((1, 2, 8), np.float32))
    with pytest.raises(InputError, match=r"llm.layer.00.dqkv output key holds \d+ NaN or Inf; find the cause"):
        pipeline.prefill(_prompt_rows(2, pipeline.table.width) * np.float32(np.nan))


@pytest.mark.parametrize(
    ("suffix", "alter", "said"),
    [
        (".bin", lambda raw: raw[:-4], "cannot load the weights .code -1.; export the model again"),
        (".bin", lambda raw: raw + b"1234", "cannot load the weights: 4 bytes are left over; export the model again"),
        (".param", lambda raw: raw[:100] + b"\nReLU x\n", "is no ncnn param"),
        (".param", lambda raw: raw.replace(b"RMSNorm ", b"Nonsense "), "cannot load the joined param .code -1."),
    ],
)
def test_a_joined_net_refuses_a_broken_file(
    manifest: Manifest, own: Manifest, suffix: str, alter: Callable[[bytes], bytes], said: str
) -> None:
    for graph in own.graphs.values():
        for name in (graph.param, *graph.weights):
            path = own.folder / name
            path.parent.mkdir(exist_ok=True)
            last = name.endswith("llm.layer.39.dattn" + suffix)
            raw = (manifest.folder / name).read_bytes()
            path.write_bytes(alter(raw) if last else raw)
    pipeline = Pipeline(own, NcnnRunner(own, verify=False), context=16)
    with pytest.raises(InputError, match=said):
        pipeline.prefill(_prompt_rows(2, pipeline.table.width))


# ---- table


def _table(folder: Path, rows: Floats, dtype: str) -> Table:
    rows.astype(dtype).tofile(folder / "t.bin")
    return Table(folder, {"file": "t.bin", "dtype": dtype, "shape": list(rows.shape)})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_table_gives_its_rows_and_logits_as_float32(tmp_path: Path, dtype: str) -> None:
    rows = np.random.default_rng(1).standard_normal((11, 6)).astype(np.float32)
    stored = rows.astype(dtype).astype(np.float32)
    table = _table(tmp_path, rows, dtype)

    assert (table.vocab_size, table.width) == rows.shape
    assert np.array_equal(table.embed([3, 0, 10, 3]), stored[[3, 0, 10, 3]])
    assert table.embed([1]).dtype == table.logits(rows[0]).dtype == np.float32
    np.testing.assert_allclose(table.logits(rows[0]), stored @ rows[0], rtol=1e-5, atol=1e-6)
    assert np.abs(stored - rows).max() == 0 if dtype == "float32" else 0 < np.abs(stored - rows).max() < 1e-2


@pytest.mark.parametrize("block", [1, 3, 10, 11, 12])
def test_logits_are_whole_at_every_block_edge(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(1).integers(-9, 9, (11, 6)).astype(np.float32)
    monkeypatch.setattr(runtime_table, "_BLOCK_ROWS", block)

    assert np.array_equal(_table(tmp_path, rows, "float32").logits(rows[4]), rows @ rows[4])


@pytest.mark.parametrize("bad", [-1, 11, 4_000_000_000])
def test_an_id_outside_the_table_is_refused(tmp_path: Path, bad: int) -> None:
    with pytest.raises(InputError, match=f"token id {bad} is outside the table of 11 rows; .*export the model again"):
        _table(tmp_path, _array(11, 6), "float32").embed([0, bad, 10])


def test_a_table_of_another_size_or_dtype_is_refused(tmp_path: Path) -> None:
    _table(tmp_path, _array(11, 6), "float32")
    entry = {"file": "t.bin", "dtype": "float32", "shape": [11, 6]}
    with pytest.raises(InputError, match=r"t.bin has 264 bytes, but should have 288 bytes; export the model again"):
        Table(tmp_path, entry | {"shape": [12, 6]})
    with pytest.raises(InputError, match=r"none.bin is missing, but should have 264 bytes; export the model again"):
        Table(tmp_path, entry | {"file": "none.bin"})
    with pytest.raises(InputError, match=r"t.bin has dtype int4, but should be one of float32, float16; export"):
        Table(tmp_path, entry | {"dtype": "int4"})


# ---- cache


def test_a_cache_gives_what_was_appended_contiguous() -> None:
    cache = KVCache(2, 5, 3, 4)
    keys, values = _array(2, 5, 3), _array(2, 5, 4)
    for start, end in ((0, 3), (3, 4), (4, 5)):
        cache.append(keys[:, start:end], values[:, start:end])
        key, value = cache.rows()
        assert cache.length == end
        assert np.array_equal(key, keys[:, :end])
        assert np.array_equal(value, values[:, :end])
        assert key.flags.c_contiguous
        assert value.flags.c_contiguous


def test_a_full_cache_refuses_with_both_numbers_and_keeps_its_rows() -> None:
    cache = KVCache(2, 5, 3, 4)
    cache.append(_array(2, 4, 3), _array(2, 4, 4))
    with pytest.raises(InputError, match="6 rows do not fit into the context of 5; pass a larger --context"):
        cache.append(_array(2, 2, 3), _array(2, 2, 4))

    assert cache.length == 4
    assert np.array_equal(cache.rows()[0], _array(2, 4, 3))


# ---- chat template


ASKED = [{"role": "user", "content": "<b> & 'c'"}]


def test_a_template_renders_as_transformers_would() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    sources = [
        CHAT_TEMPLATE,
        "{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n{{ add_generation_prompt }}",
        "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2, sort_keys=true) }}{% endfor %}",
        "{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}",
    ]
    for source in sources:
        rendered = render_jinja_template([ASKED], chat_template=source, add_generation_prompt=True)
        assert ChatTemplate(source, "here").render(ASKED) == rendered[0][0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('only one image') }}", "only one image"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "is unsafe"),
    ],
)
def test_a_template_that_refuses_is_an_input_error(source: str, said: str) -> None:
    with pytest.raises(InputError, match=f"chat template of there refuses the messages: .*{said}"):
        ChatTemplate(source, "there").render(ASKED)


def test_a_template_that_does_not_parse_is_an_input_error() -> None:
    with pytest.raises(InputError, match="chat template of there does not parse"):
        ChatTemplate("{% if %}", "there")


def test_a_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no chat template; copy chat_template.json into the checkpoint"):
        ChatTemplate.from_folder(tmp_path)
    found = []
    for name, text in (
        ("tokenizer_config.json", json.dumps({"chat_template": "tokenizer"})),
        ("chat_template.json", json.dumps({"chat_template": "json"})),
        ("chat_template.jinja", "jinja"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found.append(ChatTemplate.from_folder(tmp_path).render([]))

    assert found == ["tokenizer", "json", "jinja"]


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": ["a"]}'])
def test_a_broken_template_file_is_an_input_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"chat_template.json .*export the model again"):
        ChatTemplate.from_folder(tmp_path)


# ---- rotary tables


def test_rotary_tables_follow_the_formula() -> None:
    cos, sin = rotary_tables(3, 61, dim=8, theta=500000.0)
    angles = np.arange(3, 64)[:, None] * 500000.0 ** (-2 * np.arange(4) / 8)

    assert cos.shape == sin.shape == (1, 61, 8)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[0], np.cos(np.tile(angles, 2)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(sin[0], np.sin(np.tile(angles, 2)), rtol=0, atol=1e-5)


def test_rotary_tables_of_a_step_are_rows_of_the_whole() -> None:
    whole = rotary_tables(0, 40, dim=64, theta=10000.0)
    for start in range(40):
        step = rotary_tables(start, 1, dim=64, theta=10000.0)
        assert all(np.array_equal(one, many[:, start : start + 1]) for one, many in zip(step, whole, strict=True))


# ---- pipeline


def test_the_prompt_holds_one_placeholder_per_merged_cell(pipeline: Pipeline) -> None:
    ids = pipeline.prompt("hi", [(2, 4), (6, 2)]).ids
    places = np.flatnonzero(np.array(ids) == pipeline.image_token_id)

    assert len(places) == 2 + 3
    assert np.count_nonzero(np.diff(places) > 1) == 1  # two pictures, apart


@pytest.mark.parametrize(("text", "grids"), [("<|image_pad|>", []), ("<|image_pad|>", [(2, 2)])])
def test_placeholders_in_the_text_are_refused(pipeline: Pipeline, text: str, grids: list[tuple[int, int]]) -> None:
    said = f"holds {len(grids) + 1} image placeholders, but there are {len(grids)} images; give pictures"
    with pytest.raises(InputError, match=said):
        pipeline.prompt(text, grids)


@pytest.mark.parametrize("count", [None, 1, 3])
def test_image_tokens_unequal_to_merger_rows_are_refused(pipeline: Pipeline, count: int | None) -> None:
    ids = [5, pipeline.image_token_id, pipeline.image_token_id, 6]
    rows = None if count is None else np.ones((count, pipeline.table.width), np.float32)
    with pytest.raises(
        InputError, match=f"the prompt holds 2 image tokens, but the merger gave {count or 0} rows; give"
    ):
        pipeline.fuse(ids, rows)


def test_image_rows_replace_the_placeholders_in_order(pipeline: Pipeline) -> None:
    rows = _array(2, pipeline.table.width)
    ids = [pipeline.image_token_id, 5, pipeline.image_token_id]
    fused = pipeline.fuse(ids, rows)

    assert np.array_equal(fused, np.stack([rows[0], pipeline.table.embed([5])[0], rows[1]]))
    assert not np.array_equal(pipeline.table.embed(ids)[0], rows[0])  # the table itself is left alone


def test_a_context_too_short_is_refused_before_any_graph_is_run(manifest: Manifest, pipeline: Pipeline) -> None:
    needed = len(pipeline.prompt(PROMPT, [(2, 2)]).ids) + 3
    tight = Pipeline(manifest, Untouchable(), context=needed - 1)
    said = f"prompt and answer need {needed} tokens, but the context holds {needed - 1}; pass a larger --context"
    with pytest.raises(InputError, match=said):
        list(tight.generate([np.zeros((32, 32, 3), np.uint8)], PROMPT, 3))


def test_a_context_that_just_suffices_does(manifest: Manifest, runner: NcnnRunner, pipeline: Pipeline) -> None:
    needed = len(pipeline.prompt(PROMPT, []).ids) + 3
    pipeline.stop_ids = set()
    tight = Pipeline(manifest, runner, context=needed)
    tight.stop_ids = set()

    ids = [token.id for token in tight.generate([], PROMPT, 3)]
    assert ids == [token.id for token in pipeline.generate([], PROMPT, 3)]
    assert len(ids) == 3


def test_a_context_longer_than_the_models_positions_is_refused(manifest: Manifest) -> None:
    with pytest.raises(InputError, match="the context is 32769, but the model has 32768 positions; pass a smaller"):
        Pipeline(manifest, Untouchable(), context=32769)


def test_a_step_asks_for_the_one_new_row_and_the_true_cache(manifest: Manifest, runner: NcnnRunner) -> None:
    watched = Watched(runner)
    pipeline = Pipeline(manifest, watched, context=256)
    prompt = pipeline.prompt(PROMPT, []).ids
    pipeline.prefill(pipeline.fuse(prompt, None))
    watched.shapes.clear()
    pipeline.step(7)
    pipeline.step(8)

    heads, width = pipeline.config["num_attention_heads"], pipeline.table.width
    assert len(watched.shapes) == 2 * 2 * pipeline.config["num_hidden_layers"]
    for place, (graph_id, shapes) in enumerate(watched.shapes):
        length = len(prompt) + 1 + place // 80
        assert shapes["hidden"] == (1, width)
        if graph_id.endswith(".dattn"):
            assert shapes["query"] == (heads, 1, 24)
            assert (shapes["key"], shapes["value"]) == ((heads, length, 24), (heads, length, 16))
            assert shapes["mask"] == (1, 1, length)


def test_the_pieces_of_text_are_the_text_of_the_ids(pipeline: Pipeline) -> None:
    tokens = list(pipeline.generate([], PROMPT, 24))

    assert "".join(token.text for token in tokens) == pipeline.tokenizer.decode([token.id for token in tokens])
    assert sum(bool(token.text) for token in tokens) > 12
    assert all(token.id == token.logits.argmax() for token in tokens)


def test_an_answer_that_ends_inside_a_character_says_so(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (pipeline.tokenizer.token_id(symbol) for symbol in "Ã©")  # the bytes of an e with acute
    scripted = iter([first, second, first])
    monkeypatch.setattr(pipeline, "choose", lambda logits: next(scripted))

    assert [token.text for token in pipeline.generate([], PROMPT, 3)] == ["", "\u00e9", "\ufffd"]


def test_the_answer_comes_piece_by_piece(manifest: Manifest, runner: NcnnRunner) -> None:
    watched = Watched(runner)
    answer: Iterator[Any] = Pipeline(manifest, watched, context=256).generate([], PROMPT, 3)
    next(answer)
    asked = [len(watched.shapes)]
    next(answer)
    asked.append(len(watched.shapes))

    assert asked == [40, 40 + 80]  # the second token is computed when it is asked for


def test_the_answer_ends_at_the_count_or_at_a_stop_id(pipeline: Pipeline) -> None:
    pipeline.stop_ids = set()
    ids = [token.id for token in pipeline.generate([], PROMPT, 6)]
    assert len(ids) == 6
    assert ids[2] not in ids[:2]
    pipeline.stop_ids = {ids[2]}

    assert [token.id for token in pipeline.generate([], PROMPT, 6)] == ids[:3]


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [5, 6]}, 7, {5, 6, 7}),
        ({"eos_token_id": 5}, [7, 8], {5, 7, 8}),
        ({"eos_token_id": 5}, None, {5}),
        ({}, 7, {7}),
        (None, 7, {7}),
        (None, None, set()),
    ],
)
def test_stop_ids_come_from_both_configurations(
    own: Manifest, generation: dict[str, Any] | None, config: Any, stops: set[int]
) -> None:
    path = own.folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation), encoding="utf-8")
    _alter_config(own, eos_token_id=config)

    assert Pipeline(own, Untouchable()).stop_ids == stops


def _alter_config(own: Manifest, **values: Any) -> None:
    path = own.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {name: value for name, value in config.items() if value != "gone"}
    path.write_text(json.dumps(kept), encoding="utf-8")


def test_a_configuration_without_a_key_is_refused(own: Manifest) -> None:
    _alter_config(own, image_token_id="gone", vision_config={"hidden_size": 8})
    with pytest.raises(
        InputError, match=r"config.json has no image_token_id, vision_config.fullatt_block_indexes, .*export"
    ):
        Pipeline(own, Untouchable())


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_configuration_is_refused(own: Manifest, name: str, text: str) -> None:
    (own.folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} (cannot be read|holds a JSON list).*export the model again"):
        Pipeline(own, Untouchable())


def test_a_short_norm_is_refused(own: Manifest) -> None:
    os.truncate(own.folder / "norm.bin", 40)
    with pytest.raises(InputError, match=r"norm.bin holds 10 numbers, but should hold 64; export the model again"):
        Pipeline(own, Untouchable())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(pipeline: Pipeline, bad: float) -> None:
    hidden = np.ones(pipeline.table.width, np.float32)
    assert np.isfinite(pipeline.logits(hidden)).all()
    hidden[3] = bad
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(InputError, match="logits hold NaN or Inf; find the graph"),
    ):
        pipeline.logits(hidden)


def test_the_first_of_equal_logits_is_chosen(pipeline: Pipeline) -> None:
    assert pipeline.choose(np.array([1, 3, 3, 2], np.float32)) == 1


def test_buffers_of_one_net_serve_the_next(manifest: Manifest) -> None:
    """27 vision layers over 640 rows need the buffers of one: a net of its own pool would keep 20 MB each."""
    layers = [graph for name, graph in manifest.graphs.items() if "vision.layer" in name]
    random = np.random.default_rng(0)
    inputs = {
        port.name: random.standard_normal([size if isinstance(size, int) else 640 for size in port.shape], np.float32)
        for port in layers[0].inputs
    }
    runner = NcnnRunner(manifest, verify=False)
    runner.run(layers[0].id, inputs)
    before = psutil.Process().memory_info().rss
    for graph in layers:
        runner.run(graph.id, inputs)
    assert psutil.Process().memory_info().rss - before < 100e6


def test_a_float16_table_gives_the_same_ids(pipeline: Pipeline) -> None:
    exporter = Workspace(Choice("youtu_vl")).exporter
    half = Manifest.read(exporter.model_folder(table="float16"))
    assert half.table["dtype"] == "float16"
    ours = Pipeline(half, NcnnRunner(half, verify=False)).generate([], "Write one sentence about numbers.", 24)
    assert [t.id for t in ours] == [t.id for t in pipeline.generate([], "Write one sentence about numbers.", 24)]
