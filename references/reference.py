"""What fp32 references share: modules loaded on demand, graphs run one by one, a tied head, greedy decoding.

Layers are read from the checkpoint when they are needed; they stay where all fit into LAYERS_KEPT_BYTES. The
vocabulary's table is mapped into memory as it is stored, and widened in blocks.
But: greedy only, no sampling, no repetition penalty: what a port must reproduce id for id.
"""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from harness.errors import UnjudgedError
from harness.graphs import Graph
from references.cache import Step, make
from references.checkpoint import Checkpoint
from references.kinds import Tensors
from references.layers import Key, Layers

LAYERS_KEPT_BYTES = 2 << 30
BLOCK_BYTES = 128 << 20  # of the vocabulary's table
TABLE = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Prompt:
    """One rendered and encoded prompt."""

    text: str  # the template's output, one placeholder per image
    ids: list[int]  # placeholders expanded


class TextReference:
    """A model in fp32 over a checkpoint folder. `decoder_sizes` are those of its text decoder."""

    def __init__(
        self, model: str, checkpoint: Checkpoint, sizes: Any, decoder_sizes: Any, graphs: Sequence[Graph]
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.sizes, self.decoder_sizes = sizes, decoder_sizes
        self.graphs = {graph.id: graph for graph in graphs}
        self.layers = Layers(self._load, keep_all=self.fits)

    def run(self, graph: Graph, inputs: Mapping[str, Tensor], *, double: bool = False) -> Tensors:
        """Outputs of one graph from inputs shaped as its ports; in float64 to measure the noise floor."""
        tower = self._tower(graph.structure.name)
        key, function = self.key(graph), tower.FUNCTIONS[graph.structure.name][1]
        module = self.layers.double(key, tower.KINDS[key[0]].to_double) if double else self.layers.get(key)
        dtype = torch.float64 if double else torch.float32
        with torch.no_grad():
            return function(module, **{name: value.to(dtype) for name, value in inputs.items()})

    def module(self, kind: str, index: int) -> Any:
        """The reference module of a kind, loaded from the checkpoint."""
        return self.layers.get((kind, index))

    def key(self, graph: Graph) -> Key:
        """Kind and index of the module that a graph runs."""
        return self._tower(graph.structure.name).FUNCTIONS[graph.structure.name][0], graph.index or 0

    def empty(self, kind: str, index: int) -> nn.Module:
        """The module of a kind, its weights without memory."""
        with torch.device("meta"):
            return self._tower(kind).KINDS[kind].make(self.sizes, index).eval()

    @cached_property
    def layers_bytes(self) -> int:
        """All layers in float32, the vocabulary's table left out."""
        shapes = importlib.import_module(f"references.{self.model}").tensors(self.sizes)
        return 4 * sum(math.prod(shape) for name, shape in shapes.items() if name != TABLE)

    @property
    def fits(self) -> bool:
        """Whether all layers stay in memory together."""
        return self.layers_bytes <= LAYERS_KEPT_BYTES

    def reading_ahead(self) -> AbstractContextManager[None]:
        """Read the next layer while one computes, in the order of the graphs; the decoder's come round again."""
        order = list(dict.fromkeys(map(self.key, self.graphs.values())))
        first = next(key for key in order if key[0] == order[-1][0])
        behind = dict(zip(order, [*order[1:], first], strict=True))
        return self.layers.reading_ahead({} if self.fits else behind)

    @property
    def stop_ids(self) -> set[int]:
        """Ids that end the text: what generation_config.json and config.json name."""
        named = [self.checkpoint.json(name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        return {i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids])}

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows of the embedding table: (T,) -> (T, C)."""
        return self._table[torch.tensor(list(ids))].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and tied head: (T, C) -> (T, vocab)."""
        with torch.no_grad():
            rows = self._norm(hidden)
            return torch.cat([rows @ block.T for block in self.checkpoint.blocks(TABLE, BLOCK_BYTES)], dim=-1)

    def greedy(self, embeds: Tensor, count: int, step: Step = make) -> Iterator[tuple[int, Tensor]]:
        """Up to `count` greedy ids with their logits (vocab,), for a prompt's fused rows (T, C)."""
        decoder = self._tower("llm").Decoder(self.decoder_sizes, lambda index: self.module("llm.layer", index), step)
        hidden = decoder.forward(embeds)
        for number in range(1, count + 1):
            logits = self.logits(hidden[-1:])[0]
            token = int(logits.argmax())
            yield token, logits
            if token in self.stop_ids or number == count:
                return
            hidden = decoder.forward(self.embed([token]))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The checkpoint's chat template over messages, up to where the answer begins."""
        from transformers import PreTrainedTokenizerFast  # seconds, which graphs alone do not need

        conversation: Any = list(messages)
        rendered = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer).apply_chat_template(
            conversation, chat_template=self._chat_template(), tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def _tower(self, name: str) -> Any:
        """The module that defines a tower (vision.py, llm.py), imported when first asked for."""
        return importlib.import_module(f"references.{self.model}.{name.partition('.')[0]}")

    def _chat_template(self) -> str:
        path = self.checkpoint.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            template = self.checkpoint.json(name).get("chat_template")
            if template:
                return str(template)
        raise UnjudgedError(f"checkpoint {self.checkpoint.folder} has no chat template; add chat_template.json")

    def _load(self, key: Key) -> nn.Module:
        kind, index = key
        found, module = self._tower(kind).KINDS[kind], self.empty(kind, index)
        tensors = {}
        for name in module.state_dict():
            own, prefix = next((o, p) for o, p in found.prefixes.items() if name.startswith(o))
            tensors[name] = self.checkpoint.tensor(prefix.format(index=index) + name.removeprefix(own))
        return _assign(module, tensors)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.checkpoint.folder / "tokenizer.json"))

    @cached_property
    def _table(self) -> Tensor:
        for _ in self.checkpoint.blocks(TABLE, BLOCK_BYTES):
            pass  # looked through once
        return self.checkpoint.stored(TABLE)

    @cached_property
    def _norm(self) -> nn.Module:
        norm = self._tower("llm").new_norm(self.decoder_sizes)
        return _assign(norm, {"weight": self.checkpoint.tensor("model.norm.weight")})


def _assign(module: nn.Module, tensors: Tensors) -> nn.Module:
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.requires_grad_(False)
