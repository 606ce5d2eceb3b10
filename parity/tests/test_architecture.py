"""Claim: the house is as planned: who imports whom, what a model must bring, where models may be named."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import pytest

from harness.graphs import Structure
from parity import checks
from parity.checks import LIMITS
from parity.workspace import ROOT, Choice, Workspace
from references import MODELS

# Who may import whom, beside itself.
ARROWS = {
    "harness": set(),
    "runtime": set(),
    "references": {"harness"},
    "exporters": {"references", "harness"},
    "parity": {"references", "harness", "exporters", "runtime"},
}
OURS = set(ARROWS)
RUNTIME_NEEDS = {"PIL", "jinja2", "ncnn", "numpy"}
# Torch is for whoever computes the truth or converts it; descriptions of models are read without it.
WITHOUT_TORCH = ("config.py", "graphs.py", "weights.py", "cases.py", "__init__.py")
# Libraries that would split text instead of our own tables, and Unicode data that changes with Python.
SPLITTERS = {"re", "regex", "tokenizers", "unicodedata"}
LONGEST = 320  # lines of a file that is read as one
# Longer files, with the reason; a row that is no longer needed fails.
LONGER = {
    "parity/mutations.py": "a table: one row per mistake",
}


def sources(folder: Path) -> list[Path]:
    """Python files of the house, without what is built or installed in it."""
    return [path for top in sorted(OURS) for path in sorted((folder / top).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a relative import stays inside its own package
            yield node.lineno, node.module or "" if node.level == 0 else path.parts[-2]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # a name that is put together is a model's, and stands in no source
            yield from ((node.lineno, str(arg.value)) for arg in node.args if _is_text(arg))


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def new_arrows(folder: Path) -> list[str]:
    """`path:line imports name` of every import that ARROWS does not allow."""
    found = []
    for path in sources(folder):
        package = path.relative_to(folder).parts[0]
        for line, name in imports(path):
            top = name.partition(".")[0]
            if top in OURS and top != package and top not in ARROWS[package]:
                found.append(f"{path.relative_to(folder).as_posix()}:{line} imports {name}")
    return found


def test_nobody_imports_whom_they_may_not() -> None:
    assert len(sources(ROOT)) > 50
    assert new_arrows(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line", "allowed"),
    [
        ("harness/x.py", "import references", False),
        ("harness/x.py", "def f():\n    from runtime.mat import to_mat", False),
        ("runtime/x.py", "from harness.ids import suggest", False),
        ("references/m/x.py", "import exporters.param as p", False),
        ("references/m/x.py", "importlib.import_module('exporters.param')", False),
        ("references/m/x.py", "from harness import ids", True),
        ("exporters/x.py", "from runtime import mat", False),
        ("exporters/x.py", "import references.checkpoint, harness.ids", True),
        ("runtime/x.py", "from . import mat", True),
        ("parity/x.py", "import runtime, references, exporters, harness", True),
    ],
)
def test_a_new_arrow_is_seen(tmp_path: Path, path: str, line: str, allowed: bool) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f"{line}\n", encoding="utf-8")

    assert (new_arrows(tmp_path) == []) is allowed


def foreign(folder: Path) -> dict[str, list[str]]:
    """Third-party packages that a folder's files import, with the files."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for _, name in imports(path):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in OURS:
                found.setdefault(top, []).append(path.name)
    return found


def test_the_runtime_needs_numpy_ncnn_pillow_and_jinja2_only() -> None:
    assert set(foreign(ROOT / "runtime")) == RUNTIME_NEEDS


def test_the_harness_knows_neither_torch_nor_ncnn() -> None:
    own = {name for name, paths in foreign(ROOT / "harness").items() if not all(p.startswith("test_") for p in paths)}

    assert not own & {"torch", "ncnn", "pnnx", "transformers", "tokenizers"}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_described_without_torch(model: str) -> None:
    folder = ROOT / "references" / model
    tops = {name.partition(".")[0] for file in WITHOUT_TORCH for _, name in imports(folder / file)}

    assert not tops & {"torch", "transformers", "ncnn", "pnnx"}


