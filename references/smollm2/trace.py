"""One case through SmolLM2's reference: every graph's inputs and outputs, glue included, and the greedy ids."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from harness.graphs import Graph
from references.cases import Case
from references.kinds import Tensors
from references.lines import LINES
from references.run import Run
from references.smollm2 import llm
from references.smollm2.model import Reference

LOGIT_ROWS = 16  # rows of the vocabulary's width that a dump keeps; margins tell the rest


def lengths(reference: Reference, case: Case) -> dict[str, int]:
    """The dynamic sizes of a case's graphs by their names: T and L."""
    prompt = len(reference.prompt(case.prompt, case.history).ids)
    return {"T": prompt, "L": prompt + 1}


def trace(reference: Reference, case: Case, run: Run | None = None) -> tuple[Run, dict[str, Any]]:
    """Tensors by the names in graphs.py, and the values (ids, text, margins, floors) of one case."""
    run = run or Run(reference)
    prompt = reference.prompt(case.prompt, case.history)
    _prefill(run, prompt.ids)
    _decode_step(run, len(prompt.ids))
    ids: list[int] = []
    margins: list[float] = []
    rows: list[Tensor] = []
    for token, logits in run.greedy(run["prefill.embeds"], case.new_tokens):
        top = logits.topk(2).values
        ids.append(token)
        margins.append(float(top[0] - top[1]))
        rows += [logits] if len(rows) < LOGIT_ROWS else []
    run.keep("logits", lambda: {"logits": torch.stack(rows)})  # (rows, vocab)
    values = {
        "prompt": prompt.text,
        "prompt_ids": prompt.ids,
        "grids": [],
        "ids": ids,
        "text": reference.decode(ids),
        "margins": margins,
        "floors": run.floors(),
        "line_ids": [reference.encode(line) for line in LINES],
    }
    return run, values


def _prefill(run: Run, ids: list[int]) -> None:
    def glue() -> Tensors:
        cos, sin = llm.rotary_tables(run.reference.sizes, 0, len(ids))
        tables = {"prefill.cos": cos, "prefill.sin": sin, "prefill.mask": llm.causal_mask(len(ids))}
        return {"prefill.embeds": run.reference.embed(ids)} | tables

    run.keep("prefill", glue)
    run.graphs(_of(run, "llm.layer.prefill"))


def _decode_step(run: Run, length: int) -> None:
    """The first step after the prompt, graph by graph."""
    reference: Reference = run.reference

    def glue() -> Tensors:
        last = reference.sizes.num_hidden_layers - 1
        token = int(reference.logits(run[f"llm.layer.{last:02d}.prefill.hidden"][-1:]).argmax())
        cos, sin = llm.rotary_tables(reference.sizes, length, 1)
        tables = {"decode.cos": cos, "decode.sin": sin, "decode.mask": torch.zeros(1, 1, length + 1)}
        return {"decode.embeds": reference.embed([token])} | tables

    run.keep("decode", glue)
    run.graphs(_of(run, "llm.layer.dqkv", "llm.layer.dattn"))


def _of(run: Run, *structures: str) -> Iterator[Graph]:
    return (graph for graph in run.reference.graphs.values() if graph.structure.name in structures)
