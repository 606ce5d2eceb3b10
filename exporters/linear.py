"""Linears as exported graphs hold them: the weight as a Gemm's first factor, a wide one in panels that are added.

pnnx makes a Linear a Gemm whose second factor is the weight. As the first factor it gives the same sums sooner. And
ncnn adds the products of a row one after the other, so that rounding grows with their number, where torch's does not:
panels of at most PANEL inputs bring it near torch's at true widths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from exporters import param
from exporters.layout import Entry
from exporters.param import Layer

PANEL = 576
STEP = 16  # numbers that a register holds


def lay_out(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with each of pnnx's Linears laid out anew."""
    return [new for layer in layers for new in (_layers(layer) if _is_linear(layer) else [layer])]


def lay_out_entries(layers: Sequence[Layer], entries: Sequence[Entry]) -> list[Entry]:
    """What the .bin of those layers holds, from what pnnx's holds; `layers` are pnnx's."""
    rest = list(entries)
    found: list[Entry] = []
    for layer in layers:
        count = len(param.blobs([layer]))
        own, rest = rest[:count], rest[count:]
        found += _entries(layer, *own) if _is_linear(layer) else own
    return found


def panels(inputs: int) -> list[int]:
    """Widths of the panels of so many inputs: as even as STEP allows."""
    count = -(-inputs // PANEL)
    starts = [-(-inputs * n // (count * STEP)) * STEP for n in range(count)]
    return [b - a for a, b in pairwise([*starts, inputs])]


def _is_linear(layer: Layer) -> bool:
    """Whether a layer is a Gemm of its input and a constant weight (outputs, inputs)."""
    wanted = {"2": 0, "3": 1, "4": 0, "5": 1, "6": 1}
    return layer.type == "Gemm" and all(layer.number(key, 0) == value for key, value in wanted.items())


def _layers(layer: Layer) -> list[Layer]:
    widths = panels(layer.number("9", 0))
    if len(widths) == 1:
        return [_gemm(layer, layer.name, layer.inputs[0], layer.outputs[0], widths[0], first=True)]
    (source,), (sum_,) = layer.inputs, layer.outputs
    names = [f"{layer.name}_panel_{n}" for n in range(len(widths))]
    inputs, products = [f"{name}_in" for name in names], [f"{name}_out" for name in names]
    sizes = ",".join(map(str, (len(widths), *widths[:-1], -233)))  # -233: the rest
    return [
        Layer("Slice", f"{layer.name}_panels", (source,), tuple(inputs), {"-23300": sizes, "1": "1"}),
        *(
            _gemm(layer, name, input_, product, width, first=name == names[0])
            for name, input_, product, width in zip(names, inputs, products, widths, strict=True)
        ),
        Layer("Eltwise", f"{layer.name}_sum", tuple(products), (sum_,), {"0": "1"}),
    ]


def _gemm(layer: Layer, name: str, source: str, product: str, width: int, *, first: bool) -> Layer:
    """The weight's panel times the transposed input, transposed; the first panel adds the bias."""
    bias = "1" if first and layer.number("10", -1) == 4 else "-1"  # a number per output, or none
    params = {"10": bias, "2": "0", "3": "1", "4": "1", "5": "0", "6": "1", "7": layer.params["8"], "8": "0"}
    return Layer("Gemm", name, (source,), (product,), params | {"9": str(width), "14": "1"})


def _entries(layer: Layer, weight: Entry, *bias: Entry) -> Iterator[Entry]:
    widths = panels(layer.number("9", 0))
    if len(widths) == 1:
        yield from (weight, *bias)
        return
    for start, stop in pairwise(accumulate(widths, initial=0)):
        yield replace(weight, columns=(start, stop), begins=weight.begins and start == 0)
        yield from bias if start == 0 else ()
