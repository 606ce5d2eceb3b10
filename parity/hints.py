"""What kind of mistake the tensors behind a fault look like: each hint with the place where it was seen.

A weight that is wrong tells most, then what reaches the graph, then the first wrong blob inside it; an output least,
since a layer's output is a sum of its input and whatever is wrong.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.diagnosis import Hint, diagnose
from parity.filediff import Changed
from parity.matching import without_mask
from parity.recording import Value, heads_behind
from parity.stages import Placed
from runtime.graphs import Arrays

Floats = NDArray[np.float32]

MOST = 8  # a layer that is another one's has that many wrong tensors, all alike
BY_HEAD = ("head order", "heads", "zero")


def of_weights(changed: Sequence[Changed], values: Sequence[Value]) -> tuple[Placed, ...]:
    """Of the tensors that a bin does not hold; the rewritten layer's values tell how many heads an output has."""
    found = [(each.tensor, hint) for each in changed for hint in _of_weight(each, heads_behind(values, each.tensor))]
    return tuple(found[:MOST])


def _of_weight(changed: Changed, heads: int) -> list[Hint]:
    if changed.whose:
        return [Hint("another tensor", f"the numbers are {changed.whose}'s")]
    actual, expected = changed.actual, changed.expected
    hints = diagnose(actual, expected)
    if heads > 1 and actual.ndim == 2 and len(actual) % heads == 0:  # (heads * d, in)
        by_head = diagnose(*(side.reshape(heads, -1, side.shape[1]) for side in (actual, expected)))
        return by_head if by_head and by_head[0].kind in BY_HEAD else hints
    return hints


def of_ports(
    kind: str, actual: Arrays, expected: Arrays, names: Sequence[str], spans: Mapping[str, slice]
) -> tuple[Placed, ...]:
    """Of inputs or outputs of a graph, by the ports' names; tables of cos and sin show a turn only together."""
    if {"cos", "sin"} & set(names) and {"cos", "sin"} <= set(actual):
        turned = diagnose(*(np.concatenate([side["cos"], side["sin"]], axis=-1) for side in (actual, expected)))
        if turned and turned[0].kind == "rotary":
            return tuple((f"{kind} cos and sin", hint) for hint in turned)
    return tuple((f"{kind} {n}", hint) for n in names for hint in diagnose(actual[n], expected[n], spans=spans))


def of_blob(actual: Floats, expected: Floats, heads: int) -> tuple[Hint, ...]:
    """Of a blob beside what should stand there, in the same order of axes; heads stand side by side in the last."""
    if actual.shape != expected.shape:
        return tuple(diagnose(actual, expected))
    ours, theirs = without_mask(actual, expected)
    if heads > 1 and ours.size == np.prod(ours.shape[-2:]):  # (1, T, C) -> (T, C)
        ours, theirs = ours.reshape(ours.shape[-2:]), theirs.reshape(ours.shape[-2:])
    return tuple(diagnose(ours, theirs, heads=heads))
