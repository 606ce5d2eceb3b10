"""SmolLM2-135M-Instruct: what the model is, told without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UnjudgedError
from references.smollm2.cases import CASES, WIDE_CASES
from references.smollm2.config import PROFILES, Sizes, sizes
from references.smollm2.graphs import graphs, structures
from references.smollm2.weights import tensors

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
    """Tokens that the chat template puts around the messages: the default system turn, roles, marks."""
    assert images == 0, "the model takes no pictures"
    return 21 + sum(6 if role == "assistant" else 5 for role in roles) + 4  # "ass|istant" is two tokens
