"""ncnn's .param text: parse, edit, write; and what each layer reads from the .bin.

Format: a magic number, the counts of layers and blobs, then per layer
`type name input_count output_count inputs... outputs... key=value...`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

MAGIC = "7767517"
RESHAPE_KEYS = {1: ("0",), 2: ("0", "1"), 3: ("0", "1", "2"), 4: ("0", "1", "11", "2")}  # w, h, d, c by axes


@dataclass(frozen=True)
class Layer:
    """One line of a .param file. Values stay text: only their reader knows their type."""

    type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: dict[str, str]

    def number(self, key: str, default: int) -> int:
        """An integer parameter. Raises ValueError naming the layer when it is something else."""
        value = self.params.get(key, default)
        try:
            return int(value)
        except ValueError as error:
            raise ValueError(f"layer {self.name} has {key}={value}, but should have a whole number") from error

    def __str__(self) -> str:
        blobs = " ".join((*self.inputs, *self.outputs))
        params = "".join(f" {key}={value}" for key, value in self.params.items())
        return f"{self.type:<24} {self.name:<24} {len(self.inputs)} {len(self.outputs)} {blobs}{params}"


@dataclass(frozen=True)
class Blob:
    """One run of numbers in the .bin: `flagged` ones have a 4-byte storage word in front, 0 for float32."""

    layer: str
    count: int
    flagged: bool

    @property
    def nbytes(self) -> int:
        """Bytes in the file, the storage word included."""
        return 4 * self.count + 4 * self.flagged


def parse(text: str) -> list[Layer]:
    """Layers of a .param text. Raises ValueError naming the line that does not parse."""
    magic, _, rest = text.partition("\n")
    counts, *lines = rest.split("\n")
    if magic.strip() != MAGIC:
        raise ValueError(f"line 1 is {magic!r}, but should be {MAGIC}")
    layers = [_parse_line(number, line) for number, line in enumerate(lines, 3) if line.strip()]
    if counts.split() != _counts(layers).split():
        raise ValueError(f"line 2 counts {counts!r} layers and blobs, but should count {_counts(layers)!r}")
    return layers


def write(layers: list[Layer]) -> str:
    """The .param text of layers."""
    return "\n".join([MAGIC, _counts(layers), *map(str, layers)]) + "\n"


def tidy(text: str) -> list[Layer]:
    """The layers of pnnx's text: names unique, inputs isolated, reshapes plain. Raises ValueError as `parse` does."""
    return plain_reshapes(isolate_inputs(unique_names(parse(text))))


def unique_names(layers: list[Layer]) -> list[Layer]:
    """Give the second and later layers of one name a suffix: pnnx writes many a `splitncnn_0` twice."""
    taken = {layer.name for layer in layers}
    seen: Counter[str] = Counter()
    renamed = []
    for layer in layers:
        seen[layer.name] += 1
        name = layer.name
        if seen[layer.name] > 1:
            name = next(n for i in range(1, len(layers) + 1) if (n := f"{layer.name}_u{i}") not in taken)
            taken.add(name)
        renamed.append(replace(layer, name=name))
    return renamed


def isolate_inputs(layers: list[Layer]) -> list[Layer]:
    """Put a Split behind each Input that another layer reads directly: an in-place layer writes to it."""
    inputs = {layer.outputs[0] for layer in layers if layer.type == "Input"}
    split = {name for layer in layers if layer.type == "Split" for name in layer.inputs}
    bare = inputs - split
    isolated = []
    for layer in layers:
        renamed = tuple(f"{name}_isolated" if name in bare else name for name in layer.inputs)
        isolated.append(replace(layer, inputs=renamed))
        if layer.type == "Input" and layer.outputs[0] in bare:
            name = layer.outputs[0]
            isolated.append(Layer("Split", f"isolate_{name}", (name,), (f"{name}_isolated",), {}))
    return isolated


def plain_reshapes(layers: list[Layer]) -> list[Layer]:
    """Write -1 for the dynamic part of a Reshape's size expression, which ncnn would evaluate at every run."""
    return [_plain_reshape(layer) if layer.type == "Reshape" and "6" in layer.params else layer for layer in layers]


