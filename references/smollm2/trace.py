"""One case through SmolLM2's reference: every graph's inputs and outputs, glue included, and the greedy ids."""

from typing import Any

import torch
from torch import Tensor

from references.cases import Case
from references.dumping import run_graphs
from references.kinds import Tensors
from references.lines import LINES
from references.smollm2 import llm
from references.smollm2.model import Reference

LOGIT_ROWS = 16  # rows of the vocabulary's width that a dump keeps; margins tell the rest


def trace(reference: Reference, case: Case) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by the names in graphs.py, and the values (ids, text, margins, floors) of one case."""
    tensors: Tensors = {}
    floors: dict[str, float] = {}
    prompt = reference.prompt(case.prompt, case.history)
    _prefill(reference, prompt.ids, tensors, floors)
    _decode_step(reference, len(prompt.ids), tensors, floors)
    ids: list[int] = []
    margins: list[float] = []
    rows: list[Tensor] = []
    for token, logits in reference.greedy(tensors["prefill.embeds"], case.new_tokens):
        top = logits.topk(2).values
        ids.append(token)
        margins.append(float(top[0] - top[1]))
        rows += [logits] if len(rows) < LOGIT_ROWS else []
    tensors["logits"] = torch.stack(rows)  # (rows, vocab)
    values = {
        "prompt": prompt.text,
        "prompt_ids": prompt.ids,
        "grids": [],
        "ids": ids,
        "text": reference.decode(ids),
        "margins": margins,
        "floors": floors,
        "line_ids": [reference.encode(line) for line in LINES],
    }
    return tensors, values


def _prefill(reference: Reference, ids: list[int], tensors: Tensors, floors: dict[str, float]) -> None:
    tensors["prefill.embeds"] = reference.embed(ids)
    cos, sin = llm.rotary_tables(reference.sizes, 0, len(ids))
    tensors |= {"prefill.cos": cos, "prefill.sin": sin, "prefill.mask": llm.causal_mask(len(ids))}
    run_graphs(reference, _of(reference, "llm.layer.prefill"), tensors, floors)


def _decode_step(reference: Reference, length: int, tensors: Tensors, floors: dict[str, float]) -> None:
    """The first step after the prompt, graph by graph."""
    last = reference.sizes.num_hidden_layers - 1
    token = int(reference.logits(tensors[f"llm.layer.{last:02d}.prefill.hidden"][-1:]).argmax())
    cos, sin = llm.rotary_tables(reference.sizes, length, 1)
    tensors |= {"decode.embeds": reference.embed([token]), "decode.cos": cos, "decode.sin": sin}
    tensors["decode.mask"] = torch.zeros(1, 1, length + 1)
    run_graphs(reference, _of(reference, "llm.layer.dqkv", "llm.layer.dattn"), tensors, floors)


def _of(reference: Reference, *structures: str) -> list[Any]:
    return [graph for graph in reference.graphs.values() if graph.structure.name in structures]
