"""Claim: bad input is named with what to do next: exit code 2, no traceback, nothing half-written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from harness.errors import UnjudgedError
from parity import __main__ as parity_verbs
from parity.workspace import ROOT, Choice, Workspace, home
from references.shards import INDEX, write_json
from runtime.__main__ import main as runtime_main
from runtime.graphs import Manifest, NcnnRunner
from runtime.image import load_image
from runtime.youtu_vl import Pipeline

MODEL = "youtu_vl"
NEVER = ("Traceback", 'File "')
PROMPT = "Describe the image briefly."


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return Workspace(Choice(MODEL)).exporter.model_folder()


@pytest.fixture
def own_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder; its files are replaced in it, never written to."""
    return Path(shutil.copytree(model_folder, tmp_path / "model", copy_function=os.link))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.linear_gradient("L").resize((48, 40)).save(path)
    return path


def unmet(text: str, words: list[str]) -> list[str]:
    """Words that a message lacks, and signs of a traceback that it has."""
    return [word for word in words if word not in text] + [sign for sign in NEVER if sign in text]


def replace(path: Path, data: bytes) -> None:
    """Other content for a file whose bytes may be shared."""
    path.unlink()
    path.write_bytes(data)


# ---- the runtime


class Refusal:
    """Runs the runtime in process and checks that it refuses."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, folder: Path, *arguments: str, says: list[str], name: str = MODEL) -> None:
        try:
            code: object = runtime_main([name, "--model", str(folder), "--threads", "1", "-n", "2", *arguments])
        except SystemExit as ended:  # argparse
            code = ended.code
        out, err = self.capsys.readouterr()
        assert unmet(err, ["error: ", *says]) == []
        assert (code, out) == (2, "")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mode", "nonsense"], ["--mode", "'nonsense'", "resident"]),
        (["-n", "0"], ["-n", "'0' should be a whole number, 1 or more"]),
        (["-n", "abc"], ["-n", "'abc' should be a whole number, 1 or more"]),
        (["-n", "-3"], ["-n"]),
        (["--threads", "0"], ["--threads", "'0' should be a whole number, 1 or more"]),
        (["--context", "1.5"], ["--context", "'1.5' should be a whole number, 1 or more"]),
        (["--ids", "--json"], ["--json", "not allowed with argument --ids"]),
        (["--nonsense"], ["--nonsense", "usage: python -m runtime"]),
    ],
    ids=" ".join,
)
def test_wrong_flags(refusal: Refusal, model_folder: Path, arguments: list[str], says: list[str]) -> None:
    refusal(model_folder, *arguments, says=says)


def test_a_folder_that_holds_no_model(refusal: Refusal, tmp_path: Path, picture: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere", picture):
        refusal(folder, says=[str(folder / "manifest.json"), "is missing", "python -m parity export"])


def test_a_broken_manifest(refusal: Refusal, own_folder: Path) -> None:
    path = own_folder / "manifest.json"
    replace(path, path.read_bytes()[:-20])
    refusal(own_folder, says=[str(path), "export the model again"])


def test_another_model(refusal: Refusal, own_folder: Path) -> None:
    says = [f"{own_folder} holds {MODEL}, but nonsense was asked for", f"run: python -m runtime {MODEL}"]
    refusal(own_folder, name="nonsense", says=says)


@pytest.mark.parametrize("model", ["nonsense", "mat", "../x", "a.b"])
def test_a_model_that_the_runtime_does_not_have(refusal: Refusal, own_folder: Path, model: str) -> None:
    path = own_folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) | {"model": model}
    replace(path, json.dumps(manifest).encode())
    refusal(own_folder, name=model, says=[f"model {model} is unknown", f"runtime/{model}.py"])


def _text(path: Path) -> None:
    path.write_text("no picture\n", encoding="utf-8")


def _nothing(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    Image.linear_gradient("L").save(path, "PNG")
    path.write_bytes(path.read_bytes()[:60])


def _no_pixels(path: Path) -> None:
    path.write_bytes(b"GIF89a\0\0\0\0\0\0\0;")


def _a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_text, _nothing, _cut, _no_pixels, _a_folder], ids=lambda make: make.__name__)
def test_an_unreadable_image(
    refusal: Refusal, model_folder: Path, picture: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "bad.png"
    make(path)
    refusal(model_folder, "--image", str(picture), "--image", str(path), says=[f"image={path}", "save it as PNG"])


def test_a_missing_image(refusal: Refusal, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.jpg"
    refusal(model_folder, "--image", str(path), says=[f"image={path} does not exist", "give the path"])


def test_a_prompt_longer_than_the_context(refusal: Refusal, model_folder: Path) -> None:
    manifest = Manifest.read(model_folder)
    needed = len(Pipeline(manifest, NcnnRunner(manifest)).prompt(PROMPT, []).ids) + 2
    says = [f"need {needed} tokens", f"the context holds {needed - 1}", "--context", "shorter prompt"]
    refusal(model_folder, "--prompt", PROMPT, "--context", str(needed - 1), says=says)


def test_a_context_that_the_model_does_not_have(refusal: Refusal, model_folder: Path) -> None:
    says = ["the context is 999999999", "32768 positions", "smaller --context"]
    refusal(model_folder, "--context", "999999999", says=says)


def test_image_tokens_without_an_image(refusal: Refusal, model_folder: Path, picture: Path) -> None:
    says = ["holds 2 image placeholders, but there are 1 images", "--image"]
    refusal(model_folder, "--image", str(picture), "--prompt", "<|image_pad|>", says=says)


def test_a_prompt_that_is_no_text(refusal: Refusal, model_folder: Path) -> None:
    refusal(model_folder, "--prompt", "a\udcff", says=["lone surrogate U+DCFF", "decode its source"])


@pytest.mark.parametrize("mode", ["resident", "streaming"])
@pytest.mark.parametrize("suffix", ["param", "bin"])
def test_a_missing_graph(refusal: Refusal, own_folder: Path, suffix: str, mode: str) -> None:
    # what a prompt goes through; prefill has no weights of its own
    part = "prefill" if (mode, suffix) == ("streaming", "param") else "dqkv"
    path = own_folder / MODEL / f"llm.layer.00.{part}.{suffix}"
    path.unlink()
    refusal(own_folder, "--mode", mode, says=[str(path), "is missing", "export the model again"])


@pytest.mark.parametrize("suffix", ["param", "bin"])
def test_a_graph_of_another_checkpoint(refusal: Refusal, own_folder: Path, suffix: str) -> None:
    path = own_folder / MODEL / f"llm.layer.01.dqkv.{suffix}"
    other = (own_folder / MODEL / f"llm.layer.02.dattn.{suffix}").read_bytes()
    replace(path, other)
    refusal(own_folder, says=[str(path), "other hash", "export the model again"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "norm.bin", "embed_tokens.bin"])
def test_a_file_of_another_checkpoint_beside_the_graphs(refusal: Refusal, own_folder: Path, name: str) -> None:
    path = own_folder / name
    replace(path, path.read_bytes()[:-4])
    refusal(own_folder, says=[str(path), "other hash", "export the model again"])
    path.unlink()
    refusal(own_folder, says=[str(path), "is missing", "export the model again"])


def test_a_file_that_may_not_be_read(refusal: Refusal, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(folder: Path) -> Manifest:
        raise PermissionError(13, "Permission denied", str(folder / "manifest.json"))

    monkeypatch.setattr(Manifest, "read", forbidden)  # a privileged user may read everything
    refusal(model_folder, says=["Permission denied", str(model_folder / "manifest.json")])


# ---- the runtime as a program


def program(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A program of the house in a process of its own."""
    command = [sys.executable, "-m", *arguments]
    # its own flushes count, not a setting that makes them needless
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env = {**surroundings, **(env or {})}
    pipe = subprocess.PIPE
    heard = None if sys.platform == "win32" else hear_control_c
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, bufsize=0, preexec_fn=heard)


