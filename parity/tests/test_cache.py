"""Claim: only what an edit touches is exported again, and nothing half-built or foreign ever counts."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from exporters import export
from exporters.export import Exporter
from exporters.output import Output
from exporters.sources import source_of
from harness.errors import UnjudgedError
from harness.store import Build, Hashes, Store, file_sha256
from parity.workspace import ROOT, Choice, Workspace
from references.checkpoint import Checkpoint
from runtime.errors import InputError
from runtime.graphs import Graph, load_net, read_graph

MODEL = "youtu_vl"
GRAPH = "youtu_vl/vision.layer.07"
SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60.0  # a child imports torch first

Keys = dict[str, str]


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice(MODEL))


@pytest.fixture(scope="module")
def exporter(workspace: Workspace) -> Exporter:
    return workspace.exporter


class Log(Store):
    """A store that keeps the names of what it built."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.built: list[str] = []

    def get(self, kind: str, key: str, build: Build, **options: Any) -> Path:
        def logged(folder: Path) -> Hashes | None:
            self.built.append(str(options["name"]))
            return build(folder)

        return super().get(kind, key, logged, **options)


def like(exporter: Exporter, store: Store, *, fingerprint: str = "") -> Exporter:
    """An exporter of the same checkpoint over another store."""
    return Exporter(MODEL, exporter.checkpoint, fingerprint or exporter.fingerprint, store)


# ---- what is built


def test_nothing_is_built_twice(exporter: Exporter, tmp_path: Path) -> None:
    chosen = [GRAPH, "youtu_vl/vision.layer.08", "youtu_vl/llm.layer.39.dqkv"]
    first, second = Log(tmp_path), Log(tmp_path)
    for graph_id in chosen:
        like(exporter, first).graph(graph_id)
    assert first.built == [
        *(GRAPH, "vision.layer", f"{GRAPH} weights"),
        *(chosen[1], f"{chosen[1]} weights"),
        *(chosen[2], "llm.layer.dqkv", f"{chosen[2]} weights"),
    ]
    folders = [like(exporter, second).graph(graph_id) for graph_id in chosen]
    assert second.built == []
    assert len(set(folders)) == 3


def test_a_whole_model_is_built_once(workspace: Workspace, exporter: Exporter) -> None:
    folder = exporter.model_folder()
    again = Log(workspace.store.root)
    assert like(exporter, again).model_folder(verify=True) == folder
    assert again.built == []


def test_a_file_cut_short_is_built_again(exporter: Exporter, tmp_path: Path) -> None:
    weights = like(exporter, Store(tmp_path)).graph(GRAPH) / "graph.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    again = Log(tmp_path)
    assert (like(exporter, again).graph(GRAPH) / "graph.bin").read_bytes() == whole
    assert again.built == [GRAPH, f"{GRAPH} weights"]


def test_an_altered_file_is_built_again_when_verified(exporter: Exporter, tmp_path: Path) -> None:
    weights = like(exporter, Store(tmp_path)).graph(GRAPH) / "graph.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = Log(tmp_path)
    assert (like(exporter, again).graph(GRAPH, verify=True) / "graph.bin").read_bytes() == whole
    assert again.built == [GRAPH, f"{GRAPH} weights"]


# ---- what a key depends on


