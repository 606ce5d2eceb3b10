"""Files of weights: what is in each by names, written once however many graphs read it.

A graph's weights are one file or several in a row. Where a structure is cut (CUTS of its rewritten layer) a new file
begins, and files with the same content by names, layout and checkpoint are one: prefill reads those of dqkv and dattn.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exporters import layout
from exporters.layout import Entry
from exporters.output import Output
from harness.graphs import Graph


@dataclass(frozen=True)
class Part:
    """What one file holds: runs of numbers, each of a tensor of the module that `sources` traces to its origin."""

    entries: tuple[Entry, ...]
    sources: tuple[str, ...]  # the checkpoint's name of each, or the hash of a constant

    def recipe(self) -> list[list[Any]]:
        """All that decides the file's bytes, beside the checkpoint."""
        kinds = [[entry.transposed, entry.flagged, entry.columns] for entry in self.entries]
        return [[source, *kind] for source, kind in zip(self.sources, kinds, strict=True)]


def traced(entries: Sequence[Entry], module: Any, template: Callable[[str], str]) -> list[Entry]:
    """The entries with where their numbers come from, and with the cuts of the module's class."""
    constants = layout.constants(module)
    cuts = getattr(type(module), "CUTS", ())
    return [
        replace(
            entry,
            source=_constant(constants[entry.tensor]) if entry.tensor in constants else template(entry.tensor),
            begins=entry.tensor in cuts,
        )
        for entry in entries
    ]


def read_entries(structure: Path) -> list[Entry]:
    """The learnt layout of a structure in the store."""
    return [Entry(**entry) for entry in json.loads((structure / "layout.json").read_text(encoding="utf-8"))]


def parts(entries: Sequence[Entry], graph: Graph) -> list[Part]:
    """The files that a graph's weights stand in, in the order in which ncnn reads them."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if entry.begins and groups[-1]:
            groups.append([])
        groups[-1].append(entry)
    return [Part(tuple(group), tuple(entry.source.format(index=graph.index) for entry in group)) for group in groups]


def write(path: Path, part: Part, values: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write a part's file; its hash by its name. Raises ValueError naming a tensor that is not finite."""
    with Output(path) as output:
        for entry in part.entries:
            bad = sum(output.write(run) for run in layout.runs(entry, values[entry.tensor]))
            if bad:
                raise ValueError(f"tensor {entry.tensor} holds {bad} NaN or Inf")
    return {path.name: output.sha256}


def _constant(value: np.ndarray) -> str:
    return "constant " + hashlib.sha256(np.ascontiguousarray(value, "<f4").tobytes()).hexdigest()
