"""What a layer of the true widths costs, in a process of its own: the port's and transformers', over the same rows.

`python -m parity.widths KIND FOLDER THREADS [SIZE]` prints one JSON object. The folder is a slice of the model: a few
layers of each tower at their true widths, with the whole vocabulary table. All times are medians, in seconds.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.resources import peak_memory_bytes
from runtime.errors import InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner
from runtime.image import Pixels

PROMPT = 348  # tokens that the published port made of its test's prompt
STEPS = 24
RUNS = 3
MEMORY_BYTES = 1 << 30  # more than the processor's caches hold
Floats = NDArray[np.float32]


def ncnn(folder: Path, threads: int) -> dict[str, float]:
    """Decode, prefill and head of the runtime, the share of Python in a step, and the memory's own speed."""
    pipeline = _pipeline(folder, threads, context=PROMPT + STEPS + 1)
    width, layers = pipeline.table.width, pipeline.shape.layers
    prompt, row = _rows(PROMPT, width), _rows(1, width)
    found = {"copy": copy_speed(threads), "read": read_speed(threads)}
    found["prefill"] = _median(lambda: pipeline.prefill(prompt), RUNS) / layers
    clock = _Clock(pipeline)
    steps = []
    for _ in range(STEPS):
        started = time.perf_counter()
        pipeline.extend(row)
        steps.append(time.perf_counter() - started)
    found["decode"] = statistics.median(steps) / layers
    found["outside"] = statistics.median(a - b for a, b in zip(steps, clock.passes, strict=True)) / layers
    hidden = row[0]
    found["head"] = _median(lambda: pipeline.logits(hidden), STEPS)
    found["norm"] = found["head"] - _median(lambda: pipeline.table.logits(hidden), STEPS)
    return found


def torch(folder: Path, threads: int) -> dict[str, float]:
    """The same layers of transformers in fp32, eager; `folder` is the checkpoint."""
    import torch as library

    from references import dumping
    from references.youtu_vl import llm

    library.set_num_threads(threads)
    reference = dumping.open_reference("youtu_vl", folder)
    count = _layer_count(reference.checkpoint.names())
    text = replace(reference.sizes.text, num_hidden_layers=count)
    layers = [reference.layers._load(("llm.layer", index)) for index in range(count)]
    prompt = library.from_numpy(_rows(PROMPT, text.hidden_size))
    row = library.from_numpy(_rows(1, text.hidden_size))
    decoders: list[Any] = []

    def prefill() -> None:
        decoders[:] = [llm.Decoder(text, layers.__getitem__)]  # the memory of the one before is free again
        decoders[0].forward(prompt)

    found = {"prefill": _median(prefill, RUNS) / count}
    return found | {"decode": _median(lambda: decoders[0].forward(row), STEPS) / count}


def _layer_count(names: Iterable[str]) -> int:
    return sum(name.endswith("self_attn.o_proj.weight") for name in names)


def prompt(folder: Path, threads: int, size: int) -> dict[str, float]:
    """A prompt of `size` tokens through the decoder layers."""
    pipeline = _pipeline(folder, threads, context=size)
    rows = _rows(size, pipeline.table.width)
    pipeline.prefill(rows[:8])
    before = peak_memory_bytes()
    seconds = _median(lambda: pipeline.prefill(rows), 1)
    return {"layer": seconds / pipeline.shape.layers, "bytes": peak_memory_bytes() - before}


def context(folder: Path, threads: int, size: int) -> dict[str, float]:
    """One token over caches of `size` tokens, all but one of them filled."""
    pipeline = _pipeline(folder, threads, context=size)
    pipeline.prefill(_rows(8, pipeline.table.width))
    row = _rows(1, pipeline.table.width)

    def step() -> None:
        for cache in pipeline.caches:
            cache.length = size - 1  # what stands in the rows costs the same
        pipeline.extend(row)

    step()
    seconds = _median(step, STEPS)
    return {"layer": seconds / pipeline.shape.layers, "bytes": pipeline.row_bytes * size / pipeline.shape.layers}