def test_text_is_split_by_our_own_tables() -> None:
    used = {
        (path.name, name)
        for path in (ROOT / "runtime").glob("*.py")
        for _, name in imports(path)
        if name.partition(".")[0] in SPLITTERS
    }

    assert used == {("tokenizer.py", "unicodedata")}
    tree = ast.parse((ROOT / "runtime" / "tokenizer.py").read_text(encoding="utf-8"))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if call.startswith("unicodedata.")]
    assert call.startswith("unicodedata.normalize('NFC', ")


# ---- size


def long_files(folder: Path) -> set[str]:
    """Paths of the files, tests aside, that are longer than LONGEST."""
    return {
        path.relative_to(folder).as_posix()
        for path in sources(folder)
        if not path.name.startswith("test_") and len(path.read_text(encoding="utf-8").splitlines()) > LONGEST
    }


def test_files_are_short() -> None:
    assert long_files(ROOT) == set(LONGER)


def test_a_long_file_is_seen(tmp_path: Path) -> None:
    for name, lines in (("short.py", LONGEST), ("long.py", LONGEST + 1), ("test_long.py", LONGEST + 1)):
        (tmp_path / "runtime" / "room").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runtime" / "room" / name).write_text("x = 1\n" * lines, encoding="utf-8")

    assert long_files(tmp_path) == {"runtime/room/long.py"}


# ---- models


def missing_parts(folder: Path, model: str) -> list[str]:
    """Paths of the files that a model lacks, under the house's folder."""
    wanted = [f"references/{model}/{name}" for name in (*WITHOUT_TORCH, "model.py", "source.py", "trace.py")]
    wanted += [f"exporters/{model}.py", f"runtime/{model}.py"]
    return [path for path in wanted if not (folder / path).is_file()]


NAMES = {
    "references.{model}": (
        "CASES",
        "PROFILES",
        "WIDE_CASES",
        "frame_tokens",
        "graphs",
        "read_sizes",
        "structures",
        "tensors",
    ),
    "references.{model}.model": ("Reference",),
    "references.{model}.source": ("write",),
    "references.{model}.trace": ("lengths", "trace"),
    "exporters.{model}": ("REWRITES",),
    "runtime.{model}": ("Pipeline",),
}


def missing_names(model: str) -> list[str]:
    """`path: name` of everything that the other folders ask a model's files for in vain."""
    found = []
    for pattern, names in NAMES.items():
        module = importlib.import_module(pattern.format(model=model))
        found += [f"{_path(module)}: {name}" for name in names if not hasattr(module, name)]
    return found


def missing_rewrites(model: str, rewrites: set[str], structures: dict[str, Structure]) -> list[str]:
    """`path: name` of every structure without a rewritten layer, and of every layer without a structure."""
    path = f"exporters/{model}.py"
    lacking = [f"{path}: REWRITES[{name!r}]" for name in sorted(set(structures) - rewrites)]
    return lacking + [f"{path}: REWRITES[{name!r}] is of no structure" for name in sorted(rewrites - set(structures))]


def _path(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).relative_to(ROOT).as_posix()


def _structures(model: str) -> dict[str, Structure]:
    workspace = Workspace(Choice(model))
    sizes = workspace.description.read_sizes(workspace.config, Path(model))
    found: dict[str, Structure] = workspace.description.structures(sizes)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_whole(model: str) -> None:
    rewrites = set(importlib.import_module(f"exporters.{model}").REWRITES)

    assert missing_parts(ROOT, model) == []
    assert missing_names(model) == []
    assert missing_rewrites(model, rewrites, _structures(model)) == []


def test_what_a_new_model_lacks_is_listed_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing_parts(ROOT, "made_up")
    assert {"references/made_up/graphs.py", "exporters/made_up.py", "runtime/made_up.py"} < set(lacking)
    assert all("made_up" in path for path in lacking)

    model = MODELS[0]
    pipeline = importlib.import_module(f"runtime.{model}")
    monkeypatch.delattr(pipeline, "Pipeline")
    assert missing_names(model) == [f"runtime/{model}.py: Pipeline"]

    structures = _structures(model)
    first, *others = sorted(structures)
    assert missing_rewrites(model, {*others, "extra"}, structures) == [
        f"exporters/{model}.py: REWRITES[{first!r}]",
        f"exporters/{model}.py: REWRITES['extra'] is of no structure",
    ]


