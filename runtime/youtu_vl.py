"""Youtu-VL from pictures and a prompt to text, over exported ncnn graphs.

Stages, each a method: preprocess, prompt, vision_tables, encode_images, fuse, then the decoder's prefill, step and
logits; `generate` is their sequence.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import windows
from runtime.config import read_json
from runtime.decoder import Attention, Choose, Decoder, Floats, Prompt, Token
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner, Runner
from runtime.image import MAX_PATCHES, Pixels, patch_grid, preprocess

Pictures = Sequence[NDArray[np.uint8]]  # (H, W, 3) each
Grids = Sequence[tuple[int, int]]
History = Sequence[tuple[str, str]]  # (role, content) of the messages before the prompt

# Matrices of patches x patches that are there at once, as measured: the two masks, the copy that ncnn is given, and
# what attention over one head takes.
SQUARES = 5


class Pipeline(Decoder):
    """The model over an exported folder."""

    KEYS = (
        *("image_token_id", "num_attention_heads", "num_hidden_layers", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("rms_norm_eps", "rope_theta", "v_head_dim"),
        *("vision_config.fullatt_block_indexes", "vision_config.hidden_size", "vision_config.num_attention_heads"),
        *("vision_config.num_hidden_layers", "vision_config.patch_size", "vision_config.spatial_merge_size"),
        *("vision_config.intermediate_size", "vision_config.window_size"),
    )

    def __init__(self, manifest: Manifest, runner: Runner, **options: Any) -> None:
        super().__init__(manifest, runner, **options)
        self.preprocessor = read_json(manifest.folder, "preprocessor_config.json")
        self.image_token_id = int(self.config["image_token_id"])

    @staticmethod
    def attention(config: Mapping[str, Any]) -> Attention:
        """Keys and values are cached as they are expanded, a head of its own for each query."""
        return Attention(
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            key_dim=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            rotary_dim=config["qk_rope_head_dim"],
        )

    # ---- before the graphs

    def preprocess(self, pictures: Pictures) -> list[Pixels]:
        """uint8 (H, W, 3) pictures -> patch rows and grids."""
        return [preprocess(picture, self.preprocessor) for picture in pictures]

    def prompt(self, text: str, grids: Grids, history: History = ()) -> Prompt:
        """Render the template and expand one placeholder per image to one per merged cell.

        Raises InputError when the prompt holds another number of placeholders than there are images.
        """
        parts = [{"type": "image"} for _ in grids] + [{"type": "text", "text": text}]
        before = [{"role": role, "content": content} for role, content in history]
        rendered = self.chat.render([*before, {"role": "user", "content": parts}])
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
        """Patch rows of all pictures -> rows for the embedding sequence (cells, C).

        Raises InputError where attention over all of them needs more memory than there is.
        """
        grids = [picture.grid for picture in pixels]
        self._require_for(sum(len(picture.pixel_values) for picture in pixels))
        tables = self.vision_tables(grids)
        order = self.window_order(grids)
        full = self.config["vision_config"]["fullatt_block_indexes"]
        hidden = self._run("vision.embed", pixel_values=np.concatenate([p.pixel_values for p in pixels]))["hidden"]
        hidden = hidden[order]  # (N, C) in window order, up to the tail
        for index in range(self.config["vision_config"]["num_hidden_layers"]):
            name = f"vision.layer.{index:02d}"
            if index in full:
                hidden = self._layer(name, hidden, tables, "full_mask", slice(None))
            else:  # no window sees another, so that a few at a time cost less than all
                windowed = [
                    self._layer(name, hidden, tables, "window_mask", rows) for rows in self._windows_together(grids)
                ]
                hidden = np.concatenate(windowed)
        return self._run("vision.tail", hidden=hidden[windows.inverse_order(order)])["rows"]

    def _layer(self, name: str, hidden: Floats, tables: Arrays, mask: str, rows: slice) -> Floats:
        cos, sin = tables["cos"][:, rows], tables["sin"][:, rows]
        masked = np.ascontiguousarray(tables[mask][:, rows, rows])
        return self._run(name, hidden=hidden[rows], cos=cos, sin=sin, mask=masked)["hidden"]

    def _windows_together(self, grids: Grids) -> list[slice]:
        """Whole windows in a row, as many together as a chunk holds, one at least."""
        _, bounds = self._windows(grids)
        starts = [0]
        for start, end in pairwise(bounds.tolist()):
            if end - starts[-1] > self.chunk and start > starts[-1]:
                starts.append(start)
        return [slice(start, end) for start, end in pairwise([*starts, int(bounds[-1])])]

    def needs(self, pictures: Pictures = ()) -> dict[str, int]:
        """Bytes of memory that an answer about pictures takes, by what for."""
        grids = [patch_grid(picture, self.preprocessor) for picture in pictures]
        return self._needs_for(sum(rows * columns for rows, columns in grids)) if grids else super().needs()

    def _needs_for(self, patches: int) -> dict[str, int]:
        needs = super().needs()
        if isinstance(self.runner, NcnnRunner) and self.runner.mode == "resident":
            graphs = [
                graph_id for graph_id in self.runner.manifest.graphs if graph_id.startswith(f"{self.model}/vision.")
            ]
            needs["resident vision weights"] = self.runner.weight_bytes(graphs)
        return needs | {f"pictures of {patches} patches": self.picture_bytes(patches)}

    def _require_for(self, patches: int) -> None:
        """Raise InputError where pictures of so many patches need more memory than there is."""
        needs, patch = self._needs_for(patches), self.config["vision_config"]["patch_size"]
        others = sum(needs.values()) - self.picture_bytes(patches)

        def advice(budget: int) -> str:
            left = budget - others
            most = bisect_right(range(MAX_PATCHES + 1), left, key=self.picture_bytes) - 1
            side = int(max(most, 0) ** 0.5) * patch
            return f"scale the pictures down to {max(most, 0)} patches in all, {side}x{side} pixels"

        self.budget.require(needs, advice)

    def picture_bytes(self, patches: int) -> int:
        """Bytes at the peak of a layer in which every patch sees every other."""
        vision = self.config["vision_config"]
        row: int = 4 * vision["intermediate_size"] + 12 * vision["hidden_size"]  # a Linear's panels and their sum
        return 4 * patches * (SQUARES * patches + row)

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

    # ---- all of it

    def generate(
        self,
        pictures: Pictures,
        text: str,
        count: int,
        history: History = (),
        choose: Choose | None = None,
    ) -> Iterator[Token]:
        """Up to `count` tokens; the last may be a stop id. Greedy unless `choose` is given."""
        pixels = self.preprocess(pictures)
        ids = self.prompt(text, [picture.grid for picture in pixels], history).ids
        self.check_context(len(ids) + count)
        hidden = self.prefill(self.fuse(ids, self.encode_images(pixels) if pixels else None))
        yield from self.answer(hidden, ids, count, choose)

    # ---- parts

    def _windows(self, grids: Grids) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        vision = self.config["vision_config"]
        merge = vision["spatial_merge_size"]
        return windows.window_index(
            grids, window_cells=vision["window_size"] // vision["patch_size"] // merge, merge=merge
        )

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
