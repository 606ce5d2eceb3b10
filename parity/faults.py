"""Planted faults: how ports go wrong, as data. Each is planted alone into an otherwise green port.

A fault of the runtime replaces something on one pipeline object; a fault of a graph rewrites weights in a copy of the
exported model folder. `expected` is the id that the suite must name as the first red one, in pipeline order.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from exporters import param
from exporters.export import Exporter
from exporters.folders import link_or_copy, own_weights
from runtime import windows
from runtime.graphs import Arrays, Manifest, NcnnRunner, set_fp32_options

Floats = NDArray[np.float32]


class Port:
    """A port to plant faults in: a model folder of its own, and the pipeline over it."""

    def __init__(self, exporter: Exporter, folder: Path) -> None:
        self.exporter = exporter
        copy_model(exporter.model_folder(), folder)
        self.folder = folder
        self.runner = NcnnRunner(Manifest.read(folder), verify=False)
        self.pipeline: Any = _pipeline_class(exporter.model)(Manifest.read(folder), self.runner)

    def edit(self, graph_id: str, change: Callable[[dict[str, Floats]], None]) -> None:
        """Change the weights of a graph by their names."""
        edit_weights(self.exporter, self.folder, graph_id, change)

    def edit_param(self, graph_id: str, old: str, new: str) -> None:
        """Change the text of a graph's param; the old text must be there."""
        path = self.folder / f"{graph_id}.param"
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise LookupError(f"{path.name} holds no {old!r}: the fault does not apply any more")
        _replace(path, text.replace(old, new).encode())


@dataclass(frozen=True)
class Fault:
    """One kind of mistake."""

    name: str
    expected: str  # id, without the model, that must be named
    plant: Callable[[Port], None]
    changes_ids: bool = True  # within 64 tokens
    model: str = "youtu_vl"
    case: str = "square"
    domain: str = "glue"  # what explain must say of the place
    hints: tuple[str, ...] = ()  # kinds of harness.diagnosis, any of which is right; () where no tensor is wrong


def copy_model(source: Path, target: Path) -> None:
    """A copy of a model folder that shares the files' bytes; files are replaced in it, never written to."""
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target / path.relative_to(source))
    own_weights(target)


def edit_weights(exporter: Exporter, folder: Path, graph_id: str, change: Callable[[dict[str, Floats]], None]) -> None:
    """Change the weights in a graph's bin by their names in the rewritten layer."""
    graph = exporter.graphs[graph_id]
    structure = exporter.structure(graph.structure)
    entries = json.loads((structure / "layout.json").read_text(encoding="utf-8"))
    path = folder / f"{graph_id}.bin"
    words = np.fromfile(path, np.float32)
    blobs = param.blobs(param.parse((folder / f"{graph_id}.param").read_text(encoding="utf-8")))
    shapes = {name: value.shape for name, value in exporter.new_module(graph.structure).state_dict().items()}
    weights, places, position = {}, {}, 0
    for entry, blob in zip(entries, blobs, strict=True):
        start = position + blob.flagged
        position = start + blob.count
        if entry["tensor"] in shapes:  # constants are no weights
            places[entry["tensor"]] = slice(start, position)
            weights[entry["tensor"]] = words[start:position].reshape(shapes[entry["tensor"]]).copy()
    before = {name: value.copy() for name, value in weights.items()}
    change(weights)
    if all(np.array_equal(before[name], weights[name]) for name in before):
        raise LookupError(f"{graph_id}: the fault changed no weight: it does not apply any more")
    for name, place in places.items():
        words[place] = weights[name].ravel()
    _replace(path, words.tobytes())


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # the other name of these bytes must keep them
    path.write_bytes(data)


def _pipeline_class(model: str) -> Any:
    import importlib

    return importlib.import_module(f"runtime.{model}").Pipeline


# ---- faults of the runtime


def _after(method: str, change: Callable[..., Any]) -> Callable[[Port], None]:
    """Replace a method of the pipeline by `change` of its result (and, behind it, its arguments)."""

    def plant(port: Port) -> None:
        inner = getattr(port.pipeline, method)
        setattr(port.pipeline, method, lambda *args: change(inner(*args), *args))

    return plant


def _pixels(change: Callable[[Floats, tuple[int, int]], Floats]) -> Callable[[Port], None]:
    def replaced(pictures: list[Any], *_: Any) -> list[Any]:
        return [type(p)(np.ascontiguousarray(change(p.pixel_values, p.grid)), p.grid) for p in pictures]

    return _after("preprocess", replaced)