@pytest.mark.parametrize("model", MODELS)
def test_a_models_description_agrees_with_itself(model: str) -> None:
    workspace = Workspace(Choice(model))
    structures = _structures(model)
    ids = list(workspace.graphs)

    assert len(set(ids)) == len(ids)
    assert all(name.startswith(f"{model}/") for name in ids)
    assert {graph.structure.name for graph in workspace.graphs.values()} == set(structures)
    for graph in workspace.graphs.values():
        assert graph.structure == structures[graph.structure.name]
        assert list(graph.sources) == [port.name for port in graph.structure.inputs]
    assert len({case.name for case in workspace.description.CASES}) == len(workspace.description.CASES)


# ---- no model is special


def branches_on_models(path: Path) -> list[int]:
    """Lines where a file compares something with a model's name, or looks one up."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tested = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.match_case | ast.Dict)]
    inner = [constant for node in tested for constant in _constants(node)]
    return sorted({node.lineno for node in inner if isinstance(node.value, str) and node.value in MODELS})


def _constants(node: ast.AST) -> list[ast.Constant]:
    if isinstance(node, ast.Compare):
        tested: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, ast.match_case):
        tested = [node.pattern]
    else:
        tested = [key for key in getattr(node, "keys", []) if key is not None]
    return [leaf for part in tested for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]


def _of_a_model(path: Path) -> bool:
    return path.stem in MODELS or path.parent.name in MODELS


def test_nothing_outside_a_models_own_files_asks_for_its_name() -> None:
    common = [path for path in sources(ROOT) if not _of_a_model(path) and not path.name.startswith("test_")]

    assert len(common) > 30
    assert [f"{path}:{line}" for path in common for line in branches_on_models(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "if model == '{model}': pass",
        "assert '{model}' != model",
        "x = model in ('{model}', 'b')",
        "match model:\n    case '{model}' | 'b': pass",
        "x = {{'{model}': 1}}[model]",
    ],
)
def test_a_branch_on_a_model_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.py").write_text(line.format(model=MODELS[0]), encoding="utf-8")
    assert branches_on_models(tmp_path / "x.py") != []


# ---- limits


def known_ids() -> list[str]:
    """Every id that can be judged."""
    graphs = [name for model in MODELS for name in Workspace(Choice(model)).graphs]
    return graphs + [f"{model}/{stage}" for model in MODELS for stage in checks.STAGES]


def test_every_row_of_limits_speaks_of_an_id() -> None:
    assert LIMITS.unmatched(known_ids()) == []


@pytest.mark.parametrize("mode", ["isolated", "chained"])
def test_every_id_has_limits(mode: str) -> None:
    for name in known_ids():
        assert LIMITS.of(name, mode)["cosine_min"].bound >= 0.9999


# ---- one place for ncnn


def ncnn_calls(folder: Path) -> set[tuple[str, str]]:
    """(path, ncnn class) of every call that makes an object of ncnn, tests aside."""
    return {
        (path.relative_to(folder).as_posix(), ast.unparse(node.func))
        for path in sources(folder)
        if not path.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and re.fullmatch(r"ncnn\.\w+", ast.unparse(node.func))
    }


def test_few_places_make_mats_and_load_nets() -> None:
    assert ncnn_calls(ROOT) == {
        ("runtime/mat.py", "ncnn.Mat"),
        ("runtime/graphs.py", "ncnn.Net"),
        ("runtime/half_head.py", "ncnn.Net"),
        ("runtime/joined.py", "ncnn.Net"),
        ("runtime/pools.py", "ncnn.PoolAllocator"),
        ("parity/blobs.py", "ncnn.Net"),  # any options, every blob
        ("parity/faults/binding.py", "ncnn.Mat"),  # on borrowed memory
        ("parity/faults/binding.py", "ncnn.Net"),  # with the wrong options
        ("parity/witnesses.py", "ncnn.Option"),
        ("parity/repro_script.py", "ncnn.Mat"),  # a program of its own
        ("parity/repro_script.py", "ncnn.Net"),
    }
