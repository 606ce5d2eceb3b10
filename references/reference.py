"""What fp32 references share: modules loaded on demand, graphs run one by one, a tied head, greedy decoding.

Layers are read from the checkpoint when they are needed; as many as fit into LAYER_CACHE_BYTES stay.
But: greedy only, no sampling, no repetition penalty: what a port must reproduce id for id.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from harness.errors import UnjudgedError
from harness.graphs import Graph
from references.checkpoint import Checkpoint
from references.kinds import Tensors

LAYER_CACHE_BYTES = 2 << 30


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
        self._modules: dict[tuple[str, int], nn.Module] = {}

    def run(self, graph: Graph, inputs: Mapping[str, Tensor], *, double: bool = False) -> Tensors:
        """Outputs of one graph from inputs shaped as its ports; in float64 to measure the noise floor."""
        tower = self._tower(graph.structure.name)
        kind, function = tower.FUNCTIONS[graph.structure.name]
        module = self.module(kind, graph.index or 0)
        if double:
            module = tower.KINDS[kind].to_double(module)
        dtype = torch.float64 if double else torch.float32
        with torch.no_grad():
            return function(module, **{name: value.to(dtype) for name, value in inputs.items()})

    def module(self, kind: str, index: int) -> Any:
        """The reference module of a kind, loaded from the checkpoint."""
        if (kind, index) not in self._modules:
            module = self._load(kind, index)
            if sum(map(_nbytes, [module, *self._modules.values()])) > LAYER_CACHE_BYTES:
                self._modules.clear()
            self._modules[kind, index] = module
        return self._modules[kind, index]

    @property
    def stop_ids(self) -> set[int]:
        """Ids that end the text: what generation_config.json and config.json name."""
        named = [self.checkpoint.json(name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        return {i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids])}

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows of the embedding table: (T,) -> (T, C)."""
        return self._table[torch.tensor(list(ids))]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and tied head: (T, C) -> (T, vocab)."""
        with torch.no_grad():
            return self._norm(hidden) @ self._table.T

    def greedy(self, embeds: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """Up to `count` greedy ids with their logits (vocab,), for a prompt's fused rows (T, C)."""
        decoder = self._tower("llm").Decoder(self.decoder_sizes, lambda index: self.module("llm.layer", index))
        hidden = decoder.forward(embeds)
        for _ in range(count):
            logits = self.logits(hidden[-1:])[0]
            token = int(logits.argmax())
            yield token, logits
            if token in self.stop_ids:
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

    def _load(self, kind: str, index: int) -> nn.Module:
        found = self._tower(kind).KINDS[kind]
        with torch.device("meta"):
            module = found.make(self.sizes, index).eval()
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
        return self.checkpoint.tensor("model.embed_tokens.weight")

    @cached_property
    def _norm(self) -> nn.Module:
        norm = self._tower("llm").new_norm(self.decoder_sizes)
        return _assign(norm, {"weight": self.checkpoint.tensor("model.norm.weight")})


def _assign(module: nn.Module, tensors: Tensors) -> nn.Module:
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.requires_grad_(False)


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
