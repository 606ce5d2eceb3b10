"""Claim: a checkpoint is read exactly or refused by name; synthetic weights are the same on any machine."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import references.checkpoint
from harness.errors import UnjudgedError
from references import generator
from references.checkpoint import SINGLE, Checkpoint
from references.dumping import open_reference
from references.shards import INDEX, write_json, write_shards
from references.youtu_vl import config, source
from references.youtu_vl.weights import tensors

Shapes = dict[str, tuple[int, ...]]
SHAPES: Shapes = {"embed.weight": (5, 4), "layer.0.weight": (4, 4), "norm.weight": (4,)}


def _values(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    made = {name: generator.tensor(1, name, shape, mean=0, std=1) for name, shape in SHAPES.items()}
    return {name: torch.from_numpy(value).to(dtype) for name, value in made.items()}


def _side_files(folder: Path) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "made_up"})
    write_json(folder / "tokenizer.json", {})
    return folder


def _sharded(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    write_shards(_side_files(folder), values.items(), shard_bytes=1)
    return folder


def _single(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    save_file(values, _side_files(folder) / SINGLE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _sharded(tmp_path / "checkpoint", _values())


# ---- what is read


@pytest.mark.parametrize("write", [_sharded, _single])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tensors_are_read_as_they_were_written_widened_to_float32(
    tmp_path: Path, dtype: torch.dtype, write: Callable[[Path, dict[str, torch.Tensor]], Path]
) -> None:
    values = _values(dtype)
    checkpoint = Checkpoint(write(tmp_path / "checkpoint", values), SHAPES)

    assert checkpoint.names() == sorted(SHAPES)
    for name, value in values.items():
        read = checkpoint.tensor(name)
        assert read.dtype == torch.float32
        assert torch.equal(read, value.float())


def test_a_shard_is_a_file_of_its_own_numbered_and_indexed(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))

    assert [path.name for path in Checkpoint(folder).shards()] == [
        f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert index["metadata"]["total_size"] == 2 * (20 + 16 + 4)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(index["weight_map"].values())


def test_a_stored_head_is_not_asked_for_and_does_not_hinder(tmp_path: Path) -> None:
    values = _values() | {"lm_head.weight": torch.ones(5, 4, dtype=torch.bfloat16)}
    stored = Checkpoint(_sharded(tmp_path / "stored", values), SHAPES)
    absent = Checkpoint(_sharded(tmp_path / "absent", _values()), SHAPES)

    assert "lm_head.weight" in stored
    assert "lm_head.weight" not in absent
    assert "lm_head.weight" not in tensors(config.sizes(config.FULL))
    assert torch.equal(stored.tensor("embed.weight"), absent.tensor("embed.weight"))


def test_one_tensor_at_a_time_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = references.checkpoint.safe_open

    class Watched:
        def __init__(self, path: Path, framework: str) -> None:
            self.shard = real(path, framework)

        def __enter__(self) -> "Watched":
            self.shard.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.shard.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self.shard, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            value: torch.Tensor = self.shard.get_tensor(name)
            return value

    monkeypatch.setattr(references.checkpoint, "safe_open", Watched)
    checkpoint = Checkpoint(folder, SHAPES)
    assert read == []  # shapes are checked by the headers alone
    checkpoint.tensor("norm.weight")
    assert read == ["norm.weight"]


def test_the_fingerprint_depends_on_weights_and_on_side_files(folder: Path) -> None:
    seen = [Checkpoint(folder).fingerprint()]
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    seen.append(Checkpoint(folder).fingerprint())
    (folder / "generation_config.json").unlink()
    _replace(folder, "norm.weight", torch.zeros(4, dtype=torch.bfloat16))
    seen.append(Checkpoint(folder).fingerprint())

    assert len(set(seen)) == 3


# ---- what is refused


def _shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return folder / str(index["weight_map"][name])


def _replace(folder: Path, name: str, value: torch.Tensor | None) -> None:
    path = _shard_of(folder, name)
    values = load_file(path)
    path.unlink()
    save_file(
        {key: old for key, old in values.items() if key != name} | ({} if value is None else {name: value}),
        path,
    )


def _remove_shard(folder: Path) -> None:
    _shard_of(folder, "norm.weight").unlink()


def _truncate_shard(folder: Path) -> None:
    path = _shard_of(folder, "norm.weight")
    path.write_bytes(path.read_bytes()[:-1])


def _empty_shard(folder: Path) -> None:
    _shard_of(folder, "norm.weight").write_bytes(b"")


def _reshape(folder: Path) -> None:
    _replace(folder, "norm.weight", torch.ones(5, dtype=torch.bfloat16))


def _transpose(folder: Path) -> None:
    _replace(folder, "embed.weight", torch.ones(4, 5, dtype=torch.bfloat16))


def _drop_from_shard(folder: Path) -> None:
    _replace(folder, "norm.weight", None)


def _drop_from_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"]["norm.weight"]
    write_json(folder / INDEX, index)


def _remove_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def _cut_index(folder: Path) -> None:
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-9])


def _empty_index(folder: Path) -> None:
    write_json(folder / INDEX, {"metadata": {}})


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ', encoding="utf-8")


def _config_is_a_list(folder: Path) -> None:
    write_json(folder / "config.json", [])


FAULTS: dict[Callable[[Path], None], list[str]] = {
    _remove_shard: ["model-00003-of-00003.safetensors is missing", INDEX, "fetch it again"],
    _truncate_shard: ["model-00003-of-00003.safetensors cannot be read", "truncated", "fetch it again"],
    _empty_shard: ["model-00003-of-00003.safetensors cannot be read", "truncated", "fetch it again"],
    _reshape: ["model-00003-of", "norm.weight has shape (5,), but should be (4,)", "config.json", "fetch"],
    _transpose: ["model-00001-of", "embed.weight has shape (4, 5), but should be (5, 4)", "config.json"],
    _drop_from_shard: ["model-00003-of", "norm.weight is not in the shard", INDEX, "fetch the file again"],
    _drop_from_index: ["1 of 3 tensors", "first norm.weight", "fetch it again"],
    _remove_weights: [f"neither {INDEX} nor {SINGLE}", "fetch the weights"],
    _cut_index: [INDEX, "is not JSON", "fetch the file again"],
    _empty_index: [INDEX, "no weight_map", "fetch the file again"],
    _no_config: ["has no config.json", "copy it from"],
    _no_tokenizer: ["has no tokenizer.json", "copy it from"],
    _cut_config: ["config.json is not JSON", "fetch the file again"],
    _config_is_a_list: ["config.json holds a JSON list, but should hold an object", "fetch the file again"],
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_damaged_folder_is_refused_by_name(folder: Path, plant: Callable[[Path], None]) -> None:
    plant(folder)
    with pytest.raises(UnjudgedError) as refused:
        Checkpoint(folder, SHAPES)

    assert [words for words in [str(folder), *FAULTS[plant]] if words not in str(refused.value)] == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"checkpoint folder .*nowhere does not exist; pass CHECKPOINT=DIR"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, bad: float) -> None:
    _replace(folder, "norm.weight", torch.tensor([1, bad, 1, bad], dtype=torch.bfloat16))
    checkpoint = Checkpoint(folder, SHAPES)

    with pytest.raises(UnjudgedError, match=r"model-00003.*tensor norm.weight holds 2 NaN or Inf; .*fetch it again"):
        checkpoint.tensor("norm.weight")


def test_quantised_weights_are_refused(folder: Path) -> None:
    _replace(folder, "norm.weight", torch.ones(4, dtype=torch.int8))
    checkpoint = Checkpoint(folder, SHAPES)

    with pytest.raises(UnjudgedError, match=r"norm.weight has dtype torch.int8, but should be bfloat16, float16"):
        checkpoint.tensor("norm.weight")


def test_a_tensor_that_nobody_stored_is_refused(folder: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"tensor lm_head.weight is in no shard; .*fetch it again"):
        Checkpoint(folder).tensor("lm_head.weight")


def test_a_misplaced_tensor_is_refused_when_it_is_read(folder: Path) -> None:
    _drop_from_shard(folder)
    with pytest.raises(UnjudgedError, match=r"tensor norm.weight is not in the shard that .*fetch the file again"):
        Checkpoint(folder).tensor("norm.weight")


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"config.json has no key '.*', which references.youtu_vl needs"):
        open_reference("youtu_vl", folder)


# ---- seeded weights


def test_the_generator_gives_the_pinned_bytes() -> None:
    made = generator.tensor(20260, "model.layers.0.mlp.up_proj.weight", (64, 96), mean=0.5, std=2)

    assert generator.NAME == "philox-irwin-hall-4"
    assert hashlib.sha256(made.astype("<f4").tobytes()).hexdigest() == PINNED_FLOATS
    assert hashlib.sha256(generator.bfloat16_bits(made).astype("<u2").tobytes()).hexdigest() == PINNED_BITS


PINNED_FLOATS = "3171b42ed78e25590692dc93bfe580ba03a180f33f853988ed93c29f9d02d192"
PINNED_BITS = "24fb39163fcb1510b0877dd3afe76eca31030829809a19d3a785fa56605472c8"


def test_the_generator_gives_the_same_numbers_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generator.tensor(1, "name", (7, 143), mean=0, std=1)
    for size in (1, 10, 143, 1000, 1001):
        monkeypatch.setattr(generator, "_BLOCK", size)
        assert np.array_equal(generator.tensor(1, "name", (7, 143), mean=0, std=1), whole)


def test_every_seed_and_name_has_numbers_of_its_own() -> None:
    made = [generator.tensor(seed, name, (4096,), mean=0, std=1) for seed in (1, 2) for name in ("a", "b", "1/a")]

    assert np.abs(np.corrcoef(made) - np.eye(len(made))).max() < 0.08  # 5 sigma


def test_the_numbers_have_the_asked_mean_and_deviation() -> None:
    made = generator.tensor(1, "name", (1 << 20,), mean=3.0, std=0.25).astype(np.float64)
    unit = (made - 3.0) / 0.25

    assert abs(unit.mean()) < 5 / 2**10
    assert abs(unit.std() - 1) < 5 / 2**10.5
    assert abs((unit**3).mean()) < 0.02
    assert 2.5 < (unit**4).mean() < 2.9  # of four uniform numbers: 3 - 6/5/4 = 2.7
    assert np.abs(unit).max() < 3.47


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = (np.arange(1 << 12, dtype=np.uint32) << 20) | 0x8000  # halfway, even and odd
    ties = np.concatenate([ties, ties | 0x10000, ties - 1, ties + 1])
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]

    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(generator.bfloat16_bits(values), theirs)


# ---- synthetic checkpoints


def test_the_tiny_checkpoint_holds_the_pinned_weights(tmp_path: Path) -> None:
    name = "model.layers.39.self_attn.kv_a_layernorm.weight"
    source.write(tmp_path, "tiny", only=(name,))
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")

    assert list(stored) == [name]
    bits = stored[name].view(torch.int16).numpy().astype("<i2")
    assert hashlib.sha256(bits.tobytes()).hexdigest() == PINNED_WEIGHT


PINNED_WEIGHT = "836edc3bb200bd53611d805f35a137a1f5572b4e610a4966f876ac4d958b5107"


def test_two_writes_of_the_tiny_checkpoint_give_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        source.write(folder, "tiny")
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})

    assert written[0] == written[1]
    assert sum(name.endswith(".safetensors") for name in written[0]) > 1
    Checkpoint(tmp_path / "one", tensors(config.sizes(config.TINY)))


def test_a_part_of_a_checkpoint_holds_the_weights_of_the_whole(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, only in ((whole, ("*",)), (part, ("*.layers.3.*", "merger.*"))):
        folder.mkdir()
        source.write(folder, "tiny", only=only)
    some = Checkpoint(part)

    assert 0 < len(some.names()) < len(Checkpoint(whole).names())
    assert all(torch.equal(some.tensor(name), Checkpoint(whole).tensor(name)) for name in some.names())


def test_every_tensor_of_the_tiny_checkpoint_has_numbers_of_its_own() -> None:
    blocks = {
        bits.flatten()[:32].view(torch.int16).numpy().tobytes() for _, bits in source._tensors(config.TINY, ("*",))
    }

    assert len(blocks) == len(tensors(config.sizes(config.TINY)))


def test_the_true_widths_add_up_to_the_published_count() -> None:
    shapes = tensors(config.sizes(config.FULL))

    assert len(shapes) == 923
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 5_340_551_024


def test_the_tiny_profile_has_every_tensor_of_the_full_one_narrower() -> None:
    full, tiny = (tensors(config.sizes(profile)) for profile in (config.FULL, config.TINY))

    assert list(tiny) == list(full)
    assert all(len(tiny[name]) == len(full[name]) for name in full)
    assert all(small <= large for name in full for small, large in zip(tiny[name], full[name], strict=True))
