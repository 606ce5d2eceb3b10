"""Youtu-VL's six structures, rewritten for pnnx.

Attention is ncnn's fused SDPA layer, which holds the scores of a head per thread, where the same arithmetic spelt out
holds those of all heads: 1 GB each at the largest pictures.
Each class keeps the checkpoint's names below the prefixes in PREFIXES (own prefix -> checkpoint prefix). Its
inputs and outputs are those of the structure of that name in references/youtu_vl/graphs.py, with a batch axis
of 1 in front.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporters.layers import RMSNorm, deinterleave_matrix, heads, rotate_half_matrix
from references.youtu_vl.config import Sizes, TextSizes
from references.youtu_vl.weights import TEXT_LAYER, VISION, VISION_LAYER


class VisionEmbed(nn.Module):
    """Patch projection."""

    PREFIXES: ClassVar = {"": VISION + "embeddings."}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(sizes.vision.patch_dim, sizes.vision.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(1, N, patch_dim) -> (1, N, C)."""
        return self.patch_embedding(pixel_values)


class VisionAttention(nn.Module):
    """Multi-head attention with 2-D rotary positions; window or full is the mask's affair."""

    rotate_half: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.vision.hidden_size
        self.num_heads, self.head_dim = sizes.vision.num_attention_heads, sizes.vision.head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("rotate_half", rotate_half_matrix(self.head_dim), persistent=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(1, heads, N, head_dim) -> same shape."""
        return x * cos + torch.matmul(x, self.rotate_half) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """(1, N, C) -> same shape."""
        query = self.rotate(heads(self.q_proj(x), self.num_heads, self.head_dim), cos, sin)
        key = self.rotate(heads(self.k_proj(x), self.num_heads, self.head_dim), cos, sin)
        value = heads(self.v_proj(x), self.num_heads, self.head_dim)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.head_dim**-0.5)
        return self.out_proj(mixed.transpose(1, 2).reshape(1, -1, self.num_heads * self.head_dim))


class VisionMLP(nn.Module):
    """fc1, tanh GELU, fc2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.vision.hidden_size, sizes.vision.intermediate_size)
        self.fc2 = nn.Linear(sizes.vision.intermediate_size, sizes.vision.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(1, N, C) -> same shape."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """Pre-norm transformer block of the vision tower."""

    PREFIXES: ClassVar = {"": VISION_LAYER}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, eps = sizes.vision.hidden_size, sizes.vision.layer_norm_eps
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.self_attn = VisionAttention(sizes)
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = VisionMLP(sizes)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """(1, N, C), (1, 1, N, head_dim) twice, (1, 1, N, N) -> (1, N, C)."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), cos, sin, mask)
        return hidden + self.mlp(self.layer_norm2(hidden))


class Merger(nn.Module):
    """2x2 patch merger: norm, four rows side by side, two linear layers with erf GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        vision = sizes.vision
        self.merged = vision.hidden_size * vision.spatial_merge_size**2
        self.ln_q = RMSNorm(vision.hidden_size, vision.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.merged, self.merged), nn.GELU(), nn.Linear(self.merged, vision.out_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(1, 4 * cells, C) -> (1, cells, out_hidden_size)."""
        return self.mlp(self.ln_q(x).reshape(1, -1, self.merged))  # (1, cells, 4 * C) inside


class VisionTail(nn.Module):
    """The tower's last norm and the merger."""

    PREFIXES: ClassVar = {"post_layernorm.": VISION + "post_layernorm.", "merger.": "merger."}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.post_layernorm = nn.LayerNorm(sizes.vision.hidden_size, eps=sizes.vision.layer_norm_eps)
        self.merger = Merger(sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, 4 * cells, C) -> (1, cells, out_hidden_size)."""
        return self.merger(self.post_layernorm(hidden))


class LatentProjection(nn.Module):
    """The half of multi-head latent attention before the cache: query, key and value, rotary applied."""

    deinterleave: Tensor
    deinterleave_rotate_half: Tensor

    def __init__(self, text: TextSizes) -> None:
        super().__init__()
        self.text = text
        count, nope, rope = text.num_attention_heads, text.qk_nope_head_dim, text.qk_rope_head_dim
        self.q_a_proj = nn.Linear(text.hidden_size, text.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(text.q_lora_rank, text.rms_norm_eps)
        self.q_b_proj = nn.Linear(text.q_lora_rank, count * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(text.hidden_size, text.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(text.kv_lora_rank, text.rms_norm_eps)
        self.kv_b_proj = nn.Linear(text.kv_lora_rank, count * (nope + text.v_head_dim), bias=False)
        deinterleave = deinterleave_matrix(rope)
        self.register_buffer("deinterleave", deinterleave, persistent=False)
        self.register_buffer("deinterleave_rotate_half", deinterleave @ rotate_half_matrix(rope), persistent=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(1, heads, T, rope) in pairs -> same shape in halves."""
        return torch.matmul(x, self.deinterleave) * cos + torch.matmul(x, self.deinterleave_rotate_half) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C) -> query and key (1, heads, T, qk_head_dim), value (1, heads, T, v_head_dim)."""
        text = self.text
        count, nope, rope = text.num_attention_heads, text.qk_nope_head_dim, text.qk_rope_head_dim
        query = heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), count, nope + rope)
        compressed = self.kv_a_proj_with_mqa(x)
        latent, key_rope = compressed[..., : text.kv_lora_rank], compressed[..., text.kv_lora_rank :]
        key_value = heads(self.kv_b_proj(self.kv_a_layernorm(latent)), count, nope + text.v_head_dim)
        key_rope = self.rotate(key_rope.reshape(1, 1, -1, rope), cos, sin)  # (1, 1, T, rope)
        query_rope = self.rotate(query[..., nope:], cos, sin)
        query = torch.cat([query[..., :nope], query_rope], dim=-1)
        key = torch.cat([key_value[..., :nope], key_rope.repeat(1, count, 1, 1)], dim=-1)
        return query, key, key_value[..., nope:]


class TextMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, text: TextSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(text.hidden_size, text.intermediate_size, bias=False)
        self.up_proj = nn.Linear(text.hidden_size, text.intermediate_size, bias=False)
        self.down_proj = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(1, T, C) -> same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def attend(text: TextSizes, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """(1, heads, T, qk), (1, heads, L, qk), (1, heads, L, v), (1, 1, T, L) -> (1, T, heads * v)."""
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=text.qk_head_dim**-0.5)
    return mixed.transpose(1, 2).reshape(1, -1, text.num_attention_heads * text.v_head_dim)


def output_projection(text: TextSizes) -> nn.Linear:
    """The projection behind attention."""
    return nn.Linear(text.num_attention_heads * text.v_head_dim, text.hidden_size, bias=False)


class WholeAttention(LatentProjection):
    """Both halves of the attention; the caller attends in between."""

    def __init__(self, text: TextSizes) -> None:
        super().__init__(text)
        self.o_proj = output_projection(text)


class CachedAttention(nn.Module):
    """The half of the attention after the cache."""

    def __init__(self, text: TextSizes) -> None:
        super().__init__()
        self.o_proj = output_projection(text)


class Prefill(nn.Module):
    """A whole decoder layer over T tokens; also gives the rows for the cache."""

    PREFIXES: ClassVar = {"": TEXT_LAYER}
    CUTS: ClassVar = ("self_attn.o_proj.weight",)  # before it what dqkv holds, from it on what dattn holds

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.text = sizes.text
        self.input_layernorm = RMSNorm(sizes.text.hidden_size, sizes.text.rms_norm_eps)
        self.self_attn = WholeAttention(sizes.text)
        self.post_attention_layernorm = RMSNorm(sizes.text.hidden_size, sizes.text.rms_norm_eps)
        self.mlp = TextMLP(sizes.text)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C), (1, 1, T, rope) twice, (1, 1, T, T) -> hidden, key, value."""
        query, key, value = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = hidden + self.self_attn.o_proj(attend(self.text, query, key, value, mask))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


