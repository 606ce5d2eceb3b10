"""An ncnn graph's wiring, read from its param."""

from collections.abc import Sequence
from pathlib import Path

from exporters import param
from exporters.linear import inner_blobs
from exporters.param import Layer

SILENT = ("Input", "Split")  # they compute nothing


class Wiring:
    """Which blob comes from which; a Split's outputs stand for its input, and a Linear in panels is one layer."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.makers = {name: layer for layer in layers for name in layer.outputs}
        silent = {name for layer in layers for name in inner_blobs(layer, self.makers)}
        silent.update(name for layer in layers if layer.type in SILENT for name in layer.outputs)
        self.names = [name for layer in layers for name in layer.outputs if name not in silent]

    @classmethod
    def read(cls, path: Path) -> "Wiring":
        """Of a param file; wrong counts on its second line are no reason to refuse it."""
        text = path.read_text(encoding="utf-8")
        magic, _, *lines = text.split("\n")
        kept = [line for line in lines if line.strip()]
        outputs = sum(int(line.split()[3]) for line in kept)
        return cls(param.parse("\n".join([magic, f"{len(kept)} {outputs}", *kept])))

    def origin(self, name: str) -> str:
        """The blob itself, or the one that Splits copied it from."""
        while name in self.makers and self.makers[name].type == "Split":
            name = self.makers[name].inputs[0]
        return name

    def inputs(self, name: str) -> list[str]:
        """What a blob is computed from."""
        layer = self.makers.get(name)
        if layer is None:
            return []
        inner = inner_blobs(layer, self.makers)
        sources = self.makers[inner[0]].inputs if inner else layer.inputs
        return [self.origin(source) for source in sources]

    def upstream(self, names: Sequence[str]) -> set[str]:
        """These blobs and all that they are computed from."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.inputs(name)
        return found
