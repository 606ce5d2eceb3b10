"""Claim: a run stays within its memory: prompts in chunks, few windows at a time, a budget that is asked."""

import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ncnn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from harness.errors import UnjudgedError
from harness.metrics import measure
from parity import building, server
from parity.chain import Recorder, spooled
from parity.workspace import Choice, Workspace, home
from runtime import half_head, memory
from runtime.__main__ import main
from runtime.errors import InputError
from runtime.graphs import Arrays, Graph, Manifest, NcnnRunner, load_net
from runtime.half_head import HalfHead
from runtime.memory import Budget, available_bytes, own_blocks
from runtime.table import Table
from runtime.youtu_vl import Pipeline

Floats = NDArray[np.float32]
WHOLE = 2**20
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no thresholds to set")
SIDES = st.integers(1, 60).map(lambda cells: 2 * cells)  # patches


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.read(Workspace(Choice("youtu_vl")).exporter.model_folder())


@pytest.fixture(scope="module")
def runner(manifest: Manifest) -> NcnnRunner:
    return NcnnRunner(manifest, verify=False)


class Watched:
    """A runner that notes which graph was given how many rows."""

    threads = 1

    def __init__(self, runner: NcnnRunner) -> None:
        self.runner = runner
        self.rows: list[tuple[str, int]] = []

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        self.rows.append((graph_id.partition("/")[2], _rows(inputs)))
        return self.runner.run(graph_id, inputs)


def _rows(inputs: Mapping[str, Floats]) -> int:
    return len(inputs["hidden"] if "hidden" in inputs else inputs["pixel_values"])


class Untouchable:
    """A runner that must not be asked."""

    threads = 1

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        raise AssertionError(f"{graph_id} was run")


def rows_of(count: int, width: int) -> Floats:
    return np.random.default_rng(2).standard_normal((count, width), np.float32) / np.float32(5)


# ---- prompts in chunks


def test_a_streamed_prompt_loads_every_graph_once(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(folder: Path, graph: Graph, *, threads: int, verify: bool) -> ncnn.Net:
        loaded.append(graph.id)
        return load_net(folder, graph, threads=threads, verify=verify)

    monkeypatch.setattr("runtime.graphs.load_net", load)
    pipeline = Pipeline(manifest, NcnnRunner(manifest, mode="streaming", verify=False), context=64, chunk=16)
    rows = rows_of(50, pipeline.table.width)
    chunked = pipeline.prefill(rows)
    caches = [cache.rows() for cache in pipeline.caches]

    assert len(loaded) == len(set(loaded)) == 80
    pipeline.chunk = WHOLE
    whole = pipeline.prefill(rows)
    assert loaded[-1].endswith(".prefill")
    assert measure(chunked, whole).rel_l2 < 1e-4
    assert measure(np.roll(chunked, 1), whole).rel_l2 > 1e-4
    for ours, theirs in zip(caches, (cache.rows() for cache in pipeline.caches), strict=True):
        for made, expected in zip(ours, theirs, strict=True):
            assert measure(made, expected).rel_l2 < 1e-4


def test_a_prompt_goes_through_in_even_chunks(manifest: Manifest, runner: NcnnRunner) -> None:
    watched = Watched(runner)
    pipeline = Pipeline(manifest, watched, context=64, chunk=16)
    for rows, chunks in ((50, [17, 17, 16]), (60, [15, 15, 15, 15])):
        watched.rows.clear()
        pipeline.prefill(rows_of(rows, pipeline.table.width))
        assert [count for graph_id, count in watched.rows if graph_id == "llm.layer.07.dattn"] == chunks
    watched.rows.clear()
    pipeline.prefill(rows_of(23, pipeline.table.width))
    assert {graph_id for graph_id, _ in watched.rows} == {f"llm.layer.{index:02d}.prefill" for index in range(40)}


def test_the_next_prompt_takes_the_caches_of_the_one_before(manifest: Manifest, runner: NcnnRunner) -> None:
    pipeline = Pipeline(manifest, runner, context=64)
    rows = rows_of(11, pipeline.table.width)
    first = pipeline.prefill(rows)
    kept = [cache.keys for cache in pipeline.caches]
    pipeline.prefill(rows_of(50, pipeline.table.width))

    assert pipeline.prefill(rows).tobytes() == first.tobytes()
    assert [cache.length for cache in pipeline.caches] == [11] * len(kept)
    assert all(cache.keys is keys for cache, keys in zip(pipeline.caches, kept, strict=True))


# ---- windows a few at a time


def test_windows_in_pieces_give_the_picture(manifest: Manifest, runner: NcnnRunner) -> None:
    pictures = [np.random.default_rng(3).integers(0, 256, size, np.uint8) for size in ((600, 340, 3), (64, 300, 3))]
    watched = Watched(runner)
    pipeline = Pipeline(manifest, watched, context=64, chunk=300)
    pixels = pipeline.preprocess(pictures)
    pieces = pipeline.encode_images(pixels)
    patches = sum(len(picture.pixel_values) for picture in pixels)

    windowed = [count for graph_id, count in watched.rows if graph_id == "vision.layer.03"]
    full = [count for graph_id, count in watched.rows if graph_id == "vision.layer.07"]
    assert len(windowed) > 2
    assert (sum(windowed), full) == (patches, [patches])
    pipeline.chunk = WHOLE
    whole = pipeline.encode_images(pixels)
    assert measure(pieces, whole).rel_l2 < 3e-6
    assert measure(np.roll(pieces, 1, axis=0), whole).rel_l2 > 1e-2


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4), st.integers(1, 1000))
def test_pieces_are_whole_windows(manifest: Manifest, grids: list[tuple[int, int]], chunk: int) -> None:
    pipeline = Pipeline(manifest, Untouchable(), context=64, chunk=chunk)
    pieces = pipeline._windows_together(grids)
    _, bounds = pipeline._windows(grids)
    edges = [0, *(piece.stop for piece in pieces)]

    assert [piece.start for piece in pieces] == edges[:-1]
    assert edges[-1] == sum(height * width for height, width in grids)
    assert set(edges) <= set(bounds.tolist())
    for start, stop in pairwise(edges):
        inside = [bound for bound in bounds.tolist() if start < bound <= stop]
        assert stop - start <= chunk or len(inside) == 1


