"""Pictures: the runtime's preprocessor, window order and rotary tables equal the reference's."""

import importlib.util
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from references.youtu_vl import image as reference_image
from references.youtu_vl import vision as reference_vision
from references.youtu_vl.config import FULL, sizes
from runtime import image as runtime_image
from runtime import windows
from runtime.errors import InputError

SIZES = [  # height, width, grid
    (220, 1468, (14, 92)),
    (330, 500, (22, 32)),
    (352, 352, (22, 22)),
    (32, 32, (2, 2)),
    (100, 1500, (8, 94)),
]
# What the processor of transformers 4.56.0 gives, as published by a port that ran it.
TABLE = [
    (224, 224, (14, 14)),
    (330, 330, (22, 22)),
    (336, 336, (22, 22)),
    (448, 448, (28, 28)),
    (512, 512, (32, 32)),
    (2048, 2048, (128, 128)),
    (1080, 1920, (68, 120)),
    (3000, 4000, (166, 220)),
    (330, 500, (22, 32)),
    (100, 3000, (8, 188)),
    (32, 32, (2, 2)),
]
MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F"]

every = settings(derandomize=True, deadline=None, max_examples=60)
side = st.integers(1, 5000)
# torch 2.13 repeats the first row when the resized width is 1, and asserts inside at 1x1 (AVX kernels).
resized_side = st.integers(2, 96)
even = st.integers(1, 24).map(lambda half: 2 * half)
grids = st.lists(st.tuples(even, even), min_size=1, max_size=3)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photograph(name: str) -> Path:
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "datasets" / "images" / name


def picture(content: str, height: int, width: int) -> np.ndarray:
    if content == "noise":
        return noise(height, width)
    with Image.open(photograph(content)) as photo:
        return np.array(photo.resize((width, height), Image.Resampling.BICUBIC))


def torch_resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    channels_first = torch.tensor(image).permute(2, 0, 1).contiguous()
    return reference_image.resize(channels_first, (height, width)).permute(1, 2, 0).numpy()


def differing(actual: np.ndarray, expected: np.ndarray) -> int:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return int((actual != expected).sum())


# Pictures


@pytest.mark.parametrize("content", ["noise", "china.jpg", "flower.jpg"])
@pytest.mark.parametrize(("height", "width", "grid"), SIZES)
def test_preprocessor_is_bit_exact(height: int, width: int, grid: tuple[int, int], content: str) -> None:
    image = picture(content, height, width)
    size = runtime_image.target_size(height, width)
    assert size == (16 * grid[0], 16 * grid[1])
    assert differing(runtime_image.resize(image, *size), torch_resize(image, *size)) == 0
    pixels = runtime_image.preprocess(image, {})
    rows, reference_grid = reference_image.preprocess(image)
    assert pixels.grid == reference_grid == grid
    assert pixels.pixel_values.shape == (grid[0] * grid[1], 768)
    assert differing(pixels.pixel_values, rows.numpy()) == 0


@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
def test_photographs_are_bit_exact_from_the_file_on(name: str) -> None:
    pixels = runtime_image.preprocess(runtime_image.load_image(photograph(name)), {})
    with Image.open(photograph(name)) as photo:
        rows, grid = reference_image.preprocess(photo)
    assert pixels.grid == grid == (28, 40)
    assert differing(pixels.pixel_values, rows.numpy()) == 0


@pytest.mark.parametrize(("height", "width", "grid"), TABLE)
def test_published_sizes(height: int, width: int, grid: tuple[int, int]) -> None:
    wanted = (16 * grid[0], 16 * grid[1])
    assert runtime_image.target_size(height, width) == wanted
    assert reference_image.target_size(height, width) == wanted


def test_size_depends_on_the_rounding_of_repeated_subtraction() -> None:
    # 22 steps down: 5600 * (1 - 22 * 0.02) is a hair above 3136 and would be rounded up to 3168.
    assert runtime_image.target_size(5600, 5000) == (3136, 2816)
    assert reference_image.target_size(5600, 5000) == (3136, 2816)