class Sources:
    """A copy of the exporters' sources that stands in for the real ones."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, exporter: Exporter) -> None:
        self.folder, self.exporter = folder / "exporters", exporter
        shutil.copytree(export.HERE, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(export, "HERE", self.folder)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def keys(self) -> Keys:
        for name in ("layers", MODEL):
            self._load(f"exporters.{name}", self.folder / f"{name}.py")
        found = like(self.exporter, self.exporter.store)
        return {graph_id: found.graph_key(graph) for graph_id, graph in found.graphs.items()}

    def _load(self, name: str, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self._monkeypatch.setitem(sys.modules, name, module)
        # two edits of one length in one second would look alike
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        spec.loader.exec_module(module)
        return module


@pytest.fixture(scope="module")
def unedited(exporter: Exporter) -> Keys:
    return keys(exporter)


@pytest.fixture
def sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: Exporter, unedited: Keys
) -> Sources:  # `unedited` is computed before anything stands in for the real sources
    return Sources(tmp_path, monkeypatch, exporter)


def keys(exporter: Exporter) -> Keys:
    return {graph_id: exporter.graph_key(graph) for graph_id, graph in exporter.graphs.items()}


def kinds_that_differ(before: Keys, after: Keys) -> set[str]:
    """Kinds of the graphs whose key changed; a kind changes as a whole or not at all."""
    changed: dict[str, set[bool]] = {}
    for graph_id in before:
        changed.setdefault(kind(graph_id), set()).add(before[graph_id] != after[graph_id])
    assert all(len(answers) == 1 for answers in changed.values()), changed
    return {name for name, answers in changed.items() if answers == {True}}


def kind(graph_id: str) -> str:
    return ".".join(word for word in graph_id.partition("/")[2].split(".") if not word.isdigit())


VISION = {"vision.embed", "vision.layer", "vision.tail"}
TEXT = {"llm.layer.prefill", "llm.layer.dqkv", "llm.layer.dattn"}
# file, old, new, kinds of the graphs whose key changes
EDITS: dict[str, tuple[str, str, str, set[str]]] = {
    "one rewrite": (
        "youtu_vl.py",
        'return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))',
        'return self.fc2(F.gelu(self.fc1(x) * 1.0, approximate="tanh"))',
        {"vision.layer"},
    ),
    "a part of two rewrites": (
        "youtu_vl.py",
        "compressed = self.kv_a_proj_with_mqa(x)",
        "compressed = self.kv_a_proj_with_mqa(x) * 1.0",
        {"llm.layer.prefill", "llm.layer.dqkv"},
    ),
    "a function of two rewrites": (
        "youtu_vl.py",
        "return mixed.transpose(1, 2).reshape(1, -1, text.num_attention_heads * text.v_head_dim)",
        "return mixed.transpose(1, 2).reshape(1, -1, text.v_head_dim * text.num_attention_heads)",
        {"llm.layer.prefill", "llm.layer.dattn"},
    ),
    "a layer used by many": (
        "layers.py",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
        "return x * self.weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
        TEXT | {"vision.tail"},
    ),
    "a helper used by many": (
        "layers.py",
        "return x.reshape(1, -1, count, width).transpose(1, 2)",
        "return x.reshape(1, -1, count, width).permute(0, 2, 1, 3)",
        {"vision.layer", "llm.layer.prefill", "llm.layer.dqkv"},
    ),
    "a prefix": (
        "youtu_vl.py",
        'PREFIXES: ClassVar = {"": VISION + "embeddings."}',
        'PREFIXES: ClassVar = {"": VISION + "embedding."}',
        {"vision.embed"},
    ),
    "a comment": (
        "youtu_vl.py",
        '        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))',
        '        # a remark\n        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))',
        set(),
    ),
    "a docstring": ("youtu_vl.py", '"""fc1, tanh GELU, fc2."""', '"""Two layers."""', set()),
    "a line break": (
        "youtu_vl.py",
        "return self.merger(self.post_layernorm(hidden))",
        "return self.merger(\n            self.post_layernorm(hidden),\n        )",
        set(),
    ),
    "a comment in a tool": ("param.py", "def _none(", "# a remark\ndef _none(", set()),
    "an option of the converter": (
        "pnnx.py",
        'OPTIONS = ("fp16=0",)',
        'OPTIONS = ("fp16=0", "optlevel=2")',
        VISION | TEXT,
    ),
    "the post-processing": ("param.py", 'f"isolate_{name}"', 'f"isolated_{name}"', VISION | TEXT),
    "the layout": ("layout.py", "manual_seed(0)", "manual_seed(1)", VISION | TEXT),
    "the audit": ("audit.py", '"SDPA", ', "", VISION | TEXT),
    "the self-check": ("export.py", "SELF_CHECK = 1e-9", "SELF_CHECK = 1e-10", VISION | TEXT),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_the_keys_of_what_it_touches(sources: Sources, unedited: Keys, name: str) -> None:
    file, old, new, touched = EDITS[name]
    sources.edit(file, old, new)
    assert kinds_that_differ(unedited, sources.keys()) == touched


def test_the_edit_of_one_vision_rewrite_touches_27_graphs(sources: Sources, unedited: Keys) -> None:
    assert sources.keys() == unedited
    sources.edit("youtu_vl.py", 'approximate="tanh"', "approximate=str('tanh')")
    after = sources.keys()
    changed = [graph_id for graph_id in unedited if unedited[graph_id] != after[graph_id]]
    assert changed == [f"youtu_vl/vision.layer.{index:02d}" for index in range(27)]


def test_a_constant_counts_by_its_value(sources: Sources, unedited: Keys) -> None:
    sources.edit("youtu_vl.py", "class VisionMLP", 'MODE = "tanh"\n\n\nclass VisionMLP')
    assert sources.keys() == unedited
    sources.edit("youtu_vl.py", 'approximate="tanh"', "approximate=MODE")
    before = sources.keys()
    sources.edit("youtu_vl.py", 'MODE = "tanh"', 'MODE = "none"')
    assert kinds_that_differ(before, sources.keys()) == {"vision.layer"}


def test_a_constant_of_unknown_content_is_refused(sources: Sources) -> None:
    sources.edit("youtu_vl.py", "class VisionMLP", "TABLE = torch.zeros(3)\n\n\nclass VisionMLP")
    sources.edit("youtu_vl.py", 'approximate="tanh"', 'approximate="tanh") + TABLE.sum(')
    expected = r"exporters.youtu_vl.VisionMLP uses the global TABLE, a Tensor, whose edits would not be noticed"
    with pytest.raises(UnjudgedError, match=expected):
        sources.keys()


def test_the_description_that_a_rewrite_reads_counts(exporter: Exporter) -> None:
    text = source_of(exporter.new_module(exporter.graphs[GRAPH].structure).__class__)
    assert "self.hidden_size // self.num_attention_heads" in text  # references/youtu_vl/config.py
    assert "siglip2.vision_model.encoder.layers.{index}." in text  # references/youtu_vl/weights.py


def test_another_checkpoint_changes_every_key(exporter: Exporter, unedited: Keys) -> None:
    other = like(exporter, exporter.store, fingerprint="another")
    assert kinds_that_differ(unedited, keys(other)) == VISION | TEXT


@pytest.mark.parametrize("package", export.VERSIONS)
def test_another_version_changes_every_key(exporter: Exporter, unedited: Keys, package: str) -> None:
    other = like(exporter, exporter.store)
    other.versions = other.versions | {package: "0"}
    assert kinds_that_differ(unedited, keys(other)) == VISION | TEXT


def test_no_two_graphs_share_a_key(unedited: Keys) -> None:
    assert len(set(unedited.values())) == 149


# ---- several processes


class Unchecked(Exporter):
    """An exporter that needs no reference: importing one takes longer than all the rest."""

    def __init__(self, checkpoint: Path, fingerprint: str, store: Store) -> None:
        super().__init__(MODEL, checkpoint, fingerprint, store)
        self.__dict__["reference"] = SimpleNamespace(checkpoint=Checkpoint(checkpoint))

    def _self_check(self, graph: Any, module: Any) -> None:
        pass


def build_together(checkpoint: Path, fingerprint: str, root: Path, start: Any) -> None:
    """Run in a child: build one graph at the same time as others, leaving one line per build in the log."""
    torch.set_num_threads(1)
    store = Log(root)
    start.wait(SECONDS)
    Unchecked(checkpoint, fingerprint, store).graph(GRAPH)
    with (root / "log.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in ["ran", *store.built])


def build_until_killed(checkpoint: Path, fingerprint: str, root: Path, started: Any) -> None:
    """Run in a child that is going to be killed while it writes the weights."""
    write = Output.write

    def half(output: Output, numbers: Any) -> int:
        bad = write(output, numbers)
        output._flush()
        if output._file.tell():  # so that a part of it is there when the child is killed
            started.set()
            multiprocessing.Event().wait(SECONDS)
        return bad

    Output.write = half  # type: ignore[assignment, method-assign]
    Unchecked(checkpoint, fingerprint, Store(root)).graph(GRAPH)


def test_two_processes_build_a_graph_once(exporter: Exporter, tmp_path: Path) -> None:
    start = SPAWN.Barrier(2)
    arguments = (exporter.checkpoint, exporter.fingerprint, tmp_path, start)
    children = [SPAWN.Process(target=build_together, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(SECONDS)
        assert child.exitcode == 0
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == ["ran", "ran", "vision.layer", GRAPH, f"{GRAPH} weights"]


def test_a_killed_build_leaves_nothing_that_counts(exporter: Exporter, tmp_path: Path) -> None:
    started = SPAWN.Event()
    arguments = (exporter.checkpoint, exporter.fingerprint, tmp_path, started)
    child = SPAWN.Process(target=build_until_killed, args=arguments)
    child.start()
    assert started.wait(SECONDS)
    child.kill()
    child.join(SECONDS)
    (half,) = tmp_path.glob("weights/*/weights.bin")
    size = (exporter.graph(GRAPH) / "graph.bin").stat().st_size
    assert 0 < half.stat().st_size < size
    again = Log(tmp_path)
    folder = like(exporter, again).graph(GRAPH)
    assert again.built == [GRAPH, f"{GRAPH} weights"]
    assert file_sha256(folder / "graph.bin") == file_sha256(exporter.graph(GRAPH) / "graph.bin")
    assert list(tmp_path.glob("graph/*/graph.bin")) == [folder / "graph.bin"]


# ---- building forbidden


@pytest.fixture
def bare_home(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PARITY_HOME with the checkpoint and nothing made from it."""
    checkpoint = workspace.checkpoint
    shutil.copytree(checkpoint, tmp_path / "store" / checkpoint.parent.name / checkpoint.name)
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    return tmp_path


