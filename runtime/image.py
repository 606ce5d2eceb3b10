"""Picture file -> patch rows, as the checkpoint's image processor makes them, on numpy and Pillow alone.

Follows the fused processor of Siglip2 (uint8 antialiased bilinear resize, then normalise, then patches);
the resize repeats the fixed-point arithmetic of torch's uint8 kernel bit for bit.
But: one picture at a time, no padding of rows; EXIF orientation is ignored, as the processor ignores it.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from runtime.errors import InputError

PATCH = 16
MERGE = 2
# The processor's own default; it overrides the `max_num_patches` that preprocessor_config.json states.
MAX_PATCHES = 36864

# What the processor class takes where preprocessor_config.json is silent or says null.
DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": PATCH,
}


@dataclass(frozen=True)
class Pixels:
    """One picture as patch rows in merge-block order, and its (rows, columns) of patches."""

    pixel_values: NDArray[np.float32]  # (N, patch * patch * 3)
    grid: tuple[int, int]


@dataclass(frozen=True)
class Recipe:
    """The numbers of a preprocessor_config.json that this module needs."""

    mean: Sequence[float]
    std: Sequence[float]
    rescale: float
    patch: int


def load_image(path: str | Path) -> NDArray[np.uint8]:
    """Picture file as RGB -> (H, W, 3)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata, palettes with alpha: the pixels are still good
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return _decode(Path(path))


def _decode(path: Path) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as picture:
            return np.array(picture.convert("RGB"), dtype=np.uint8)
    except FileNotFoundError:
        raise InputError(f"image={path} does not exist; give the path of a picture file") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = Image.MAX_IMAGE_PIXELS
        raise InputError(f"image={path} has more than {limit} pixels; scale the picture down first") from None
    except Exception as fault:  # decoders raise what their parsers meet: OSError, SyntaxError, struct.error
        raise InputError(
            f"image={path} cannot be read ({fault}); open it in an image program and save it as PNG or JPEG"
        ) from fault


def target_size(
    height: int, width: int, *, factor: int = 32, max_patches: int = MAX_PATCHES, patch: int = PATCH
) -> tuple[int, int]:
    """Height and width of the resized picture: multiples of `factor`, `max_patches` patches at most."""
    if max_patches < (factor // patch) ** 2:
        raise InputError(f"max_patches={max_patches}, but should be at least {(factor // patch) ** 2}: one merged cell")
    scale = 1.0
    while True:
        rows, columns = (max(factor, ceil(side * scale / factor) * factor) for side in (height, width))
        if (rows // patch) * (columns // patch) <= max_patches:
            return rows, columns
        scale -= 0.02  # repeated subtraction: its rounding decides some sizes, 1 - 0.02 * n would not match


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Antialiased bilinear resize, columns first: (H, W, 3) -> (height, width, 3)."""
    image = _resample(image.swapaxes(0, 1), width).swapaxes(0, 1)  # (H, width, 3)
    return np.ascontiguousarray(_resample(image, height))  # (height, width, 3)


def _resample(image: NDArray[np.uint8], target: int) -> NDArray[np.uint8]:
    if len(image) == target:
        return image
    sources, weights, shift = _taps(len(image), target)
    half = 1 << (shift - 1)  # rounds where the shift alone would floor
    total = np.full((target, *image.shape[1:]), half, dtype=np.int32)
    for source, weight in zip(sources.T, weights.T, strict=True):
        total += weight[:, None, None] * image[source]
    return (total >> shift).clip(0, 255).astype(np.uint8)


def _taps(size: int, target: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """For each output sample the input samples (target, K), their weights (target, K), the weights' shift."""
    ratio = size / target
    support = max(1.0, ratio)
    centre = ratio * (np.arange(target) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), size)
    taps = first[:, None] + np.arange((last - first).max())  # (target, K)
    weight = np.maximum(0.0, 1.0 - np.abs((taps - centre[:, None] + 0.5) * (1.0 / support)))
    weight[taps >= last[:, None]] = 0.0
    weight /= np.cumsum(weight, axis=1)[:, -1:]  # summed left to right like the kernel, not pairwise
    peak = weight.max()
    shift = next(bits for bits in range(22, 0, -1) if int(0.5 + peak * (1 << bits)) < 1 << 15)
    return np.minimum(taps, size - 1), (weight * (1 << shift) + 0.5).astype(np.int32), shift


def normalise(
    image: NDArray[np.uint8],
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    rescale: float = 1 / 255,
) -> NDArray[np.float32]:
    """(H, W, 3) uint8 -> float32; rescaling is folded into mean and std: (x - 127.5) / 127.5 by default."""
    scale = np.float32(1.0 / rescale)
    pixels: NDArray[np.float32] = image.astype(np.float32) - np.asarray(mean, np.float32) * scale
    pixels /= np.asarray(std, np.float32) * scale
    return pixels


def patchify(pixels: NDArray[np.float32], patch: int = PATCH, merge: int = MERGE) -> NDArray[np.float32]:
    """(H, W, C) -> rows in merge-block order, (dy, dx, channel) inside a row: (N, patch * patch * C)."""
    height, width, channels = pixels.shape
    side = patch * merge
    blocks = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    rows = blocks.transpose(0, 3, 1, 4, 2, 5, 6)  # (H/side, W/side, merge, merge, patch, patch, C)
    return rows.reshape(-1, patch * patch * channels)  # (N, patch * patch * C)


def preprocess(
    image: NDArray[np.uint8], config: Mapping[str, Any], *, merge: int = MERGE, max_patches: int = MAX_PATCHES
) -> Pixels:
    """RGB picture (H, W, 3) and the contents of preprocessor_config.json -> patch rows and grid."""
    rows, columns = patch_grid(image, config, merge=merge, max_patches=max_patches)
    recipe = _recipe(config)
    resized = resize(image, rows * recipe.patch, columns * recipe.patch)
    pixels = normalise(resized, recipe.mean, recipe.std, recipe.rescale)
    return Pixels(patchify(pixels, recipe.patch, merge), (rows, columns))


def patch_grid(
    image: NDArray[np.uint8], config: Mapping[str, Any], *, merge: int = MERGE, max_patches: int = MAX_PATCHES
) -> tuple[int, int]:
    """(rows, columns) of patches that `preprocess` makes of a picture."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise InputError(f"image={image.dtype} {image.shape}, but should be uint8 (H, W, 3), not empty; use load_image")
    patch = _recipe(config).patch
    height, width = target_size(*image.shape[:2], factor=patch * merge, max_patches=max_patches, patch=patch)
    return height // patch, width // patch


def _recipe(config: Mapping[str, Any]) -> Recipe:
    stated = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    for key in ("do_resize", "do_rescale", "do_normalize"):
        _require(stated, key, stated[key] is True, "true")
    _require(stated, "resample", stated["resample"] == 2, "2 (bilinear)")
    _require(stated, "rescale_factor", _positive(stated["rescale_factor"]), "a positive number")
    patch = stated["patch_size"]
    _require(stated, "patch_size", isinstance(patch, int) and _positive(patch), "a positive integer")
    _require(stated, "image_mean", _triple(stated["image_mean"]), "3 numbers")
    std = stated["image_std"]
    _require(stated, "image_std", _triple(std) and all(map(_positive, std)), "3 positive numbers")
    return Recipe(stated["image_mean"], std, stated["rescale_factor"], patch)


def _require(config: Mapping[str, Any], key: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise InputError(
            f"{key}={config[key]!r}, but should be {wanted} [preprocessor_config.json]; "
            "the runtime knows no other processing: use the checkpoint's own file"
        )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _triple(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_number, value))
