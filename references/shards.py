"""Writes checkpoints in the Hugging Face folder layout: numbered safetensors shards, their index, JSON beside them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
# A synthetic checkpoint may hold a part of the model: globs on the tensor names that it has.
PARTIAL = "partial.json"
EVERYTHING = ("*",)


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int) -> None:
    """Write named tensors as numbered safetensors shards and their index, at most one shard in memory."""
    weight_map: dict[str, str] = {}
    total = 0
    parts = list(_write_parts(folder, tensors, shard_bytes))
    for number, (path, names, size) in enumerate(parts, 1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.replace(folder / final)
        weight_map |= dict.fromkeys(names, final)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def write_json(path: Path, value: object) -> None:
    """Write JSON as the hub's own tools do: two spaces, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _write_parts(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> Iterator[tuple[Path, list[str], int]]:
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, value in tensors:
        if shard and size + value.nbytes > shard_bytes:
            yield _write_part(folder, number, shard), list(shard), size
            shard, size, number = {}, 0, number + 1
        shard[name] = value
        size += value.nbytes
    yield _write_part(folder, number, shard), list(shard), size


def _write_part(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> Path:
    path = folder / f"part-{number}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    return path