def hear_control_c() -> None:
    """A job that a shell runs in the background ignores Ctrl-C and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(errors="replace"), err.decode()


def asking(folder: Path, *arguments: str) -> list[str]:
    """Arguments that ask the runtime something."""
    return ["runtime", MODEL, "--model", str(folder), "--prompt", PROMPT, "--threads", "1", *arguments]


def test_the_exit_code_is_the_programs(model_folder: Path, tmp_path: Path) -> None:
    code, out, err = finished(program(*asking(model_folder, "--image", str(tmp_path / "none.jpg"))))

    assert (code, out) == (2, "")
    assert unmet(err, ["error: image=", "does not exist"]) == []


BLOCKED = ("torch", "transformers", "tokenizers", "safetensors", "pnnx", "sklearn")
BLOCKED_OURS = ("harness", "references", "exporters", "parity")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED + BLOCKED_OURS}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment where nothing but the runtime's own needs can be imported."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def test_the_bare_environment_is_bare(bare: dict[str, str]) -> None:
    for name in ("torch", "parity"):
        code = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            cwd=ROOT,
            env=os.environ | bare,
            capture_output=True,
            check=False,
        )
        assert f"{name} is blocked" in code.stderr.decode()


def test_the_runtime_answers_without_torch(model_folder: Path, picture: Path, bare: dict[str, str]) -> None:
    manifest = Manifest.read(model_folder)
    pipeline = Pipeline(manifest, NcnnRunner(manifest))
    tokens = list(pipeline.generate([load_image(picture)], PROMPT, 8))
    ids, text = [token.id for token in tokens], "".join(token.text for token in tokens)
    arguments = asking(model_folder, "--image", str(picture), "-n", "8")
    processes = [program(*arguments, *flags, env=bare) for flags in (["--json"], ["--ids"], ["--mode", "streaming"])]
    (_, as_json, _), (_, as_ids, _), (_, as_text, _) = results = [finished(process) for process in processes]

    assert [code for code, _, _ in results] == [0] * 3
    assert all(re.fullmatch(r"memory: .* are free\n", err) for _, _, err in results)
    assert json.loads(as_json) == {"ids": ids, "text": text}
    assert as_ids == " ".join(map(str, ids)) + "\n"
    assert as_text == text + "\n"
    assert len(set(ids)) > 4


def test_text_arrives_before_the_end_and_control_c_ends_it(model_folder: Path) -> None:
    process = program(*asking(model_folder, "-n", "3000"))  # fewer bytes than a pipe's buffer holds back
    assert process.stdout is not None
    first = process.stdout.read(1)
    if sys.platform == "win32":
        process.kill()
        return
    process.send_signal(signal.SIGINT)
    code, out, err = finished(process)

    assert (len(first), code) == (1, 130)
    assert unmet(err, ["interrupted"]) == []
    assert len(out) < 2000  # of over 7000


def test_a_reader_who_leaves_ends_it_quietly(model_folder: Path) -> None:
    process = program(*asking(model_folder, "-n", "2000"))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    with process.stderr as errors:
        assert re.fullmatch(rb"memory: .* are free\n", errors.read())
    assert process.wait(120) == 1


# ---- checkpoints, through the verbs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(Workspace(Choice(MODEL)).checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def fresh_home(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, that knows the converted structures and nothing else."""
    folder = tmp_path / "home"
    (folder / "store").mkdir(parents=True)
    (folder / "store" / "structure").symlink_to(home() / "store" / "structure")
    monkeypatch.setenv("PARITY_HOME", str(folder))
    return folder


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`python -m parity ...` in process: exit code and all that was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["parity", *arguments])
        try:
            code = parity_verbs.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        return code, "".join(capsys.readouterr())

    return run