# ---- the budget


def test_weights_that_do_not_fit_are_refused_with_the_mode_that_fits(manifest: Manifest) -> None:
    runner = NcnnRunner(manifest, verify=False)
    needs = Pipeline(manifest, runner, context=64).needs()
    weights = needs["resident weights"]
    files = {name for graph in manifest.graphs.values() if "llm" in graph.id for name in graph.weights}
    assert weights == sum((manifest.folder / name).stat().st_size for name in files)  # prefill shares theirs

    said = r"this needs 0.0\d GB \(resident weights .*caches for a context of 64 .*\) of memory, but 0.01 GB are free; "
    with pytest.raises(InputError, match=said + "pass --mode streaming, which needs 0.00 GB"):
        Pipeline(manifest, runner, context=64, memory=weights - 1)
    assert Pipeline(manifest, runner, context=64, memory=sum(needs.values())).budget.bytes == sum(needs.values())


def _decode_files(manifest: Manifest) -> list[list[Path]]:
    graphs = [graph for graph in manifest.graphs.values() if graph.id.endswith((".dqkv", ".dattn"))]
    return [[manifest.folder / name for name in graph.weights] for graph in graphs]


def _size(path: Path) -> int:
    return path.stat().st_size


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does(manifest: Manifest) -> None:
    runner = NcnnRunner(manifest, mode="streaming", verify=False)
    with pytest.raises(InputError, match=r"caches for a context of 8192 .*; pass --context [0-9]+ or less") as raised:
        Pipeline(manifest, runner, context=8192, memory=30_000_000)
    largest = max(sum(map(_size, paths)) for paths in _decode_files(manifest))
    assert runner.weight_bytes(name for name in manifest.graphs if ".d" in name) == 2 * largest  # read, and laid out
    context = int(str(raised.value).rpartition("--context ")[2].split()[0])

    assert Pipeline(manifest, runner, context=context, memory=30_000_000).context == context
    with pytest.raises(InputError, match=f"pass --context {context} or less"):
        Pipeline(manifest, runner, context=context + 1, memory=30_000_000)
    with pytest.raises(InputError, match="free some, or take another machine"):
        Pipeline(manifest, runner, context=64, memory=1000)


def test_a_picture_beyond_the_budget_is_refused_with_the_size_that_fits(manifest: Manifest) -> None:
    pipeline = Pipeline(manifest, Untouchable(), context=5000, memory=500_000_000)
    picture = np.zeros((2048, 2048, 3), np.uint8)
    with pytest.raises(InputError, match=r"pictures of 16384 patches \d+\.\d\d GB\) of memory, but 0.50 GB") as raised:
        list(pipeline.generate([picture], "What is this?", 1))
    told = re.search(r"scale the pictures down to (\d+) patches in all, (\d+)x(\d+) pixels", str(raised.value))
    assert told is not None
    patches, side, _ = map(int, told.groups())

    assert side == int(patches**0.5) * 16
    pipeline._require_for(patches)
    with pytest.raises(InputError, match=f"pictures of {patches + 1} patches"):
        pipeline._require_for(patches + 1)


