"""Faults of weight files."""

from collections.abc import Callable

import numpy as np

from parity.faults.port import Fault, Floats, Port, replace


def _swap(graph_ids: tuple[str, ...], first: str, second: str) -> Callable[[Port], None]:
    """Two tensors of one shape change places."""

    def change(weights: dict[str, Floats]) -> None:
        weights[first], weights[second] = weights[second], weights[first]

    def plant(port: Port) -> None:
        for graph_id in graph_ids:
            port.edit(graph_id, change)

    return plant


def _layers_swapped(port: Port) -> None:
    """Decoder layers 10 and 11 change places in all their graphs."""
    for part in ("prefill", "dqkv", "dattn"):
        first, second = (port.folder / f"youtu_vl/llm.layer.{index}.{part}.bin" for index in (10, 11))
        one, other = first.read_bytes(), second.read_bytes()
        replace(first, other)
        replace(second, one)


def _o_proj_transposed(port: Port) -> None:
    def change(weights: dict[str, Floats]) -> None:
        weights["self_attn.o_proj.weight"] = weights["self_attn.o_proj.weight"].T

    for part in ("prefill", "dattn"):
        port.edit(f"youtu_vl/llm.layer.20.{part}", change)


def _head_zeroed(port: Port) -> None:
    def change(weights: dict[str, Floats]) -> None:
        weights["self_attn.v_proj.weight"][:12] = 0

    port.edit("youtu_vl/vision.layer.13", change)


def _merger_doubled(port: Port) -> None:
    def change(weights: dict[str, Floats]) -> None:
        for name in ("merger.mlp.2.weight", "merger.mlp.2.bias"):
            weights[name] *= 2

    port.edit("youtu_vl/vision.tail", change)


def _weights(graph_ids: tuple[str, ...], name: str, change: Callable[[Floats], Floats]) -> Callable[[Port], None]:
    """One tensor of a name is changed in each of the graphs."""

    def edit(weights: dict[str, Floats]) -> None:
        weights[name] = change(weights[name])

    def plant(port: Port) -> None:
        for graph_id in graph_ids:
            port.edit(graph_id, edit)

    return plant


def _in_eight_bits(weight: Floats) -> Floats:
    step = np.abs(weight).max() / 127
    return np.round(weight / step) * step


def _with_nan(weight: Floats) -> Floats:
    found = weight.copy()
    found.flat[[5, 70, 700]] = np.nan
    return found


def _heads_tiled(port: Port) -> None:
    """Query head 1 reads key head 1 instead of 0, and so on: key heads are laid out 0 1 2 0 1 2, not 0 0 0 1 1 1."""

    def change(weights: dict[str, Floats]) -> None:
        by_head = weights["self_attn.q_proj.weight"].reshape(3, 3, 64, -1)
        weights["self_attn.q_proj.weight"] = by_head.swapaxes(0, 1).reshape(576, -1)

    for part in ("prefill", "dqkv"):
        port.edit(f"smollm2/llm.layer.10.{part}", change)


def _bin_cut_short(port: Port) -> None:
    path = port.folder / "youtu_vl/llm.layer.05.dqkv.bin"
    replace(path, path.read_bytes()[:-20])


DECODER_12, DECODER_15 = (
    (f"youtu_vl/llm.layer.{index}.prefill", f"youtu_vl/llm.layer.{index}.dqkv") for index in (12, 15)
)


def _first_word_lost(port: Port) -> None:
    """The word before the first weights is missing: all that follows is read four bytes early."""
    path = port.folder / "youtu_vl/vision.layer.21.bin"
    data = path.read_bytes()
    replace(path, data[4:] + data[:4])


def _rows_of_another(weight: Floats) -> Floats:
    """The first half of the rows twice."""
    half = len(weight) // 2
    return np.concatenate([weight[:half], weight[:half]])


FAULTS = (
    Fault(
        "weights in eight bits",
        "llm.layer.12.prefill",
        _weights(DECODER_12, "self_attn.q_b_proj.weight", _in_eight_bits),
        changes_ids=False,
        domain="weights file",
        hints=("small everywhere", "rounding", "steps", "all but first row"),
    ),
    Fault(
        "NaN in the weights",
        "vision.layer.09",
        _weights(("youtu_vl/vision.layer.09",), "mlp.fc1.weight", _with_nan),
        domain="weights file",
        hints=("non-finite",),
    ),
    Fault("bin cut short", "llm.layer.05.dqkv", _bin_cut_short, domain="weights file"),
    Fault(
        "query heads tiled",
        "llm.layer.10.prefill",
        _heads_tiled,
        model="smollm2",
        case="multi_turn",
        domain="weights file",
        hints=("head order", "all but first row"),
    ),
    Fault(
        "one head of vision layer 13 zeroed",
        "vision.layer.13",
        _head_zeroed,
        domain="weights file",
        hints=("zero", "heads", "head order"),
    ),
    Fault("merger output doubled", "vision.tail", _merger_doubled, domain="weights file", hints=("scale",)),
    Fault(
        "decoder layers 10 and 11 swapped",
        "llm.layer.10.prefill",
        _layers_swapped,
        domain="weights file",
        hints=("another tensor",),
    ),
    Fault(
        "gate_proj and up_proj swapped",
        "llm.layer.12.prefill",
        _swap(
            ("youtu_vl/llm.layer.12.prefill", "youtu_vl/llm.layer.12.dattn"),
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
        ),
        domain="weights file",
        hints=("another tensor",),
    ),
    Fault("o_proj transposed", "llm.layer.20.prefill", _o_proj_transposed, domain="weights file", hints=("axes",)),
    Fault("bin read four bytes early", "vision.layer.21", _first_word_lost, domain="weights file"),
    Fault(
        "half of a weight twice",
        "llm.layer.15.prefill",
        _weights(DECODER_15, "self_attn.kv_b_proj.weight", _rows_of_another),
        domain="weights file",
        hints=("heads", "channel block", "all but first row"),
    ),
)
