"""The byte layout of a structure's .bin, learnt once from pnnx's own file and then written for every layer.

Learning is by value: the structure is converted with random probe weights, all different, so that each run of
numbers in the .bin equals one tensor of the module. Constants (rotation matrices) equal buffers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import nn

from exporters.param import Blob
from harness.errors import UnjudgedError

FIRST = 64  # numbers of a run that are compared before all of them


@dataclass(frozen=True)
class Entry:
    """One run of numbers: which tensor of the module it holds.

    source: the checkpoint's name of the tensor with {index} for the layer's, or the hash of a constant.
    begins: whether a file begins with it, so that a graph that holds no more than the rest can share the file.
    columns: first and behind the last of the columns that it holds; None means all of them.
    """

    tensor: str
    transposed: bool
    flagged: bool
    source: str = ""
    begins: bool = False
    columns: Sequence[int] | None = None

    def of(self, value: np.ndarray) -> np.ndarray:
        """Its numbers of its tensor's value: a view."""
        stored = value.T if self.transposed else value
        return stored[:, slice(*self.columns)] if self.columns else stored


def set_probe_weights(module: nn.Module) -> None:
    """Fill all parameters with seeded random numbers, so that no two of them are equal."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5, generator=random)


def tensors(module: nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers of a module, float32."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: value.detach().numpy() for name, value in named}


def constants(module: nn.Module) -> dict[str, np.ndarray]:
    """The buffers of a module: what its layers hold besides the checkpoint's tensors."""
    return {name: value.detach().numpy() for name, value in module.named_buffers()}


def learn(weights: Path, blobs: Sequence[Blob], module: nn.Module) -> list[Entry]:
    """Match every run of numbers of a .bin with a tensor of the module that it was converted from."""
    size, wanted = weights.stat().st_size, sum(blob.nbytes for blob in blobs)
    if size != wanted:
        raise UnjudgedError(f"pnnx wrote {size} bytes of weights, but its param asks for {wanted}")
    known = tensors(module)
    words = np.fromfile(weights, np.float32)
    entries, position = [], 0
    for blob in blobs:
        start = position + blob.flagged
        position = start + blob.count
        entries.append(_match(words[start:position], blob, known))
    unused = sorted(set(known) - {entry.tensor for entry in entries})
    if unused:
        raise UnjudgedError(f"pnnx left out the tensors {unused}")
    return entries


def write(file: BinaryIO, entries: Sequence[Entry], values: Mapping[str, np.ndarray]) -> None:
    """Write a .bin in the learnt layout."""
    for entry in entries:
        for run in runs(entry, values[entry.tensor]):
            file.write(np.ascontiguousarray(run).reshape(-1).data)


def runs(entry: Entry, value: np.ndarray) -> Iterator[np.ndarray]:
    """What a .bin holds for an entry, one array behind the other: views where its tensor's value is float32."""
    if entry.flagged:
        yield np.zeros(1, "<f4")  # storage word 0: float32
    yield entry.of(value).astype("<f4", copy=False)


def read(weights: Path, entries: Sequence[Entry], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors in a .bin of the learnt layout, which is as long as it should be, in the shapes of `like`."""
    words, position = np.fromfile(weights, np.float32), 0
    values = {name: np.empty(value.shape, np.float32) for name, value in like.items()}
    for entry in entries:
        target = entry.of(values[entry.tensor])
        start = position + entry.flagged
        position = start + target.size
        target[...] = words[start:position].reshape(target.shape)
    return values


def _match(numbers: np.ndarray, blob: Blob, known: Mapping[str, np.ndarray]) -> Entry:
    for name, value in known.items():
        if value.size == numbers.size:
            for transposed in (False, True):
                array = value.T if transposed else value
                # the first numbers tell most tensors apart, without a turned copy of 100 MB
                if np.array_equal(array.flat[:FIRST], numbers[:FIRST]) and np.array_equal(array.ravel(), numbers):
                    return Entry(name, transposed, blob.flagged)
    raise UnjudgedError(
        f"the {blob.count} numbers of ncnn layer {blob.layer} equal no tensor of the rewritten layer: "
        "pnnx changed them, so its output cannot be reused for other layers"
    )
