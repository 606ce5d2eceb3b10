"""Faults of graph files: what a converter or an edit by hand does to a param."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from exporters import param, pnnx
from exporters.export import Exporter
from harness.graphs import Structure
from parity.faults.port import Fault, Port, replaced


def _edited(graph_id: str, change: Callable[[str], str]) -> Callable[[Port], None]:
    return lambda port: port.edit_param(graph_id, change)


def _line(start: str, change: Callable[[str], str]) -> Callable[[str], str]:
    """Change the first line that starts so."""

    def changed(text: str) -> str:
        lines = text.splitlines(keepends=True)
        place = next(number for number, line in enumerate(lines) if line.startswith(start))
        return "".join([*lines[:place], change(lines[place]), *lines[place + 1 :]])

    return changed


def _outputs_exchanged(text: str) -> str:
    """Outputs taken in the order in which a converter listed them."""
    return _renamed(param.parse(text), {"out1": "out2", "out2": "out1"})


def _one_name_for_two(text: str) -> str:
    """The result of the second norm has the name of the first one's: whoever reads it gets the first."""
    layers = param.parse(text)
    first, second = [layer.outputs[0] for layer in layers if layer.type == "LayerNorm"]
    return _renamed(layers, {second: first})


def _without_split(text: str) -> str:
    """The Split behind the first input is gone, and both its readers read the input itself."""
    layers = param.parse(text)
    split = next(layer for layer in layers if layer.type == "Split")
    kept = [layer for layer in layers if layer is not split]
    return _renamed(kept, dict.fromkeys(split.outputs, split.inputs[0]))


def _renamed(layers: list[param.Layer], names: dict[str, str]) -> str:
    def new(blobs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(blob, blob) for blob in blobs)

    return param.write([replace(layer, inputs=new(layer.inputs), outputs=new(layer.outputs)) for layer in layers])


def _nothing(runner: Any) -> None:
    """The child runs the graphs as they are; it may still die."""


def _split_lost(port: Port) -> None:
    port.edit_param("youtu_vl/vision.layer.10", _without_split)
    port.serve(_nothing)


def _rebuilt_layer_differs(port: Port) -> None:
    """The layer that was written anew for the export has an epsilon of its own."""

    def plant(exporter: Exporter) -> None:
        rewritten = exporter.rewritten

        def changed(graph: Any, *, double: bool = False) -> Any:
            module = rewritten(graph, double=double)
            module.layer_norm2.eps = 1e-5
            return module

        exporter.rewritten = changed  # type: ignore[method-assign]

    port.export_again("youtu_vl/vision.layer.06", plant)


def _traced_without_batch(port: Port) -> None:
    """The converter is shown inputs without a batch axis."""

    inputs, shapes = pnnx.example_inputs, pnnx._shapes
    unbatched: dict[str, Any] = {
        "example_inputs": lambda structure, lengths: [tensor[0] for tensor in inputs(structure, lengths)],
        "_shapes": lambda structure, lengths: shapes(structure, lengths).replace("[1,", "["),
    }

    def plant(exporter: Exporter) -> None:
        convert = exporter._convert

        def converted(structure: Structure, folder: Path) -> None:
            with patch.multiple(pnnx, **unbatched):
                convert(structure, folder)

        exporter._convert = converted  # type: ignore[method-assign]

    port.export_again("youtu_vl/vision.layer.12", plant)


FAULTS = (
    Fault(
        "erf GELU for tanh",
        "vision.layer.05",
        _edited("youtu_vl/vision.layer.05", _line("GELU", replaced("0=1", "0=0"))),
        changes_ids=False,
        domain="graph file",
        hints=("small everywhere", "activation"),
    ),
    Fault(
        "attention not scaled",
        "llm.layer.07.prefill",
        _edited("youtu_vl/llm.layer.07.prefill", lambda text: re.sub(r"(SDPA .* 6=)\S+", r"\g<1>1.0", text)),
        changes_ids=False,
        domain="graph file",
        hints=("all but first row",),
    ),
    Fault(
        "norm epsilon of a vision layer",
        "vision.layer.03",
        _edited("youtu_vl/vision.layer.03", replaced("1=1.000000e-6", "1=1.000000e-2")),
        changes_ids=False,
        domain="graph file",
        hints=("norm epsilon", "small everywhere"),
    ),
    Fault(
        "layer type that ncnn does not know",
        "llm.layer.09.dattn",
        _edited("youtu_vl/llm.layer.09.dattn", _line("Swish", replaced("Swish       ", "pnnx.masked_fill"))),
        domain="graph file",
    ),
    Fault(
        "key and value exchanged",
        "llm.layer.22.prefill",
        _edited("youtu_vl/llm.layer.22.prefill", _outputs_exchanged),
        changes_ids=False,
        domain="graph file",
        hints=("shape",),
    ),
    Fault(
        "two blobs of one name",
        "vision.layer.16",
        _edited("youtu_vl/vision.layer.16", _one_name_for_two),
        domain="graph file",
    ),
    Fault("Split lost", "vision.layer.10", _split_lost, domain="graph file"),
    Fault(
        "length baked in",
        "vision.layer.20",
        _edited("youtu_vl/vision.layer.20", _line("Reshape", replaced("2=-1", "2=484"))),
        changes_ids=False,
        domain="graph file",
    ),
    Fault("rebuilt layer differs", "vision.layer.06", _rebuilt_layer_differs, domain="rewrite"),
    Fault("traced without a batch axis", "vision.layer.12", _traced_without_batch, domain="converter"),
)
