"""transformers' functions that the vision reference is held against.

A module of its own, imported by the tests that use it: its seconds are not for every `pytest -k`.
"""

from transformers import Siglip2VisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    Qwen2_5_VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)
from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

__all__ = [
    "Qwen2_5_VLVisionAttention",
    "Qwen2_5_VLVisionConfig",
    "Qwen2_5_VLVisionRotaryEmbedding",
    "Siglip2EncoderLayer",
    "Siglip2VisionConfig",
    "apply_rotary_pos_emb_vision",
    "get_vision_position_ids",
    "get_vision_window_index",
]