def image(folder: Path, threads: int, size: int) -> dict[str, float]:
    """A picture of `size` x `size` patches through a windowed and a full vision layer."""
    pipeline = _pipeline(folder, threads, context=8)
    timed = pipeline.runner = Timed(pipeline.runner)
    patches = _rows(size**2, pipeline.config["vision_config"]["patch_size"] ** 2 * 3)
    pipeline.encode_images([Pixels(_rows(4, patches.shape[1]), (2, 2))])  # loads the graphs
    before = peak_memory_bytes()
    timed.seconds.clear()
    pipeline.encode_images([Pixels(patches, (size, size))])
    full = pipeline.config["vision_config"]["fullatt_block_indexes"][0]
    window = next(index for index in range(2) if index != full)
    layers = {"window": f"vision.layer.{window:02d}", "full": f"vision.layer.{full:02d}"}
    found = {kind: sum(timed.seconds[f"youtu_vl/{name}"]) for kind, name in layers.items()}
    return found | {"bytes": peak_memory_bytes() - before, "told": pipeline.picture_bytes(len(patches))}


def copy_speed(threads: int) -> float:
    """Bytes per second that threads copy from memory to memory; the best of RUNS, which is the limit."""
    target = np.ones(MEMORY_BYTES // 4, np.float32)
    pieces = np.array_split(target, threads), np.array_split(np.ones_like(target), threads)
    return _speed(np.copyto, *pieces)


def read_speed(threads: int) -> float:
    """Bytes per second that threads read from memory; the best of RUNS."""
    return _speed(np.max, np.array_split(np.ones(MEMORY_BYTES // 4, np.float32), threads))


def _speed(work: Callable[..., Any], *pieces: list[Floats]) -> float:
    with ThreadPoolExecutor(len(pieces[0])) as pool:
        return MEMORY_BYTES / min(_seconds(lambda: list(pool.map(work, *pieces))) for _ in range(RUNS))


def _pipeline(folder: Path, threads: int, *, context: int) -> Any:
    manifest = Manifest.read(folder)
    runner = NcnnRunner(manifest, threads=threads, verify=False)
    return importlib.import_module(f"runtime.{manifest.model}").Pipeline(manifest, runner, context=context)


class _Clock:
    """Seconds that each pass through the joined net spends in ncnn."""

    def __init__(self, pipeline: Any) -> None:
        self.passes: list[float] = []
        start = pipeline.joined.start

        def timed() -> Any:
            run = start()
            self.passes.append(0.0)
            run._extractor = _TimedExtractor(run._extractor, self.passes)
            return run

        pipeline.joined.start = timed


class _TimedExtractor:
    """An extractor whose work is added to the last of `passes`."""

    def __init__(self, extractor: Any, passes: list[float]) -> None:
        self._extractor, self._passes = extractor, passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def extract(self, blob: int) -> Any:
        """What the extractor gives."""
        started = time.perf_counter()
        found = self._extractor.extract(blob)
        self._passes[-1] += time.perf_counter() - started
        return found


class Timed:
    """A runner that keeps the seconds of every load and run by graph."""

    def __init__(self, runner: NcnnRunner) -> None:
        self._runner, self.threads = runner, runner.threads
        self.loads: dict[str, list[float]] = {}
        self.seconds: dict[str, list[float]] = {}

    def run(self, graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        """Outputs by port name."""
        started = time.perf_counter()
        self._runner.load(graph_id)
        loaded = time.perf_counter()
        outputs = self._runner.run(graph_id, inputs)
        self.loads.setdefault(graph_id, []).append(loaded - started)
        self.seconds.setdefault(graph_id, []).append(time.perf_counter() - loaded)
        return outputs


def _rows(count: int, width: int) -> Floats:
    return np.random.default_rng(count).standard_normal((count, width), np.float32)


def _median(work: Callable[[], Any], runs: int) -> float:
    """Median seconds of runs behind one that is not counted."""
    work()
    return statistics.median(_seconds(work) for _ in range(runs))


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


KINDS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function for function in (ncnn, torch, prompt, context, image)
}


if __name__ == "__main__":
    kind, folder, *numbers = sys.argv[1:]
    try:
        print(json.dumps(KINDS[kind](Path(folder), *map(int, numbers))))
    except InputError as error:  # the port refuses a size: that is what it costs
        print(json.dumps({"refused": str(error)}))
