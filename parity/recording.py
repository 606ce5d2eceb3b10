"""Everything that a torch layer computes on given inputs, in order, with the operation and the line that made it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ROOT = Path(__file__).parents[1]
RECORDED = ("torch.float32", "torch.float64")


@dataclass(frozen=True)
class Value:
    """One tensor of the rewritten layer: by what and where it was computed, and from which values."""

    number: int
    operation: str
    module: str  # name of the innermost module, "" for the layer itself
    source: str  # file:line
    array: Floats  # with the batch axis
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        places = [f"in {self.module}"] * bool(self.module) + [f"({self.source})"] * bool(self.source)
        return " ".join([self.operation, *places, str(shape_of(self.array))])


@dataclass(frozen=True)
class Recording:
    """All values of one run of a layer, in order; and its outputs, without the batch axis."""

    values: list[Value]
    outputs: list[Floats]


class _Tape:
    """Collects values; a tensor is known by its id, so all of them are kept alive."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.modules: list[str] = []  # the innermost last
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def add(self, tensor: Any, operation: str, source: str = "", given: Any = ()) -> None:
        if id(tensor) in self._numbers or tensor.is_meta or str(tensor.dtype) not in RECORDED:
            return
        inputs = tuple(self._numbers[id(t)] for t in _tensors(given) if id(t) in self._numbers)
        module = self.modules[-1] if self.modules else ""
        array = tensor.detach().numpy()
        self.values.append(Value(len(self.values), operation, module, source, array, inputs))
        self._numbers[id(tensor)] = len(self._alive)
        self._alive.append(tensor)

    def play(self, call: Callable[[], Any]) -> Any:
        """Run and record every operation's results."""
        import torch
        from torch.overrides import TorchFunctionMode

        tape = self

        class Recorder(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for tensor in _tensors(result):
                    tape.add(tensor, str(getattr(func, "__name__", func)).strip("_"), _source(), (args, kwargs))
                return result

        with torch.no_grad(), Recorder():
            return call()


def record(module: Any, inputs: Mapping[str, NDArray[Any]]) -> Recording:
    """Everything that a rewritten layer computes: its inputs, its own tensors, every operation's results.

    inputs: by name, without the batch axis, in the order of the layer's arguments and of its dtype.
    """
    import torch

    tape = _Tape()
    tensors = [torch.from_numpy(np.ascontiguousarray(array))[None] for array in inputs.values()]
    for name, tensor in zip(inputs, tensors, strict=True):
        tape.add(tensor, f"input {name}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tape.add(tensor, f"tensor {name}")
    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: tape.modules.append(name)))
        hooks.append(part.register_forward_hook(lambda *_: _drop_last(tape.modules)))
    try:
        outputs = tape.play(lambda: module(*tensors))
    finally:
        for hook in hooks:
            hook.remove()
    return Recording(tape.values, [tensor[0].numpy() for tensor in _tensors(outputs)])


def record_call(call: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, NDArray[Any]]) -> Recording:
    """Everything that a function of tensors by name computes; modules are not named."""
    import torch

    tape = _Tape()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
    for name, tensor in tensors.items():
        tape.add(tensor, f"input {name}")
    outputs = tape.play(lambda: call(tensors))
    return Recording(tape.values, [tensor.numpy() for tensor in _tensors(outputs)])


def shape_of(array: Floats) -> tuple[int, ...]:
    """Shape without axes of size 1."""
    return tuple(size for size in array.shape if size != 1)


def heads_of(values: Sequence[Value], value: Value) -> int:
    """How many heads stand side by side in a value's last axis: as many as the layer then makes of it, else 1."""
    for user in values:
        shape = user.array.shape
        if user.inputs == (value.number,) and shape[:-2] == value.array.shape[:-1]:  # (1, T, C) -> (1, T, heads, d)
            return shape[-2] if shape[-2] * shape[-1] == value.array.shape[-1] else 1
    return 1


def heads_behind(values: Sequence[Value], tensor: str) -> int:
    """The heads of what the layer computes with one of its tensors."""
    number = next((value.number for value in values if value.operation == f"tensor {tensor}"), None)
    return next((heads_of(values, user) for user in values if number in user.inputs), 1)


def _drop_last(modules: list[str]) -> None:
    modules.pop()


def _tensors(nested: Any) -> Iterator[Any]:
    import torch

    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(list(nested.values()))
    elif isinstance(nested, tuple | list):
        for item in nested:
            yield from _tensors(item)


def _source() -> str:
    """file:line of the innermost frame in a file of ours other than this one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path != Path(__file__) and path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