def _shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return folder / str(index["weight_map"][name])


def _change(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    path = _shard_of(folder, name)
    values = {key: value.clone() for key, value in load_file(path).items()}
    changed = change(values.pop(name))
    save_file(values | ({} if changed is None else {name: changed}), path)


BIAS = "siglip2.vision_model.embeddings.patch_embedding.bias"


def _without_shard(folder: Path) -> None:
    _shard_of(folder, BIAS).unlink()


def _cut_shard(folder: Path) -> None:
    path = _shard_of(folder, BIAS)
    path.write_bytes(path.read_bytes()[:-100])


def _wrong_shape(folder: Path) -> None:
    _change(folder, BIAS, lambda value: value[1:].clone())


def _missing_tensor(folder: Path) -> None:
    _change(folder, BIAS, lambda value: None)


def _nan(folder: Path) -> None:
    _change(folder, BIAS, lambda value: value.index_fill(0, torch.tensor([2]), float("nan")))


def _nan_in_the_table(folder: Path) -> None:
    _change(
        folder,
        "model.embed_tokens.weight",
        lambda value: value.index_fill(0, torch.tensor([2]), float("nan")),
    )


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def _list_config(folder: Path) -> None:
    write_json(folder / "config.json", [1])


def _config_without_a_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["kv_lora_rank"]
    write_json(folder / "config.json", config)


def _config_of_text_only(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | {"vision_config": None})


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


DAMAGE: dict[Callable[[Path], None], list[str]] = {
    _without_shard: ["model-00001-of", "is missing", "fetch it again"],
    _cut_shard: ["model-00001-of", "truncated", "fetch it again"],
    _wrong_shape: ["model-00001-of", f"tensor {BIAS} has shape (47,), but should be (48,)", "fetch"],
    _missing_tensor: ["model-00001-of", f"tensor {BIAS} is not in the shard", "fetch the file again"],
    _nan: ["model-00001-of", f"tensor {BIAS} holds 1 NaN or Inf", "fetch it again"],
    _nan_in_the_table: ["tensor model.embed_tokens.weight holds 64 NaN or Inf", "fetch it again"],
    _no_config: ["has no config.json"],
    _cut_config: ["config.json is not JSON", "fetch the file again"],
    _list_config: ["config.json"],
    _config_without_a_key: ["config.json has no key 'kv_lora_rank'"],
    _config_of_text_only: ["config.json"],
    _no_tokenizer: ["has no tokenizer.json", "copy it from"],
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_checkpoint_is_not_exported(
    checkpoint: Path,
    fresh_home: Path,
    verb: Callable[..., tuple[int, str]],
    damage: Callable[[Path], None],
) -> None:
    damage(checkpoint)
    code, said = verb("export", MODEL, "--checkpoint", str(checkpoint))

    assert unmet(said, ["error: ", str(checkpoint), *DAMAGE[damage]]) == []
    assert code == 2
    assert built(fresh_home) <= {"base"}


def built(folder: Path) -> set[str]:
    """Kinds of artefacts that count as built; nothing half-written may lie beside them."""
    store = folder / "store"
    artefacts = [path for kind in store.iterdir() if not kind.is_symlink() for path in kind.iterdir() if path.is_dir()]
    assert [path for path in artefacts if not (path / "complete.json").is_file()] == []
    return {path.parent.name for path in artefacts}


@pytest.mark.parametrize("damage", [_without_shard, _no_config])
def test_a_damaged_checkpoint_is_not_dumped(
    checkpoint: Path,
    fresh_home: Path,
    verb: Callable[..., tuple[int, str]],
    damage: Callable[[Path], None],
) -> None:
    damage(checkpoint)
    code, said = verb("dumps", MODEL, "--checkpoint", str(checkpoint))

    assert unmet(said, ["error: ", str(checkpoint), *DAMAGE[damage]]) == []
    assert (code, built(fresh_home)) == (2, set())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "youtu"], ["model youtu is unknown", f"did you mean {MODEL}?"]),
        (["export", "youtu"], ["model youtu is unknown", f"did you mean {MODEL}?"]),
        (["dumps", "nonsense"], ["model nonsense is unknown"]),
        (["graphs", "nonsense"], ["model nonsense is unknown"]),
        (["checkpoint", "nonsense"], ["model nonsense is unknown"]),
        (["export", MODEL, "--profile", "nonsense"], ["profile nonsense is unknown", "did you mean tiny?"]),
        (["export", MODEL, "--table", "nonsense"], ["table is 'nonsense'", "float32, float16"]),
        (["export", MODEL, "--checkpoint", "nowhere"], ["checkpoint nowhere", "config.json"]),
        (["dumps", MODEL, "--checkpoint", "nowhere"], ["checkpoint nowhere", "config.json"]),
        (["run", MODEL, "--checkpoint", "nowhere"], ["checkpoint nowhere", "config.json"]),
        (["dumps", MODEL, "--case", "sqare"], ["case sqare is unknown", "did you mean square?"]),
        (["run", MODEL, "--case", "sqare"], ["case sqare is unknown", "did you mean square?"]),
        (["run", "-j", "0"], ["-j", "greater than or equal"]),
        (["nonsense"], ["nonsense", "--help"]),
    ],
    ids=" ".join,
)
def test_a_verb_refuses_before_it_builds(
    fresh_home: Path, verb: Callable[..., tuple[int, str]], arguments: list[str], says: list[str]
) -> None:
    code, said = verb(*arguments)

    assert unmet(said, says) == []
    assert (code, built(fresh_home)) == (2, set())


