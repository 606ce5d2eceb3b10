"""One case through Youtu-VL's reference: every graph's inputs and outputs, glue included, and the greedy ids."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from references.cases import Case
from references.dumping import run_graphs
from references.kinds import Tensors
from references.lines import LINES
from references.youtu_vl import llm, vision
from references.youtu_vl.model import Reference


def trace(reference: Reference, case: Case) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by the names in graphs.py, and the values (ids, grids, text, margins, floors) of one case."""
    tensors: Tensors = {}
    floors: dict[str, float] = {}
    grids = _pictures(reference, case, tensors)
    if grids:
        _vision(reference, grids, tensors, floors)
    prompt = reference.prompt(case.prompt, grids)
    _prefill(reference, prompt.ids, tensors, floors)
    _decode_step(reference, len(prompt.ids), tensors, floors)
    steps = list(reference.greedy(tensors["prefill.embeds"], case.new_tokens))
    tensors["logits"] = torch.stack([logits for _, logits in steps])  # (steps, vocab)
    ids = [token for token, _ in steps]
    top = tensors["logits"].topk(2, dim=-1).values
    values = {
        "prompt": prompt.text,
        "prompt_ids": prompt.ids,
        "grids": [list(grid) for grid in grids],
        "image_positions": [i for i, token in enumerate(prompt.ids) if token == reference.image_token_id],
        "ids": ids,
        "text": reference.decode(ids),
        "margins": (top[:, 0] - top[:, 1]).tolist(),
        "floors": floors,
        "line_ids": [reference.encode(line) for line in LINES],
    }
    return tensors, values


def _pictures(reference: Reference, case: Case, tensors: Tensors) -> list[tuple[int, int]]:
    done = [reference.preprocess(picture) for picture in case.images()]
    if done:
        tensors["pixel_values"] = torch.cat([pixel_values for pixel_values, _ in done])  # (N, 768)
    return [grid for _, grid in done]


def _vision(reference: Reference, grids: list[tuple[int, int]], tensors: Tensors, floors: dict[str, float]) -> None:
    tables = vision.tables(grids, reference.sizes.vision)
    tensors |= {
        "vision.order": tables.order,
        "vision.cos": tables.cos[None],
        "vision.sin": tables.sin[None],
        "vision.window_mask": tables.window_mask[None],
        "vision.full_mask": tables.full_mask[None],
    }
    embed, *layers, tail = (graph for graph in reference.graphs.values() if graph.structure.name.startswith("vision."))
    run_graphs(reference, [embed], tensors, floors)
    tensors["vision.permuted"] = tensors["vision.embed.hidden"][tables.order]
    run_graphs(reference, layers, tensors, floors)
    tensors["vision.unpermuted"] = tensors[f"vision.layer.{len(layers) - 1:02d}.hidden"][tables.inverse]
    run_graphs(reference, [tail], tensors, floors)


def _prefill(reference: Reference, ids: list[int], tensors: Tensors, floors: dict[str, float]) -> None:
    config = llm.configuration(reference.sizes.text)
    tensors["prefill.embeds"] = fuse(reference, ids, tensors)
    cos, sin = llm.rotary_tables(config, 0, len(ids))
    tensors |= {"prefill.cos": cos, "prefill.sin": sin, "prefill.mask": llm.causal_mask(len(ids))}
    run_graphs(reference, _of(reference, "llm.layer.prefill"), tensors, floors)


def _decode_step(reference: Reference, length: int, tensors: Tensors, floors: dict[str, float]) -> None:
    """The first step after the prompt, graph by graph."""
    last = reference.sizes.text.num_hidden_layers - 1
    token = int(reference.logits(tensors[f"llm.layer.{last:02d}.prefill.hidden"][-1:]).argmax())
    cos, sin = llm.rotary_tables(llm.configuration(reference.sizes.text), length, 1)
    tensors |= {"decode.embeds": reference.embed([token]), "decode.cos": cos, "decode.sin": sin}
    tensors["decode.mask"] = torch.zeros(1, 1, length + 1)
    run_graphs(reference, _of(reference, "llm.layer.dqkv", "llm.layer.dattn"), tensors, floors)


def fuse(reference: Reference, ids: list[int], tensors: Mapping[str, Tensor]) -> Tensor:
    """Embedding rows, those of image placeholders overwritten by the merger's rows in order: (T, C)."""
    embeds = reference.embed(ids).clone()
    if "vision.tail.rows" in tensors:
        embeds[torch.tensor(ids) == reference.image_token_id] = tensors["vision.tail.rows"]
    return embeds


def _of(reference: Reference, *structures: str) -> list[Any]:
    return [graph for graph in reference.graphs.values() if graph.structure.name in structures]