def test_a_picture_brings_the_vision_weights_where_they_stay(manifest: Manifest) -> None:
    picture = np.zeros((64, 96, 3), np.uint8)
    files = {name for graph in manifest.graphs.values() if "vision" in graph.id for name in graph.weights}
    vision = sum((manifest.folder / name).stat().st_size for name in files)
    resident = Pipeline(manifest, NcnnRunner(manifest, verify=False), context=64)
    assert list(resident.needs()) == ["resident weights", "caches for a context of 64"]
    brought = {"resident vision weights": vision, "pictures of 24 patches": resident.picture_bytes(24)}
    assert resident.needs([picture]) == resident.needs() | brought
    streaming = Pipeline(manifest, NcnnRunner(manifest, mode="streaming", verify=False), context=64)
    assert list(streaming.needs([picture]).items() - streaming.needs().items()) == [
        ("pictures of 24 patches", streaming.picture_bytes(24))
    ]

    needed = sum(resident.needs([picture]).values())
    Pipeline(manifest, resident.runner, context=64, memory=needed)._require_for(24)
    with pytest.raises(
        InputError, match=r"resident vision weights .* pictures of 24 patches .*scale the pictures down to"
    ):
        Pipeline(manifest, resident.runner, context=64, memory=needed - 1)._require_for(24)


def test_a_budget_without_limit_is_what_the_machine_has() -> None:
    budget = Budget()
    assert budget.bytes is None or abs(budget.bytes - (available_bytes() or 0)) < 2e9
    assert str(Budget(8_000_000_000)) == "8.00 GB are free"


def test_the_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.memory._GROUP", tmp_path)
    for name, text in (("max", "5000\n"), ("current", "3000\n"), ("stat", "anon 2000\nfile 700\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes() == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() != 2700


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "much"])
def test_a_wrong_budget_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["youtu_vl", "--memory", text])
    assert ended.value.code == 2
    assert f"argument --memory: '{text}' should be a number of gigabytes, such as 8" in capsys.readouterr().err


