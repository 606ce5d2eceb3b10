"""One decoder layer of one step over a cache of transformers, computed, or taken from what was kept of it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from references.kinds import Tensors

Step = Callable[[str, Callable[[], Tensors]], Tensors]  # (piece, what makes it) -> what it gave


def make(piece: str, compute: Callable[[], Tensors]) -> Tensors:
    """The step that keeps nothing."""
    return compute()


def through(cache: DynamicCache, index: int, past: int, step: Step, layer: Callable[[], Tensor]) -> Tensor:
    """Hidden rows behind layer `index`, the cache longer by these rows' own part."""

    def compute() -> Tensors:
        hidden = layer()
        own: Any = cache.layers[index]
        return {"hidden": hidden, "key": own.keys[..., past:, :], "value": own.values[..., past:, :]}

    made = step(f"{past:06d}.{index:02d}", compute)
    if cache.get_seq_length(index) == past:  # it was kept from a run before
        cache.update(made["key"], made["value"], index)
    return made["hidden"]
