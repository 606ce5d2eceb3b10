"""Faults on the reference's side: what the port is compared with is not what it should be."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from harness.dumps import Dump
from parity.faults.port import Fault, Port


def _of_another_release(dump: Dump) -> Dump:
    """Made when transformers had another default."""
    return _told(dump, transformers="5.0.0")


def _in_bfloat16(dump: Dump) -> Dump:
    """The reference ran in the checkpoint's own dtype."""

    def rounded(tensor: np.ndarray) -> np.ndarray:
        if tensor.dtype != np.float32:
            return tensor
        bits = tensor.view(np.uint32)
        return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)

    tensors = {name: rounded(np.ascontiguousarray(tensor)) for name, tensor in dump.tensors.items()}
    return replace(_told(dump, dtype="bfloat16"), tensors=tensors)


def _told(dump: Dump, **changed: str) -> Dump:
    if "made_with" not in dump.provenance:  # a shape case: random inputs
        return dump
    made_with = {**dump.provenance["made_with"], **changed}
    return replace(dump, provenance={**dump.provenance, "made_with": made_with})


def _dump(change: Callable[[Dump], Dump]) -> Callable[[Port], None]:
    return lambda port: port.change_dump(change)


FAULTS = (
    Fault("dump of another transformers", "reference.made_with", _dump(_of_another_release), changes_ids=False),
    Fault("dump in bfloat16", "reference.made_with", _dump(_in_bfloat16), changes_ids=False),
)
