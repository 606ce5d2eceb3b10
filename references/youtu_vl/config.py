"""Youtu-VL-4B: sizes, read from a checkpoint's config.json. Needs no torch.

Key names follow the checkpoint: text keys at the root, the vision tower's under `vision_config`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the SigLIP-2 vision tower and of the patch merger behind it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    num_channels: int
    window_size: int  # pixels
    spatial_merge_size: int
    out_hidden_size: int
    layer_norm_eps: float
    fullatt_block_indexes: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: (dy, dx, channel)."""
        return self.patch_size * self.patch_size * self.num_channels

    @property
    def window_cells(self) -> int:
        """Side of an attention window, in merged cells."""
        return self.window_size // self.patch_size // self.spatial_merge_size


@dataclass(frozen=True)
class TextSizes:
    """Sizes of the multi-head latent attention decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without rotation, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Sizes:
    """All sizes of the model."""

    vision: VisionSizes
    text: TextSizes


def sizes(config: dict[str, Any]) -> Sizes:
    """Sizes stated by a config.json. Raises KeyError naming the key that is missing."""
    vision = dict(config["vision_config"] or {})
    vision["fullatt_block_indexes"] = tuple(vision["fullatt_block_indexes"])
    return Sizes(
        vision=VisionSizes(**{name: vision[name] for name in VisionSizes.__dataclass_fields__}),
        text=TextSizes(**{name: config[name] for name in TextSizes.__dataclass_fields__}),
    )


# What config.json says at the true widths (facts of the published checkpoint).
FULL: dict[str, Any] = {
    "architectures": ["YoutuVLForConditionalGeneration"],
    "model_type": "youtu_vl",
    "vocab_size": 283386,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_interleave": True,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128001,
    "vision_start_token_id": 128262,
    "vision_end_token_id": 128263,
    "image_token_id": 128264,
    "video_token_id": 128265,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 1152,
        "out_hidden_size": 2560,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_patches": 4096,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "spatial_merge_size": 2,
        "window_size": 256,
        "vision_use_head": False,
        "fullatt_block_indexes": [7, 15, 23, 26],
    },
}

# The synthetic `tiny` profile: the true topology, narrow widths. Widths differ from each other where the
# true ones do, so that a transposed or swapped tensor seldom fits by chance; o_proj is square on purpose.
TINY: dict[str, Any] = FULL | {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 152,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "bos_token_id": 1536,
    "eos_token_id": 1537,
    "pad_token_id": 1537,
    "vision_start_token_id": 1538,
    "vision_end_token_id": 1539,
    "image_token_id": 1540,
    "video_token_id": 1541,
    "vision_config": FULL["vision_config"]
    | {"hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 104, "num_attention_heads": 4},
}

# The synthetic checkpoints. The true widths keep the small tokenizer, and with it its ids: rows of the vocabulary
# table beyond them are never read.
PROFILES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "full": FULL | {name: value for name, value in TINY.items() if name.endswith("_token_id")},
}
