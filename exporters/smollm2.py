"""SmolLM2's three structures, rewritten for pnnx: grouped-query attention without copies of keys and values.

Attention is ncnn's fused SDPA layer, which reads each shared key head for all its query heads: per token it takes a
third of the time of the same arithmetic spelt out. Names are the checkpoint's below PREFIXES.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from exporters.layers import RMSNorm, heads, rotate_half
from references.smollm2.config import Sizes
from references.smollm2.weights import LAYER


class Projection(nn.Module):
    """The half of attention before the cache: query, key and value, rotary applied to the first two."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        shared = sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, shared, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C) -> query (1, heads, T, d), key and value (1, kv heads, T, d)."""
        width, shared = self.sizes.head_dim, self.sizes.num_key_value_heads
        query = rotate(heads(self.q_proj(x), self.sizes.num_attention_heads, width), cos, sin)
        key = rotate(heads(self.k_proj(x), shared, width), cos, sin)
        return query, key, heads(self.v_proj(x), shared, width)


class Attention(Projection):
    """Attention of a whole layer: the projections and the one behind."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.o_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)


class OutputProjection(nn.Module):
    """The half of attention behind the cache."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.o_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(1, T, C) -> same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(1, heads, T, d), (1, 1, T, d) twice -> (1, heads, T, d)."""
    return x * cos + rotate_half(x) * sin


def attend(sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """(1, heads, T, d), (1, kv heads, L, d) twice, (1, 1, T, L) -> (1, T, heads * d)."""
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=sizes.head_dim**-0.5, enable_gqa=True
    )
    return mixed.transpose(1, 2).reshape(1, -1, sizes.num_attention_heads * sizes.head_dim)


class Prefill(nn.Module):
    """A whole decoder layer over T tokens; also gives the rows for the cache."""

    PREFIXES: ClassVar = {"": LAYER}
    CUTS: ClassVar = ("self_attn.o_proj.weight",)  # before it what dqkv holds, from it on what dattn holds

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C), (1, 1, T, d) twice, (1, 1, T, T) -> hidden, key, value."""
        query, key, value = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = hidden + self.self_attn.o_proj(attend(self.sizes, query, key, value, mask))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


class Dqkv(nn.Module):
    """A decoder layer up to the cache: newest tokens -> query, key, value."""

    PREFIXES: ClassVar = {"": LAYER}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Projection(sizes)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, T, C), (1, 1, T, d) twice -> query, key, value."""
        return self.self_attn(self.input_layernorm(hidden), cos, sin)


class Dattn(nn.Module):
    """A decoder layer from the cache on: query, whole cache and mask -> hidden."""

    PREFIXES: ClassVar = {"": LAYER}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.self_attn = OutputProjection(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """(1, T, C), (1, heads, T, d), (1, kv heads, L, d) twice, (1, 1, T, L) -> (1, T, C)."""
        hidden = hidden + self.self_attn.o_proj(attend(self.sizes, query, key, value, mask))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


REWRITES: dict[str, type[nn.Module]] = {
    "llm.layer.prefill": Prefill,
    "llm.layer.dqkv": Dqkv,
    "llm.layer.dattn": Dattn,
}
