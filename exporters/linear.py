"""Linears as exported graphs hold them: the weight as a Gemm's first factor, a wide one in panels that are added.

Between two Linears of an MLP the rows stand as columns: Gemms that need not turn what they read and give take less,
a twentieth of a layer's time.

Layers that work on numbers one by one, or move them, share out channels among threads. So there each column is a
channel, and where rows are split into heads each row is one.

Tiles that ncnn chooses by the second cache are larger than the first: with TILE_ROWS and TILE_INPUTS, of which the
first holds a tile of each factor, a prefill takes a tenth less.

pnnx makes a Linear a Gemm whose second factor is the weight. As the first factor it gives the same sums sooner. And
ncnn adds the products of a row one after the other, so that rounding grows with their number, where torch's does not:
panels of at most PANEL inputs bring it near torch's at true widths.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from exporters import param
from exporters.layout import Entry
from exporters.param import Layer

PANEL = 576
STEP = 16  # numbers that a register holds
TILE_OUTPUTS, TILE_ROWS, TILE_INPUTS = 256, 48, 128
ELEMENTWISE = ("BinaryOp", "GELU", "Swish")


def lay_out(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with each of pnnx's Linears laid out anew."""
    turned = _turned(layers)
    channels = turned | _split_into_heads(layers)
    return [new for layer in layers for new in (_layers(layer, turned, channels) if _is_linear(layer) else [layer])]


def lay_out_entries(layers: Sequence[Layer], entries: Sequence[Entry]) -> list[Entry]:
    """What the .bin of those layers holds, from what pnnx's holds; `layers` are pnnx's."""
    rest = list(entries)
    found: list[Entry] = []
    for layer in layers:
        count = len(param.blobs([layer]))
        own, rest = rest[:count], rest[count:]
        found += _entries(layer, *own) if _is_linear(layer) else own
    return found


def inner_blobs(layer: Layer, makers: Mapping[str, Layer]) -> list[str]:
    """The blobs between a Linear's input and the sum of its panels, which `layer` makes; [] of other layers.

    makers: which layer makes a blob.
    """
    products = [makers[name] for name in layer.inputs if name in makers]
    if layer.type != "Eltwise" or any(product.type != "Gemm" for product in products):
        return []
    pieces = [name for product in products for name in product.inputs]
    is_cut = all(name in makers and makers[name].type == "Slice" for name in pieces)
    return [*pieces, *layer.inputs] if pieces and is_cut else []


def panels(inputs: int) -> list[int]:
    """Widths of the panels of so many inputs: as even as STEP allows."""
    count = -(-inputs // PANEL)
    starts = [-(-inputs * n // (count * STEP)) * STEP for n in range(count)]
    return [b - a for a, b in pairwise([*starts, inputs])]


def tile_outputs(outputs: int) -> int:
    """Outputs of a tile of the weight, whole registers: where tiles are few, their number is even, for two threads."""
    pairs = -(-outputs // (2 * TILE_OUTPUTS))
    return -(-outputs // (2 * pairs * STEP)) * STEP


def _is_linear(layer: Layer) -> bool:
    """Whether a layer is a Gemm of its input and a constant weight (outputs, inputs)."""
    wanted = {"2": 0, "3": 1, "4": 0, "5": 1, "6": 1}
    return layer.type == "Gemm" and all(layer.number(key, 0) == value for key, value in wanted.items())


def _turned(layers: Sequence[Layer]) -> set[str]:
    """The blobs that Linears make and read, with nothing but element-wise layers between."""
    makers = {name: layer for layer in layers for name in layer.outputs}
    readers = {name: layer for layer in layers for name in layer.inputs}
    found = {name for name, layer in makers.items() if _is_linear(layer) or layer.type in ELEMENTWISE}

    def holds(name: str) -> bool:
        maker, reader = makers[name], readers.get(name)
        made = _is_linear(maker) or found.issuperset(maker.inputs)
        return made and reader is not None and (_is_linear(reader) or found.issuperset(reader.outputs))

    while left := {name for name in found if not holds(name)}:
        found -= left
    return found


def _split_into_heads(layers: Sequence[Layer]) -> set[str]:
    """The blobs that a Reshape to three axes reads, as many channels as there are rows."""
    return {layer.inputs[0] for layer in layers if layer.type == "Reshape" and layer.number("2", 0) == -1}


def _layers(layer: Layer, turned: Container[str], channels: Container[str]) -> list[Layer]:
    """A Gemm or, wide, a Slice of the input, a Gemm of each panel, and their sum; the first one adds the bias."""
    (source,), (product,) = layer.inputs, layer.outputs
    widths = panels(layer.number("9", 0))
    bias = "1" if layer.number("10", -1) == 4 else "-1"  # a number per output, or none
    params = {"2": "0", "3": "0" if source in turned else "1", "4": "1", "5": "0", "6": "1", "7": layer.params["8"]}
    params |= {"8": "0", "11": "1" if product in channels else "0", "14": "0" if product in turned else "1"}
    params |= {"20": str(tile_outputs(layer.number("8", 0))), "21": str(TILE_ROWS), "22": str(TILE_INPUTS)}
    if len(widths) == 1:
        return [replace(layer, params={"10": bias, **params, "9": str(widths[0])})]
    names = [f"{layer.name}_panel_{n}" for n in range(len(widths))]
    inputs, products = (tuple(f"{name}_{end}" for name in names) for end in ("in", "out"))
    biases = [bias, *["-1"] * (len(widths) - 1)]
    gemms = [
        Layer("Gemm", name, (piece,), (part,), {"10": added, **params, "9": str(width)})
        for name, piece, part, width, added in zip(names, inputs, products, widths, biases, strict=True)
    ]
    sizes = ",".join(map(str, (len(widths), *widths[:-1], -233)))  # -233: the rest
    cut = {"-23300": sizes, "1": "0" if source in turned else "1"}
    return [
        Layer("Slice", f"{layer.name}_panels", (source,), inputs, cut),
        *gemms,
        Layer("Eltwise", f"{layer.name}_sum", products, (product,), {"0": "1"}),
    ]


def _entries(layer: Layer, weight: Entry, *bias: Entry) -> Iterator[Entry]:
    widths = panels(layer.number("9", 0))
    if len(widths) == 1:
        yield from (weight, *bias)
        return
    for start, stop in pairwise(accumulate(widths, initial=0)):
        yield replace(weight, columns=(start, stop), begins=weight.begins and start == 0)
        yield from bias if start == 0 else ()
