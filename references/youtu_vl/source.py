"""Synthetic Youtu-VL checkpoints: the real folder layout, tensor names and token structure, seeded weights.

The scales make the network behave like one that can be judged: next-token margins are small, every layer and the
image matter, and greedy decoding does not collapse to one token. Random weights of std 0.02 would do neither.
"""

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from references import generator
from references.shards import EVERYTHING, PARTIAL, write_json, write_shards
from references.youtu_vl import config, weights

SEED = 2  # of four tried, the one whose smallest next-token margin over all cases is largest: 0.0026
HERE = Path(__file__).parent
TOKENIZER = (HERE / "tokenizer.json").read_text(encoding="utf-8")
CHAT_TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
SHARD_BYTES = {"tiny": 2_000_000, "full": 1_000_000_000}

# glob on the tensor name -> (mean, standard deviation; "fan_in" scales it by fan_in ** -0.5). First match holds.
SCALES: tuple[tuple[str, float, float, str], ...] = (
    ("*norm*.weight", 1.0, 0.1, ""),
    ("*ln_q.weight", 1.0, 0.1, ""),
    ("*.bias", 0.0, 0.1, ""),
    ("model.embed_tokens.weight", 0.0, 0.2, ""),
    ("*patch_embedding.weight", 0.0, 1.0, "fan_in"),
    ("merger.mlp.2.weight", 0.0, 0.5, "fan_in"),
    ("*.out_proj.weight", 0.0, 1.0, "fan_in"),
    ("*.fc2.weight", 0.0, 1.0, "fan_in"),
    ("*.o_proj.weight", 0.0, 1.0, "fan_in"),
    ("*.down_proj.weight", 0.0, 1.0, "fan_in"),
    # 2.0 would amplify fp32 noise tenfold over 40 layers, 1.3 lets the ids collapse
    ("*", 0.0, 1.5, "fan_in"),
)

PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Siglip2ImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "max_num_patches": 256,
    "patch_size": 16,
    "resample": 2,
    "rescale_factor": 1 / 255,
}


def write(folder: Path, profile: str, *, only: tuple[str, ...] = EVERYTHING) -> None:
    """Write the checkpoint of a profile; `only` holds globs on tensor names, for a part of the true widths."""
    values = config.PROFILES[profile]
    write_json(folder / "config.json", values)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_json(folder / "generation_config.json", _generation(values))
    write_json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8", newline="\n")
    if only != EVERYTHING:
        write_json(folder / PARTIAL, {"only": list(only)})
    write_shards(folder, _tensors(values, only), shard_bytes=SHARD_BYTES[profile])


def _generation(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": values["bos_token_id"],
        "do_sample": False,
        "eos_token_id": [values["eos_token_id"]],
        "pad_token_id": values["pad_token_id"],
    }


def _tensors(values: dict[str, Any], only: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in weights.tensors(config.sizes(values)).items():
        if any(fnmatch(name, pattern) for pattern in only):
            yield name, torch.from_numpy(_weight(name, shape).view("int16")).view(torch.bfloat16)


def _weight(name: str, shape: tuple[int, ...]) -> Any:
    _, mean, std, scaling = next(row for row in SCALES if fnmatch(name, row[0]))
    return generator.bfloat16_tensor(SEED, name, shape, mean=mean, std=std / math.sqrt(shape[-1]) if scaling else std)
