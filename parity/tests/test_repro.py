"""The repro bundle runs alone and shows a difference that is there."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UnjudgedError
from parity import repro
from parity.workspace import Choice, Workspace

GRAPH = "youtu_vl/llm.layer.12.dattn"


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice("youtu_vl"))


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(folder / "repro.py")]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder.parent)


@pytest.mark.parametrize("graph_id", [GRAPH, "youtu_vl/vision.embed", "youtu_vl/llm.layer.00.prefill"])
def test_the_bundle_is_equal_where_the_graph_is(workspace: Workspace, tmp_path: Path, graph_id: str) -> None:
    done = run(repro.write(workspace, graph_id, "square", tmp_path / "bundle"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{graph_id} ")


def test_the_bundle_shows_a_difference(workspace: Workspace, tmp_path: Path) -> None:
    folder = repro.write(workspace, GRAPH, "square", tmp_path / "bundle")
    words = np.fromfile(folder / "graph.bin", np.float32)
    words[-100:] *= 1.1
    words.tofile(folder / "graph.bin")
    done = run(folder)
    assert done.returncode == 1
    assert "hidden (1, 64): rel_l2 " in done.stdout


def test_the_script_needs_numpy_and_ncnn_only(workspace: Workspace, tmp_path: Path) -> None:
    folder = repro.write(workspace, GRAPH, "square", tmp_path / "bundle")
    tree = ast.parse((folder / "repro.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"json", "sys", "ncnn", "numpy"}
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    assert set(about["versions"]) == {"ncnn", "pnnx", "numpy", "torch", "transformers"}


@pytest.mark.parametrize(
    ("graph_id", "case", "said"),
    [
        ("youtu_vl/llm.layer.12.dattm", "square", f"did you mean {GRAPH}"),
        (GRAPH, "squire", "case squire is unknown; did you mean square"),
        ("youtu_vl/vision.embed", "text_only", "case text_only does not run youtu_vl/vision.embed; pass --case"),
    ],
)
def test_what_cannot_be_bundled_is_told(
    workspace: Workspace, tmp_path: Path, graph_id: str, case: str, said: str
) -> None:
    with pytest.raises(UnjudgedError, match=said):
        repro.write(workspace, graph_id, case, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(UnjudgedError, match="is there already; remove it"):
        repro.write(workspace, GRAPH, "square", tmp_path / "bundle")
