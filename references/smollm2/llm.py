"""SmolLM2's decoder: transformers' own Llama classes, every configuration value set, run part by part.

`prefill` is the whole layer of transformers; `dqkv` and `dattn` call its modules in the order of its forward pass,
cut where the port keeps its cache.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from references.cache import Step, make, through
from references.kinds import Function, Kind, Tensors, doubled
from references.smollm2.config import Sizes
from references.smollm2.weights import LAYER

MASKED = -1e9  # finite, and exp() of it is exactly 0


def configuration(sizes: Sizes) -> LlamaConfig:
    """transformers' configuration, every value set."""
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        hidden_act="silu",
        max_position_embeddings=sizes.max_position_embeddings,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    return config


def rotary_tables(sizes: Sizes, start: int, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions start..start+count-1: (1, count, head_dim) each."""
    positions = torch.arange(start, start + count)[None]
    return LlamaRotaryEmbedding(configuration(sizes))(torch.empty(0), positions)


def causal_mask(count: int) -> Tensor:
    """Additive mask, a row sees itself and the rows before it: (1, count, count)."""
    return torch.full((count, count), MASKED).triu(1)[None]


def prefill(layer: LlamaDecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensors:
    """(T, C), (1, T, d) twice, (1, T, T) -> hidden (T, C), key and value (kv heads, T, d)."""
    cache = DynamicCache()
    layer.self_attn.layer_idx = 0  # a cache of this layer alone
    out = layer(hidden[None], attention_mask=mask[None], cache=cache, position_embeddings=(cos, sin))
    kept: Any = cache.layers[0]
    return {"hidden": out[0], "key": kept.keys[0], "value": kept.values[0]}


def dqkv(layer: LlamaDecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    """(T, C), (1, T, d) twice -> query (heads, T, d), key and value (kv heads, T, d)."""
    attention = layer.self_attn
    x = layer.input_layernorm(hidden[None])
    query, key, value = (
        projection(x).view(1, len(hidden), -1, attention.head_dim).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return {"query": query[0], "key": key[0], "value": value[0]}


def dattn(layer: LlamaDecoderLayer, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensors:
    """(T, C), (heads, T, d), (kv heads, L, d) twice, (1, T, L) -> hidden (T, C)."""
    attention = layer.self_attn
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
    mixed, _ = attend(attention, query[None], key[None], value[None], mask[None], scaling=attention.scaling)
    out = hidden[None] + attention.o_proj(mixed.flatten(2))
    return {"hidden": (out + layer.mlp(layer.post_attention_layernorm(out)))[0]}


def to_double(layer: LlamaDecoderLayer) -> LlamaDecoderLayer:
    """A float64 copy; transformers' norms and eager softmax, which round to float32 inside, are replaced."""
    double: LlamaDecoderLayer = doubled(layer)
    double.self_attn.config = copy.deepcopy(layer.self_attn.config)
    double.self_attn.config._attn_implementation = "sdpa"
    for name, norm in list(double.named_modules()):
        if isinstance(norm, LlamaRMSNorm):
            parent, _, child = name.rpartition(".")
            setattr(double.get_submodule(parent), child, _RMSNorm(norm.weight, norm.variance_epsilon))
    return double


class Decoder:
    """The whole decoder, layer by layer over one cache of transformers."""

    def __init__(self, sizes: Sizes, layer: Callable[[int], LlamaDecoderLayer], step: Step = make) -> None:
        self.sizes, self.layer, self.step = sizes, layer, step
        self.cache = DynamicCache()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (T, C) that follow what was given before -> hidden rows (T, C)."""
        past = self.cache.get_seq_length()
        mask = torch.cat([torch.zeros(1, len(rows), past), causal_mask(len(rows))], dim=-1)  # (1, T, past + T)
        tables = rotary_tables(self.sizes, past, len(rows))
        hidden = rows[None]
        with torch.no_grad():
            for index in range(self.sizes.num_hidden_layers):
                compute = partial(self._layer, index, hidden, mask, tables)
                hidden = through(self.cache, index, past, self.step, compute)
        return hidden[0]

    def _layer(self, index: int, hidden: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        layer = self.layer(index)
        layer.self_attn.layer_idx = index
        out: Tensor = layer(hidden, attention_mask=mask[None], cache=self.cache, position_embeddings=tables)
        return out


def new_norm(sizes: Sizes) -> LlamaRMSNorm:
    """The final norm, its weight still to be given."""
    return LlamaRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)


class _RMSNorm(nn.Module):
    """RMSNorm that keeps the dtype of its input."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


KINDS = {"llm.layer": Kind(lambda s, index: LlamaDecoderLayer(configuration(s), index), {"": LAYER}, to_double)}
FUNCTIONS: dict[str, tuple[str, Function]] = {
    "llm.layer.prefill": ("llm.layer", prefill),
    "llm.layer.dqkv": ("llm.layer", dqkv),
    "llm.layer.dattn": ("llm.layer", dattn),
}
