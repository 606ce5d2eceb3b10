"""One case through Youtu-VL's reference: every graph's inputs and outputs, glue included, and the greedy ids."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from harness.graphs import Graph
from references.cases import Case
from references.kinds import Tensors
from references.lines import LINES
from references.run import Run
from references.youtu_vl import llm, vision
from references.youtu_vl.model import Reference

Grids = list[tuple[int, int]]


def lengths(reference: Reference, case: Case) -> dict[str, int]:
    """The dynamic sizes of a case's graphs by their names: patches, cells, T and L."""
    grids = [grid for _, grid in _preprocessed(reference, case)]
    prompt = len(reference.prompt(case.prompt, grids).ids)
    patches = sum(height * width for height, width in grids)
    return {"patches": patches, "cells": sum(map(reference.cells, grids)), "T": prompt, "L": prompt + 1}


def trace(reference: Reference, case: Case, run: Run | None = None) -> tuple[Run, dict[str, Any]]:
    """Tensors by the names in graphs.py, and the values (ids, grids, text, margins, floors) of one case."""
    run = run or Run(reference)
    pictures = _preprocessed(reference, case)
    grids = [grid for _, grid in pictures]
    if grids:
        run.keep("pictures", lambda: {"pixel_values": torch.cat([pixels for pixels, _ in pictures])})  # (N, 768)
        _vision(run, grids)
    prompt = reference.prompt(case.prompt, grids)
    _prefill(run, prompt.ids, with_pictures=bool(grids))
    _decode_step(run, len(prompt.ids))
    steps = list(run.greedy(run["prefill.embeds"], case.new_tokens))
    logits = torch.stack([logits for _, logits in steps])  # (steps, vocab)
    run.keep("logits", lambda: {"logits": logits})
    ids = [token for token, _ in steps]
    top = logits.topk(2, dim=-1).values
    values = {
        "prompt": prompt.text,
        "prompt_ids": prompt.ids,
        "grids": [list(grid) for grid in grids],
        "image_positions": [i for i, token in enumerate(prompt.ids) if token == reference.image_token_id],
        "ids": ids,
        "text": reference.decode(ids),
        "margins": (top[:, 0] - top[:, 1]).tolist(),
        "floors": run.floors(),
        "line_ids": [reference.encode(line) for line in LINES],
    }
    return run, values


def _preprocessed(reference: Reference, case: Case) -> list[tuple[Tensor, tuple[int, int]]]:
    return [reference.preprocess(picture) for picture in case.images()]


def _vision(run: Run, grids: Grids) -> None:
    tables = vision.tables(grids, run.reference.sizes.vision)
    run.keep("vision.tables", lambda: _named(tables))
    embed, *layers, tail = _of(run, "vision.embed", "vision.layer", "vision.tail")
    run.graphs([embed])
    run.keep("vision.permuted", lambda: {"vision.permuted": run["vision.embed.hidden"][tables.order]})
    run.graphs(layers)
    last = f"vision.layer.{len(layers) - 1:02d}.hidden"
    run.keep("vision.unpermuted", lambda: {"vision.unpermuted": run[last][tables.inverse]})
    run.graphs([tail])


def _named(tables: vision.Tables) -> Tensors:
    return {
        "vision.order": tables.order,
        "vision.cos": tables.cos[None],
        "vision.sin": tables.sin[None],
        "vision.window_mask": tables.window_mask[None],
        "vision.full_mask": tables.full_mask[None],
    }


def _prefill(run: Run, ids: list[int], *, with_pictures: bool) -> None:
    def glue() -> Tensors:
        cos, sin = llm.rotary_tables(llm.configuration(run.reference.sizes.text), 0, len(ids))
        embeds = fuse(run.reference, ids, run["vision.tail.rows"] if with_pictures else None)
        mask = llm.causal_mask(len(ids))
        return {"prefill.embeds": embeds, "prefill.cos": cos, "prefill.sin": sin, "prefill.mask": mask}

    run.keep("prefill", glue)
    run.graphs(_of(run, "llm.layer.prefill"))


def _decode_step(run: Run, length: int) -> None:
    """The first step after the prompt, graph by graph."""
    reference: Reference = run.reference

    def glue() -> Tensors:
        last = reference.sizes.text.num_hidden_layers - 1
        token = int(reference.logits(run[f"llm.layer.{last:02d}.prefill.hidden"][-1:]).argmax())
        cos, sin = llm.rotary_tables(llm.configuration(reference.sizes.text), length, 1)
        tables = {"decode.cos": cos, "decode.sin": sin, "decode.mask": torch.zeros(1, 1, length + 1)}
        return {"decode.embeds": reference.embed([token])} | tables

    run.keep("decode", glue)
    run.graphs(_of(run, "llm.layer.dqkv", "llm.layer.dattn"))


def fuse(reference: Reference, ids: list[int], rows: Tensor | None) -> Tensor:
    """Embedding rows, those of image placeholders overwritten by the merger's rows in order: (T, C)."""
    embeds = reference.embed(ids)
    if rows is not None:
        embeds[torch.tensor(ids) == reference.image_token_id] = rows
    return embeds


def _of(run: Run, *structures: str) -> Iterator[Graph]:
    return (graph for graph in run.reference.graphs.values() if graph.structure.name in structures)
