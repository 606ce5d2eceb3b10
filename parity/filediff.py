"""A graph's files beside those that the converter and the checkpoint give: lines of the param, tensors of the bin."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporters import layout, param
from exporters.export import Exporter
from exporters.weights import read_entries
from harness.errors import UnjudgedError
from harness.graphs import Graph
from parity.stages import error_of

Floats = NDArray[np.float32]

DIFF_LINES = 12


@dataclass(frozen=True)
class Changed:
    """A tensor of the rewritten layer that the bin does not hold, and what it holds instead."""

    tensor: str
    layer: str  # of the param
    actual: Floats
    expected: Floats
    whose: str = ""  # the tensor of the checkpoint that stands there

    def __str__(self) -> str:
        return f"{self.tensor} ({self.layer}): {self._instead()}"

    def _instead(self) -> str:
        ours, theirs = self.actual, self.expected
        if self.whose:
            return f"the numbers are {self.whose}'s in its place"
        if np.array_equal(ours.ravel(), theirs.T.ravel()):
            return "the numbers are its own transposed"
        differing = int((ours != theirs).sum())
        zeros = int(((ours == 0) & (theirs != 0)).sum())
        error = error_of(ours.reshape(1, -1), theirs.reshape(1, -1))
        text = f"{differing} of {ours.size} numbers differ, rel_l2 {error:.1e}"
        return f"{text}, {zeros} are 0" if zeros else text


@dataclass(frozen=True)
class Clean:
    """Files as the converter writes them, with the rewritten layer's weights."""

    param: Path
    bin: Path
    entries: list[layout.Entry]
    layers: Mapping[str, str]  # tensor -> the layer of the param that holds it, or the first of its parts
    tensors: Mapping[str, Floats]  # of the rewritten layer

    @classmethod
    def write(cls, exporter: Exporter, graph: Graph, module: Any, text: str, folder: Path) -> "Clean | None":
        """Into a folder, with the param's text or, where that is "", the stored one; None where it cannot be."""
        try:
            structure = exporter.structure(graph.structure)
        except UnjudgedError:
            return None
        stored = (structure / "graph.param").read_text(encoding="utf-8")
        entries, blobs = read_entries(structure), param.blobs(param.parse(stored))
        clean = cls(
            folder / "clean.param",
            folder / "clean.bin",
            entries,
            {entry.tensor: blob.layer for entry, blob in reversed([*zip(entries, blobs, strict=True)])},
            layout.tensors(module),
        )
        clean.param.write_text(text or stored, encoding="utf-8", newline="\n")
        with clean.bin.open("wb") as file:
            layout.write(file, entries, clean.tensors)
        return clean

    def changed_lines(self, actual: Path) -> list[str]:
        """Lines of a param that differ, spaces aside: `-` as the converter writes it, `+` as it is."""
        ours, theirs = (
            [" ".join(line.split()) for line in path.read_text().splitlines()] for path in (actual, self.param)
        )
        found = difflib.unified_diff(theirs, ours, n=0, lineterm="")
        lines = [line for line in found if line[:3] not in ("---", "+++") and not line.startswith("@@")]
        more = [f"... and {len(lines) - DIFF_LINES} lines more"] if len(lines) > DIFF_LINES else []
        return lines[:DIFF_LINES] + more

    def wrong_size(self, actual: Path) -> str:
        """What is said of a bin of another size; "" of one that is as large as it should be."""
        ours, theirs = (4 * (path.stat().st_size // 4) for path in (actual, self.bin))
        return f"the bin holds {ours} bytes, but should hold {theirs}" if ours != theirs else ""

    def changed(self, actual: Path, holder: Callable[[Floats], str | None]) -> list[Changed]:
        """Tensors whose numbers in a bin of the right size are not the checkpoint's.

        holder: which tensor of the checkpoint holds an array's numbers.
        """
        found = []
        for name, there in layout.read(actual, self.entries, self.tensors).items():
            wanted = self.tensors[name]
            if there.tobytes() != wanted.tobytes():
                whose = holder(there) if np.ptp(there) else None  # constants stand in many a tensor
                found.append(Changed(name, self.layers[name], there, wanted, whose or ""))
        return found
