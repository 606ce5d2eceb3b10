"""Faults before the vision tower: what the port sees, and what it makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from parity.faults.port import Fault, Floats, Port, after
from runtime import image


def _pixels(change: Callable[[Floats, tuple[int, int]], Floats]) -> Callable[[Port], None]:
    def replaced(pictures: list[Any], *_: Any) -> list[Any]:
        return [type(p)(np.ascontiguousarray(change(p.pixel_values, p.grid)), p.grid) for p in pictures]

    return after("preprocess", replaced)


def _seen(change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> Callable[[Port], None]:
    """The port sees other pictures than the reference."""

    def plant(port: Port) -> None:
        inner = port.pipeline.preprocess
        port.pipeline.preprocess = lambda pictures: inner([np.ascontiguousarray(change(p)) for p in pictures])

    return plant


def _raster_rows(rows: Floats, grid: tuple[int, int]) -> Floats:
    h, w = grid
    return rows.reshape(h // 2, w // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(h * w, -1)


def _channels_first(rows: Floats, grid: tuple[int, int]) -> Floats:
    return rows.reshape(len(rows), 16, 16, 3).transpose(0, 3, 1, 2).reshape(len(rows), -1)


def _blue_first(rows: Floats, grid: tuple[int, int]) -> Floats:
    return rows.reshape(len(rows), -1, 3)[..., ::-1].reshape(len(rows), -1)


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


def _decoded(change: Callable[[Image.Image], Image.Image]) -> Callable[[Port], None]:
    """Another way from a picture file to its pixels; in the whole process."""

    def decode(path: Path) -> NDArray[np.uint8]:
        with Image.open(path) as picture:
            return np.array(change(picture).convert("RGB"), np.uint8)

    def plant(port: Port) -> None:
        image._decode = decode

    return plant


def _on_white(picture: Image.Image) -> Image.Image:
    if "A" not in picture.getbands():
        return picture
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA"))


def _turned(picture: Image.Image) -> Image.Image:
    turned: Image.Image = ImageOps.exif_transpose(picture)
    return turned


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
    Fault("half of the picture", "image.grid", _seen(lambda picture: picture[: len(picture) // 2])),
    Fault("raster patch order", "image.pixel_values", _pixels(_raster_rows), hints=("row order",)),
    Fault(
        "patch rows with channels first",
        "image.pixel_values",
        _pixels(_channels_first),
        hints=("interleave", "channel order"),
    ),
    Fault("blue channel first", "image.pixel_values", _pixels(_blue_first), hints=("channel order",)),
    Fault(
        "picture turned as EXIF says",
        "test_exif_orientation_is_not_applied",
        _decoded(_turned),
        changes_ids=False,
        tests="test_image.py",
    ),
    Fault(
        "transparency on white",
        "test_alpha_is_dropped_and_palette_transparency_does_not_warn",
        _decoded(_on_white),
        changes_ids=False,
        tests="test_image.py",
    ),
)
