"""A text decoder over three ncnn graphs per layer: the part of a pipeline that models share.

`prefill` takes a whole prompt; `dqkv` and `dattn` take new rows over the caches: one token of the answer, or the new
part of a conversation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.chat import ChatTemplate
from runtime.config import read_config, read_json
from runtime.errors import EXPORT_AGAIN, InputError
from runtime.graphs import Arrays, Manifest, NcnnRunner, Runner
from runtime.joined import JoinedNet, Part
from runtime.kv_cache import KVCache
from runtime.memory import Budget, gigabytes
from runtime.pools import drop_buffers
from runtime.rope import rotary_tables
from runtime.table import Table
from runtime.tokenizer import Tokenizer
from runtime.windows import MASKED

Floats = NDArray[np.float32]
CONTEXT = 4096  # tokens of prompt and answer, where nothing else is said
CHUNK = 256  # rows that go through a graph at once, where more would only cost memory
Choose = Callable[[Floats, Sequence[int]], int]  # logits and the ids before -> the next id


@dataclass(frozen=True)
class Prompt:
    """A rendered and encoded prompt, image placeholders expanded."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Token:
    """One generated token: its id, the text that is complete with it, and the logits it was chosen from."""

    id: int
    text: str
    logits: Floats


@dataclass(frozen=True)
class Attention:
    """Sizes of the attention: what the caches of all layers hold per token, and how many numbers of it are rotated."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int


class Decoder(ABC):
    """The text half of a model over an exported folder. `runner` runs the graphs.

    KEYS: the keys of config.json that the model reads, "a" or "part.b".
    context: bounds prompt plus answer, in tokens; the caches are allocated for so many.
    chunk: about so many rows of a prompt go through a graph at once: attention does not grow with the square.
    memory: bytes that weights, caches and pictures may take; default: what the machine has left.
    Raises InputError where the weights in the runner's mode and the caches need more.
    """

    KEYS: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        manifest: Manifest,
        runner: Runner,
        *,
        context: int = CONTEXT,
        chunk: int = CHUNK,
        memory: int | None = None,
    ) -> None:
        self.model, self.folder = manifest.model, manifest.folder
        self.runner, self.context, self.chunk = runner, context, chunk
        self.config = read_config(manifest.folder, self.KEYS, context)
        self.shape = self.attention(self.config)
        self.tokenizer = Tokenizer.from_file(manifest.folder / "tokenizer.json")
        self.chat = ChatTemplate.from_folder(manifest.folder)
        resident = isinstance(runner, NcnnRunner) and runner.mode == "resident"
        self.table = Table(manifest.folder, manifest.table, threads=runner.threads, resident=resident)
        self.norm_weight = _row(manifest.folder / "norm.bin", self.table.width)
        self.stop_ids = _stop_ids(manifest.folder, self.config)
        self.caches: list[KVCache] = []
        self._joined: JoinedNet | None = None
        self.budget = Budget(memory)
        self.budget.require(self.needs(), self._narrower)

    @staticmethod
    @abstractmethod
    def attention(config: Mapping[str, Any]) -> Attention:
        """Sizes of the attention by the model's config.json."""

    def needs(self, pictures: Sequence[Any] = ()) -> dict[str, int]:
        """Bytes of memory that an answer takes, by what for; text alone here, a model that sees adds its pictures."""
        return self._weights_and_caches(self.runner)

    def _weights_and_caches(self, runner: Runner) -> dict[str, int]:
        needs = {f"caches for a context of {self.context}": self.context * self.row_bytes}
        if isinstance(runner, NcnnRunner):
            decode = [graph_id for graph_id in runner.manifest.graphs if graph_id.endswith((".dqkv", ".dattn"))]
            table = self.table.memory_bytes if runner.mode == "resident" else 0
            needs = {f"{runner.mode} weights": runner.weight_bytes(decode) + table} | needs
        return needs

    @property
    def row_bytes(self) -> int:
        """Bytes that the caches of all layers hold per token."""
        return 4 * self.shape.layers * self.shape.heads * (self.shape.key_dim + self.shape.value_dim)

    def _narrower(self, budget: int) -> str:
        """What fits into a budget, to be typed."""
        needs = self.needs()
        streaming = self.runner.streaming() if isinstance(self.runner, NcnnRunner) else self.runner
        fits = self._weights_and_caches(streaming)
        if sum(fits.values()) <= budget:
            return f"pass --mode streaming, which needs {gigabytes(sum(fits.values()))}"
        left = budget - (sum(fits.values()) - self.context * self.row_bytes)
        mode = "--mode streaming " if needs != fits else ""
        rows = left // self.row_bytes
        return f"pass {mode}--context {rows} or less" if rows > 0 else "free some, or take another machine"

    def prefill(self, embeds: Floats) -> Floats:
        """The whole prompt through every layer, filling cleared caches: (T, C) -> hidden of its last row (C,)."""
        count = len(embeds)
        self.check_context(count)
        self.clear_caches()
        if self.joined or self._pieces(count) > 1:
            # through the graphs of the decode step: a resident runner holds one copy of the weights
            return self.extend(embeds)
        cos, sin = self.rotary(0, count)
        mask = self.causal_mask(count)
        hidden = embeds
        for index, cache in enumerate(self.caches):
            out = self._run(f"llm.layer.{index:02d}.prefill", hidden=hidden, cos=cos, sin=sin, mask=mask)
            cache.append(out["key"], out["value"])
            hidden = out["hidden"]
        last: Floats = hidden[-1]
        return last

    def clear_caches(self) -> None:
        """Caches of no rows, in the memory of those before: a second set would take as much again."""
        shape = self.shape
        if not self.caches:
            sizes = (shape.heads, self.context, shape.key_dim, shape.value_dim)
            self.caches = [KVCache(*sizes) for _ in range(shape.layers)]
        for cache in self.caches:
            cache.length = 0

    def release(self) -> None:
        """Let go of the caches and, streaming, of the graph in memory: the next prompt begins anew."""
        self.caches = []
        if isinstance(self.runner, NcnnRunner):
            self.runner.release()

    def step(self, token: int) -> Floats:
        """One token through every layer, over the caches: hidden (C,)."""
        return self.extend(self.table.embed([token]))

    def extend(self, embeds: Floats) -> Floats:
        """New rows through every layer, over the caches: (T, C) -> hidden of the last row (C,)."""
        past, count = self.caches[0].length, len(embeds)
        self.check_context(past + count)
        chunks = np.array_split(embeds, self._pieces(count))
        starts = [past + sum(map(len, chunks[:number])) for number in range(len(chunks))]
        if self.joined:
            hidden = [self._through_joined(self.joined, *piece) for piece in zip(chunks, starts, strict=True)][-1]
        else:
            hidden = self._through_graphs(chunks, starts)[-1]
        last: Floats = hidden[-1].copy()  # out of the memory of the pass
        return last

    def _pieces(self, count: int) -> int:
        """How many even chunks of rows are nearest to the size asked for: a short last one would cost as a long one."""
        return max(1, round(count / self.chunk))

    def _through_graphs(self, chunks: list[Floats], starts: Sequence[int]) -> list[Floats]:
        """Chunks that begin at the positions `starts`, layer by layer, so that each graph is loaded once."""
        for index, cache in enumerate(self.caches):
            queries = []
            for chunk, start in zip(chunks, starts, strict=True):
                cos, sin = self.rotary(start, len(chunk))
                new = self._run(f"llm.layer.{index:02d}.dqkv", hidden=chunk, cos=cos, sin=sin)
                cache.append(new["key"], new["value"])
                queries.append(new["query"])
            chunks = [
                self._attend(index, chunk, query, start)
                for chunk, query, start in zip(chunks, queries, starts, strict=True)
            ]
        return chunks

    def _attend(self, index: int, hidden: Floats, query: Floats, start: int) -> Floats:
        if len(hidden) > 1:
            drop_buffers()
        key, value = self.caches[index].rows(start + len(hidden))
        inputs = {"hidden": hidden, "query": query, "key": key, "value": value}
        return self._run(f"llm.layer.{index:02d}.dattn", mask=self._mask(start, len(hidden)), **inputs)["hidden"]

    def _mask(self, past: int, count: int) -> Floats:
        """Additive mask of `count` rows behind `past`: (1, count, past + count)."""
        return np.concatenate([np.zeros((1, count, past), np.float32), self.causal_mask(count)], axis=-1)

    def _through_joined(self, net: JoinedNet, hidden: Floats, start: int) -> Floats:
        joined = net.start()
        cos, sin = self.rotary(start, len(hidden))
        mask = self._mask(start, len(hidden))
        for name, array in (("hidden", hidden), ("cos", cos), ("sin", sin), ("mask", mask)):
            joined.give(name, array)
        for index, cache in enumerate(self.caches):
            if len(hidden) > 1:
                drop_buffers()  # of other lengths and panels than what comes: 1.2 GB in 40 layers
            dqkv = f"{self.model}/llm.layer.{index:02d}.dqkv"
            joined.carry(f"{dqkv}.key", f"key.{index}", cache.keys, cache.length)
            joined.carry(f"{dqkv}.value", f"value.{index}", cache.values, cache.length)
            cache.length += len(hidden)
        return joined.take(f"{self.model}/llm.layer.{len(self.caches) - 1:02d}.dattn.hidden")

    @property
    def joined(self) -> JoinedNet | None:
        """The decode step as one net, where the runner keeps graphs in memory."""
        runner = self.runner
        if not isinstance(runner, NcnnRunner) or runner.mode != "resident":
            return None
        if self._joined is None:
            folder, parts = runner.manifest.folder, list(self._parts(runner))
            self._joined = JoinedNet(folder, parts, threads=runner.threads, verify=runner.verify, finite=runner.finite)
        return self._joined

    def _parts(self, runner: NcnnRunner) -> Iterator[Part]:
        hidden = "hidden"
        for index in range(self.shape.layers):
            dqkv, dattn = (f"{self.model}/llm.layer.{index:02d}.{part}" for part in ("dqkv", "dattn"))
            yield Part(runner.graph(dqkv), {"hidden": hidden, "cos": "cos", "sin": "sin"})
            cached = {"key": f"key.{index}", "value": f"value.{index}", "mask": "mask"}
            yield Part(runner.graph(dattn), {"hidden": hidden, "query": f"{dqkv}.query", **cached})
            hidden = f"{dattn}.hidden"

    def logits(self, hidden: Floats) -> Floats:
        """Final norm and tied head: (C,) -> (vocab,). Raises InputError when they are not finite."""
        scale = 1 / np.sqrt(np.mean(np.square(hidden)) + np.float32(self.config["rms_norm_eps"]))
        logits = self.table.logits((hidden * scale * self.norm_weight).astype(np.float32))
        if not np.isfinite(logits).all():
            raise InputError(f"the logits hold NaN or Inf; find the graph: python -m parity run {self.model}")
        return logits

    def choose(self, logits: Floats) -> int:
        """The greedy id: the first of the largest logits."""
        return int(logits.argmax())

    def rotary(self, start: int, count: int) -> tuple[Floats, Floats]:
        """cos and sin of the text positions start..start+count-1: (1, count, rope)."""
        return rotary_tables(start, count, dim=self.shape.rotary_dim, theta=self.config["rope_theta"])

    def causal_mask(self, count: int) -> Floats:
        """Additive mask, a row sees itself and the rows before it: (1, count, count)."""
        return np.triu(np.full((count, count), MASKED, np.float32), 1)[None]

    def answer(
        self, hidden: Floats, prompt_ids: Sequence[int], count: int, choose: Choose | None = None
    ) -> Iterator[Token]:
        """Up to `count` tokens behind a prompt whose last row is `hidden` (C,); the last may be a stop id.

        `choose` picks an id from logits and all ids before; greedy without it.
        """
        ids = list(prompt_ids)
        stream = self.tokenizer.stream()
        for number in range(count):
            logits = self.logits(hidden)
            ids.append(choose(logits, ids) if choose else self.choose(logits))
            last = ids[-1] in self.stop_ids or number == count - 1
            yield Token(ids[-1], stream.push(ids[-1]) + (stream.finish() if last else ""), logits)
            if last:
                return
            hidden = self.step(ids[-1])

    def _run(self, name: str, **inputs: Floats) -> Arrays:
        return self.runner.run(f"{self.model}/{name}", inputs)

    def check_context(self, count: int) -> None:
        """Raise InputError when prompt and answer of `count` tokens do not fit into the context."""
        if count > self.context:
            raise InputError(
                f"prompt and answer need {count} tokens, but the context holds {self.context}; "
                "pass a larger --context, a shorter prompt or a smaller -n"
            )


def _row(path: Path, width: int) -> Floats:
    row = np.fromfile(path, np.float32) if path.is_file() else np.empty(0, np.float32)
    if len(row) != width:
        raise InputError(f"{path} holds {len(row)} numbers, but should hold {width}; {EXPORT_AGAIN}")
    return row


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> set[int]:
    """Ids that end the answer: what generation_config.json and config.json name as eos_token_id."""
    stated = (folder / "generation_config.json").is_file()
    generation = read_json(folder, "generation_config.json") if stated else {}
    named = [source.get("eos_token_id") for source in (generation, config)]
    return {i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
