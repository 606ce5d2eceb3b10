"""Faults of positions, masks and window orders."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.faults.port import Fault, Floats, Port, after
from runtime import windows
from runtime.graphs import Arrays


def _swap_axes(tables: Arrays, *_: Any) -> Arrays:
    """Angles of rows and columns change places."""

    def swapped(table: Floats) -> Floats:
        quarter = table.shape[-1] // 4
        parts = table.reshape(1, -1, 4, quarter)
        return np.ascontiguousarray(parts[:, :, [1, 0, 3, 2]]).reshape(table.shape)

    return tables | {"cos": swapped(tables["cos"]), "sin": swapped(tables["sin"])}


def _no_windows(tables: Arrays, *_: Any) -> Arrays:
    return tables | {"window_mask": tables["full_mask"]}


def _full_layer_windowed(port: Port) -> None:
    vision = port.pipeline.config["vision_config"]
    vision["fullatt_block_indexes"] = [index for index in vision["fullatt_block_indexes"] if index != 7]


def _inverse_as_order(order: NDArray[np.int64], *_: Any) -> NDArray[np.int64]:
    return windows.inverse_order(order)


def _rotary_base(theta: float) -> Callable[[Port], None]:
    def plant(port: Port) -> None:
        port.pipeline.config["rope_theta"] = theta

    return plant


def _mask_off_by_one(mask: Floats, *_: Any) -> Floats:
    """Every row sees its successor too."""
    count = mask.shape[-1]
    return np.triu(np.full((count, count), mask.min(), np.float32), 2)[None]


def _rotary_in_pairs(tables: tuple[Floats, Floats], *_: Any) -> tuple[Floats, Floats]:
    """Angles for neighbours instead of halves."""
    cos, sin = (np.ascontiguousarray(t[..., : t.shape[-1] // 2].repeat(2, -1)) for t in tables)
    return cos, sin


def _weak_mask(mask: Floats, *_: Any) -> Floats:
    return mask * np.float32(1e-8)


def _infinite_mask(mask: Floats, *_: Any) -> Floats:
    return np.where(mask < 0, np.float32(-np.inf), mask)


def _decode_position_plus_one(port: Port) -> None:
    rotary = port.pipeline.rotary
    port.pipeline.rotary = lambda start, count: rotary(start + (start > 0), count)


def _all_positions_plus_one(port: Port) -> None:
    rotary = port.pipeline.rotary
    port.pipeline.rotary = lambda start, count: rotary(start + 1, count)


FAULTS = (
    Fault("rotary angles in pairs", "positions.text_cos", after("rotary", _rotary_in_pairs), hints=("interleave",)),
    Fault("mask too weak", "positions.causal_mask", after("causal_mask", _weak_mask), hints=("scale",)),
    Fault(
        "mask of minus infinity",
        "positions.causal_mask",
        after("causal_mask", _infinite_mask),
        changes_ids=False,
        hints=("non-finite",),
    ),
    Fault(
        "rotary base of 10,000",
        "positions.text_cos",
        _rotary_base(1e4),
        False,
        model="smollm2",
        case="multi_turn",
        hints=("rotary", "growth"),
    ),
    Fault(
        "inverse used as window order",
        "positions.window_order",
        after("window_order", _inverse_as_order),
        hints=("inverse order",),
    ),
    Fault(
        "h and w swapped in the vision rotary",
        "positions.vision_cos",
        after("vision_tables", _swap_axes),
        hints=("row order", "axes", "channel order", "halves"),
    ),
    Fault(
        "window layers see everything", "positions.window_mask", after("vision_tables", _no_windows), hints=("zero",)
    ),
    Fault("rotary base of the text", "positions.text_cos", _rotary_base(1e4), hints=("rotary", "growth")),
    Fault(
        "causal mask off by one",
        "positions.causal_mask",
        after("causal_mask", _mask_off_by_one),
        hints=("row shift", "all but last row"),
    ),
    Fault("full layer 7 windowed", "vision.layer.07", _full_layer_windowed, hints=("outside image", "scattered rows")),
    Fault("decode position + 1", "llm.layer.00.dqkv", _decode_position_plus_one, hints=("rotary", "growth")),
    Fault(
        "all positions + 1",
        "positions.text_cos",
        _all_positions_plus_one,
        changes_ids=False,
        hints=("rotary", "row shift"),
    ),
)
