"""Kinds of reference modules: how one is made, and where its weights stand in a checkpoint."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Tensors = dict[str, Tensor]
Function = Callable[..., Tensors]  # (module, inputs by port name) -> outputs by port name


def doubled(module: nn.Module) -> Any:
    """A copy in float64, no copy in float32 on the way: a layer of the true widths is 0.4 GB."""
    wide = {id(value): nn.Parameter(value.double(), requires_grad=False) for value in module.parameters()}
    return copy.deepcopy(module, wide).double()


@dataclass(frozen=True)
class Kind:
    """A kind of module. `make` takes the model's sizes and the layer's index; weights come from the checkpoint."""

    make: Callable[[Any, int], nn.Module]
    prefixes: Mapping[str, str]  # own prefix -> checkpoint prefix, with {index} for the layer's
    to_double: Callable[[Any], nn.Module] = doubled
