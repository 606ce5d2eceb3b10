"""The 149 graphs of Youtu-VL in execution order. Needs no torch.

Tensor names in a dump: an output of a graph is `<graph id without model>.<port>`; what the glue between the
graphs computes has the names used in `sources` below.
"""

from harness.graphs import Graph, Port, Structure
from references.youtu_vl.config import Sizes

MODEL = "youtu_vl"


def structures(sizes: Sizes) -> dict[str, Structure]:
    """The six structures by name."""
    vision, text = sizes.vision, sizes.text
    heads, key_dim, value_dim = text.num_attention_heads, text.qk_head_dim, text.v_head_dim
    patches = Port("hidden", ("patches", vision.hidden_size))
    vision_table = (1, "patches", vision.head_dim)
    hidden = Port("hidden", ("T", text.hidden_size))
    cos, sin = (Port(name, (1, "T", text.qk_rope_head_dim)) for name in ("cos", "sin"))
    query = Port("query", (heads, "T", key_dim))
    key, value = Port("key", (heads, "T", key_dim)), Port("value", (heads, "T", value_dim))
    rotary = {"MemoryData": 2, "MatMul of MemoryData": 4, "RMSNorm": 3, "Slice": 3}
    every = (
        Structure(
            "vision.embed",
            (Port("pixel_values", ("patches", vision.patch_dim)),),
            (patches,),
            {"Gemm": 1, "MatMul": 0, "MemoryData": 0},
        ),
        Structure(
            "vision.layer",
            (
                patches,
                Port("cos", vision_table),
                Port("sin", vision_table),
                Port("mask", (1, "patches", "patches")),
            ),
            (patches,),
            {"Gemm": 6, "SDPA": 1, "MatMul": 2, "MemoryData": 1, "MatMul of MemoryData": 2, "LayerNorm": 2, "GELU": 1},
        ),
        Structure(
            "vision.tail",
            (Port("hidden", ("4*cells", vision.hidden_size)),),
            (Port("rows", ("cells", vision.out_hidden_size)),),
            {"Gemm": 2, "MatMul": 0, "MemoryData": 0, "LayerNorm": 1, "RMSNorm": 1, "GELU": 1},
        ),
        Structure(
            "llm.layer.prefill",
            (hidden, cos, sin, Port("mask", (1, "T", "T"))),
            (hidden, key, value),
            rotary | {"Gemm": 8, "SDPA": 1, "MatMul": 4, "RMSNorm": 4, "Swish": 1},
        ),
        Structure(
            "llm.layer.dqkv",
            (hidden, cos, sin),
            (query, key, value),
            rotary | {"Gemm": 4, "MatMul": 4},
        ),
        Structure(
            "llm.layer.dattn",
            (
                hidden,
                query,
                Port("key", (heads, "L", key_dim)),
                Port("value", (heads, "L", value_dim)),
                Port("mask", (1, "T", "L")),
            ),
            (hidden,),
            {"Gemm": 4, "SDPA": 1, "MatMul": 0, "MemoryData": 0, "RMSNorm": 1, "Swish": 1},
        ),
    )
    return {structure.name: structure for structure in every}


def graphs(sizes: Sizes) -> list[Graph]:
    """All graphs in execution order: vision, prefill of every layer, then one decode step."""
    kinds = structures(sizes)
    every = [Graph(f"{MODEL}/vision.embed", kinds["vision.embed"], None, {"pixel_values": ("pixel_values",)})]
    every += [_vision_layer(kinds["vision.layer"], index, sizes) for index in range(sizes.vision.num_hidden_layers)]
    every.append(Graph(f"{MODEL}/vision.tail", kinds["vision.tail"], None, {"hidden": ("vision.unpermuted",)}))
    layers = range(sizes.text.num_hidden_layers)
    every += [_prefill(kinds["llm.layer.prefill"], index) for index in layers]
    for index in layers:
        every += [_dqkv(kinds["llm.layer.dqkv"], index), _dattn(kinds["llm.layer.dattn"], index)]
    return every


def _vision_layer(structure: Structure, index: int, sizes: Sizes) -> Graph:
    before = "vision.permuted" if index == 0 else f"vision.layer.{index - 1:02d}.hidden"
    mask = "vision.full_mask" if index in sizes.vision.fullatt_block_indexes else "vision.window_mask"
    sources = {"hidden": (before,), "cos": ("vision.cos",), "sin": ("vision.sin",), "mask": (mask,)}
    return Graph(f"{MODEL}/vision.layer.{index:02d}", structure, index, sources)


def _prefill(structure: Structure, index: int) -> Graph:
    before = "prefill.embeds" if index == 0 else f"llm.layer.{index - 1:02d}.prefill.hidden"
    sources = {
        "hidden": (before,),
        "cos": ("prefill.cos",),
        "sin": ("prefill.sin",),
        "mask": ("prefill.mask",),
    }
    return Graph(f"{MODEL}/llm.layer.{index:02d}.prefill", structure, index, sources)


def _decode_input(index: int) -> str:
    return "decode.embeds" if index == 0 else f"llm.layer.{index - 1:02d}.dattn.hidden"


def _dqkv(structure: Structure, index: int) -> Graph:
    sources = {"hidden": (_decode_input(index),), "cos": ("decode.cos",), "sin": ("decode.sin",)}
    return Graph(f"{MODEL}/llm.layer.{index:02d}.dqkv", structure, index, sources)


def _dattn(structure: Structure, index: int) -> Graph:
    layer = f"llm.layer.{index:02d}"
    sources = {
        "hidden": (_decode_input(index),),
        "query": (f"{layer}.dqkv.query",),
        "key": (f"{layer}.prefill.key", f"{layer}.dqkv.key"),
        "value": (f"{layer}.prefill.value", f"{layer}.dqkv.value"),
        "mask": ("decode.mask",),
    }
    return Graph(f"{MODEL}/{layer}.dattn", structure, index, sources)
