"""Run the pnnx converter: a traced module in, .ncnn.param text and .ncnn.bin file out.

Always fp16=0 (the default stores half-precision weights) and two sets of sizes that differ everywhere, since
two equal dynamic sizes would be baked. optlevel stays at its default 2: 0 and 1 crash.
"""

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from harness.errors import UnjudgedError
from harness.graphs import Dim, Port, Structure

OPTIONS = ("fp16=0",)
TIMEOUT_SECONDS = 1800
_START = 37  # above the codes of ncnn's operations and axis orders, which a length in a param is told from


def convert(module: nn.Module, structure: Structure, folder: Path) -> tuple[str, Path]:
    """Trace and convert a module. Returns the .param text and the .bin's path.

    Raises UnjudgedError with the converter's own last lines when it fails.
    """
    import pnnx

    first, second = trace_lengths(structure)
    traced = folder / "graph.pt"
    _trace(module, structure, first).save(str(traced))
    shapes = [f"inputshape={_shapes(structure, first)}", f"inputshape2={_shapes(structure, second)}"]
    command = [pnnx.EXEC_PATH, traced.name, *shapes, *OPTIONS]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UnjudgedError(f"{structure.name}: pnnx did not finish in {TIMEOUT_SECONDS} s") from error
    param, weights = folder / "graph.ncnn.param", folder / "graph.ncnn.bin"
    if run.returncode != 0 or not param.is_file() or not weights.is_file():
        log = "\n".join((run.stdout + run.stderr).splitlines()[-20:])
        raise UnjudgedError(f"{structure.name}: pnnx failed with exit code {run.returncode}:\n{log}")
    return param.read_text(encoding="utf-8"), weights


def trace_lengths(structure: Structure) -> tuple[dict[str, int], dict[str, int]]:
    """Two sets of dynamic lengths: primes, no two sizes that they give equal, nor to a fixed size."""
    dims = _dims(structure)
    fixed = {dim for dim in dims if isinstance(dim, int)}
    factors = {int(dim.rpartition("*")[0] or 1) for dim in dims if isinstance(dim, str)}
    free = (prime for prime in _primes(_START) if not fixed & {factor * prime for factor in factors})
    names = structure.length_names
    return {name: next(free) for name in names}, {name: next(free) for name in names}


def traced_sizes(structure: Structure) -> set[int]:
    """Every size that a dynamic axis had in the traces: none of them may stand in the result."""
    dynamic = Port("", tuple(dim for dim in _dims(structure) if isinstance(dim, str)))
    return {size for lengths in trace_lengths(structure) for size in dynamic.sizes(lengths)}


def example_inputs(structure: Structure, lengths: dict[str, int]) -> list[torch.Tensor]:
    """Seeded random inputs with a batch axis of 1."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, *port.sizes(lengths), generator=random) for port in structure.inputs]


def _trace(module: nn.Module, structure: Structure, lengths: dict[str, int]) -> torch.jit.ScriptModule:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what pnnx reads
        warnings.simplefilter("error", torch.jit.TracerWarning)  # it means that a size or a value is baked
        try:
            return torch.jit.trace(module.eval(), example_inputs(structure, lengths))
        except Exception as error:
            cause = error.__cause__ or error  # a warning raised inside torch comes wrapped
            raise UnjudgedError(
                f"{structure.name}: torch cannot trace the rewritten layer {type(module).__name__}; "
                f"mend it: {type(cause).__name__}: {cause}"
            ) from error


def _shapes(structure: Structure, lengths: dict[str, int]) -> str:
    sizes = ([1, *port.sizes(lengths)] for port in structure.inputs)
    return ",".join("[" + ",".join(map(str, shape)) + "]" for shape in sizes)


def _dims(structure: Structure) -> list[Dim]:
    return [dim for port in structure.inputs + structure.outputs for dim in port.shape]


def _primes(start: int) -> Iterator[int]:
    number = start
    while True:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
        number += 1
