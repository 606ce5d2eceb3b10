"""Faults of text: template, tokenizer, the choice of ids, and their way back to text."""

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from parity.faults.port import Fault, Floats, Port, after


def _added_token_unknown(port: Port) -> None:
    """The token that begins a turn is not known as one piece."""
    matcher = port.pipeline.tokenizer._in_raw_text
    matcher.tokens.pop(max(matcher.tokens, key=lambda text: text == "<|begin_of_text|>"))


def _default_system_prompt_missing(prompt: Any, *args: Any) -> Any:
    text = prompt.text
    start = text.index("\n", text.index("system")) + 1
    return type(prompt)(text[:start] + text[text.index(".", start) + 1 :], prompt.ids[:3] + prompt.ids[9:])


def _splitting_step_lost(port: Port) -> None:
    del port.pipeline.tokenizer._steps[-1]


def _composed(port: Port) -> None:
    """Text is composed (NFC) though the tokenizer does not ask for it."""
    encode = port.pipeline.tokenizer.encode
    port.pipeline.tokenizer.encode = lambda text: encode(unicodedata.normalize("NFC", text))


def _merges_lost(port: Port) -> None:
    """Only every tenth merge is left."""
    bpe = port.pipeline.tokenizer._bpe
    bpe.merges = dict(list(bpe.merges.items())[::10])
    bpe.ignore_merges = False


def _first_id_twice(prompt: Any, *_: Any) -> Any:
    return type(prompt)(prompt.text, [prompt.ids[0], *prompt.ids])


def _placeholder_lost(prompt: Any, *_: Any) -> Any:
    ids = list(prompt.ids)
    repeated = next(place for place, (one, two) in enumerate(itertools.pairwise(ids)) if one == two)
    return type(prompt)(prompt.text, ids[:repeated] + ids[repeated + 1 :])


def _space_behind(prompt: Any, *_: Any) -> Any:
    return type(prompt)(prompt.text + " ", prompt.ids)


def _always_id_0(port: Port) -> None:
    port.pipeline.choose = lambda logits: 0


def _ids_decoded_alone(port: Port) -> None:
    """Characters of several ids are lost."""
    tokenizer = port.pipeline.tokenizer
    port.pipeline.tokenizer.stream = lambda: SimpleNamespace(
        push=lambda token: tokenizer.decode([token]), finish=lambda: ""
    )


def _second_best(port: Port) -> None:
    port.pipeline.choose = lambda logits: int(np.argsort(logits)[-2])


def _stop_ids_unknown(port: Port) -> None:
    """The answer goes on behind its end; for 16 tokens here, which is enough to see it."""
    answer = port.pipeline.answer
    port.pipeline.stop_ids = set()
    port.pipeline.answer = lambda hidden, ids, count, choose=None: answer(hidden, ids, min(count, 16), choose)


def _token_past_the_table(port: Port) -> None:
    """A token that is missing in the vocabulary was appended to it and got the next id."""
    matcher = port.pipeline.tokenizer._in_raw_text
    token = matcher.tokens["<|begin_of_text|>"]
    matcher.tokens["<|begin_of_text|>"] = replace(token, id=port.pipeline.config["vocab_size"])


def _repetition_penalty(port: Port) -> None:
    """A generation setting that the reference does not have."""
    answer = port.pipeline.answer

    def penalised(logits: Floats, before: Sequence[int]) -> int:
        logits = logits.copy()
        seen = list(set(before))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.05, logits[seen] * 1.05)
        return int(logits.argmax())

    port.pipeline.answer = lambda hidden, ids, count, choose=None: answer(hidden, ids, count, choose or penalised)


def _windows_line_ends(prompt: Any, *_: Any) -> Any:
    return type(prompt)(prompt.text.replace("\n", "\r\n"), prompt.ids)


def _in_a_code_page(port: Port) -> None:
    """Text reaches the tokenizer in the code page of a Chinese Windows."""
    encode = port.pipeline.tokenizer.encode
    port.pipeline.tokenizer.encode = lambda text: encode(text.encode("gbk", "replace").decode("latin-1"))


def _characters_beyond_16_bits(port: Port) -> None:
    """Text is walked in units of 16 bits: whatever needs two of them is lost."""
    encode = port.pipeline.tokenizer.encode
    port.pipeline.tokenizer.encode = lambda text: encode("".join(c if ord(c) < 0x10000 else "\ufffd" for c in text))


FAULTS = (
    Fault("space behind the prompt", "template.text", after("prompt", _space_behind), changes_ids=False),
    Fault("first id twice", "tokenizer.ids", after("prompt", _first_id_twice)),
    Fault("one image placeholder lost", "tokenizer.ids", after("prompt", _placeholder_lost)),
    Fault("merges lost", "tokenizer.ids", _merges_lost),
    Fault("splitting step lost", "tokenizer.lines", _splitting_step_lost, changes_ids=False),
    Fault("text composed", "tokenizer.lines", _composed, changes_ids=False),
    Fault("added token unknown", "tokenizer.ids", _added_token_unknown),
    Fault("default system prompt missing", "template.text", after("prompt", _default_system_prompt_missing)),
    Fault("always id 0", "sampling.ids", _always_id_0),
    Fault("second best id chosen", "sampling.ids", _second_best),
    Fault("ids decoded alone", "decode.text", _ids_decoded_alone, changes_ids=False),
    Fault("stop ids unknown", "decode.ids", _stop_ids_unknown, model="smollm2", case="multi_turn"),
    Fault("token appended past the table", "tokenizer.ids", _token_past_the_table),
    Fault("repetition penalty", "decode.ids", _repetition_penalty),
    Fault("line ends of Windows", "template.text", after("prompt", _windows_line_ends), changes_ids=False),
    Fault("text in another code page", "tokenizer.lines", _in_a_code_page, changes_ids=False),
    Fault("characters beyond 16 bits lost", "tokenizer.lines", _characters_beyond_16_bits, changes_ids=False),
)
