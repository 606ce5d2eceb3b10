"""The fp32 truth for Youtu-VL: every graph's function, and the whole model from pictures to greedy ids.

Layers are read from the checkpoint when they are needed; as many as fit into LAYER_CACHE_BYTES stay.
But: greedy only, no sampling, no repetition penalty: what a port must reproduce id for id.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.models.youtu.modeling_youtu import YoutuDecoderLayer, YoutuRMSNorm

from harness.errors import UnjudgedError
from harness.graphs import Graph
from references.checkpoint import Checkpoint
from references.youtu_vl import image, llm, vision
from references.youtu_vl.config import Sizes, sizes
from references.youtu_vl.graphs import graphs
from references.youtu_vl.weights import TEXT_LAYER, VISION, VISION_LAYER

LAYER_CACHE_BYTES = 2 << 30

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Prompt:
    """One rendered and encoded prompt."""

    text: str  # the template's output, one placeholder per image
    ids: list[int]  # placeholders expanded


class Tail(nn.Module):
    """The graph `vision.tail`: the tower's last norm and the merger."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.post_layernorm = nn.LayerNorm(sizes.vision.hidden_size, eps=sizes.vision.layer_norm_eps)
        self.merger = vision.Merger(sizes.vision)

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, N, C) in merge-block order -> (1, cells, out)."""
        return self.merger(self.post_layernorm(hidden))


@dataclass(frozen=True)
class Kind:
    """How one kind of module is made, and where its weights stand: own prefix -> checkpoint prefix."""

    make: Callable[[Sizes, int], nn.Module]
    prefixes: Mapping[str, str]
    to_double: Callable[[Any], nn.Module] = lambda module: copy.deepcopy(module).double()


KINDS: dict[str, Kind] = {
    "vision.embed": Kind(lambda s, _: vision.Embeddings(s.vision), {"": VISION + "embeddings."}),
    "vision.layer": Kind(lambda s, _: vision.EncoderLayer(s.vision), {"": VISION_LAYER}),
    "vision.tail": Kind(
        lambda s, _: Tail(s), {"post_layernorm.": VISION + "post_layernorm.", "merger.": "merger."}
    ),
    "llm.layer": Kind(
        lambda s, index: YoutuDecoderLayer(llm.configuration(s.text), index), {"": TEXT_LAYER}, llm.to_double
    ),
}


def _vision_embed(module: nn.Module, pixel_values: Tensor) -> Tensors:
    return {"hidden": module(pixel_values)[0]}


def _vision_layer(module: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensors:
    return {"hidden": module(hidden[None], cos[0], sin[0], mask[0])[0]}


def _vision_tail(module: nn.Module, hidden: Tensor) -> Tensors:
    return {"rows": module(hidden[None])[0]}


# structure -> (kind of module behind it, its function of the structure's inputs)
FUNCTIONS: dict[str, tuple[str, Callable[..., Tensors]]] = {
    "vision.embed": ("vision.embed", _vision_embed),
    "vision.layer": ("vision.layer", _vision_layer),
    "vision.tail": ("vision.tail", _vision_tail),
    "llm.layer.prefill": ("llm.layer", llm.prefill),
    "llm.layer.dqkv": ("llm.layer", llm.dqkv),
    "llm.layer.dattn": ("llm.layer", llm.dattn),
}


class Reference:
    """Youtu-VL in fp32 over a checkpoint folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.sizes = sizes(checkpoint.config)
        self.graphs = {graph.id: graph for graph in graphs(self.sizes)}
        self.config = llm.configuration(self.sizes.text)
        self._modules: dict[tuple[str, int], nn.Module] = {}

    def run(self, graph: Graph, inputs: Mapping[str, Tensor], *, double: bool = False) -> Tensors:
        """Outputs of one graph from inputs shaped as its ports; in float64 to measure the noise floor."""
        kind, function = FUNCTIONS[graph.structure.name]
        module = self.module(kind, graph.index or 0)
        if double:
            module = KINDS[kind].to_double(module)
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
        expanded = head + "".join(
            placeholder * self.cells(grid) + part for grid, part in zip(grids, rest, strict=True)
        )
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
        named = [
            self.checkpoint.json(name).get("eos_token_id")
            for name in ("generation_config.json", "config.json")
        ]
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
        cache = DynamicCache()
        hidden = self._layers(embeds, llm.causal_mask(len(embeds)), cache)
        for _ in range(count):
            logits = self.logits(hidden[-1:])[0]
            token = int(logits.argmax())
            yield token, logits
            if token in self.stop_ids:
                return
            mask = torch.zeros(1, 1, cache.get_seq_length() + 1)
            hidden = self._layers(self.embed([token]), mask, cache)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _layers(self, rows: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        tables = llm.rotary_tables(self.config, cache.get_seq_length(), len(rows))
        hidden = rows[None]
        with torch.no_grad():
            for index in range(self.sizes.text.num_hidden_layers):
                layer = self.module("llm.layer", index)
                hidden = layer(hidden, attention_mask=mask[None], cache=cache, position_embeddings=tables)
        return hidden[0]

    def _render(self, text: str, images: int) -> str:
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        conversation: Any = [{"role": "user", "content": content}]
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
        raise UnjudgedError(
            f"checkpoint {self.checkpoint.folder} has no chat template; add chat_template.json"
        )

    def _load(self, kind: str, index: int) -> nn.Module:
        with torch.device("meta"):
            module = KINDS[kind].make(self.sizes, index).eval()
        tensors = {}
        for name in module.state_dict():
            own, prefix = next((o, p) for o, p in KINDS[kind].prefixes.items() if name.startswith(o))
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
        norm = YoutuRMSNorm(self.sizes.text.hidden_size, eps=self.sizes.text.rms_norm_eps)
        return _assign(norm, {"weight": self.checkpoint.tensor("model.norm.weight")})


def _assign(module: nn.Module, tensors: Tensors) -> nn.Module:
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.requires_grad_(False)


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
