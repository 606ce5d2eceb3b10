"""Checkpoints in the Hugging Face folder layout: read one tensor at a time, and write shards of that layout.

But: no remote code is run and no hub is asked; a folder on disk is all there is.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from harness.errors import UnjudgedError
from references.shards import INDEX

SINGLE = "model.safetensors"
# The files beside the shards that a run depends on; the ones marked True must be there.
SIDE_FILES = {
    "config.json": True,
    "tokenizer.json": True,
    "preprocessor_config.json": False,
    "generation_config.json": False,
    "tokenizer_config.json": False,
    "chat_template.json": False,
    "chat_template.jinja": False,
}
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """One checkpoint folder. `expected` maps each tensor name that the model needs to its shape.

    Raises UnjudgedError when a file or tensor is missing, truncated, of another shape, or not finite.
    """

    def __init__(self, folder: Path, expected: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UnjudgedError(
                f"checkpoint folder {folder} does not exist; pass CHECKPOINT=DIR with a folder that holds config.json"
            )
        for name, needed in SIDE_FILES.items():
            if needed and not (folder / name).is_file():
                raise UnjudgedError(f"checkpoint {folder} has no {name}; copy it from the model's own repository")
        self.config = self.json("config.json")
        self._shard_of = self._index()
        self._finite: set[str] = set()  # names of tensors that were looked through
        if expected is not None:
            self._check(expected)

    def json(self, name: str) -> dict[str, Any]:
        """Content of one of the JSON files; empty when an optional one is absent."""
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnjudgedError(f"{path} is not JSON ({error}); fetch the file again") from error
        if not isinstance(value, dict):
            raise UnjudgedError(
                f"{path} holds a JSON {type(value).__name__}, but should hold an object; fetch the file again"
            )
        return value

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return sorted(self._shard_of)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, widened to float32. Raises UnjudgedError when it is missing or not finite."""
        value = self.stored(name).float()
        if name not in self._finite:
            self._check_finite(name, value)
        return value

    def stored(self, name: str) -> torch.Tensor:
        """One tensor in the numbers it is stored in, its file mapped into memory. Raises UnjudgedError without it."""
        if name not in self._shard_of:
            raise UnjudgedError(
                f"{self.folder}: tensor {name} is in no shard; the checkpoint is incomplete, fetch it again"
            )
        path = self._shard_of[name]
        with self._open(path) as shard:
            if name not in shard.keys():  # noqa: SIM118 - a shard cannot be iterated
                raise UnjudgedError(_misplaced(path, name))
            value: torch.Tensor = shard.get_tensor(name)
        if value.dtype not in _WIDENED:
            raise UnjudgedError(
                f"{path}: tensor {name} has dtype {value.dtype}, but should be bfloat16, float16 or float32; "
                "convert the checkpoint"
            )
        return value

    def holder(self, values: torch.Tensor) -> str | None:
        """The first tensor, by name, that holds these numbers; of others no more than a row is read."""
        for name, path in sorted(self._shard_of.items()):
            with self._open(path) as shard:
                stored = shard.get_slice(name)
                same_shape = tuple(stored.get_shape()) == tuple(values.shape)
                if (
                    same_shape
                    and torch.equal(stored[:1].float(), values[:1])
                    and torch.equal(self.tensor(name), values)
                ):
                    return name
        return None

    def blocks(self, name: str, block_bytes: int) -> Iterator[torch.Tensor]:
        """The rows of a matrix, widened to float32, in blocks of some bytes at most."""
        stored = self.stored(name)
        for block in stored.split(max(1, block_bytes // (4 * stored.shape[1]))):
            value = block.float()
            if name not in self._finite:
                self._check_finite(name, value, whole=stored)
            yield value
        self._finite.add(name)

    def _check_finite(self, name: str, value: torch.Tensor, *, whole: torch.Tensor | None = None) -> None:
        # a sum is not finite where one number is not; it takes a twentieth of the time that looking at each takes
        if not torch.isfinite(value.sum()) and not torch.isfinite(value).all():
            value = value if whole is None else whole
            bad = int((~torch.isfinite(value)).sum())
            raise UnjudgedError(
                f"{self._shard_of[name]}: tensor {name} holds {bad} NaN or Inf; the file is damaged, fetch it again"
            )
        if whole is None:
            self._finite.add(name)

    def shards(self) -> list[Path]:
        """The shard files, sorted."""
        return sorted(set(self._shard_of.values()))

    def side_files(self) -> list[Path]:
        """The files beside the shards that are there."""
        return [self.folder / name for name in SIDE_FILES if (self.folder / name).is_file()]

    def fingerprint(self) -> str:
        """SHA-256 over all files that a run depends on."""
        total = hashlib.sha256()
        for path in [*self.side_files(), *self.shards()]:
            with path.open("rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def _index(self) -> dict[str, Path]:
        if (self.folder / INDEX).is_file():
            index = self.json(INDEX).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise UnjudgedError(f"{self.folder / INDEX} has no weight_map; fetch the file again")
            shard_of = {name: self.folder / file for name, file in index.items()}
        elif (self.folder / SINGLE).is_file():
            with self._open(self.folder / SINGLE) as shard:
                shard_of = dict.fromkeys(shard.keys(), self.folder / SINGLE)
        else:
            raise UnjudgedError(f"checkpoint {self.folder} has neither {INDEX} nor {SINGLE}; fetch the weights")
        for path in sorted(set(shard_of.values())):
            if not path.is_file():
                raise UnjudgedError(f"checkpoint shard {path} is missing; {INDEX} names it, fetch it again")
        return shard_of

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in expected if name not in self._shard_of]
        if missing:
            raise UnjudgedError(
                f"{self.folder}: {len(missing)} of {len(expected)} tensors are in no shard, "
                f"first {missing[0]}; the checkpoint is incomplete or of another model, fetch it again"
            )
        by_shard: dict[Path, dict[str, tuple[int, ...]]] = {}
        for name, shape in expected.items():
            by_shard.setdefault(self._shard_of[name], {})[name] = shape
        for path, shapes in by_shard.items():
            with self._open(path) as shard:
                _check_shard(path, shard, shapes)

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UnjudgedError(
                f"checkpoint shard {path} cannot be read ({error}); it is truncated or damaged, fetch it again"
            ) from error


def _check_shard(path: Path, shard: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
    stored = set(shard.keys())
    for name, wanted in expected.items():
        if name not in stored:
            raise UnjudgedError(_misplaced(path, name))
        shape = tuple(shard.get_slice(name).get_shape())
        if shape != wanted:
            raise UnjudgedError(
                f"{path}: tensor {name} has shape {shape}, but should be {wanted} by config.json; "
                "the two are of different models, fetch both again"
            )


def _misplaced(path: Path, name: str) -> str:
    return f"{path}: tensor {name} is not in the shard that {INDEX} names; fetch the file again"
