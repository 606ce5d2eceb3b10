"""The 90 graphs of SmolLM2 in execution order. Needs no torch. Keys and values have the 3 shared heads only."""

from harness.graphs import Graph, Port, Structure
from references.smollm2.config import Sizes

MODEL = "smollm2"


def structures(sizes: Sizes) -> dict[str, Structure]:
    """The three structures by name."""
    width = sizes.head_dim
    hidden = Port("hidden", ("T", sizes.hidden_size))
    cos, sin = (Port(name, (1, "T", width)) for name in ("cos", "sin"))
    query = Port("query", (sizes.num_attention_heads, "T", width))
    key, value = (Port(name, (sizes.num_key_value_heads, "T", width)) for name in ("key", "value"))
    rotary = {"RotaryEmbed": 2, "MatMul": 0, "MemoryData": 0}
    every = (
        Structure(
            "llm.layer.prefill",
            (hidden, cos, sin, Port("mask", (1, "T", "T"))),
            (hidden, key, value),
            rotary | {"Gemm": 7, "SDPA": 1, "RMSNorm": 2, "Swish": 1},
        ),
        Structure(
            "llm.layer.dqkv", (hidden, cos, sin), (query, key, value), rotary | {"Gemm": 3, "SDPA": 0, "RMSNorm": 1}
        ),
        Structure(
            "llm.layer.dattn",
            (
                hidden,
                query,
                Port("key", (sizes.num_key_value_heads, "L", width)),
                Port("value", (sizes.num_key_value_heads, "L", width)),
                Port("mask", (1, "T", "L")),
            ),
            (hidden,),
            {"Gemm": 4, "SDPA": 1, "MatMul": 0, "MemoryData": 0, "RMSNorm": 1, "Swish": 1},
        ),
    )
    return {structure.name: structure for structure in every}


def graphs(sizes: Sizes) -> list[Graph]:
    """All graphs in execution order: prefill of every layer, then one decode step."""
    kinds = structures(sizes)
    layers = range(sizes.num_hidden_layers)
    every = [_prefill(kinds["llm.layer.prefill"], index) for index in layers]
    for index in layers:
        every += [_dqkv(kinds["llm.layer.dqkv"], index), _dattn(kinds["llm.layer.dattn"], index)]
    return every


def _prefill(structure: Structure, index: int) -> Graph:
    before = "prefill.embeds" if index == 0 else f"llm.layer.{index - 1:02d}.prefill.hidden"
    sources = {"hidden": (before,), "cos": ("prefill.cos",), "sin": ("prefill.sin",), "mask": ("prefill.mask",)}
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
