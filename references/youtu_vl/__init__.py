"""Youtu-VL-4B: what the model is, told without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UnjudgedError
from references.youtu_vl.cases import CASES, WIDE_CASES
from references.youtu_vl.config import PROFILES, Sizes, sizes
from references.youtu_vl.graphs import graphs, structures
from references.youtu_vl.weights import tensors

__all__ = ["CASES", "PROFILES", "WIDE_CASES", "frame_tokens", "graphs", "read_sizes", "structures", "tensors"]


def read_sizes(config: dict[str, Any], folder: Path) -> Sizes:
    """Sizes by a checkpoint's config.json. Raises UnjudgedError when a key is missing."""
    try:
        return sizes(config)
    except KeyError as error:
        raise UnjudgedError(
            f"{folder / 'config.json'} has no key {error}, which {__name__} needs; is it this model's?"
        ) from error


def frame_tokens(images: int, roles: Sequence[str]) -> int:
    """Tokens that the chat template puts around image tokens and text: system turn, roles, image marks."""
    return 11 + 5 * len(roles) + 2 * images + 3
