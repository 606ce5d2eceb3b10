"""Dumps: one case's reference tensors in `<case>.safetensors`, and beside it what they are, `<case>.json`.

Writing the same dump twice gives the same bytes. Reading checks everything that was written; whatever is
missing, cut short, altered or made from something else is an error that ends with the command to type.
At true widths a dump is a gigabyte: it is written and read tensor by tensor.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from harness.errors import UnjudgedError
from harness.metrics import Tensor
from harness.store import atomic_write_chunks, atomic_write_text, file_sha256

_KEYS = {"model", "case", "provenance", "values", "tensors", "bytes", "sha256"}
_Index = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Dump:
    """The reference results of one case. `tensors` may read each one when it is asked for.

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
    index = _index(dump.tensors)
    atomic_write_chunks(tensors_path, _chunks(dump.tensors, index))
    manifest = {
        "model": dump.model,
        "case": dump.case,
        "provenance": dump.provenance,
        "values": dump.values,
        "tensors": index,
        "bytes": tensors_path.stat().st_size,
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


def _tensors(path: Path, manifest: Mapping[str, Any], command: str) -> Mapping[str, Tensor]:
    size = path.stat().st_size
    if size != manifest["bytes"]:
        raise UnjudgedError(f"{path} has bytes={size}, but should be {manifest['bytes']}; write it again: {command}")
    if file_sha256(path) != manifest["sha256"]:
        raise UnjudgedError(f"{path} does not have the hash in its manifest; write it again: {command}")
    tensors = _Tensors(path)
    if tensors.index != manifest["tensors"]:
        raise UnjudgedError(f"{path} does not hold the tensors in its manifest; write it again: {command}")
    return tensors


class _Tensors(Mapping[str, Tensor]):
    """Tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _open(path)
        header = _header(path)
        self.index: _Index = {
            name: {"dtype": _dtypes()[found["dtype"]], "shape": found["shape"]} for name, found in header.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.index:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __reduce__(self) -> tuple[type["_Tensors"], tuple[Path]]:
        return _Tensors, (self._path,)  # another process opens the file itself


def _index(tensors: Mapping[str, Tensor]) -> _Index:
    found = ((name, tensors[name]) for name in sorted(tensors))
    return {name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in found}


def _chunks(tensors: Mapping[str, Tensor], index: _Index) -> Iterator[bytes]:
    """The bytes that safetensors.numpy.save gives, without all tensors in memory."""
    empty = {name: np.empty(0, found["dtype"]) for name, found in index.items()}
    header, end = json.loads(safetensors.numpy.save(empty)[8:]), 0  # its order, and its words for the dtypes
    for name, entry in header.items():
        start = end
        end += math.prod(index[name]["shape"]) * np.dtype(index[name]["dtype"]).itemsize
        entry |= {"shape": index[name]["shape"], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in header:
        yield np.asarray(tensors[name], order="C").tobytes()


def _open(path: Path) -> Any:
    return safetensors.safe_open(path, framework="numpy")


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: found for name, found in header.items() if name != "__metadata__"}


@cache
def _dtypes() -> dict[str, str]:
    """safetensors' word for each of numpy's dtypes that it knows."""
    names = ["bool", "float16", "float32", "float64", "complex64"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    words = json.loads(safetensors.numpy.save({name: np.empty(0, name) for name in names})[8:])
    return {found["dtype"]: name for name, found in words.items()}
