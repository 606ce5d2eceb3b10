"""Tensor names and shapes of a Youtu-VL checkpoint. Needs no torch."""

from references.youtu_vl.config import Sizes, TextSizes, VisionSizes

Shapes = dict[str, tuple[int, ...]]

VISION = "siglip2.vision_model."
VISION_LAYER = VISION + "encoder.layers.{index}."
TEXT_LAYER = "model.layers.{index}."


def tensors(sizes: Sizes) -> Shapes:
    """Every tensor that the model needs: name -> shape [out, in]. A stored lm_head.weight is not needed: tied."""
    text, vision = sizes.text, sizes.vision
    shapes: Shapes = {
        VISION + "embeddings.patch_embedding.weight": (vision.hidden_size, vision.patch_dim),
        VISION + "embeddings.patch_embedding.bias": (vision.hidden_size,),
    }
    for index in range(vision.num_hidden_layers):
        prefix = VISION_LAYER.format(index=index)
        shapes |= {prefix + name: shape for name, shape in _vision_layer(vision).items()}
    shapes |= _tail(vision)
    shapes["model.embed_tokens.weight"] = (text.vocab_size, text.hidden_size)
    for index in range(text.num_hidden_layers):
        prefix = TEXT_LAYER.format(index=index)
        shapes |= {prefix + name: shape for name, shape in _text_layer(text).items()}
    shapes["model.norm.weight"] = (text.hidden_size,)
    return shapes


def _vision_layer(vision: VisionSizes) -> Shapes:
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes: Shapes = {}
    for norm in ("layer_norm1", "layer_norm2"):
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= {f"self_attn.{projection}.weight": (width, width), f"self_attn.{projection}.bias": (width,)}
    return shapes | {
        "mlp.fc1.weight": (inner, width),
        "mlp.fc1.bias": (inner,),
        "mlp.fc2.weight": (width, inner),
        "mlp.fc2.bias": (width,),
    }


def _tail(vision: VisionSizes) -> Shapes:
    merged = vision.hidden_size * vision.spatial_merge_size**2
    return {
        VISION + "post_layernorm.weight": (vision.hidden_size,),
        VISION + "post_layernorm.bias": (vision.hidden_size,),
        "merger.ln_q.weight": (vision.hidden_size,),
        "merger.mlp.0.weight": (merged, merged),
        "merger.mlp.0.bias": (merged,),
        "merger.mlp.2.weight": (vision.out_hidden_size, merged),
        "merger.mlp.2.bias": (vision.out_hidden_size,),
    }


def _text_layer(text: TextSizes) -> Shapes:
    heads = text.num_attention_heads
    return {
        "input_layernorm.weight": (text.hidden_size,),
        "self_attn.q_a_proj.weight": (text.q_lora_rank, text.hidden_size),
        "self_attn.q_a_layernorm.weight": (text.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * text.qk_head_dim, text.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (text.kv_lora_rank + text.qk_rope_head_dim, text.hidden_size),
        "self_attn.kv_a_layernorm.weight": (text.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank),
        "self_attn.o_proj.weight": (text.hidden_size, heads * text.v_head_dim),
        "post_attention_layernorm.weight": (text.hidden_size,),
        "mlp.gate_proj.weight": (text.intermediate_size, text.hidden_size),
        "mlp.up_proj.weight": (text.intermediate_size, text.hidden_size),
        "mlp.down_proj.weight": (text.hidden_size, text.intermediate_size),
    }