def test_memory_is_told_before_it_is_taken(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["youtu_vl", "--model", str(manifest.folder), "--prompt", "?", "-n", "1", "--ids", "--context", "64"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert re.fullmatch(r"memory: 0\.\d\d GB \(resident weights .*, caches for a context of 64 .*\), .*\n", said)
    path = tmp_path / "picture.png"
    Image.new("RGB", (96, 64)).save(path)
    assert main([*arguments, "--image", str(path)]) == 0
    said = capsys.readouterr().err
    assert re.search(r"a context of 64 .*, resident vision weights .*, pictures of 24 patches .*\), .*\n", said)

    assert main([*arguments, "--memory", "0.001"]) == 2
    assert re.match(r"error: this needs 0\.\d\d GB .* but 0.00 GB are free; ", capsys.readouterr().err)


# ---- a float16 table in memory


@pytest.mark.parametrize("part", [1, 60, 1 << 20])
@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (129, 33), (70, 64)])
def test_a_half_head_gives_the_logits_of_the_widened_rows(
    shape: tuple[int, int], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.half_head._PART_BYTES", part)
    random = np.random.default_rng(5)
    rows, hidden = random.standard_normal(shape).astype(np.float16), random.standard_normal(shape[1], np.float32)
    head = HalfHead(rows, threads=2)

    assert head.exact
    assert head.logits(hidden).shape == (len(rows),)
    assert measure(head.logits(hidden), rows.astype(np.float32) @ hidden).rel_l2 < 1e-6
    rounded = hidden.astype(np.float16).astype(np.float32)
    assert shape[1] < 5 or measure(head.logits(rounded), rows.astype(np.float32) @ hidden).rel_l2 > 1e-6


def test_a_head_that_rounds_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(6).standard_normal((80, 16)).astype(np.float16)
    rows.tofile(tmp_path / "t.bin")
    entry = {"file": "t.bin", "dtype": "float16", "shape": [80, 16]}
    hidden = np.linspace(-2, 2, 16, dtype=np.float32)
    exact = Table(tmp_path, entry, resident=True)
    assert exact._half is not None
    assert Table(tmp_path, entry)._half is None

    run = half_head._run
    monkeypatch.setattr(half_head, "_run", lambda net, x: run(net, x.astype(np.float16).astype(np.float32)))
    rounding = Table(tmp_path, entry, resident=True)
    assert rounding._half is None
    assert measure(rounding.logits(hidden), rows.astype(np.float32) @ hidden).rel_l2 < 1e-6


# ---- the child that runs graphs for the claims


def test_the_child_holds_what_was_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Workspace(Choice("youtu_vl")).exporter
    names = [f"youtu_vl/vision.layer.{index:02d}" for index in range(3)]
    files = {name: (str(exporter.graph(name)), exporter.entry(exporter.graphs[name])) for name in names}
    inputs = {port.name: rows_of(4, 48) for port in exporter.graphs[names[0]].structure.inputs if port.name == "hidden"}
    inputs |= {"cos": rows_of(4, 12)[None], "sin": rows_of(4, 12)[None], "mask": np.zeros((1, 4, 4), np.float32)}
    size = NcnnRunner(Manifest.read(exporter.model_folder()), verify=False).weight_bytes(names[:1])

    monkeypatch.setattr(server, "HELD_BYTES", 3 * size)
    child = server.make()
    first = {name: child.run(*files[name], inputs)["hidden"] for name in names}
    assert list(child._runners) == [files[name][0] for name in names[1:]]
    child.run(*files[names[1]], inputs)
    assert list(child._runners) == [files[names[2]][0], files[names[1]][0]]
    assert child.run(*files[names[0]], inputs)["hidden"].tobytes() == first[names[0]].tobytes()
    assert list(child._runners) == [files[names[1]][0], files[names[0]][0]]


def test_the_child_streams_a_model_that_is_too_wide_to_be_held(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: tuple[Any, ...] = (str(manifest.folder), [], "Write one sentence about numbers.", 3, (), None)
    narrow = server.make()
    ids = [token.id for token in narrow.generate(*ask)]
    monkeypatch.setattr(server, "HELD_BYTES", 1)
    wide = server.make()

    assert [token.id for token in wide.generate(*ask)] == ids
    modes = [pipeline.runner.mode for child in (narrow, wide) for pipeline in child._pipelines.values()]
    assert modes == ["resident", "streaming"]


def test_one_process_judges_a_wide_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    workspaces = [Workspace(Choice("youtu_vl"))]
    assert building.processes(workspaces, 2, Console()) == 2
    assert not capsys.readouterr().out
    monkeypatch.setattr(building, "WIDE_BYTES", 1_000_000)
    assert building.processes(workspaces, 2, Console()) == 1
    assert capsys.readouterr().out == "youtu_vl: judged by one process, within 4 GB of memory\n"


def test_a_wide_model_is_exported_by_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(Choice("youtu_vl"))
    exported = home() / "exported" / "youtu_vl.txt"
    before = exported.stat().st_mtime_ns if exported.exists() else 0
    monkeypatch.setattr(building, "WIDE_BYTES", 1_000_000)
    monkeypatch.setattr(building, "export", None)  # in this process
    building.build_all(workspace, Console(), workers=1)
    assert exported.stat().st_mtime_ns > before
    assert Path(exported.read_text(encoding="utf-8")) == workspace.exporter.model_folder()

    workspace.model = "youtu"
    with pytest.raises(UnjudgedError, match=r"the export ended with exit code 2; .*: .* -m parity export youtu$"):
        building.export_apart(workspace)
    assert "error: model youtu is unknown; did you mean youtu_vl?" in capfd.readouterr().err


# ---- a chain's outputs


def test_large_outputs_are_kept_in_files_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = rows_of(10, 10), rows_of(600, 500)
    assert spooled(small) is small
    kept = spooled(large)
    assert isinstance(kept, np.memmap)
    assert kept.tobytes() == large.tobytes()
    assert spooled(large[:, ::-1]).tobytes() == large[:, ::-1].tobytes()

    outputs = {"hidden": large[:3]}
    recorder = Recorder(SimpleNamespace(run=lambda graph_id, inputs: outputs), None)
    monkeypatch.setattr("parity.chain.SPOOLED_BYTES", 1)
    assert recorder.run("made/up", {}) is outputs
    assert recorder.outputs["made/up"]["hidden"].tobytes() == large[:3].tobytes()


# ---- what runs give back


HEAP = """
import ctypes, numpy
from runtime.memory import own_blocks

NAMES = ("arena", "ordblks", "smblks", "mapped", "hblkhd", "uordblks", "fsmblks", "fordblks", "keepcost", "spare")
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]
heap = ctypes.pythonapi.mallinfo2
heap.restype = Heap

def mapped():
    before = heap().mapped
    block = numpy.empty(2 << 20, numpy.uint8)
    return heap().mapped - before

with own_blocks():
    pass
with own_blocks():
    inside = mapped()
print(inside, mapped())
"""


@GLIBC
def test_weights_get_blocks_of_their_own_and_runs_none() -> None:
    told = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    assert told.stdout == "1 0\n"


@GLIBC
def test_what_runs_give_back_is_not_asked_of_the_system_again() -> None:
    import resource  # POSIX only

    size = 24 << 20
    with own_blocks():
        pass

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(size, np.uint8).fill(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 100  # of 6,144 pages


def test_a_net_is_loaded_into_blocks_of_its_own(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "_set_thresholds", lambda *sizes: thresholds.append(sizes))
    load_net(manifest.folder, manifest.graphs["youtu_vl/llm.layer.00.dqkv"], threads=1, verify=False)
    assert thresholds == [(1 << 20, 1 << 20), (32 << 20, 512 << 20)]
