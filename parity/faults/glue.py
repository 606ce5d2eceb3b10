"""Faults between the graphs: what is handed from one to the next, the caches, and the head."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.faults.port import Fault, Floats, Port, fed, given
from runtime.graphs import Arrays


def _image_rows_not_fused(port: Port) -> None:
    port.pipeline.fuse = lambda ids, rows: port.pipeline.table.embed(ids)


def _image_rows_reversed(port: Port) -> None:
    fuse = port.pipeline.fuse
    port.pipeline.fuse = lambda ids, rows: fuse(ids, None if rows is None else rows[::-1])


def _window_order_not_undone(port: Port) -> None:
    """The tail is fed rows in window order."""
    order = port.pipeline.window_order
    run = port.runner.run

    def faulty(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        if graph_id.endswith("vision.tail"):
            grids = port.pipeline.planted_grids
            return run(graph_id, {"hidden": inputs["hidden"][order(grids)]})
        return run(graph_id, inputs)

    _remember_grids(port)
    port.runner.run = faulty


def _remember_grids(port: Port) -> None:
    encode = port.pipeline.encode_images

    def remembering(pixels: list[Any]) -> Floats:
        port.pipeline.planted_grids = [picture.grid for picture in pixels]
        rows: Floats = encode(pixels)
        return rows

    port.pipeline.encode_images = remembering


def _merged_by_columns(port: Port) -> None:
    """The tail is fed the four patches of a cell column by column."""
    run = port.runner.run

    def faulty(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        if graph_id.endswith("vision.tail"):
            rows = inputs["hidden"]
            return run(graph_id, {"hidden": rows.reshape(-1, 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)})
        return run(graph_id, inputs)

    port.runner.run = faulty


def _cache_row_lost(port: Port) -> None:
    """The prompt's last row never reaches the caches."""
    prefill = port.pipeline.prefill

    def faulty(embeds: Floats) -> Floats:
        hidden: Floats = prefill(embeds)
        for cache in port.pipeline.caches:
            last = cache.length - 1
            key, value = cache.rows()
            cache.length = last
            cache.append(np.zeros_like(key[:, last:]), np.zeros_like(value[:, last:]))
        return hidden

    port.pipeline.prefill = faulty


def _oldest_rows_overwritten(port: Port) -> None:
    """The rows of the system prompt are overwritten in the caches of one layer."""
    prefill = port.pipeline.prefill

    def faulty(embeds: Floats) -> Floats:
        hidden: Floats = prefill(embeds)
        for array in (port.pipeline.caches[6].keys, port.pipeline.caches[6].values):
            array[:, :15] = array[:, 15:30]
        return hidden

    port.pipeline.prefill = faulty


def _head_rows_shifted(port: Port) -> None:
    port.pipeline.logits = _changed(port.pipeline.logits, lambda logits: np.roll(logits, 1))


def _changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args: change(function(*args))


def _final_norm_without_weight(port: Port) -> None:
    port.pipeline.norm_weight = np.ones_like(port.pipeline.norm_weight)


def _mask_left_out(port: Port) -> None:
    """Decode graphs see cached rows through a mask that hides the oldest one."""
    run = port.runner.run

    def faulty(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        if graph_id.endswith("layer.04.dattn"):
            mask = inputs["mask"].copy()
            mask[..., 0] = -1e9
            inputs = {**inputs, "mask": mask}
        return run(graph_id, inputs)

    port.runner.run = faulty


def _last_row_but_one(port: Port) -> None:
    """The head is given the row before the last, as where padding was counted wrongly."""
    prefill = port.pipeline.prefill

    def faulty(embeds: Floats) -> Floats:
        short = prefill(embeds[:-1]) if port.pipeline.joined else None  # the chained claims read every row anyway
        hidden: Floats = prefill(embeds)
        return hidden if short is None else short

    port.pipeline.prefill = faulty


def _with_a_batch_axis(inputs: Mapping[str, Floats]) -> Mapping[str, Floats]:
    return {**inputs, "hidden": inputs["hidden"][None]}


def _transposed_view(inputs: Mapping[str, Floats]) -> Mapping[str, Floats]:
    """A transposed array is handed over as if its memory were in order."""
    hidden = inputs["hidden"]
    return {**inputs, "hidden": np.ascontiguousarray(hidden.T).reshape(hidden.shape)}


def _ids_of_64_bits(port: Port) -> None:
    """Ids of 64 bits are read as pairs of 32."""
    embed = port.pipeline.table.embed
    port.pipeline.table.embed = lambda ids: embed(np.array(ids, np.int64).view(np.int32)[: len(ids)].tolist())


def _fp16_overflow(values: Floats) -> Floats:
    """A residual stream whose largest values leave fp16, as one of magnitude 1e5 would."""
    with np.errstate(over="ignore"):
        scale = np.float32(1e5 / np.abs(values).max())
        return (values * scale).astype(np.float16).astype(np.float32) / scale


def _packed_rows_imprecise(values: Floats) -> Floats:
    """An approximate square root where four rows are packed."""
    found = values.copy()
    found[: len(values) // 4 * 4] *= np.float32(1 + 1e-4)
    return found


FAULTS = (
    Fault("image rows not fused", "fusion.embeds", _image_rows_not_fused, hints=("image span",)),
    Fault("image rows in reversed order", "fusion.embeds", _image_rows_reversed, hints=("row order",)),
    Fault("window order not undone", "vision.tail", _window_order_not_undone, hints=("row order",)),
    Fault("patches of a cell by columns", "vision.tail", _merged_by_columns, hints=("row order",)),
    Fault("cache row lost", "llm.layer.00.dattn", _cache_row_lost, hints=("zero", "last rows")),
    Fault(
        "oldest rows overwritten in one layer", "llm.layer.06.dattn", _oldest_rows_overwritten, hints=("first rows",)
    ),
    Fault(
        "oldest row hidden from one layer",
        "llm.layer.04.dattn",
        _mask_left_out,
        False,
        model="smollm2",
        case="multi_turn",
        hints=("channel block", "few values"),
    ),
    Fault("rows of the head shifted", "head.logits", _head_rows_shifted, hints=("channel order", "value order")),
    Fault("final norm without its weight", "head.logits", _final_norm_without_weight, hints=("channel scale",)),
    Fault("last row but one", "decode.ids", _last_row_but_one),
    Fault("hidden rows with a batch axis", "vision.layer.14", fed("youtu_vl/vision.layer.14", _with_a_batch_axis)),
    Fault(
        "transposed view read in order",
        "llm.layer.03.prefill",
        fed("youtu_vl/llm.layer.03.prefill", _transposed_view),
        changes_ids=False,  # the answer goes through the joined net, and not this way
        hints=("axes", "value order"),
    ),
    Fault("ids of 64 bits read as 32", "fusion.embeds", _ids_of_64_bits, hints=("outside image", "scattered rows")),
    Fault("fp16 overflow", "vision.layer.17", given("youtu_vl/vision.layer.17", _fp16_overflow), hints=("non-finite",)),
    Fault(
        "norm imprecise in packed rows",
        "vision.layer.08",
        given("youtu_vl/vision.layer.08", _packed_rows_imprecise),
        changes_ids=False,
        hints=("scale", "row scale", "small everywhere"),
    ),
)
