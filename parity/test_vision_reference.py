"""The vision reference against oracles: transformers' functions, published vectors, hand formulas."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.youtu_vl.config import FULL, TINY, VisionSizes, sizes
from references.youtu_vl.vision import (
    Attention,
    EncoderLayer,
    Merger,
    Vision,
    block_mask,
    rotary_angles,
    rotate,
    tables,
    window_index,
)


def oracles() -> Any:
    """transformers' functions, imported when a test needs them."""
    from parity import oracles

    return oracles


NARROW = replace(sizes(TINY).vision, num_hidden_layers=3, fullatt_block_indexes=(1,))
TRUE = sizes(FULL).vision

# grid, bounds of the windows in patches, {place: cells that start there} (published by a port of the model)
VECTORS = [
    ((14, 14), [0, 196], {0: list(range(49))}),
    ((22, 22), [0, 256, 352, 448, 484], {0: [*range(8), *range(11, 19)], 64: [8, 9, 10, 19, 20, 21]}),
    ((28, 28), [0, 256, 448, 640, 784], {0: [*range(8), *range(14, 22)], 64: [*range(8, 14), 22]}),
    ((14, 92), [0, 224, 448, 672, 896, 1120, 1288], {0: [*range(8), *range(46, 54)]}),
    ((22, 32), [0, 256, 512, 608, 704], {0: [*range(8), *range(16, 24)]}),
    ((8, 188), [*range(0, 1409, 128), 1504], {0: [*range(8), *range(94, 102)]}),
]