def _raster_rows(rows: Floats, grid: tuple[int, int]) -> Floats:
    h, w = grid
    return rows.reshape(h // 2, w // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(h * w, -1)


def _channels_first(rows: Floats, grid: tuple[int, int]) -> Floats:
    return rows.reshape(len(rows), 16, 16, 3).transpose(0, 3, 1, 2).reshape(len(rows), -1)


def _blue_first(rows: Floats, grid: tuple[int, int]) -> Floats:
    return rows.reshape(len(rows), -1, 3)[..., ::-1].reshape(len(rows), -1)


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
    port.runner.run = faulty  # type: ignore[method-assign]


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

    port.runner.run = faulty  # type: ignore[method-assign]


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


def _decode_position_plus_one(port: Port) -> None:
    rotary = port.pipeline.rotary
    port.pipeline.rotary = lambda start, count: rotary(start + (start > 0), count)


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


def _stop_ids_unknown(port: Port) -> None:
    """The answer goes on behind its end; for 16 tokens here, which is enough to see it."""
    answer = port.pipeline.answer
    port.pipeline.stop_ids = set()
    port.pipeline.answer = lambda hidden, ids, count, choose=None: answer(hidden, ids, min(count, 16), choose)


def _head_rows_shifted(port: Port) -> None:
    port.pipeline.logits = _changed(port.pipeline.logits, lambda logits: np.roll(logits, 1))


def _changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args: change(function(*args))


def _added_token_unknown(port: Port) -> None:
    """The token that begins a turn is not known as one piece."""
    matcher = port.pipeline.tokenizer._in_raw_text
    matcher.tokens.pop(max(matcher.tokens, key=lambda text: text == "<|begin_of_text|>"))


def _half_precision_on(port: Port) -> None:
    """One net keeps its numbers in bfloat16."""
    graph = port.runner.graph("youtu_vl/vision.layer.11")
    net = ncnn.Net()
    set_fp32_options(net.opt, 1)
    net.opt.use_bf16_storage = True
    net.load_param(str(port.folder / graph.param))
    net.load_model(str(port.folder / graph.weights[0]))
    port.runner._nets[graph.id] = net


def _default_system_prompt_missing(prompt: Any, *args: Any) -> Any:
    text = prompt.text
    start = text.index("\n", text.index("system")) + 1
    return type(prompt)(text[:start] + text[text.index(".", start) + 1 :], prompt.ids[:3] + prompt.ids[9:])


def _seen(change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> Callable[[Port], None]:
    """The port sees other pictures than the reference."""

    def plant(port: Port) -> None:
        inner = port.pipeline.preprocess
        port.pipeline.preprocess = lambda pictures: inner([np.ascontiguousarray(change(p)) for p in pictures])

    return plant


def _other_decoder(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """5 % of the pixels are off by 2, as another JPEG library leaves them."""
    random = np.random.Generator(np.random.Philox(key=1))
    noise = random.choice([-2, 2], picture.shape) * (random.random(picture.shape) < 0.05)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def _coarse(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Every second pixel twice: a resize that does not widen its kernel."""
    return picture[::2, ::2].repeat(2, 0).repeat(2, 1)[: len(picture), : picture.shape[1]]


def _other_statistics(rows: Floats, grid: tuple[int, int]) -> Floats:
    """Mean and deviation of another processor."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    return ((rows.reshape(-1, 3) * np.float32(0.5) + np.float32(0.5) - mean) / std).reshape(rows.shape)


def _not_rescaled(rows: Floats, grid: tuple[int, int]) -> Floats:
    return rows * np.float32(255) + np.float32(254)


def _one_step_off(rows: Floats, grid: tuple[int, int]) -> Floats:
    """One value in 5,000 is off by one of 255 steps."""
    random = np.random.Generator(np.random.Philox(key=1))
    return rows + np.float32(2 / 255) * (random.random(rows.shape) < 2e-4).astype(np.float32)


def _splitting_step_lost(port: Port) -> None:
    del port.pipeline.tokenizer._steps[-1]


def _composed(port: Port) -> None:
    """Text is composed (NFC) though the tokenizer does not ask for it."""
    encode = port.pipeline.tokenizer.encode
    port.pipeline.tokenizer.encode = lambda text: encode(unicodedata.normalize("NFC", text))


def _merges_lost(port: Port) -> None:
    """Only every tenth merge is left."""
    bpe = port.pipeline.tokenizer._bpe
    bpe.merges = dict(list(bpe.merges.items())[::10])
    bpe.ignore_merges = False


def _first_id_twice(prompt: Any, *_: Any) -> Any:
    return type(prompt)(prompt.text, [prompt.ids[0], *prompt.ids])


def _placeholder_lost(prompt: Any, *_: Any) -> Any:
    ids = list(prompt.ids)
    repeated = next(place for place, (one, two) in enumerate(itertools.pairwise(ids)) if one == two)
    return type(prompt)(prompt.text, ids[:repeated] + ids[repeated + 1 :])


def _space_behind(prompt: Any, *_: Any) -> Any:
    return type(prompt)(prompt.text + " ", prompt.ids)


def _rotary_in_pairs(tables: tuple[Floats, Floats], *_: Any) -> tuple[Floats, Floats]:
    """Angles for neighbours instead of halves."""
    cos, sin = (np.ascontiguousarray(t[..., : t.shape[-1] // 2].repeat(2, -1)) for t in tables)
    return cos, sin


def _weak_mask(mask: Floats, *_: Any) -> Floats:
    return mask * np.float32(1e-8)


def _infinite_mask(mask: Floats, *_: Any) -> Floats:
    return np.where(mask < 0, np.float32(-np.inf), mask)


def _always_id_0(port: Port) -> None:
    port.pipeline.choose = lambda logits: 0


def _ids_decoded_alone(port: Port) -> None:
    """Characters of several ids are lost."""
    tokenizer = port.pipeline.tokenizer
    port.pipeline.tokenizer.stream = lambda: SimpleNamespace(
        push=lambda token: tokenizer.decode([token]), finish=lambda: ""
    )


def _second_best(port: Port) -> None:
    port.pipeline.choose = lambda logits: int(np.argsort(logits)[-2])


def _final_norm_without_weight(port: Port) -> None:
    port.pipeline.norm_weight = np.ones_like(port.pipeline.norm_weight)


# ---- faults of the graphs


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
        _replace(first, other)
        _replace(second, one)


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


def _norm_epsilon(port: Port) -> None:
    port.edit_param("youtu_vl/vision.layer.03", "1=1.000000e-6", "1=1.000000e-2")


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


def _mask_left_out(port: Port) -> None:
    """Decode graphs see cached rows through a mask that hides the oldest one."""
    run = port.runner.run

    def faulty(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        if graph_id.endswith("layer.04.dattn"):
            mask = inputs["mask"].copy()
            mask[..., 0] = -1e9
            inputs = {**inputs, "mask": mask}
        return run(graph_id, inputs)

    port.runner.run = faulty  # type: ignore[method-assign]


def _bin_cut_short(port: Port) -> None:
    path = port.folder / "youtu_vl/llm.layer.05.dqkv.bin"
    _replace(path, path.read_bytes()[:-20])


def _erf_gelu(port: Port) -> None:
    """GELU by erf where the layer has tanh."""
    path = port.folder / "youtu_vl/vision.layer.05.param"
    line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("GELU"))
    port.edit_param("youtu_vl/vision.layer.05", line, line.replace("0=1", "0=0"))


def _scale_lost(port: Port) -> None:
    """Attention is not scaled."""
    path = port.folder / "youtu_vl/llm.layer.07.prefill.param"
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("BinaryOp") and " 1=1 " in line)
    port.edit_param("youtu_vl/llm.layer.07.prefill", line, re.sub(r" 2=\S+", " 2=1.0", line))


DECODER_12 = ("youtu_vl/llm.layer.12.prefill", "youtu_vl/llm.layer.12.dqkv")

FAULTS = (
    Fault(
        "picture upside down",
        "image.pixel_values",
        _seen(lambda picture: picture[::-1, ::-1]),
        hints=("value order", "row order", "axes"),
    ),
    Fault("another JPEG decoder", "image.pixel_values", _seen(_other_decoder), hints=("steps",)),
    Fault("no antialias", "image.pixel_values", _seen(_coarse), hints=("periodic channels", "steps")),
    Fault(
        "mean and deviation of CLIP",
        "image.pixel_values",
        _pixels(_other_statistics),
        hints=("channel affine", "affine"),
    ),
    Fault("not rescaled", "image.pixel_values", _pixels(_not_rescaled), hints=("affine", "scale")),
    Fault(
        "a few values off by one step",
        "image.pixel_values",
        _pixels(_one_step_off),
        changes_ids=False,
        hints=("steps", "few values"),
    ),
    Fault("space behind the prompt", "template.text", _after("prompt", _space_behind), changes_ids=False),
    Fault("first id twice", "tokenizer.ids", _after("prompt", _first_id_twice)),
    Fault("one image placeholder lost", "tokenizer.ids", _after("prompt", _placeholder_lost)),
    Fault("merges lost", "tokenizer.ids", _merges_lost),
    Fault("splitting step lost", "tokenizer.lines", _splitting_step_lost, changes_ids=False),
    Fault("text composed", "tokenizer.lines", _composed, changes_ids=False),
    Fault("rotary angles in pairs", "positions.text_cos", _after("rotary", _rotary_in_pairs), hints=("interleave",)),
    Fault("mask too weak", "positions.causal_mask", _after("causal_mask", _weak_mask), hints=("scale",)),
    Fault(
        "mask of minus infinity",
        "positions.causal_mask",
        _after("causal_mask", _infinite_mask),
        changes_ids=False,
        hints=("non-finite",),
    ),
    Fault(
        "erf GELU for tanh",
        "vision.layer.05",
        _erf_gelu,
        changes_ids=False,
        domain="graph file",
        hints=("small everywhere", "activation"),
    ),
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
        "attention not scaled",
        "llm.layer.07.prefill",
        _scale_lost,
        changes_ids=False,
        domain="graph file",
        hints=("all but first row", "scale"),
    ),
    Fault("half of the picture", "image.grid", _seen(lambda picture: picture[: len(picture) // 2])),
    Fault("added token unknown", "tokenizer.ids", _added_token_unknown),
    Fault("bfloat16 left on", "vision.layer.11", _half_precision_on, hints=("small everywhere", "rounding")),
    Fault("patches of a cell by columns", "vision.tail", _merged_by_columns),
    Fault("oldest rows overwritten in one layer", "llm.layer.06.dattn", _oldest_rows_overwritten),
    Fault("rows of the head shifted", "head.logits", _head_rows_shifted, hints=("channel order", "value order")),
    Fault("stop ids unknown", "decode.ids", _stop_ids_unknown, model="smollm2", case="multi_turn"),
    Fault("always id 0", "sampling.ids", _always_id_0),
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
        "rotary base of 10,000",
        "positions.text_cos",
        _rotary_base(1e4),
        False,
        model="smollm2",
        case="multi_turn",
        hints=("rotary", "growth"),
    ),
    Fault(
        "oldest row hidden from one layer",
        "llm.layer.04.dattn",
        _mask_left_out,
        False,
        model="smollm2",
        case="multi_turn",
        hints=("zero", "first rows"),
    ),
    Fault("ids decoded alone", "decode.text", _ids_decoded_alone, changes_ids=False),
    Fault("raster patch order", "image.pixel_values", _pixels(_raster_rows), hints=("row order",)),
    Fault(
        "patch rows with channels first",
        "image.pixel_values",
        _pixels(_channels_first),
        hints=("interleave", "channel order"),
    ),
    Fault("blue channel first", "image.pixel_values", _pixels(_blue_first), hints=("channel order",)),
    Fault("default system prompt missing", "template.text", _after("prompt", _default_system_prompt_missing)),
    Fault(
        "inverse used as window order",
        "positions.window_order",
        _after("window_order", _inverse_as_order),
        hints=("inverse order",),
    ),
    Fault(
        "h and w swapped in the vision rotary",
        "positions.vision_cos",
        _after("vision_tables", _swap_axes),
        hints=("row order", "axes", "channel order", "halves"),
    ),
    Fault(
        "window layers see everything", "positions.window_mask", _after("vision_tables", _no_windows), hints=("zero",)
    ),
    Fault("rotary base of the text", "positions.text_cos", _rotary_base(1e4), hints=("rotary", "growth")),
    Fault(
        "causal mask off by one",
        "positions.causal_mask",
        _after("causal_mask", _mask_off_by_one),
        hints=("row shift", "all but last row"),
    ),
    Fault("image rows not fused", "fusion.embeds", _image_rows_not_fused, hints=("image span",)),
    Fault("image rows in reversed order", "fusion.embeds", _image_rows_reversed, hints=("row order",)),
    Fault(
        "norm epsilon of a vision layer",
        "vision.layer.03",
        _norm_epsilon,
        changes_ids=False,
        domain="graph file",
        hints=("norm epsilon", "small everywhere"),
    ),
    Fault("full layer 7 windowed", "vision.layer.07", _full_layer_windowed, hints=("outside image", "scattered rows")),
    Fault(
        "one head of vision layer 13 zeroed",
        "vision.layer.13",
        _head_zeroed,
        domain="weights file",
        hints=("zero", "heads", "head order"),
    ),
    Fault("window order not undone", "vision.tail", _window_order_not_undone, hints=("row order",)),
    Fault("merger output doubled", "vision.tail", _merger_doubled, domain="weights file", hints=("scale",)),
    Fault("decoder layers 10 and 11 swapped", "llm.layer.10.prefill", _layers_swapped, domain="weights file"),
    Fault(
        "gate_proj and up_proj swapped",
        "llm.layer.12.prefill",
        _swap(
            ("youtu_vl/llm.layer.12.prefill", "youtu_vl/llm.layer.12.dattn"),
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
        ),
        domain="weights file",
        hints=("halves",),
    ),
    Fault("o_proj transposed", "llm.layer.20.prefill", _o_proj_transposed, domain="weights file", hints=("axes",)),
    Fault("decode position + 1", "llm.layer.00.dqkv", _decode_position_plus_one, hints=("rotary", "growth")),
    Fault("cache row lost", "llm.layer.00.dattn", _cache_row_lost, hints=("zero", "last rows")),
    Fault("final norm without its weight", "head.logits", _final_norm_without_weight, hints=("channel scale",)),
    Fault("second best id chosen", "sampling.ids", _second_best),
)
