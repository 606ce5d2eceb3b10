"""Tensor names and shapes of a SmolLM2 checkpoint. Needs no torch."""

from references.smollm2.config import Sizes

Shapes = dict[str, tuple[int, ...]]

LAYER = "model.layers.{index}."


def tensors(sizes: Sizes) -> Shapes:
    """Every tensor that the model needs: name -> shape [out, in]."""
    shapes: Shapes = {"model.embed_tokens.weight": (sizes.vocab_size, sizes.hidden_size)}
    for index in range(sizes.num_hidden_layers):
        shapes |= {LAYER.format(index=index) + name: shape for name, shape in _layer(sizes).items()}
    return shapes | {"model.norm.weight": (sizes.hidden_size,)}


def _layer(sizes: Sizes) -> Shapes:
    width, inner = sizes.hidden_size, sizes.intermediate_size
    shared = sizes.num_key_value_heads * sizes.head_dim
    return {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (shared, width),
        "self_attn.v_proj.weight": (shared, width),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