# ---- building forbidden


def test_a_run_that_may_not_build_says_what_to_type(fresh_home: Path) -> None:
    wanted = [
        "parity/test_graphs.py",
        "-k",
        "vision.embed and smallest",
        "--no-build",
        "-p",
        "no:cacheprovider",
    ]
    code, out, _ = finished(program("pytest", *wanted, "-q"))

    says = ["not built, and building is forbidden", f"build it: python -m parity checkpoint {MODEL}"]
    assert unmet(out, says) == []
    assert (code, built(fresh_home)) == (1, set())


def test_a_missing_graph_is_named_when_building_is_forbidden(fresh_home: Path) -> None:
    (fresh_home / "store" / "structure").unlink()
    _ = Workspace(Choice(MODEL)).checkpoint
    workspace = Workspace(Choice(MODEL, build=False))
    with pytest.raises(UnjudgedError) as refused:
        workspace.exporter.graph(f"{MODEL}/vision.embed")

    says = [
        f"{MODEL}/vision.embed",
        "not built, and building is forbidden",
        f"python -m parity export {MODEL}",
    ]
    assert unmet(str(refused.value), says) == []
    with pytest.raises(UnjudgedError) as refused:
        workspace.dump("smallest")

    says = [
        "dump of case smallest",
        "not built, and building is forbidden",
        f"python -m parity dumps {MODEL}",
    ]
    assert unmet(str(refused.value), says) == []
    assert built(fresh_home) == {"checkpoint"}
