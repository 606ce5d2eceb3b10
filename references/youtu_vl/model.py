"""The fp32 truth for Youtu-VL: every graph's function, and the whole model from pictures to greedy ids."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from harness.errors import UnjudgedError
from references.checkpoint import Checkpoint
from references.reference import Prompt, TextReference
from references.youtu_vl import image
from references.youtu_vl.config import sizes
from references.youtu_vl.graphs import MODEL, graphs


class Reference(TextReference):
    """Youtu-VL in fp32 over a checkpoint folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        found = sizes(checkpoint.config)
        super().__init__(MODEL, checkpoint, found, found.text, graphs(found))

    def prompt(self, text: str, grids: Sequence[tuple[int, int]]) -> Prompt:
        """Chat template, then one image placeholder -> a copy per merged cell, then ids."""
        content = [{"type": "image"}] * len(grids) + [{"type": "text", "text": text}]
        rendered = self.render([{"role": "user", "content": content}])
        placeholder = self._tokenizer.id_to_token(self.image_token_id)
        if placeholder is None:
            raise UnjudgedError(f"tokenizer.json has no token {self.image_token_id}, the image_token_id of config.json")
        head, *rest = rendered.split(placeholder)
        if len(rest) != len(grids):
            raise UnjudgedError(
                f"the prompt holds {len(rest)} {placeholder}, but should hold {len(grids)}, one per image"
            )
        expanded = head + "".join(placeholder * self.cells(grid) + part for grid, part in zip(grids, rest, strict=True))
        return Prompt(rendered, self.encode(expanded))

    def preprocess(self, picture: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
        """uint8 (H, W, 3) -> pixel_values (N, 768) and grid."""
        return image.preprocess(picture)

    def cells(self, grid: tuple[int, int]) -> int:
        """Merged cells of a patch grid: the image tokens."""
        return grid[0] * grid[1] // self.sizes.vision.spatial_merge_size**2

    @property
    def image_token_id(self) -> int:
        """Id of the image placeholder, by config.json."""
        return int(self.checkpoint.config["image_token_id"])
