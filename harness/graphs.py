"""What a graph is, told without torch and without ncnn: ports, structures, ids in execution order.

Each model describes its graphs once with these classes; export, dumps, runtime manifest, audit and tests read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Dim = int | str  # a fixed size, a size's name ("T"), or a multiple of one ("4*cells")


@dataclass(frozen=True)
class Port:
    """One input or output of a structure, without the batch axis."""

    name: str
    shape: tuple[Dim, ...]

    def sizes(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the port when each size's name has the given length. Raises KeyError on an unknown name."""
        return tuple(_size(dim, lengths) for dim in self.shape)


@dataclass(frozen=True)
class Structure:
    """Graphs of one structure differ in their weights only: they are converted once."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    census: Mapping[str, int]  # layer type -> how many the exported param must hold

    @property
    def length_names(self) -> tuple[str, ...]:
        """Names of the dynamic sizes, in order of first use."""
        dims = [dim for port in self.inputs for dim in port.shape if isinstance(dim, str)]
        return tuple(dict.fromkeys(dim.rpartition("*")[2] for dim in dims))


@dataclass(frozen=True)
class Graph:
    """One exported sub-graph. `sources` says per input which tensors of a dump feed it.

    Several sources of one input are joined along the row axis (axis -2): a key cache is the prompt's rows
    and then the new row.
    """

    id: str
    structure: Structure
    index: int | None  # of the layer in its tower
    sources: Mapping[str, tuple[str, ...]]


def _size(dim: Dim, lengths: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    factor, _, name = dim.rpartition("*")
    return int(factor or 1) * lengths[name]
