"""Weights are stored once, graph by graph needs little disk, and too little of it is told before the work starts."""

import importlib
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from exporters import space, weights
from exporters.export import Exporter
from exporters.folders import MANIFEST, link_tree, own_weights, weight_files
from exporters.tensors import Uninitialised
from harness import resources
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.store import Store
from parity import rolling
from parity.workspace import Choice, Workspace
from runtime.graphs import Manifest, load_net

MODEL = "youtu_vl"
LAYER = f"{MODEL}/llm.layer.07"


@pytest.fixture(scope="module")
def exporter() -> Exporter:
    return Workspace(Choice(MODEL)).exporter


def fresh(exporter: Exporter, root: Path) -> Exporter:
    return Exporter(MODEL, exporter.checkpoint, exporter.fingerprint, Store(root), arguments=f"{MODEL} --profile tiny")


def test_a_prefill_graph_reads_the_files_of_the_decode_graphs(exporter: Exporter) -> None:
    parts = [exporter.weights(f"{LAYER}.{part}") for part in ("prefill", "dqkv", "dattn")]
    assert parts[0] == [*parts[1], *parts[2]]
    assert all(path.is_file() for path in parts[0])
    manifest = Manifest.read(exporter.model_folder())
    assert manifest.graphs[f"{LAYER}.prefill"].weights == (f"{LAYER}.dqkv.bin", f"{LAYER}.dattn.bin")
    load_net(manifest.folder, manifest.graphs[f"{LAYER}.prefill"], threads=1, verify=True)


def files_at(sizes: Exporter, layouts: Exporter) -> dict[str, int]:
    """Bytes of every file of weights by its content, at the widths of `sizes`; the layout is that of others."""
    files = {}
    for graph in sizes.graphs.values():
        constants = dict(sizes.new_module(graph.structure).named_buffers())
        entries = weights.read_entries(layouts.structure(layouts.graphs[graph.id].structure))
        for part in weights.parts(entries, graph):
            size = 4 * sum(entry.flagged for entry in part.entries)
            for entry, source in zip(part.entries, part.sources, strict=True):
                shape = constants[entry.tensor].shape if entry.tensor in constants else sizes.shapes[source]
                size += entry.of(np.broadcast_to(np.float32(), shape)).nbytes
            files[str(part.recipe())] = size
    return files


@pytest.mark.parametrize(("model", "profile", "limit"), [(MODEL, "full", 1.001), ("smollm2", "", 1.001)])
def test_weights_are_stored_once(model: str, profile: str, limit: float) -> None:
    sizes, layouts = Workspace(Choice(model, profile)), Workspace(Choice(model)).exporter
    described = SimpleNamespace(
        graphs=sizes.graphs,
        shapes=sizes.description.tensors(sizes.description.read_sizes(sizes.config, Path())),
        new_module=lambda structure: new_module(sizes, structure.name),
    )
    table = 4 * (prod(described.shapes[space.TABLE]) + described.shapes["model.norm.weight"][0])
    ratio = (sum(files_at(described, layouts).values()) + table) / space.weight_bytes(described)  # type: ignore[arg-type]
    assert 1 <= ratio < limit


def new_module(workspace: Workspace, name: str) -> object:
    with Uninitialised():
        sizes = workspace.description.read_sizes(workspace.config, Path())
        return importlib.import_module(f"exporters.{workspace.model}").REWRITES[name](sizes)


def test_an_exported_folder_holds_as_many_bytes_as_computed(exporter: Exporter) -> None:
    folder = exporter.model_folder()
    files = files_at(exporter, exporter)
    assert sum(path.stat().st_size for path in (folder / MODEL).glob("*.bin")) == sum(files.values())


def test_a_folder_of_ones_own_has_a_file_for_every_graph(exporter: Exporter, tmp_path: Path) -> None:
    source = exporter.model_folder()
    link_tree(source, tmp_path)
    before = (source / MANIFEST).read_bytes()
    own_weights(tmp_path)
    assert (source / MANIFEST).read_bytes() == before
    for graph_id in exporter.graphs:
        assert weight_files(tmp_path, graph_id) == [tmp_path / f"{graph_id}.bin"]
    whole = b"".join(path.read_bytes() for path in exporter.weights(f"{LAYER}.prefill"))
    assert (tmp_path / f"{LAYER}.prefill.bin").read_bytes() == whole
    load_net(tmp_path, Manifest.read(tmp_path).graphs[f"{LAYER}.prefill"], threads=1, verify=True)


def test_too_little_disk_or_memory_is_told_before_the_work_with_the_mode_that_fits(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fresh(exporter, tmp_path / "store")
    needed = space.missing_bytes(own)
    assert space.weight_bytes(own) < needed < 1.02 * space.weight_bytes(own)
    with monkeypatch.context() as machine:
        machine.setattr(resources, "free_disk_bytes", lambda folder: needed - 1)
        expected = (
            r"^python -m parity export youtu_vl --profile tiny needs 0.0 GB of disk, but 0.0 GB are free; "
            r"free some, or take another mode: this mode fits: python -m parity run youtu_vl --profile tiny --rolling$"
        )
        with pytest.raises(UnjudgedError, match=expected):
            own.model_folder()
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 600_000_000)
    with pytest.raises(UnjudgedError, match=r"needs 0.9 GB of memory, but 0.6 GB are free; .* no narrower mode fits$"):
        own.model_folder()
    assert list((tmp_path / "store").glob("graph/*")) == []


def test_an_interruption_loses_no_graph_that_was_done(exporter: Exporter, tmp_path: Path) -> None:
    done: list[str] = []

    def interrupt(graph_id: str) -> None:
        done.append(graph_id)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh(exporter, tmp_path).model_folder(each=interrupt)
    again = fresh(exporter, tmp_path)
    assert [graph_id for graph_id, graph in again.graphs.items() if again.holds(graph)] == done
    assert list(tmp_path.glob("*/*.tmp-*")) == []
    missing = space.missing_bytes(fresh(exporter, tmp_path / "empty")) - space.missing_bytes(again)
    assert missing > 4 * np.prod(again.shapes[space.TABLE])


def test_a_rolling_run_keeps_no_graph(exporter: Exporter, tmp_path: Path) -> None:
    class Child:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def call(self, method: str, *arguments: object) -> dict[str, object]:
            self.calls.append(method)
            assert list(tmp_path.glob("graph/*/graph.param"))
            return {}

    child = Child()
    visited: list[str] = []
    workspace = SimpleNamespace(exporter=exporter)
    runner = rolling.RollingRunner(workspace, child, tmp_path)  # type: ignore[arg-type]

    def visit(graph: Graph) -> None:
        visited.append(graph.id)
        assert runner.exporter._tensors._kept == {}
        runner.run(graph.id, {})

    runner.visit = visit
    runner.run(f"{LAYER}.prefill", {})
    assert (visited, child.calls) == ([f"{LAYER}.prefill"], ["run", "run", "forget"])
    assert list(tmp_path.iterdir()) == []