class Dqkv(nn.Module):
    """A decoder layer up to the cache: newest tokens -> query, key, value."""

    PREFIXES: ClassVar = {"": TEXT_LAYER}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.text.hidden_size, sizes.text.rms_norm_eps)
        self.self_attn = LatentProjection(sizes.text)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C), (1, 1, T, rope) twice -> query, key, value."""
        return self.self_attn(self.input_layernorm(hidden), cos, sin)


class Dattn(nn.Module):
    """A decoder layer from the cache on: query, whole cache and mask -> hidden."""

    PREFIXES: ClassVar = {"": TEXT_LAYER}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.text = sizes.text
        self.self_attn = CachedAttention(sizes.text)
        self.post_attention_layernorm = RMSNorm(sizes.text.hidden_size, sizes.text.rms_norm_eps)
        self.mlp = TextMLP(sizes.text)

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """(1, T, C), (1, heads, T, qk), (1, heads, L, qk), (1, heads, L, v), (1, 1, T, L) -> (1, T, C)."""
        hidden = hidden + self.self_attn.o_proj(attend(self.text, query, key, value, mask))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


REWRITES: dict[str, type[nn.Module]] = {
    "vision.embed": VisionEmbed,
    "vision.layer": VisionLayer,
    "vision.tail": VisionTail,
    "llm.layer.prefill": Prefill,
    "llm.layer.dqkv": Dqkv,
    "llm.layer.dattn": Dattn,
}