def forbidden() -> Workspace:
    return Workspace(Choice(MODEL, build=False))


ASKS: dict[str, tuple[Callable[[Workspace], object], str]] = {
    "graph": (lambda w: w.exporter.graph(GRAPH), f"{GRAPH} .*: python -m parity export {MODEL}"),
    "base": (lambda w: w.exporter.base(), f"{MODEL} base .*: python -m parity export {MODEL}"),
    "model": (lambda w: w.exporter.model_folder(), f"{MODEL} .*: python -m parity export {MODEL}"),
    "dump": (lambda w: w.dump("smallest"), f"case smallest .*: python -m parity dumps {MODEL}$"),
}


@pytest.mark.usefixtures("bare_home")
@pytest.mark.parametrize("name", ASKS)
def test_what_is_missing_is_told_with_the_command_that_builds_it(name: str) -> None:
    ask, expected = ASKS[name]
    with pytest.raises(UnjudgedError, match=expected):
        ask(forbidden())


def test_a_missing_checkpoint_is_told_with_the_command_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_HOME", str(tmp_path))
    with pytest.raises(UnjudgedError, match=f"not built.*: python -m parity checkpoint {MODEL}$"):
        _ = forbidden().checkpoint


def test_the_command_for_a_checkpoint_of_the_users_own_names_its_folder(exporter: Exporter, tmp_path: Path) -> None:
    other = like(exporter, Store(tmp_path, build=False))
    with pytest.raises(UnjudgedError, match=f"parity export {MODEL} --checkpoint {exporter.checkpoint}$"):
        other.graph(GRAPH)
    chosen = Exporter(
        MODEL,
        exporter.checkpoint,
        exporter.fingerprint,
        Store(tmp_path, build=False),
        arguments=f"{MODEL} --profile full",
    )
    with pytest.raises(UnjudgedError, match=f"parity export {MODEL} --profile full$"):
        chosen.graph(GRAPH)


