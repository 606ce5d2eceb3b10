"""The rewritten layer against the reference's, in float64 on random rows, before it may be exported.

Both layers hold the very same tensors, so that a layer of 100 million weights costs its arithmetic and no copies.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness.graphs import Graph
from harness.metrics import measure
from references.dumping import random_inputs
from references.kinds import Function

ROWS = 6


def errors(
    model: str, sizes: Any, graph: Graph, module: Any, tensor: Callable[[str], Tensor]
) -> Iterator[tuple[str, float]]:
    """Per output its name and relative L2; `module` and what `tensor` reads from the checkpoint are in float64."""
    inputs = {name: value.double() for name, value in random_inputs(graph, length=ROWS).items()}
    with torch.no_grad():
        expected = _reference(model, sizes, graph, tensor)(**inputs)
        outputs = module(*(inputs[port.name][None] for port in graph.structure.inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for port, actual in zip(graph.structure.outputs, outputs, strict=True):
        yield port.name, measure(actual[0].numpy(), expected[port.name].numpy()).rel_l2


def _reference(model: str, sizes: Any, graph: Graph, tensor: Callable[[str], Tensor]) -> Function:
    """The reference's function of a graph over its float64 module."""
    tower = importlib.import_module(f"references.{model}.{graph.structure.name.partition('.')[0]}")
    name, function = tower.FUNCTIONS[graph.structure.name]
    kind = tower.KINDS[name]
    with torch.device("meta"):  # made without numbers: a copy in float64 of what has none costs nothing
        module = kind.to_double(kind.make(sizes, graph.index or 0).eval())
    state = {}
    for own in module.state_dict():
        inner, prefix = next((o, p) for o, p in kind.prefixes.items() if own.startswith(o))
        state[own] = tensor(prefix.format(index=graph.index or 0) + own.removeprefix(inner))
    module.load_state_dict(state, strict=True, assign=True)
    return lambda **inputs: function(module, **inputs)