def _plain_reshape(layer: Layer) -> Layer:
    sizes = _top_level(layer.params["6"].strip('"'))
    dynamic = [size for size in sizes if not size.isdigit()]
    if len(dynamic) != 1:
        return layer
    keys = RESHAPE_KEYS[len(sizes)]
    params = {name: value for name, value in layer.params.items() if name != "6"}
    return replace(layer, params=params | {k: s if s.isdigit() else "-1" for k, s in zip(keys, sizes, strict=True)})


def _top_level(expression: str) -> list[str]:
    """Parts between the commas that stand in no parentheses: `64,*(3,0h),3` has three."""
    parts, depth = [""], 0
    for char in expression:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def blobs(layers: list[Layer]) -> list[Blob]:
    """What the .bin must hold, in order. Raises KeyError naming a layer type that is not known here."""
    return [blob for layer in layers for blob in WEIGHTS[layer.type](layer)]


def _counts(layers: list[Layer]) -> str:
    return f"{len(layers)} {sum(len(layer.outputs) for layer in layers)}"


def _parse_line(number: int, line: str) -> Layer:
    fields = line.split()
    try:
        kind, name, n_in, n_out = fields[0], fields[1], int(fields[2]), int(fields[3])
        split, end = 4 + n_in, 4 + n_in + n_out
        params = dict(field.split("=", 1) for field in fields[end:])
    except (IndexError, ValueError) as error:
        raise ValueError(f"line {number} is no layer: {line!r}") from error
    if len(fields) < end:
        raise ValueError(f"line {number} names {len(fields) - 4} of its {n_in + n_out} blobs: {line!r}")
    return Layer(kind, name, tuple(fields[4:split]), tuple(fields[split:end]), params)


def _none(layer: Layer) -> list[Blob]:
    return []


def _gemm(layer: Layer) -> list[Blob]:
    """A B + C: constant A (M x K) or B (N x K), then constant C of a number per row or per column of the result."""
    m, n, k = (layer.number(key, 0) for key in ("7", "8", "9"))
    constant = {"4": m * k, "5": n * k}
    found = [Blob(layer.name, size, True) for key, size in constant.items() if layer.number(key, 0)]
    bias = {1: m, 4: n}.get(layer.number("10", 0))
    if layer.number("6", 0) and bias is not None:
        found.append(Blob(layer.name, bias, True))
    return found


def _inner_product(layer: Layer) -> list[Blob]:
    found = [Blob(layer.name, layer.number("2", 0), True)]
    if layer.number("1", 0):
        found.append(Blob(layer.name, layer.number("0", 0), False))
    return found


def _layer_norm(layer: Layer) -> list[Blob]:
    return [Blob(layer.name, layer.number("0", 0), False)] * 2 if layer.number("2", 1) else []


def _rms_norm(layer: Layer) -> list[Blob]:
    return [Blob(layer.name, layer.number("0", 0), False)] if layer.number("2", 1) else []


def _memory_data(layer: Layer) -> list[Blob]:
    count = 1
    for key in ("0", "1", "11", "2"):
        count *= layer.number(key, 0) or 1
    return [Blob(layer.name, count, layer.number("21", 1) == 0)]


# Every layer type that a graph of ours may hold. Another one is a finding of the audit.
WEIGHTS: dict[str, Callable[[Layer], list[Blob]]] = {
    "BinaryOp": _none,
    "Concat": _none,
    "Eltwise": _none,
    "GELU": _none,
    "Gemm": _gemm,
    "InnerProduct": _inner_product,
    "Input": _none,
    "LayerNorm": _layer_norm,
    "MatMul": _none,
    "MemoryData": _memory_data,
    "Permute": _none,
    "RMSNorm": _rms_norm,
    "RotaryEmbed": _none,
    "Reduction": _none,
    "Reshape": _none,
    "SDPA": _none,
    "Slice": _none,
    "Split": _none,
    "Swish": _none,
    "Tile": _none,
    "UnaryOp": _none,
}