def test_a_run_without_building_is_red_and_says_what_to_type(bare_home: Path) -> None:
    chosen = "vision.layer.07 and (square or smallest)"
    command = [sys.executable, "-m", "pytest", "parity/test_graphs.py", "-k", chosen, "--no-build", "-q"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PARITY_HOME": str(bare_home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 failed" in run.stdout
    assert "skipped" not in run.stdout
    assert f"{GRAPH} could not be judged" in run.stdout
    assert f"build it: python -m parity export {MODEL}" in run.stdout
    assert f"build it: python -m parity dumps {MODEL}" in run.stdout
    assert [path.name for path in (bare_home / "store").glob("*/*") if path.is_dir()] == [
        path.name for path in (bare_home / "store" / "checkpoint").glob("*") if path.is_dir()
    ]


# ---- foreign files


@pytest.fixture
def placed(exporter: Exporter, tmp_path: Path) -> Graph:
    """One graph as it stands in a model folder, here tmp_path."""
    folder = exporter.model_folder()
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    entry = next(entry for entry in manifest["graphs"] if entry["id"] == GRAPH)
    for name in (entry["param"], *entry["weights"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, tmp_path / name)
    return read_graph(entry)


def test_a_graph_loads_with_its_own_files(placed: Graph, tmp_path: Path) -> None:
    load_net(tmp_path, placed, threads=1, verify=True)


@pytest.mark.parametrize("file", ["graph.bin", "graph.param"])
def test_a_file_of_another_graph_is_refused(exporter: Exporter, placed: Graph, tmp_path: Path, file: str) -> None:
    """Weights of another checkpoint have the right size: only the hash tells."""
    other = "youtu_vl/vision.layer.08" if file == "graph.bin" else "youtu_vl/vision.tail"
    target = tmp_path / (placed.weights[0] if file == "graph.bin" else placed.param)
    shutil.copyfile(exporter.graph(other) / file, target)
    with pytest.raises(InputError, match=rf"^{GRAPH}: .*{target.name} .*other hash.*; export the model again"):
        load_net(tmp_path, placed, threads=1, verify=True)
