"""Exported model folders: which files a graph's weights are, and how a folder of one's own is changed.

A graph's weights are the files that its manifest entry lists, one after the other. A graph that shares none of them
with another has one file, named after it.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.store import atomic_write_text, file_sha256

MANIFEST = "manifest.json"


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file where the file system can, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Second names, or copies, of all files below a folder."""
    for path in source.rglob("*"):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def join(files: Sequence[Path], target: Path) -> Path:
    """The one file that ncnn's own loader takes: the only one there is, else all of them in a row at `target`."""
    return files[0] if len(files) == 1 else concatenate(files, target)


def weight_files(folder: Path, graph_id: str) -> list[Path]:
    """The files of a graph's weights in a model folder; the one named after it where no manifest lists the graph."""
    entries = _read(folder)["graphs"] if (folder / MANIFEST).is_file() else []
    own = {"id": graph_id, "weights": [f"{graph_id}.bin"]}
    entry = next((entry for entry in entries if entry["id"] == graph_id), own)
    return [folder / name for name in entry["weights"]]


def own_weights(folder: Path) -> None:
    """Give every graph of a copied model folder one file of its own, so that each can be changed alone."""
    manifest = _read(folder)
    for entry in manifest["graphs"]:
        name = f"{entry['id']}.bin"
        if entry["weights"] != [name]:
            path = concatenate([folder / file for file in entry["weights"]], folder / name)
            hashes = {entry["param"]: entry["sha256"][entry["param"]], name: file_sha256(path)}
            entry |= {"weights": [name], "sha256": hashes}
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a folder's manifest, in place of the one that is there."""
    atomic_write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def _read(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def concatenate(files: Sequence[Path], target: Path) -> Path:
    """Write files in a row as one."""
    with target.open("wb") as joined:
        for path in files:
            with path.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 24)
    return target
