"""Each kind of mistake, planted alone under fp32-like noise, is the first hint; equal or unrelated arrays have none."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from harness.diagnosis import KINDS, Hint, Tensor, diagnose

T, C, H, D = 40, 48, 4, 16
SPANS = {"image": slice(5, 17)}


def tensor(*shape: int, seed: int = 1) -> Tensor:
    random = np.random.default_rng(seed)
    energy = np.exp(0.5 * random.standard_normal((*shape[:-1], 1)))
    return np.asarray(random.standard_normal(shape) * energy)


def noisy(values: Tensor) -> Tensor:
    """As fp32 leaves it: 1e-7 of the values and of their rms."""
    random = np.random.default_rng(99)
    rms = np.sqrt(np.square(values).mean())
    noise = 1e-7 * (values * random.standard_normal(values.shape) + rms * random.standard_normal(values.shape))
    return np.asarray(values + noise, np.float32)


def kinds(actual: Tensor, expected: Tensor, **options: Any) -> list[str]:
    return [hint.kind for hint in diagnose(actual, expected, **options)]


def first(actual: Tensor, expected: Tensor, **options: Any) -> Hint:
    hints = diagnose(actual, expected.astype(np.float32), **options)
    assert hints, "no hint"
    return hints[0]


def on_rows(rows: Any, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def planted(x: Tensor) -> Tensor:
        x = x.copy()
        x[..., rows, :] = change(x[..., rows, :])
        return x

    return planted


def on_channels(channels: Any, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def planted(x: Tensor) -> Tensor:
        x = x.copy()
        x[..., channels] = change(x[..., channels])
        return x

    return planted


def on_head(head: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def planted(x: Tensor) -> Tensor:
        x = x.copy()
        x[head] = change(x[head])
        return x

    return planted


def garbage(x: Tensor) -> Tensor:
    return tensor(*x.shape, seed=7)


def zero(x: Tensor) -> Tensor:
    return np.zeros_like(x)


def bf16(x: Tensor) -> Tensor:
    bits = x.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return np.asarray((bits & np.uint32(0xFFFF0000)).view(np.float32))


def windows(x: Tensor) -> Tensor:
    """Rows of a 4 x 10 grid, line by line, put in 2 x 2 windows."""
    return x.reshape(2, 2, 5, 2, -1).transpose(0, 2, 1, 3, 4).reshape(x.shape)


def growing(x: Tensor) -> Tensor:
    return np.asarray(x + 0.01 * np.arange(T)[:, None] * garbage(x))


def quick_gelu(x: Tensor) -> Tensor:
    return np.asarray(x / (1 + np.exp(-1.702 * x)))


def gelu(x: Tensor) -> Tensor:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def turned(x: Tensor, positions: Tensor, base: float, *, section: int = D) -> Tensor:
    """The last `section` channels of each head rotated, halves paired."""
    half = section // 2
    angle = positions[:, None] * base ** (-np.arange(half) / half)
    keep, a, b = x[..., :-section], x[..., -section:-half], x[..., -half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([keep, a * cos - b * sin, b * cos + a * sin], axis=-1)


def low_rows_off(x: Tensor) -> Tensor:
    """What a norm inside a layer leaves behind: errors of one size over the energy, in all directions."""
    return np.asarray(x + 1e-4 * garbage(x) / np.square(x).mean(axis=-1, keepdims=True))


# name: kind, shape, the mistake, options of diagnose, words of the evidence
PLANTED: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor], dict[str, Any], str]] = {
    "sign": ("sign", (T, C), np.negative, {}, "other sign"),
    "doubled": ("scale", (T, C), lambda x: 2 * x, {}, "every value is 2 x the reference's"),
    "doubled vector": ("scale", (C,), lambda x: 2 * x, {}, "2 x"),
    "slightly scaled": ("scale", (T, C), lambda x: 1.0003 * x, {}, "1.0003 x"),
    "offset": ("offset", (T, C), lambda x: x + 0.25, {}, "+0.25 off"),
    "mean and std": ("affine", (H, T, D), lambda x: 0.9 * x - 0.25, {}, "0.9 x the reference's -0.25"),
    "fp16": ("rounding", (T, C), lambda x: x.astype(np.float16), {}, "fp16 numbers"),
    "bf16": ("rounding", (T, C), bf16, {}, "bf16 numbers"),
    "transposed": ("axes", (T, T), lambda x: x.T, {}, "permuted by (1, 0)"),
    "transposed matrices": ("axes", (H, D, D), lambda x: x.transpose(0, 2, 1), {}, "permuted by (0, 2, 1)"),
    "memory order": ("axes", (T, C), lambda x: x.T.reshape(T, C), {}, "permuted by (1, 0)"),
    "heads first": (
        "axes",
        (T, H * D),
        lambda x: x.reshape(T, H, D).transpose(1, 0, 2).reshape(T, H * D),
        {"heads": H},
        "of its (40, 4, 16) permuted by (1, 0, 2)",
    ),
    "four axes": ("axes", (2, 3, 4, 5), lambda x: x.transpose(1, 3, 0, 2).reshape(2, 3, 4, 5), {}, "by (1, 3, 0, 2)"),
    "heads tiled": ("head order", (H, T, D), lambda x: x[[0, 2, 1, 3]], {}, "head 1 holds head 2"),
    "heads tiled side by side": (
        "head order",
        (T, H * D),
        lambda x: x.reshape(T, H, D)[:, [0, 2, 1, 3]].reshape(T, -1),
        {"heads": H},
        "head 1 holds head 2, 2 of 4 are moved",
    ),
    "rows late by one": ("row shift", (T, C), lambda x: np.concatenate([0 * x[:1], x[:-1]]), {}, "shifted by +1"),
    "rows early by three": ("row shift", (H, T, D), lambda x: np.roll(x, -3, axis=1), {}, "shifted by -3"),
    "rows reversed": ("row order", (T, C), lambda x: x[::-1], {}, "reversed"),
    "image reversed": (
        "row order",
        (T, C),
        on_rows(slice(5, 17), lambda x: x[::-1]),
        {"spans": SPANS},
        "reversed in 5-16, row 5 holds row 16",
    ),
    "window order": ("row order", (T, C), windows, {}, "2 x 2 windows of 4 x 10 where the reference goes line by line"),
    "rows shuffled": (
        "row order",
        (T, C),
        lambda x: x[np.random.default_rng(5).permutation(T)],
        {},
        "rows in another order: row 0 holds row",
    ),
    "two rows swapped": ("row order", (T, C), on_rows([9, 30], lambda x: x[::-1]), {}, "row 9 holds row 30"),
    "swapped halves": ("halves", (T, C), lambda x: np.roll(x, C // 2, axis=-1), {}, "swapped halves"),
    "swapped halves of a vector": ("halves", (C,), lambda x: np.roll(x, C // 2), {}, "swapped halves"),
    "swapped halves of heads": (
        "halves",
        (T, H * D),
        lambda x: np.roll(x.reshape(T, H, D), D // 2, axis=-1).reshape(T, -1),
        {"heads": H},
        "swapped halves in every 16",
    ),
    "even and odd": (
        "interleave",
        (H, T, D),
        lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1),
        {},
        "8 x 2",
    ),
    "channels last": (
        "interleave",
        (T, C),
        lambda x: x.reshape(T, 16, 3).transpose(0, 2, 1).reshape(T, C),
        {},
        "interleaved (16 x 3 read as 3 x 16)",
    ),
    "colours in planes": (
        "interleave",
        (T, 768),
        lambda x: x.reshape(T, 256, 3).transpose(0, 2, 1).reshape(T, 768),
        {},
        "interleaved (256 x 3 read as 3 x 256)",
    ),
    "blue first": (
        "channel order",
        (T, C),
        lambda x: x.reshape(T, -1, 3)[..., ::-1].reshape(T, C),
        {},
        "reversed in every 3",
    ),
    "channels reversed": ("channel order", (T, C), lambda x: x[:, ::-1], {}, "reversed, channel 0 holds channel 47"),
    "each row turned by itself": (
        "value order",
        (T, C),
        lambda x: np.stack([np.roll(row, 5 * i) for i, row in enumerate(x)]),
        {},
        "same values in another order",
    ),
    "norm weight missing": ("channel scale", (T, C), lambda x: x * (1 + 0.3 * np.sin(np.arange(C))), {}, "factor"),
    "bias missing": ("channel offset", (T, C), lambda x: x + np.sin(np.arange(C)), {}, "summand"),
    "colours normalised wrongly": (
        "channel affine",
        (T, C),
        lambda x: x * np.tile([0.9, 1.1, 1.2], 16) + np.tile([0.1, 0.2, -0.1], 16),
        {},
        "factor, from 0.9 to 1.2",
    ),
    "rows scaled": ("row scale", (T, C), lambda x: x * (1 + 0.5 * np.sin(np.arange(T)))[:, None], {}, "each row"),
    "epsilon of a last norm": (
        "norm epsilon",
        (T, C),
        lambda x: x / np.sqrt(1 + 1e-2 * np.exp(np.sin(np.arange(T))))[:, None],
        {},
        "all on one side of 1",
    ),
    "epsilon of an inner norm": ("norm epsilon", (T, C), low_rows_off, {}, "rows of low energy"),
    "grey levels": (
        "steps",
        (T, C),
        lambda x: x + np.random.default_rng(3).integers(-1, 3, x.shape) * (tensor(*x.shape, seed=4) > 0.5) / 127.5,
        {},
        "each by a multiple of 0.00784314 (at most 2 of them)",
    ),
    "all zero": ("zero", (T, C), zero, {}, "every value is zero"),
    "head zero": ("zero", (H, T, D), on_head(2, zero), {}, "head 2 of 4 is zero"),
    "rows zero": ("zero", (T, C), on_rows(slice(30, 40), zero), {}, "rows 30-39 of 40 are zero"),
    "channels zero": ("zero", (T, C), on_channels([3, 7], zero), {}, "channels 3, 7 of 48 are zero"),
    "rotary base": (
        "rotary",
        (H, T, D),
        lambda x: turned(turned(x, -np.arange(T), 1e6), np.arange(T), 1e4),
        {},
        "not in row 0",
    ),
    "rotary base of a section": (
        "rotary",
        (H, T, D + 8),
        lambda x: turned(turned(x, -np.arange(T), 1e6), np.arange(T), 1e4),
        {},
        "channels i and i + 8 of 8-23",
    ),
    "positions plus one": (
        "rotary",
        (T, H * D),
        lambda x: turned(x.reshape(T, H, D).transpose(1, 0, 2), np.ones(T), 1e4).transpose(1, 0, 2).reshape(T, -1),
        {"heads": H},
        "by the same angle (+1.0000 rad in pair 0)",
    ),
    "growth": ("growth", (T, C), growing, {}, "row 0 is equal"),
    "image only": ("image span", (T, C), on_rows(slice(5, 17), garbage), {"spans": SPANS}, "12 of the 12 rows"),
    "all but the image": (
        "outside image",
        (T, C),
        on_rows(np.r_[0:5, 17:40], garbage),
        {"spans": SPANS},
        "28 of the 28 rows outside image",
    ),
    "mask sees the next": ("all but last row", (T, C), on_rows(slice(0, 39), garbage), {}, "rows 0-38 of 40"),
    "first row exact": ("all but first row", (T, C), on_rows(slice(1, 40), garbage), {}, "rows 1-39 of 40"),
    "first row": ("first rows", (H, T, D), on_rows(slice(0, 1), garbage), {}, "row 0 of 40"),
    "last row": ("last rows", (T, C), on_rows(slice(39, 40), garbage), {}, "row 39 of 40"),
    "from the image on": (
        "last rows",
        (T, C),
        on_rows(slice(5, 40), garbage),
        {"spans": SPANS},
        "image begins there",
    ),
    "border": ("border rows", (T, C), on_rows([0, 1, 38, 39], garbage), {}, "rows 0-1, 38-39"),
    "rows in the middle": ("row block", (T, C), on_rows(slice(8, 12), garbage), {}, "rows 8-11"),
    "every eighth row": ("scattered rows", (T, C), on_rows(slice(7, 40, 8), garbage), {}, "every 8th"),
    "one head": ("heads", (H, T, D), on_head(1, garbage), {}, "head 1 of 4 differs"),
    "one head beside others": (
        "heads",
        (T, H * D),
        on_channels(slice(16, 32), garbage),
        {"heads": H},
        "head 1 of 4 differs",
    ),
    "channel block": ("channel block", (T, C), on_channels(slice(24, 48), garbage), {}, "channels 24-47 of 48"),
    "second half of heads": (
        "periodic channels",
        (T, H * D),
        lambda x: on_channels(slice(8, 16), garbage)(x.reshape(T, H, D)).reshape(T, -1),
        {},
        "channels 8-15 of every 16",
    ),
    "odd channels": ("periodic channels", (T, C), on_channels(slice(1, C, 2), garbage), {}, "channels 1 of every 2"),
    "two channels": ("scattered channels", (T, C), on_channels([3, 20], garbage), {}, "channels 3, 20 of 48"),
    "two values": ("few values", (T, C), on_rows([3, 8], on_channels(20, lambda x: x + 1)), {}, "2 of 1920"),
    "clipped": ("activation", (60, 60), lambda x: np.minimum(x, 1.5), {}, "function of the value"),
    "small": ("small everywhere", (T, C), lambda x: x + 1e-4 * np.abs(x) * garbage(np.ones((T, C))), {}, "rel_l2"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistake_is_the_first_hint(name: str) -> None:
    kind, shape, plant, options, words = PLANTED[name]
    expected = tensor(*shape)
    hint = first(noisy(plant(expected)), expected, **options)
    assert hint.kind == kind, hint
    assert words in hint.evidence


@pytest.mark.parametrize("power", [-30, 30])
@pytest.mark.parametrize("name", ["doubled", "offset", "rows reversed", "head zero", "growth", "one head"])
def test_hints_do_not_depend_on_the_size_of_values(name: str, power: int) -> None:
    kind, shape, plant, options, _ = PLANTED[name]
    expected = tensor(*shape)
    actual = noisy(plant(expected))
    assert first(np.ldexp(actual, power), np.ldexp(expected, power), **options).kind == kind


def test_every_kind_is_planted() -> None:
    told_elsewhere = {"another tensor"}  # by explain, which knows all tensors
    here = {row[0] for row in PLANTED.values()} | {"shape", "non-finite", "inverse order"}
    assert set(KINDS) == here | told_elsewhere


def test_inverse_of_a_permutation() -> None:
    expected = np.random.default_rng(5).permutation(T)
    (hint,) = diagnose(np.argsort(expected), expected)
    assert hint == Hint("inverse order", "40 indices are the inverse of the reference's permutation")


@pytest.mark.parametrize("planted", [quick_gelu, lambda x: gelu(x) + 2e-4 * np.sin(3 * x)])
def test_another_activation(planted: Callable[[Tensor], Tensor]) -> None:
    x = tensor(200, 96)
    monotone = np.where(x > -0.7, x, -x)  # below, two values of x share one of gelu
    hint = first(noisy(planted(monotone)), gelu(monotone))
    assert hint.kind == "activation", hint


@pytest.mark.parametrize("wave", [np.cos, np.sin])
def test_rotary_table_of_another_base(wave: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = (np.arange(150)[:, None] * base ** (-np.arange(8) / 8) for base in (1e4, 1.6e6))
    hint = first(noisy(wave(ours)), wave(theirs))
    assert hint.kind == "rotary"
    assert hint.evidence.endswith("channel 1 goes 0.3162 rad a row, but should go 0.1677")


def test_what_is_wrong_inside_a_place_is_told() -> None:
    expected = tensor(H, T, D)
    hints = diagnose(noisy(on_head(1, lambda x: 2 * x)(expected)), expected)
    assert [hint.kind for hint in hints] == ["heads", "scale"]
    assert hints[1].evidence.startswith("in head 1 of 4: every value is 2 x")


def test_place_of_an_order_is_told_too() -> None:
    expected = tensor(T, C)
    actual = noisy(on_rows(slice(5, 17), lambda x: x[::-1])(expected))
    assert kinds(actual, expected, spans=SPANS) == ["row order", "image span"]


def test_equal_rows_stay_where_they_are() -> None:
    """Rows of one token are alike: only what moved is said to have."""
    expected = np.repeat(tensor(T // 4, C), 4, axis=0)
    actual = noisy(on_rows([3, 30], lambda x: x[::-1])(expected))
    assert "row 3 holds row" in first(actual, expected).evidence
    assert "2 of 40 are moved" in first(actual, expected).evidence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.T, "equal when the axes are permuted by (1, 0)"),
        (lambda x: x.T * 2, "permuted by (1, 0), but the values differ then too"),
        (lambda x: x[None], "only axes of length 1 differ; the values are equal"),
        (lambda x: x[None] * 2, "only axes of length 1 differ; apart from that the values differ"),
        (lambda x: x[:-1], "axis 0 is 1 too short, and the first 39 are equal"),
        (lambda x: x[2:], "axis 0 is 2 too short, and the last 38 are equal"),
        (lambda x: np.pad(x, ((0, 0), (0, 4))), "axis 1 is 4 too long, and the first 48 are equal"),
        (lambda x: x.reshape(C, T), "equal"),
        (lambda x: x.reshape(T, H, -1), "the same, and in memory order they are equal"),
        (lambda x: x[:3, :5], "should be (40, 48)"),
    ],
)
def test_other_shapes(change: Callable[[Tensor], Tensor], words: str) -> None:
    expected = tensor(T, C)
    hint = first(noisy(change(expected)), expected)
    assert hint.kind == "shape"
    assert words in hint.evidence


def test_shape_does_not_hide_the_rest() -> None:
    expected = tensor(T, C)
    assert kinds(noisy(2 * expected[None]), expected) == ["shape", "scale"]


def test_nan_and_inf() -> None:
    expected = tensor(H, T, D).astype(np.float32)
    actual = expected.copy()
    actual[:, 7], actual[2, 30, 3] = np.nan, -np.inf
    (hint,) = diagnose(actual, expected)
    assert hint.kind == "non-finite"
    said = f"the output holds {H * D} NaN and 1 Inf of {H * T * D} values, the first at (0, 7, 0), in rows 7, 30 of 40"
    assert hint.evidence == said
    assert "in whole row 7 of 40" in diagnose(np.where(np.isinf(actual), 0, actual), expected)[0].evidence
    assert diagnose(expected, actual)[0].evidence.startswith("the reference itself holds")


def test_nan_on_both_sides_does_not_hide_the_rest() -> None:
    expected = tensor(T, C)
    expected[3, 4], expected[0, 0] = np.nan, -np.inf
    assert diagnose(expected, expected) == []
    actual = expected.copy()
    actual[9:12] = 0
    assert kinds(actual, expected)[0] == "zero"


SHAPES = [(1,), (C,), (1, C), (T, 1), (T, C), (T, T), (H, T, D), (2, H, T, D)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_and_nearly_equal_arrays_have_no_hint(shape: tuple[int, ...]) -> None:
    expected = tensor(*shape)
    assert diagnose(expected, expected) == []
    assert diagnose(noisy(expected), expected, spans=SPANS, heads=H) == []
    assert diagnose(noisy(expected), expected, floor=1e-7) == []


def test_noise_is_what_the_floor_says() -> None:
    expected = tensor(T, C)
    actual = expected + 3e-5 * tensor(T, C, seed=2)
    assert kinds(actual, expected) == ["small everywhere"]
    assert kinds(actual, expected, floor=1e-5) == []


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1, 100])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != (1,)])
def test_unrelated_arrays_have_no_hint(shape: tuple[int, ...], size: float) -> None:
    for seed in range(2, 12):
        assert diagnose(size * tensor(*shape, seed=seed), tensor(*shape), spans=SPANS, heads=H) == []


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_large_noise_has_no_hint(share: float) -> None:
    for seed in range(2, 12):
        actual = tensor(T, C) + share * tensor(T, C, seed=seed)
        assert diagnose(actual, tensor(T, C), spans=SPANS, heads=H) == []


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 2.0, np.nan, np.inf, -np.inf, 1e-45, 3e38])
SHAPE = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def any_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two arrays of any shapes, mostly the same, with any values."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    shape = draw(SHAPE)
    other = draw(st.just(shape) | st.permutations(shape).map(tuple) | SHAPE)
    return tuple(draw(arrays.arrays(dtype, s, elements=NUMBERS)) for s in (shape, other))  # type: ignore[return-value]


@given(any_pairs(), st.none() | st.floats(0, 1), st.none() | st.integers(0, 5), st.slices(5))
@settings(derandomize=True, deadline=None, max_examples=400)
def test_any_arrays_are_diagnosed_alike_twice(
    pair: tuple[Tensor, Tensor], floor: float | None, heads: int | None, span: slice
) -> None:
    hints = diagnose(*pair, floor=floor, heads=heads, spans={"image": span})
    assert hints == diagnose(*pair, floor=floor, heads=heads, spans={"image": span})
    assert all(hint.kind in KINDS and hint.evidence for hint in hints)
    assert diagnose(pair[0], pair[0], floor=floor) == []


@pytest.mark.parametrize("plant", [garbage, lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x * 2])
def test_a_layer_of_true_width_takes_no_time(plant: Callable[[Tensor], Tensor]) -> None:
    expected = tensor(1288, 1152).astype(np.float32)
    actual = noisy(plant(expected))
    start = time.process_time()
    diagnose(actual, expected, spans=SPANS)
    assert time.process_time() - start < 3  # 0.3 s, were the machine idle
