"""Cases: what goes in (pictures and prompt) and how many new tokens are decoded.

Pictures are crops of the two photographs that scikit-learn ships, or drawn here; all are made anew, bit for bit.
"""

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from harness.errors import UnjudgedError

Picture = Callable[[], Image.Image]


@dataclass(frozen=True)
class Case:
    """One input of a model."""

    name: str
    prompt: str
    pictures: tuple[Picture, ...] = ()
    new_tokens: int = 64
    about: str = ""
    history: tuple[tuple[str, str], ...] = ()  # (role, content) of the messages before the prompt

    def identity(self) -> dict[str, Any]:
        """What a dump of the case depends on: the pictures by their pixels."""
        pixels = [hashlib.sha256(image.tobytes()).hexdigest() for image in self.images()]
        found: dict[str, Any] = {"prompt": self.prompt, "pictures": pixels, "new_tokens": self.new_tokens}
        return found | ({"history": self.history} if self.history else {})

    def images(self) -> list[np.ndarray]:
        """The pictures as uint8 (H, W, 3)."""
        return [np.array(picture().convert("RGB")) for picture in self.pictures]


def photograph(name: str) -> Image.Image:
    """One of scikit-learn's sample photographs: china.jpg or flower.jpg, 427 x 640 (H x W)."""
    spec = importlib.util.find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "images" / name if spec and spec.origin else None
    if path is None or not path.is_file():
        raise UnjudgedError(f"photograph {name} of scikit-learn is not installed; run: pip install scikit-learn")
    return Image.open(path).convert("RGB")


def crop(name: str, left: int, top: int, width: int, height: int) -> Picture:
    """A part of a photograph."""
    return lambda: photograph(name).crop((left, top, left + width, top + height))


def scaled(name: str, width: int, height: int) -> Picture:
    """A whole photograph, stretched."""
    return lambda: photograph(name).resize((width, height), Image.Resampling.BICUBIC)


def page(width: int, height: int) -> Picture:
    """A screenshot-like page: a title bar, lines of drawn text, a button."""

    def draw() -> Image.Image:
        image = Image.new("RGB", (width, height), (250, 250, 247))
        pen = ImageDraw.Draw(image)
        font = ImageFont.load_default_imagefont()
        pen.rectangle((0, 0, width, 26), fill=(38, 70, 120))
        pen.text((10, 8), "Parity report - vision tower", fill=(255, 255, 255), font=font)
        for line in range((height - 90) // 16):
            error = f"rel_l2 {3.1 + line * 0.4:.1f}e-07   cosine 0.9999{line % 10}"
            pen.text(
                (12, 38 + line * 16), f"{line:02d}  layer {line * 7 % 27:02d}   {error}", fill=(20, 20, 20), font=font
            )
        pen.rectangle((width - 110, height - 40, width - 14, height - 14), fill=(198, 60, 50))
        pen.text((width - 92, height - 32), "Run again", fill=(255, 255, 255), font=font)
        return image

    return draw
