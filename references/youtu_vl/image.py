"""Picture -> patch rows in torch: the truth that the runtime's preprocessor is measured against.

Follows Siglip2ImageProcessorFast as Youtu-VL's processor calls it: uint8 antialiased bilinear, 36864 patches.
But: one picture per call; EXIF orientation is not applied, alpha is dropped without compositing.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

PATCH = 16
MERGE = 2
MAX_PATCHES = 36864


def target_size(height: int, width: int) -> tuple[int, int]:
    """Size after the resize: sides scaled, rounded up to 32, the scale lowered until the patches fit."""

    def scaled(side: int, scale: float) -> int:
        unit = PATCH * MERGE
        return max(unit, math.ceil(side * scale / unit) * unit)

    scale = 1.0
    size = scaled(height, scale), scaled(width, scale)
    while (size[0] / PATCH) * (size[1] / PATCH) > MAX_PATCHES:
        scale -= 0.02
        size = scaled(height, scale), scaled(width, scale)
    return size


def resize(image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """uint8 (3, H, W) -> uint8 (3, *size)."""
    return F.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]


def patchify(pixels: torch.Tensor) -> torch.Tensor:
    """(C, H, W) -> (N, 16 * 16 * C): merge-block order, (dy, dx, channel) inside a row."""
    C, H, W = pixels.shape
    h, w = H // PATCH // MERGE, W // PATCH // MERGE
    blocks = pixels.view(C, h, MERGE, PATCH, w, MERGE, PATCH)
    return blocks.permute(1, 4, 2, 5, 3, 6, 0).reshape(-1, PATCH * PATCH * C)  # (N, 16 * 16 * C)


def preprocess(image: Image.Image | np.ndarray) -> tuple[torch.Tensor, tuple[int, int]]:
    """Picture, or uint8 (H, W, 3) -> float32 (N, 768) and the grid (rows, columns) of patches."""
    if isinstance(image, Image.Image):
        image = np.array(image.convert("RGB"))
    channels_first = torch.tensor(image).permute(2, 0, 1).contiguous()  # (3, H, W)
    H, W = target_size(*image.shape[:2])
    pixels = (resize(channels_first, (H, W)).float() - 127.5) / 127.5  # (3, H, W)
    return patchify(pixels), (H // PATCH, W // PATCH)
