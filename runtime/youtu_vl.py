"""Youtu-VL from pictures and a prompt to text, over exported ncnn graphs.

Stages, each a method: preprocess, prompt, vision_tables, encode_images, fuse, prefill, step, logits;
`generate` is their sequence. Greedy only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import windows
from runtime.chat import ChatTemplate
from runtime.errors import EXPORT_AGAIN, InputError
from runtime.graphs import Arrays, Manifest, Runner
from runtime.image import Pixels, preprocess
from runtime.kv_cache import KVCache
from runtime.rope import rotary_tables
from runtime.table import Table
from runtime.tokenizer import Tokenizer

MASKED = windows.MASKED
Grids = Sequence[tuple[int, int]]
Floats = NDArray[np.float32]

# The keys of config.json that are read here.
TEXT_KEYS = (
    *("image_token_id", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "rope_theta", "v_head_dim"),
)
VISION_KEYS = (
    *("fullatt_block_indexes", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("patch_size", "spatial_merge_size", "window_size"),
)


@dataclass(frozen=True)
class Prompt:
    """A rendered and encoded prompt, image placeholders expanded."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Token:
    """One generated token: its id, the text that is complete with it, and the logits it was chosen from."""

    id: int
    text: str
    logits: Floats


class Pipeline:
    """The model over an exported folder. `runner` runs the graphs; `context` bounds prompt plus answer."""

    def __init__(self, manifest: Manifest, runner: Runner, *, context: int = 4096) -> None:
        self.folder, self.runner, self.context = manifest.folder, runner, context
        self.config = _config(manifest.folder, context)
        self.tokenizer = Tokenizer.from_file(manifest.folder / "tokenizer.json")
        self.chat = ChatTemplate.from_folder(manifest.folder)
        self.preprocessor = _json(manifest.folder, "preprocessor_config.json")
        self.table = Table(manifest.folder, manifest.table)
        self.norm_weight = _row(manifest.folder / "norm.bin", self.table.width)
        self.image_token_id = int(self.config["image_token_id"])
        self.stop_ids = _stop_ids(manifest.folder, self.config)
        self.caches: list[KVCache] = []

    # ---- before the graphs

    def preprocess(self, pictures: Sequence[NDArray[np.uint8]]) -> list[Pixels]:
        """uint8 (H, W, 3) pictures -> patch rows and grids."""
        return [preprocess(picture, self.preprocessor) for picture in pictures]

    def prompt(self, text: str, grids: Grids) -> Prompt:
        """Render the template and expand one placeholder per image to one per merged cell.

        Raises InputError when the prompt holds another number of placeholders than there are images.
        """
        parts = [{"type": "image"} for _ in grids] + [{"type": "text", "text": text}]
        rendered = self.chat.render([{"role": "user", "content": parts}])
        return Prompt(rendered, self._expand(self.tokenizer.encode(rendered), grids))

    def vision_tables(self, grids: Grids) -> Arrays:
        """cos, sin, window_mask and full_mask of the layers, in window order."""
        vision = self.config["vision_config"]
        order = self.window_order(grids)
        _, bounds = self._windows(grids)
        cos, sin = windows.rotary_tables(grids, vision["hidden_size"] // vision["num_attention_heads"])
        return {
            "cos": cos[order][None],
            "sin": sin[order][None],
            "window_mask": windows.block_mask(bounds)[None],
            "full_mask": windows.block_mask(windows.image_bounds(grids))[None],
        }

    def window_order(self, grids: Grids) -> NDArray[np.int64]:
        """Gather that brings patch rows into window order: (N,)."""
        index, _ = self._windows(grids)
        return windows.patch_order(index, merge=self.config["vision_config"]["spatial_merge_size"])

    # ---- vision graphs

    def encode_images(self, pixels: Sequence[Pixels]) -> Floats:
        """Patch rows of all pictures -> rows for the embedding sequence (cells, C)."""
        grids = [picture.grid for picture in pixels]
        tables = self.vision_tables(grids)
        order = self.window_order(grids)
        full = self.config["vision_config"]["fullatt_block_indexes"]
        hidden = self._run("vision.embed", pixel_values=np.concatenate([p.pixel_values for p in pixels]))["hidden"]
        hidden = hidden[order]  # (N, C) in window order, up to the tail
        for index in range(self.config["vision_config"]["num_hidden_layers"]):
            mask = tables["full_mask" if index in full else "window_mask"]
            inputs = {"hidden": hidden, "cos": tables["cos"], "sin": tables["sin"], "mask": mask}
            hidden = self._run(f"vision.layer.{index:02d}", **inputs)["hidden"]
        return self._run("vision.tail", hidden=hidden[windows.inverse_order(order)])["rows"]

    # ---- decoder graphs

    def fuse(self, ids: Sequence[int], rows: Floats | None) -> Floats:
        """Embedding rows, placeholders overwritten by image rows in order: (T, C).

        Raises InputError when their counts differ: the model would not see its image and still answer.
        """
        embeds = self.table.embed(ids)
        places = np.flatnonzero(np.asarray(ids) == self.image_token_id)
        count = 0 if rows is None else len(rows)
        if len(places) != count:
            raise InputError(
                f"the prompt holds {len(places)} image tokens, but the merger gave {count} rows; "
                "give prompt() and encode_images() the grids of the same pictures"
            )
        if rows is not None:
            embeds[places] = rows
        return embeds

    def prefill(self, embeds: Floats) -> Floats:
        """The whole prompt through every layer, filling new caches: (T, C) -> hidden of its last row (C,)."""
        count = len(embeds)
        self._check_context(count)
        cos, sin = self.rotary(0, count)
        mask = self.causal_mask(count)
        hidden = embeds
        self.caches = [self._new_cache() for _ in range(self.config["num_hidden_layers"])]
        for index, cache in enumerate(self.caches):
            out = self._run(f"llm.layer.{index:02d}.prefill", hidden=hidden, cos=cos, sin=sin, mask=mask)
            cache.append(out["key"], out["value"])
            hidden = out["hidden"]
        last: Floats = hidden[-1]
        return last

    def step(self, token: int) -> Floats:
        """One token through every layer, over the caches: hidden (C,)."""
        position = self.caches[0].length
        cos, sin = self.rotary(position, 1)
        mask = np.zeros((1, 1, position + 1), np.float32)
        hidden = self.table.embed([token])
        for index, cache in enumerate(self.caches):
            new = self._run(f"llm.layer.{index:02d}.dqkv", hidden=hidden, cos=cos, sin=sin)
            cache.append(new["key"], new["value"])
            key, value = cache.rows()
            inputs = {"hidden": hidden, "query": new["query"], "key": key, "value": value, "mask": mask}
            hidden = self._run(f"llm.layer.{index:02d}.dattn", **inputs)["hidden"]
        row: Floats = hidden[0]
        return row

    def logits(self, hidden: Floats) -> Floats:
        """Final norm and tied head: (C,) -> (vocab,). Raises InputError when they are not finite."""
        scale = 1 / np.sqrt(np.mean(np.square(hidden)) + np.float32(self.config["rms_norm_eps"]))
        logits = self.table.logits((hidden * scale * self.norm_weight).astype(np.float32))
        if not np.isfinite(logits).all():
            raise InputError("the logits hold NaN or Inf; find the graph: python -m parity run youtu_vl")
        return logits

    def choose(self, logits: Floats) -> int:
        """The greedy id: the first of the largest logits."""
        return int(logits.argmax())

    def rotary(self, start: int, count: int) -> tuple[Floats, Floats]:
        """cos and sin of the text positions start..start+count-1: (1, count, rope)."""
        return rotary_tables(start, count, dim=self.config["qk_rope_head_dim"], theta=self.config["rope_theta"])

    def causal_mask(self, count: int) -> Floats:
        """Additive mask, a row sees itself and the rows before it: (1, count, count)."""
        return np.triu(np.full((count, count), MASKED, np.float32), 1)[None]

    # ---- all of it

    def generate(self, pictures: Sequence[NDArray[np.uint8]], text: str, count: int) -> Iterator[Token]:
        """Up to `count` greedy tokens; the last may be a stop id."""
        pixels = self.preprocess(pictures)
        ids = self.prompt(text, [picture.grid for picture in pixels]).ids
        self._check_context(len(ids) + count)
        hidden = self.prefill(self.fuse(ids, self.encode_images(pixels) if pixels else None))
        stream = self.tokenizer.stream()
        for number in range(count):
            logits = self.logits(hidden)
            token = self.choose(logits)
            last = token in self.stop_ids or number == count - 1
            yield Token(token, stream.push(token) + (stream.finish() if last else ""), logits)
            if last:
                return
            hidden = self.step(token)

    # ---- parts

    def _run(self, name: str, **inputs: Floats) -> Arrays:
        return self.runner.run(f"youtu_vl/{name}", inputs)

    def _windows(self, grids: Grids) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        vision = self.config["vision_config"]
        merge = vision["spatial_merge_size"]
        return windows.window_index(
            grids, window_cells=vision["window_size"] // vision["patch_size"] // merge, merge=merge
        )

    def _new_cache(self) -> KVCache:
        key_dim = self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]
        return KVCache(self.config["num_attention_heads"], self.context, key_dim, self.config["v_head_dim"])

    def _expand(self, ids: list[int], grids: Grids) -> list[int]:
        placeholders = ids.count(self.image_token_id)
        if placeholders != len(grids):
            raise InputError(
                f"the prompt holds {placeholders} image placeholders, but there are {len(grids)} images; "
                "give pictures with --image, not with placeholders in the text"
            )
        merge = self.config["vision_config"]["spatial_merge_size"] ** 2
        cells = iter([height * width // merge for height, width in grids])
        return [i for token in ids for i in [token] * (next(cells) if token == self.image_token_id else 1)]

    def _check_context(self, count: int) -> None:
        if count > self.context:
            raise InputError(
                f"prompt and answer need {count} tokens, but the context holds {self.context}; "
                "pass a larger --context, a shorter prompt or a smaller -n"
            )


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); {EXPORT_AGAIN}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, no object; {EXPORT_AGAIN}")
    return value


def _config(folder: Path, context: int) -> dict[str, Any]:
    """config.json with all keys that the pipeline reads, its positions enough for the context."""
    config = _json(folder, "config.json")
    vision = config.get("vision_config") or {}
    missing = [key for key in TEXT_KEYS if key not in config] + [key for key in VISION_KEYS if key not in vision]
    if missing:
        raise InputError(f"{folder / 'config.json'} has no {', '.join(missing)}; {EXPORT_AGAIN}")
    positions = config["max_position_embeddings"]
    if context > positions:
        raise InputError(f"the context is {context}, but the model has {positions} positions; pass a smaller --context")
    return config


def _row(path: Path, width: int) -> Floats:
    row = np.fromfile(path, np.float32) if path.is_file() else np.empty(0, np.float32)
    if len(row) != width:
        raise InputError(f"{path} holds {len(row)} numbers, but should hold {width}; {EXPORT_AGAIN}")
    return row


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> set[int]:
    """Ids that end the answer: what generation_config.json and config.json name as eos_token_id."""
    stated = (folder / "generation_config.json").is_file()
    generation = _json(folder, "generation_config.json") if stated else {}
    named = [source.get("eos_token_id") for source in (generation, config)]
    return {i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
