"""The fp32 truth for Youtu-VL: every graph's function, and the whole model from pictures to greedy ids.

Layers are read from the checkpoint when they are needed; as many as fit into LAYER_CACHE_BYTES stay.
But: greedy only, no sampling, no repetition penalty: what a port must reproduce id for id.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from harness.errors import UnjudgedError
from harness.graphs import Graph
from references.checkpoint import Checkpoint
from references.kinds import Tensors
from references.youtu_vl import image
from references.youtu_vl.config import sizes
from references.youtu_vl.graphs import graphs

LAYER_CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Prompt:
    """One rendered and encoded prompt."""

    text: str  # the template's output, one placeholder per image
    ids: list[int]  # placeholders expanded


class Reference:
    """Youtu-VL in fp32 over a checkpoint folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.sizes = sizes(checkpoint.config)
        self.graphs = {graph.id: graph for graph in graphs(self.sizes)}
        self._modules: dict[tuple[str, int], nn.Module] = {}

    def run(self, graph: Graph, inputs: Mapping[str, Tensor], *, double: bool = False) -> Tensors:
        """Outputs of one graph from inputs shaped as its ports; in float64 to measure the noise floor."""
        tower = _tower(graph.structure.name)
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

    def prompt(self, text: str, grids: Sequence[tuple[int, int]]) -> Prompt:
        """Chat template, then one image placeholder -> a copy per merged cell, then ids."""
        rendered = self._render(text, len(grids))
        placeholder = self._tokenizer.id_to_token(self.image_token_id)
        if placeholder is None:
            raise UnjudgedError(f"tokenizer.json has no token {self.image_token_id}, the image_token_id of config.json")
        head, *rest = rendered.split(placeholder)
        if len(rest) != len(grids):
            raise UnjudgedError(
                f"the prompt holds {len(rest)} {placeholder}, but should hold {len(grids)}, one per image"
            )
        expanded = head + "".join(placeholder * self.cells(grid) + part for grid, part in zip(grids, rest, strict=True))
        return Prompt(rendered, self.encode(expanded))

    def preprocess(self, picture: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
        """uint8 (H, W, 3) -> pixel_values (N, 768) and grid."""
        return image.preprocess(picture)

    def cells(self, grid: tuple[int, int]) -> int:
        """Merged cells of a patch grid: the image tokens."""
        return grid[0] * grid[1] // self.sizes.vision.spatial_merge_size**2

    @property
    def image_token_id(self) -> int:
        """Id of the image placeholder, by config.json."""
        return int(self.checkpoint.config["image_token_id"])

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
        decoder = _tower("llm").Decoder(self.sizes.text, lambda index: self.module("llm.layer", index))
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

    def _render(self, text: str, images: int) -> str:
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        conversation: Any = [{"role": "user", "content": content}]
        from transformers import PreTrainedTokenizerFast  # seconds, which graphs alone do not need

        rendered = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer).apply_chat_template(
            conversation, chat_template=self._chat_template(), tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

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
        found = _tower(kind).KINDS[kind]
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
        norm = _tower("llm").new_norm(self.sizes.text)
        return _assign(norm, {"weight": self.checkpoint.tensor("model.norm.weight")})


def _tower(name: str) -> Any:
    """The module that defines a tower: vision.py or llm.py, imported when first asked for."""
    return importlib.import_module(f"references.youtu_vl.{name.partition('.')[0]}")


def _assign(module: nn.Module, tensors: Tensors) -> nn.Module:
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.requires_grad_(False)


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
