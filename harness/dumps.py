"""Dumps: one case's reference tensors in `<case>.safetensors`, and beside it what they are, `<case>.json`.

Writing the same dump twice gives the same bytes. Reading checks everything that was written; whatever is
missing, cut short, altered or made from something else is an error that ends with the command to type.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from harness.errors import UnjudgedError
from harness.metrics import Tensor
from harness.store import atomic_write_bytes, atomic_write_text, file_sha256

_KEYS = {"model", "case", "provenance", "values", "tensors", "bytes", "sha256"}


@dataclass(frozen=True)
class Dump:
    """The reference results of one case.

    provenance: what the tensors were made from (checkpoint hash, source hash, versions): any JSON.
    values: results that are no tensors (ids, texts): any JSON.
    """

    model: str
    case: str
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


def dump_paths(folder: Path, case: str) -> tuple[Path, Path]:
    """Where a case's tensors and manifest are."""
    return folder / f"{case}.safetensors", folder / f"{case}.json"


def write_dump(folder: Path, dump: Dump) -> None:
    """Write the tensors, then the manifest that vouches for them."""
    tensors_path, manifest_path = dump_paths(folder, dump.case)
    tensors = {name: np.asarray(dump.tensors[name], order="C") for name in sorted(dump.tensors)}
    data = safetensors.numpy.save(tensors)
    atomic_write_bytes(tensors_path, data)
    manifest = {
        "model": dump.model,
        "case": dump.case,
        "provenance": dump.provenance,
        "values": dump.values,
        "tensors": _index(tensors),
        "bytes": len(data),
        "sha256": file_sha256(tensors_path),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    atomic_write_text(manifest_path, text + "\n")


def read_dump(folder: Path, case: str, *, command: str, expect_provenance: Mapping[str, Any] | None = None) -> Dump:
    """Read a case and check it; command is what to type when it is not there or not good."""
    tensors_path, manifest_path = dump_paths(folder, case)
    for path in (manifest_path, tensors_path):
        if not path.is_file():
            raise UnjudgedError(f"{path} is missing; write it: {command}")
    manifest = _manifest(manifest_path, command)
    _check_provenance(manifest_path, manifest["provenance"], expect_provenance or {}, command)
    tensors = _tensors(tensors_path, manifest, command)
    return Dump(manifest["model"], manifest["case"], tensors, manifest["values"], manifest["provenance"])


def _manifest(path: Path, command: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnjudgedError(f"{path} is no whole manifest ({error}); write it again: {command}") from error
    if not isinstance(manifest, dict) or set(manifest) != _KEYS:
        raise UnjudgedError(f"{path} should have the keys {sorted(_KEYS)}; write it again: {command}")
    return manifest


def _check_provenance(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], command: str) -> None:
    wanted = json.loads(json.dumps(wanted))  # as it would have been stored: lists, no tuples
    stale = [key for key in sorted(wanted) if key not in stored or stored[key] != wanted[key]]
    if stale:
        said = "; ".join(f"{key}={stored.get(key)!r}, but should be {wanted[key]!r}" for key in stale)
        raise UnjudgedError(f"{path} is stale: {said}; write it again: {command}")


def _tensors(path: Path, manifest: Mapping[str, Any], command: str) -> dict[str, Tensor]:
    size = path.stat().st_size
    if size != manifest["bytes"]:
        raise UnjudgedError(f"{path} has bytes={size}, but should be {manifest['bytes']}; write it again: {command}")
    if file_sha256(path) != manifest["sha256"]:
        raise UnjudgedError(f"{path} does not have the hash in its manifest; write it again: {command}")
    tensors: dict[str, Tensor] = safetensors.numpy.load_file(path)
    if _index(tensors) != manifest["tensors"]:
        raise UnjudgedError(f"{path} does not hold the tensors in its manifest; write it again: {command}")
    return tensors


def _index(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in tensors.items()}