even = st.integers(1, 24).map(lambda half: 2 * half)
every_grids = given(grids=st.lists(st.tuples(even, even), min_size=1, max_size=3))
every = settings(derandomize=True, deadline=None, max_examples=60)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomise(module: torch.nn.Module, seed: int = 1) -> None:
    """Weights of gain 1, biases and norms neither 0 nor 1, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / math.sqrt(weight.shape[1]) if weight.ndim == 2 else 0.5 + 0.3 * noise)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def thw(grids: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([(1, height, width) for height, width in grids])


@pytest.fixture
def vision() -> Vision:
    module = Vision(NARROW).eval()
    randomise(module)
    return module.requires_grad_(False)


# Windows


@pytest.mark.parametrize(("grid", "bounds", "starts"), VECTORS, ids=lambda value: str(value)[:8])
def test_published_window_vectors(grid: tuple[int, int], bounds: list[int], starts: dict[int, list[int]]) -> None:
    index, cu_seqlens = window_index([grid], window_cells=TRUE.window_cells, merge=2)
    assert cu_seqlens.tolist() == bounds
    assert sorted(index.tolist()) == list(range(grid[0] * grid[1] // 4))
    for place, cells in starts.items():
        assert index[place : place + len(cells)].tolist() == cells


@every
@every_grids
def test_window_index_equals_transformers(grids: list[tuple[int, int]]) -> None:
    index, cu_seqlens = window_index(grids, window_cells=TRUE.window_cells, merge=2)
    theirs, their_cu_seqlens = oracles().get_vision_window_index(thw(grids), 2, TRUE.window_size, TRUE.patch_size)
    assert torch.equal(index, theirs)
    assert torch.equal(cu_seqlens, their_cu_seqlens)
    assert cu_seqlens.dtype == their_cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("grids", [[(22, 22)], [(14, 92)], [(6, 18), (22, 32)]])
def test_masked_attention_equals_a_loop_over_single_windows(grids: list[tuple[int, int]], vision: Vision) -> None:
    t = vision.tables(grids)
    hidden = random(1, len(t.order), NARROW.hidden_size)
    layer = vision.layers[0]
    masked = layer(hidden, t.cos, t.sin, t.window_mask)
    _, bounds = oracles().get_vision_window_index(thw(grids), 2, TRUE.window_size, TRUE.patch_size)
    spans = [slice(start, end) for start, end in pairwise(bounds)]
    looped = [layer(hidden[:, s], t.cos[s], t.sin[s], torch.zeros(())) for s in spans]
    assert relative(masked, torch.cat(looped, dim=1)) < 1e-6
    assert relative(layer(hidden, t.cos, t.sin, t.full_mask), masked) > 1e-2  # the window matters


def test_mask_is_zero_inside_a_block_and_finite_outside() -> None:
    mask = block_mask(torch.tensor([0, 2, 3]))
    assert mask.tolist() == [[0, 0, -1e9], [0, 0, -1e9], [-1e9, -1e9, 0]]
    assert mask.dtype == torch.float32


# Rotary positions


def qwen_tables(grids: list[tuple[int, int]], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = oracles().Qwen2_5_VLVisionConfig(hidden_size=head_dim * 2, num_heads=2)
    rotary = oracles().Qwen2_5_VLVisionRotaryEmbedding(config)
    return rotary(torch.zeros(1), oracles().get_vision_position_ids(thw(grids), 2))


@every
@every_grids
def test_rotary_tables_equal_qwens(grids: list[tuple[int, int]]) -> None:
    angles = rotary_angles(grids, head_dim=TRUE.head_dim, merge=2)
    cos, sin = qwen_tables(grids, TRUE.head_dim)
    assert torch.equal(angles.cos(), cos)
    assert torch.equal(angles.sin(), sin)


def test_rotary_angles_by_hand() -> None:
    angles = rotary_angles([(4, 6)], head_dim=8, merge=2)
    frequencies = [1.0, 10000.0 ** (-2 / 4)]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4)]
    for row, (r, c) in zip(angles, places, strict=False):
        once = [r * f for f in frequencies] + [c * f for f in frequencies]
        assert row.tolist() == pytest.approx(once + once)


def test_rotation_equals_qwens() -> None:
    q, k = random(1, 24, 4, 72), random(1, 24, 4, 72, seed=1)
    cos, sin = qwen_tables([(4, 6)], 72)
    theirs = oracles().apply_rotary_pos_emb_vision(q, k, cos, sin)
    for ours, expected in zip((q, k), theirs, strict=True):
        assert relative(rotate(ours.transpose(1, 2), cos, sin).transpose(1, 2), expected) < 1e-6


# One block


def siglip2_layer(sizes: VisionSizes, ours: EncoderLayer) -> Any:
    config = oracles().Siglip2VisionConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        layer_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
    )
    config._attn_implementation = "eager"
    layer = oracles().Siglip2EncoderLayer(config).eval().requires_grad_(False)
    layer.load_state_dict(ours.state_dict(), strict=True)
    return layer


@pytest.mark.parametrize("grids", [[(6, 10)], [(18, 4), (2, 2)]])
def test_block_without_rotation_equals_siglip2(grids: list[tuple[int, int]], vision: Vision) -> None:
    ours, t = vision.layers[0], vision.tables(grids)
    assert isinstance(ours, EncoderLayer)
    hidden = random(1, len(t.order), NARROW.hidden_size)
    theirs = siglip2_layer(NARROW, ours)(hidden, attention_mask=t.window_mask[None, None])
    unturned = ours(hidden, torch.ones_like(t.cos), torch.zeros_like(t.sin), t.window_mask)
    assert relative(unturned, theirs) < 1e-6
    assert relative(ours(hidden, t.cos, t.sin, t.window_mask), theirs) > 1e-3  # the rotation matters


def qwen_attention(sizes: VisionSizes, ours: Attention) -> Any:
    config = oracles().Qwen2_5_VLVisionConfig(hidden_size=sizes.hidden_size, num_heads=sizes.num_attention_heads)
    config._attn_implementation = "eager"
    attention = oracles().Qwen2_5_VLVisionAttention(config).eval().requires_grad_(False)
    parts = (ours.q_proj, ours.k_proj, ours.v_proj)
    attention.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
    attention.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
    attention.proj.load_state_dict(ours.out_proj.state_dict())
    return attention


@pytest.mark.parametrize("grids", [[(22, 22)], [(18, 4), (2, 2)]])
def test_rotated_windowed_attention_equals_qwens(grids: list[tuple[int, int]], vision: Vision) -> None:
    ours, t = vision.layers[0].self_attn, vision.tables(grids)
    assert isinstance(ours, Attention)
    hidden = random(1, len(t.order), NARROW.hidden_size)
    index, bounds = oracles().get_vision_window_index(thw(grids), 2, TRUE.window_size, TRUE.patch_size)
    cos, sin = (in_windows(table, index) for table in qwen_tables(grids, NARROW.head_dim))
    theirs = qwen_attention(NARROW, ours)(in_windows(hidden[0], index), bounds, position_embeddings=(cos, sin))
    assert relative(ours(hidden[:, t.order], t.cos, t.sin, t.window_mask)[0], theirs) < 1e-6


def in_windows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (-1, 4))[index].flatten(0, 1)


def test_block_norms_use_the_models_eps(vision: Vision) -> None:
    # Rows this small make eps the larger term of the root, so a default eps of 1e-5 would show.
    ours = vision.layers[0]
    assert isinstance(ours, EncoderLayer)
    hidden = random(1, 8, NARROW.hidden_size) * 1e-4
    flat = torch.ones(8, NARROW.head_dim), torch.zeros(8, NARROW.head_dim), torch.zeros(8, 8)
    theirs = siglip2_layer(NARROW, ours)(hidden, attention_mask=flat[2][None, None])
    assert relative(ours(hidden, *flat), theirs) < 1e-6


# Merger


def merged_by_hand(merger: Merger, x: np.ndarray) -> np.ndarray:
    weights = {name: value.double().numpy() for name, value in merger.state_dict().items()}
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights["ln_q.weight"]
    cells = np.stack([np.concatenate(normed[4 * cell : 4 * cell + 4]) for cell in range(len(x) // 4)])
    inner = cells @ weights["mlp.0.weight"].T + weights["mlp.0.bias"]
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    return inner @ weights["mlp.2.weight"].T + weights["mlp.2.bias"]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_merger_equals_a_hand_formula(scale: float, vision: Vision) -> None:
    x = random(1, 24, NARROW.hidden_size) * scale
    expected = torch.from_numpy(merged_by_hand(vision.merger, x[0].double().numpy()))[None]
    assert relative(vision.merger(x), expected) < 1e-6
    assert relative(vision.merger.double()(x.double()), expected) < 1e-14


def test_tail_equals_a_hand_formula(vision: Vision) -> None:
    hidden = random(1, 24, NARROW.hidden_size) * 1e-3  # small rows: eps counts
    norm = vision.siglip2.vision_model.post_layernorm
    x = hidden[0].double().numpy()
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * norm.weight.double().numpy() + norm.bias.double().numpy()
    assert relative(vision.tail(hidden)[0], torch.from_numpy(merged_by_hand(vision.merger, x))) < 1e-6


# The tower


@pytest.mark.parametrize("grid", [(22, 22), (14, 92)])
def test_rows_come_back_in_merge_block_order(grid: tuple[int, int], vision: Vision) -> None:
    # The window order of these grids is not its own inverse. Blocks that add nothing leave rows as they were.
    t = vision.tables([grid])
    assert not torch.equal(t.order, t.inverse)
    for layer in vision.layers:
        assert isinstance(layer, EncoderLayer)
        layer.self_attn.out_proj.weight.zero_()
        layer.self_attn.out_proj.bias.zero_()
        layer.mlp.fc2.weight.zero_()
        layer.mlp.fc2.bias.zero_()
    pixel_values = random(len(t.order), NARROW.patch_dim)
    assert torch.equal(vision(pixel_values, [grid]), vision.tail(vision.embed(pixel_values)))


def by_stages(vision: Vision, pixel_values: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    t = vision.tables(grids).to(pixel_values.dtype)
    hidden = vision.embed(pixel_values)[:, t.order]
    for number, layer in enumerate(vision.layers):
        hidden = layer(hidden, t.cos, t.sin, vision.mask(number, t))
    return vision.tail(hidden[:, t.inverse])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stages_equal_the_whole(dtype: torch.dtype, vision: Vision) -> None:
    grids = [(6, 18), (22, 4)]
    pixel_values = random(196, NARROW.patch_dim).to(dtype)
    vision = vision.to(dtype)
    whole = vision(pixel_values, grids)
    assert whole.dtype == dtype
    assert whole.shape == (1, 49, NARROW.out_hidden_size)
    assert torch.equal(by_stages(vision, pixel_values, grids), whole)


def test_float64_measures_the_noise_of_float32(vision: Vision) -> None:
    pixel_values = random(22 * 22, NARROW.patch_dim)
    single = vision(pixel_values, [(22, 22)])
    double = vision.double()(pixel_values.double(), [(22, 22)])
    assert 0.1 < single.std() < 10
    assert 1e-9 < relative(single, double) < 1e-5


def test_pictures_do_not_see_each_other(vision: Vision) -> None:
    grids = [(6, 18), (22, 4)]
    pixel_values = random(196, NARROW.patch_dim)
    apart = [vision(rows, [grid]) for rows, grid in zip(pixel_values.split([108, 88]), grids, strict=True)]
    assert relative(vision(pixel_values, grids), torch.cat(apart, dim=1)) < 1e-6


def test_full_layers_let_a_patch_reach_other_windows(vision: Vision) -> None:
    t = vision.tables([(2, 36)])  # 3 windows in a row
    assert [vision.mask(number, t) is t.full_mask for number in range(3)] == [False, True, False]
    assert t.full_mask.count_nonzero() == 0
    pixel_values = random(72, NARROW.patch_dim)
    moved = pixel_values.clone()
    moved[-1] += 1.0
    change = (vision(moved, [(2, 36)]) - vision(pixel_values, [(2, 36)]))[0].norm(dim=-1)  # (18,)
    assert change.min() > 1e-5


def test_patches_are_embedded_by_a_linear_map_with_bias(vision: Vision) -> None:
    embedding = vision.siglip2.vision_model.embeddings.patch_embedding
    pixel_values = random(8, NARROW.patch_dim)
    by_hand = pixel_values.double().numpy() @ embedding.weight.double().numpy().T
    expected = torch.from_numpy(by_hand + embedding.bias.double().numpy())[None]
    assert relative(vision.embed(pixel_values), expected) < 1e-6


def test_state_dict_has_the_checkpoints_names_and_shapes() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in Vision(TRUE).state_dict().items()}
    assert shapes == checkpoint_shapes()
    assert len(shapes) == 441
    assert sum(math.prod(shape) for shape in shapes.values()) == 412_354_800 + 33_038_464


def checkpoint_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published checkpoint's vision weights."""
    linear = {"merger.mlp.0": (4608, 4608), "merger.mlp.2": (2560, 4608)}
    norms = ["siglip2.vision_model.post_layernorm"]
    linear["siglip2.vision_model.embeddings.patch_embedding"] = (1152, 768)
    for number in range(27):
        layer = f"siglip2.vision_model.encoder.layers.{number}"
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
        linear |= {f"{layer}.self_attn.{name}_proj": (1152, 1152) for name in ("q", "k", "v", "out")}
        linear |= {f"{layer}.mlp.fc1": (4304, 1152), f"{layer}.mlp.fc2": (1152, 4304)}
    shapes: dict[str, tuple[int, ...]] = {"merger.ln_q.weight": (1152,)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (1152,), f"{name}.bias": (1152,)}
    return shapes


def test_tables_keep_indices_when_cast() -> None:
    t = tables([(6, 18)], NARROW).to(torch.float64)
    assert t.order.dtype == t.inverse.dtype == torch.int64
    assert t.cos.dtype == t.sin.dtype == t.window_mask.dtype == t.full_mask.dtype == torch.float64
