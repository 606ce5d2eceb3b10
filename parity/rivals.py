"""Speed of one engine in a process of its own: ncnn's runtime, transformers, llama.cpp, over the same token ids.

`python -m parity.rivals ENGINE FOLDER THREADS` prints one JSON object: decode and prefill in tokens per second.
`python -m parity.rivals write-f32 SOURCE TARGET` makes the file that llama.cpp reads. Every
engine evaluates the same ids, picks the largest logit, and stops at no token. llama.cpp takes fp32 weights, which it
makes out of the package's file by its own conversion, and an fp32 cache.
But: text only, and llama.cpp only for the model whose package holds a GGUF file.
"""

import ctypes
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Only their number matters: ordinary ids, the same for all engines.
PROMPT = [100 + 137 * number % 40_000 for number in range(300)]
SHORT = PROMPT[:37]
NEW_TOKENS = 64
RUNS = 3
Feed = Callable[[Sequence[int]], int]  # ids behind those fed before -> the greedy next id
Engine = tuple[Callable[[], None], Feed]  # forget what was fed; feed


def ncnn_runtime(folder: Path, threads: int) -> Engine:
    """The runtime over an exported model folder."""
    from runtime.graphs import Manifest, NcnnRunner

    manifest = Manifest.read(folder)
    runner = NcnnRunner(manifest, threads=threads, finite=True)  # as `python -m runtime` runs it
    pipeline = importlib.import_module(f"runtime.{manifest.model}").Pipeline(manifest, runner)

    def feed(ids: Sequence[int]) -> int:
        return int(pipeline.choose(pipeline.logits(pipeline.extend(pipeline.table.embed(ids)))))

    return pipeline.clear_caches, feed


def transformers_eager(folder: Path, threads: int) -> Engine:
    """transformers in fp32 with eager attention over a checkpoint folder."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    fed: list[Any] = []

    def feed(ids: Sequence[int]) -> int:
        if not fed:
            fed.append(DynamicCache(config=model.config))
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1, cache=fed[0])
        return int(out.logits[0, -1].argmax())

    return fed.clear, feed


def llama_cpp(folder: Path, threads: int) -> Engine:
    """llama.cpp over the F32 GGUF file in `folder`."""
    import llama_cpp as library

    model_options = library.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(folder / "f32.gguf").encode(), model_options)
    options = library.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 1024, 512, 512
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = library.GGML_TYPE_F32
    context = library.llama_init_from_model(model, options)
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def feed(ids: Sequence[int]) -> int:
        tokens = (library.llama_token * len(ids))(*ids)  # named: the batch does not keep them alive
        batch = library.llama_batch_get_one(tokens, len(ids))
        if library.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), shape=(vocab,))
        return int(logits.argmax())

    return lambda: library.llama_memory_clear(library.llama_get_memory(context), True), feed


def write_f32(source: Path, target: Path) -> None:
    """An F32 GGUF file out of a quantised one, by llama.cpp's own conversion. Raises RuntimeError when it fails."""
    import llama_cpp as library

    options = library.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = library.LLAMA_FTYPE_ALL_F32, True
    options.output_tensor_type = options.token_embedding_type = library.GGML_TYPE_F32
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    if code != 0:
        raise RuntimeError(f"llama.cpp could not convert {source} (code {code})")


ENGINES = {"ncnn": ncnn_runtime, "transformers": transformers_eager, "llama.cpp": llama_cpp}


def measure(engine: Engine) -> dict[str, Any]:
    """Medians over RUNS after one warm-up; also the ids of the last run, which must be those of the others."""
    forget, feed = engine
    prefill, decode, ids = [], [], []
    for _ in range(RUNS + 1):
        forget()
        started = time.perf_counter()
        feed(PROMPT)
        prefill.append(len(PROMPT) / (time.perf_counter() - started))
        forget()
        ids = [feed(SHORT)]
        started = time.perf_counter()
        for _ in range(NEW_TOKENS):
            ids.append(feed(ids[-1:]))
        decode.append(NEW_TOKENS / (time.perf_counter() - started))
    return {"prefill": statistics.median(prefill[1:]), "decode": statistics.median(decode[1:]), "ids": ids}


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "write-f32":
        write_f32(*map(Path, arguments))
    else:
        print(json.dumps(measure(ENGINES[verb](Path(arguments[0]), int(arguments[1])))))
