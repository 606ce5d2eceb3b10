"""Claim: what the benchmarks time is the work that they name. How fast it is, no test says."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from harness.resources import processor
from parity import bench_export, bench_whole, bench_widths, widths
from parity.bench import Figure, tell, watch
from parity.workspace import Choice, Workspace
from runtime.graphs import Manifest

MODEL = "youtu_vl"


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice(MODEL))


@pytest.fixture(scope="module")
def sliced(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench_widths.slice_folder(workspace, tmp_path_factory.mktemp("bench") / "slice")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little work as shows what is done."""
    for name, value in (("PROMPT", 9), ("STEPS", 3), ("RUNS", 2), ("MEMORY_BYTES", 1 << 20)):
        monkeypatch.setattr(widths, name, value)


def test_a_slice_is_the_models_first_layers(workspace: Workspace, sliced: Path) -> None:
    manifest = Manifest.read(sliced)
    layers = {graph.index for graph in workspace.graphs.values() if graph.id in manifest.graphs} - {None}
    assert layers == set(range(bench_widths.LAYERS))
    assert len(manifest.graphs) == 2 + 4 * bench_widths.LAYERS
    pipeline = widths._pipeline(sliced, 1, context=8)
    assert pipeline.shape.layers == bench_widths.LAYERS
    assert manifest.table["dtype"] == "float16"
    whole = json.loads((workspace.exporter.base(table="float16") / "config.json").read_text(encoding="utf-8"))
    assert whole["num_hidden_layers"] == 40  # the store's own is left alone


def test_the_port_and_torch_run_the_same_layers(
    workspace: Workspace, sliced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = widths.ncnn(sliced, 1)
    assert set(ours) == {"copy", "read", "prefill", "decode", "outside", "head", "norm"}
    assert 0 < ours["outside"] < ours["decode"]
    monkeypatch.setattr(widths, "_layer_count", lambda names: bench_widths.LAYERS)
    theirs = widths.torch(workspace.checkpoint, 1)
    assert 0 < theirs["decode"] < theirs["prefill"] * 10


def test_a_slice_of_a_checkpoint_has_its_layers_counted() -> None:
    names = [f"model.layers.{index}.self_attn.{kind}.weight" for index in range(3) for kind in ("o_proj", "q_b_proj")]
    assert widths._layer_count(names) == 3


def test_growth_is_measured_by_what_grows(sliced: Path) -> None:
    short, long = (widths.prompt(sliced, 1, size) for size in (4, 600))
    assert long["layer"] > short["layer"]
    narrow, wide = (widths.context(sliced, 1, size) for size in (16, 32))
    assert 2 * narrow["bytes"] == wide["bytes"]
    picture = widths.image(sliced, 1, 4)
    assert set(picture) == {"window", "full", "bytes", "told"}


def test_a_refused_size_is_told_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    console = Console(file=StringIO(), width=200)
    rows = {2: {"window": 1.0, "full": 2.0, "bytes": 3e6, "told": 4e6}, 128: {"refused": "this needs 9 GB"}}
    plot = bench_widths._plot({"prompt": {1: {"layer": 1.0, "bytes": 1}}, "image": rows})
    assert [axes.get_title() for axes in plot.axes] == ["prompt", "image"]
    bench_widths._tell_growth({"image": rows}, console)
    assert "this needs 9 GB" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_figure_is_told_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    console = Console(file=StringIO(), width=200)
    tell("it", [Figure("speed", "x", [3.0, 1.0, 2.0], ">= 2")], console, 3, options="7 threads", details={"a": 1})
    found = json.loads((tmp_path / "bench-it.json").read_text(encoding="utf-8"))
    assert (found["options"], found["runs"], found["details"]) == ("7 threads", 3, {"a": 1})
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 x" in said
    assert "1 to 3" in said
    assert f"options: 7 threads; machine: {found['machine']}, " in said
    assert f", {processor()} with " in found["machine"]


def test_a_file_with_two_names_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_bytes(b"123")
    assert sum(bench_export._sizes(tmp_path).values()) == 8


def test_memory_may_be_counted_without_files(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(60_000_000))
    read = f"import numpy,time; held = numpy.memmap({str(path)!r}); held.max(); time.sleep(1)"
    with_files, without = (watch(["-c", read], with_files=flag)[1] for flag in (True, False))
    assert with_files - without > 50


def test_a_whole_model_is_measured_graph_by_graph() -> None:
    found = bench_whole.measure(MODEL, "tiny")
    assert len(found["graphs"]) == 149
    assert not found["red"]
    assert all(graph["run"] > 0 and 0 < graph["isolated"] < 1e-5 for graph in found["graphs"].values())
    kinds = [figure.name for figure in bench_whole._figures(found | {"memory": 1.0})]
    assert "vision.layer, time of each of 27" in kinds
    assert "llm.layer.dattn, relative L2 chained" in kinds
