"""The tiny tokenizer.json: `python -m references.youtu_vl.tokenizer` trains it and writes it here.

It has the true one's structure (three-stage splitting, ignore_merges, special and plain added tokens,
interleaved coordinates) at 2048 entries. What is known of the true one leaves two readings of its splitting.
A: runs of CJK characters, then GPT-4o's words with single digits. B: single CJK characters, then Llama 3's.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.txt"
TOKENIZER = HERE / "tokenizer.json"

BASE_TOKENS = 1536
RESERVED_TOKENS = 35
VISUAL_TOKENS = 256
COORDINATES = 64
CUSTOM_TOKENS = 64
TASK_TOKENS = (
    *("<mask>", "</mask>", "<ins>", "</ins>", "<box>", "</box>", "<poly>", "</poly>", "<ref>", "</ref>"),
    *("<kpt>", "</kpt>", "<OTHERS>", "<depth>", "</depth>", "<person>", "</person>", "<label>", "</label>"),
    *("<seg>", "</seg>", "<line>", "</line>"),
)

# The words of the chat template are single tokens, as in the true vocabulary: its frame counts 21 tokens.
FRAME = ["system\n", "You are a helpful assistant.", "user\n", "assistant\n"]
FRAME_WEIGHT = 100

# Hangul; CJK punctuation; Bopomofo; Han and kana.
CJK_SETS = (
    "[\uac00-\ud7a3\u3131-\u318e]",
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]",
    "[\u3105-\u312f]",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]",
)
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LEAD = r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# Reading -> (first stage, second stage).
PATTERNS = {
    "A": (
        "|".join(f"{members}+" for members in CJK_SETS),
        rf"{LEAD}{UPPER}*{LOWER}+{SUFFIX}?|{LEAD}{UPPER}+{LOWER}*{SUFFIX}?"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    ),
    "B": (
        "|".join(CJK_SETS),
        rf"{SUFFIX}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    ),
}


def pre_tokenizer(reading: str) -> dict[str, Any]:
    """The `pre_tokenizer` of a reading, "A" or "B"."""
    stages = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[reading]
    ]
    return {"type": "Sequence", "pretokenizers": [*stages, byte_level()]}


def byte_level() -> dict[str, Any]:
    """The ByteLevel component: bytes to symbols and back, no splitting."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def added_contents() -> list[str]:
    """Texts of the added tokens in id order, from id 1536."""
    return [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|vision_start|>"),
        *("<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        *(f"<|reserved_special_token_{n}|>" for n in range(RESERVED_TOKENS)),
        *(f"<|visual_token_{n}|>" for n in range(VISUAL_TOKENS)),
        *(f"<{axis}_{n}>" for n in range(COORDINATES) for axis in "xy"),
        *(f"<custom_{n}>" for n in range(1, CUSTOM_TOKENS + 1)),
        *TASK_TOKENS,
    ]


def _added_token(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": content.startswith("<|")}


def train() -> dict[str, Any]:
    """The content of the tiny tokenizer.json in reading A, trained on corpus.txt."""
    untrained = {"pre_tokenizer": pre_tokenizer("A"), "model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(untrained))
    trainer = BpeTrainer(vocab_size=BASE_TOKENS, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer.train_from_iterator(lines + FRAME * FRAME_WEIGHT, trainer)
    config: dict[str, Any] = json.loads(tokenizer.to_str())
    config["model"]["ignore_merges"] = True
    config["decoder"] = config["post_processor"] = byte_level()
    config["added_tokens"] = [
        _added_token(number, content) for number, content in enumerate(added_contents(), start=BASE_TOKENS)
    ]
    return config


def committed(reading: str = "A") -> dict[str, Any]:
    """The content of the committed tokenizer.json, with the splitting of a reading."""
    config: dict[str, Any] = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    return config | {"pre_tokenizer": pre_tokenizer(reading)}


def text_of(config: dict[str, Any]) -> str:
    """How a tokenizer.json is written: one added token per line, the rest dense."""
    return json.dumps(config, ensure_ascii=False).replace('}, {"id": ', '},\n{"id": ') + "\n"


if __name__ == "__main__":
    TOKENIZER.write_text(text_of(train()), encoding="utf-8")
