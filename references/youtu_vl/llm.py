"""Youtu-VL's decoder: transformers' own Youtu classes, every configuration value set, run part by part.

`prefill` is the whole layer of transformers; `dqkv` and `dattn` call its modules in the order of its forward pass,
cut where the port keeps its cache: at the expanded key and value.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.youtu.configuration_youtu import YoutuConfig
from transformers.models.youtu.modeling_youtu import (
    YoutuDecoderLayer,
    YoutuRMSNorm,
    YoutuRotaryEmbedding,
    apply_rotary_pos_emb_interleave,
    eager_attention_forward,
)

from references.cache import Step, make, through
from references.kinds import Function, Kind, doubled
from references.youtu_vl.config import TextSizes
from references.youtu_vl.weights import TEXT_LAYER

MASKED = -1e9  # finite, and exp() of it is exactly 0


def configuration(text: TextSizes) -> YoutuConfig:
    """transformers' configuration; its defaults are those of another model, so every value is set."""
    config = YoutuConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        kv_lora_rank=text.kv_lora_rank,
        q_lora_rank=text.q_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim,
        v_head_dim=text.v_head_dim,
        qk_nope_head_dim=text.qk_nope_head_dim,
        hidden_act="silu",
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=text.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": text.rope_theta},
        rope_interleave=text.rope_interleave,
        attention_bias=False,
        attention_dropout=0.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    return config


def rotary_tables(config: YoutuConfig, start: int, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions start..start+count-1: (1, count, rope) each."""
    positions = torch.arange(start, start + count)[None]
    return YoutuRotaryEmbedding(config)(torch.empty(0), positions)


def causal_mask(count: int) -> Tensor:
    """Additive mask, a row sees itself and the rows before it: (1, count, count)."""
    return torch.full((count, count), MASKED).triu(1)[None]


def prefill(layer: YoutuDecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """(T, C), (1, T, rope) twice, (1, T, T) -> hidden (T, C), key and value (heads, T, d)."""
    cache = _OneLayerCache()
    out = layer(hidden[None], attention_mask=mask[None], cache=cache, position_embeddings=(cos, sin))
    key, value = layer.self_attn.expand_kv(*cache.latents)
    return {"hidden": out[0], "key": key[0], "value": value[0].contiguous()}


def dqkv(layer: YoutuDecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
    """(T, C), (1, T, rope) twice -> query, key, value (heads, T, d)."""
    attention: Any = layer.self_attn
    x = layer.input_layernorm(hidden[None])
    query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    query = query.view(1, len(hidden), -1, attention.qk_head_dim).transpose(1, 2)  # (1, heads, T, qk)
    query_pass, query_rot = query.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    compressed = attention.kv_a_proj_with_mqa(x)
    latent, key_rot = compressed.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    latent = attention.kv_a_layernorm(latent)[:, None]  # (1, 1, T, kv_lora_rank)
    query_rot, key_rot = apply_rotary_pos_emb_interleave(query_rot, key_rot[:, None], cos, sin)
    key, value = attention.expand_kv(latent, key_rot)
    query = torch.cat((query_pass, query_rot), dim=-1)
    return {"query": query[0], "key": key[0], "value": value[0].contiguous()}


def dattn(
    layer: YoutuDecoderLayer, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """(T, C), (heads, T, qk), (heads, L, qk), (heads, L, v), (1, T, L) -> hidden (T, C)."""
    attention = layer.self_attn
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
    mixed, _ = attend(attention, query[None], key[None], value[None], mask[None], scaling=attention.scaling)
    out = hidden[None] + attention.o_proj(mixed.flatten(2))
    return {"hidden": (out + layer.mlp(layer.post_attention_layernorm(out)))[0]}


def to_double(layer: YoutuDecoderLayer) -> YoutuDecoderLayer:
    """A float64 copy. transformers' norms and its eager softmax would round to float32 inside: both are replaced."""
    double: YoutuDecoderLayer = doubled(layer)
    double.self_attn.config = copy.deepcopy(layer.self_attn.config)
    double.self_attn.config._attn_implementation = "sdpa"
    for name, norm in list(double.named_modules()):
        if isinstance(norm, YoutuRMSNorm):
            parent, _, child = name.rpartition(".")
            setattr(double.get_submodule(parent), child, _RMSNorm(norm.weight, norm.variance_epsilon))
    return double


class _RMSNorm(nn.Module):
    """RMSNorm that keeps the dtype of its input."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Decoder:
    """The whole decoder, layer by layer over one cache of transformers."""

    def __init__(self, text: TextSizes, layer: Callable[[int], YoutuDecoderLayer], step: Step = make) -> None:
        self.text, self.layer, self.step = text, layer, step
        self.config = configuration(text)
        self.cache = DynamicCache()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (T, C) that follow what was given before -> hidden rows (T, C)."""
        past = self.cache.get_seq_length()
        mask = torch.cat([torch.zeros(1, len(rows), past), causal_mask(len(rows))], dim=-1)  # (1, T, past + T)
        tables = rotary_tables(self.config, past, len(rows))
        hidden = rows[None]
        with torch.no_grad():
            for index in range(self.text.num_hidden_layers):
                compute = partial(self._layer, index, hidden, mask, tables)
                hidden = through(self.cache, index, past, self.step, compute)
        return hidden[0]

    def _layer(self, index: int, hidden: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        layer = self.layer(index)
        out: Tensor = layer(hidden, attention_mask=mask[None], cache=self.cache, position_embeddings=tables)
        return out


def new_norm(text: TextSizes) -> YoutuRMSNorm:
    """The final norm, its weight still to be given."""
    return YoutuRMSNorm(text.hidden_size, eps=text.rms_norm_eps)


class _OneLayerCache(DynamicCache):
    """Keeps what one layer writes to the cache: the latent and the rotated shared key."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: object) -> tuple[Tensor, Tensor]:
        self.latents = (key_states, value_states)
        return self.latents


KINDS = {
    "llm.layer": Kind(lambda s, index: YoutuDecoderLayer(configuration(s.text), index), {"": TEXT_LAYER}, to_double)
}
FUNCTIONS: dict[str, tuple[str, Function]] = {
    "llm.layer.prefill": ("llm.layer", prefill),
    "llm.layer.dqkv": ("llm.layer", dqkv),
    "llm.layer.dattn": ("llm.layer", dattn),
}