@every
@given(height=side, width=side)
def test_any_image_size_gives_the_references_grid(height: int, width: int) -> None:
    size = runtime_image.target_size(height, width)
    assert size == reference_image.target_size(height, width)
    assert (size[0] // 16) * (size[1] // 16) <= 36864
    assert size[0] % 32 == size[1] % 32 == 0


@every
@given(st.integers(1, 120), st.integers(1, 120), resized_side, resized_side, st.integers(0, 2**16))
def test_any_small_picture_resizes_bit_exactly(h: int, w: int, height: int, width: int, seed: int) -> None:
    image = noise(h, w, seed)
    assert differing(runtime_image.resize(image, height, width), torch_resize(image, height, width)) == 0


@pytest.mark.parametrize(
    ("h", "w", "height", "width"),
    [(1, 1, 32, 32), (2, 2000, 32, 2016), (2000, 2, 2016, 32), (200, 9000, 200, 32), (900, 700, 64, 32)],
)
def test_extreme_pictures_resize_bit_exactly(h: int, w: int, height: int, width: int) -> None:
    image = noise(h, w)
    assert differing(runtime_image.resize(image, height, width), torch_resize(image, height, width)) == 0


def test_pillows_own_resize_is_within_one_lsb_but_not_equal() -> None:
    # Pillow keeps 22 bits of weight where torch keeps 15: the reason for a resize of our own.
    image = noise(220, 1468)
    pillow = np.array(Image.fromarray(image).resize((1472, 224), Image.Resampling.BILINEAR))
    ours = runtime_image.resize(image, 224, 1472)
    assert np.abs(pillow.astype(int) - ours).max() == 1
    assert 0 < differing(pillow, ours) < ours.size // 100


def test_patch_rows_are_in_merge_block_order_with_channels_last() -> None:
    height, width = 64, 96
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    rows = runtime_image.patchify(((y * width + x) * 3 + c).astype(np.float32))
    corners = [(int(row[0]) // 3 // width // 16, int(row[0]) // 3 % width // 16) for row in rows]
    assert corners[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert corners[12:14] == [(2, 0), (2, 1)]
    assert rows[0, :4].tolist() == [0, 1, 2, 3]  # r, g, b of the first pixel, then its right neighbour
    assert rows[0, 48] == width * 3  # then the next line of the patch


# Picture files


@pytest.mark.parametrize("mode", MODES)
def test_modes_load_as_pillow_converts_them(mode: str, tmp_path: Path) -> None:
    grey = Image.fromarray(noise(9, 7)).convert("L")
    wide = {"I": np.int32, "I;16": np.uint16, "F": np.float32}.get(mode)
    image = grey.convert(mode) if wide is None else Image.fromarray(np.array(grey).astype(wide) * wide(3))
    assert image.mode == mode
    file = tmp_path / "picture.tiff"
    image.convert("RGB").save(file) if mode == "HSV" else image.save(file)
    loaded = runtime_image.load_image(file)
    assert loaded.flags.c_contiguous
    assert differing(loaded, np.array(image.convert("RGB"))) == 0


def test_alpha_is_dropped_and_palette_transparency_does_not_warn(tmp_path: Path) -> None:
    clear = Image.merge("RGBA", [*Image.fromarray(noise(5, 6)).split(), Image.new("L", (6, 5), 0)])
    clear.save(tmp_path / "clear.png")
    assert differing(runtime_image.load_image(tmp_path / "clear.png"), noise(5, 6)) == 0
    palette = Image.fromarray(noise(5, 6)).convert("P")
    palette.save(tmp_path / "palette.png", transparency=bytes(range(200)))
    loaded = runtime_image.load_image(tmp_path / "palette.png")  # warnings are errors here
    assert differing(loaded, np.array(palette.convert("RGB"))) == 0


def test_exif_orientation_is_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees"
    Image.fromarray(noise(5, 6)).save(tmp_path / "turned.png", exif=exif)
    assert differing(runtime_image.load_image(tmp_path / "turned.png"), noise(5, 6)) == 0


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes((3 * width + 1) * height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [b"", b"no picture at all", png(0, 4), png(4, 0), png(8, 8)[:-30]],
    ids=["empty", "text", "no_width", "no_height", "truncated"],
)
def test_unreadable_files_are_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"^image=.*broken\.png cannot be read .* save it as PNG or JPEG$"):
        runtime_image.load_image(file)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^image=.*nowhere\.png does not exist; give the path"):
        runtime_image.load_image(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match=r"cannot be read \(.*directory"):
        runtime_image.load_image(tmp_path)


@pytest.mark.parametrize("limit", [10, 30], ids=["beyond_twice", "beyond_once"])
def test_decompression_bombs_are_refused(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.png").write_bytes(png(8, 5))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(InputError, match=rf"bomb\.png has more than {limit} pixels; scale"):
        runtime_image.load_image(tmp_path / "bomb.png")


def test_the_callers_warning_filters_are_restored(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(png(4, 4))
    before = list(warnings.filters)
    runtime_image.load_image(tmp_path / "good.png")
    assert list(warnings.filters) == before


# preprocessor_config.json


def test_mean_std_and_rescale_come_from_the_config() -> None:
    config = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0], "rescale_factor": 1 / 128}
    image = noise(32, 32)
    pixels = runtime_image.preprocess(image, config).pixel_values
    wanted = (image[0, 0] / 128 - np.array([0.1, 0.2, 0.3])) / np.array([0.5, 0.25, 1.0])
    assert np.allclose(pixels[0, :3], wanted, rtol=0, atol=1e-6)


def test_silent_and_null_keys_take_the_processors_defaults() -> None:
    image = noise(40, 50)
    config = {"do_resize": None, "image_mean": None, "max_num_patches": 256, "do_convert_rgb": None}
    stated = {
        "do_resize": True,
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
    }
    first, second = (runtime_image.preprocess(image, c).pixel_values for c in (config, stated))
    assert differing(first, second) == 0


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("do_resize", False, "true"),
        ("do_rescale", False, "true"),
        ("do_normalize", 0, "true"),
        ("resample", 3, r"2 \(bilinear\)"),
        ("rescale_factor", 0, "a positive number"),
        ("patch_size", 16.5, "a positive integer"),
        ("image_mean", [0.5, 0.5], "3 numbers"),
        ("image_mean", "0.5", "3 numbers"),
        ("image_mean", [0.5, 0.5, float("nan")], "3 numbers"),
        ("image_std", [0.5, 0.0, 0.5], "3 positive numbers"),
    ],
)
def test_other_processing_is_refused_by_key_and_value(key: str, value: object, wanted: str) -> None:
    with pytest.raises(InputError, match=rf"^{key}=.*, but should be {wanted} \[preprocessor_config") as error:
        runtime_image.preprocess(noise(8, 8), {key: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("image", [np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3))])
def test_anything_but_an_rgb_picture_is_refused(image: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"^image=.* but should be uint8 \(H, W, 3\)"):
        runtime_image.preprocess(image, {})


def test_a_cap_below_one_merged_cell_is_refused() -> None:
    with pytest.raises(InputError, match="max_patches=3, but should be at least 4"):
        runtime_image.target_size(10, 10, max_patches=3)


# Window order, rotary tables, masks


@every
@given(grids=grids)
def test_any_grid_gives_the_references_window_index(grids: list[tuple[int, int]]) -> None:
    index, bounds = windows.window_index(grids)
    reference_index, reference_bounds = reference_vision.window_index(grids, window_cells=8, merge=2)
    assert differing(index, reference_index.numpy()) == 0
    assert differing(bounds, reference_bounds.numpy()) == 0


@pytest.mark.parametrize("head_dim", [72, 12])
@pytest.mark.parametrize("grid", [(2, 2), (14, 92), (8, 188), (188, 8), (2, 18432)])
def test_rotary_tables_equal_the_references(grid: tuple[int, int], head_dim: int) -> None:
    angles = reference_vision.rotary_angles([grid, (2, 4)], head_dim=head_dim, merge=2)
    cos, sin = windows.rotary_tables([grid, (2, 4)], head_dim)
    assert cos.dtype == sin.dtype == np.float32
    assert np.abs(cos - angles.cos().numpy()).max() <= 2**-23  # equal angles; only cos and sin may round apart
    assert np.abs(sin - angles.sin().numpy()).max() <= 2**-23


@pytest.mark.parametrize("grids", [[(22, 22)], [(14, 92)], [(22, 32), (2, 2), (6, 18)]])
def test_order_and_masks_equal_the_references(grids: list[tuple[int, int]]) -> None:
    tables = reference_vision.tables(grids, sizes(FULL).vision)
    index, bounds = windows.window_index(grids)
    order = windows.patch_order(index)
    assert differing(order, tables.order.numpy()) == 0
    assert differing(windows.inverse_order(order), tables.inverse.numpy()) == 0
    assert differing(windows.block_mask(bounds), tables.window_mask.numpy()) == 0
    assert differing(windows.block_mask(windows.image_bounds(grids)), tables.full_mask.numpy()) == 0
