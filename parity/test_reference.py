"""Claim: the reference is transformers' own model, is deterministic, and its cuts into graphs change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers.models.youtu.modeling_youtu import YoutuForCausalLM
from harness.dumps import dump_paths, write_dump
from harness.metrics import measure
from parity.checks import inputs_of
from parity.plugin import Session
from parity.workspace import Workspace, tensor_name
from references import dumping
from references.youtu_vl.config import FULL, sizes
from references.youtu_vl.model import Reference

MODEL = "youtu_vl"


@pytest.fixture(scope="module")
def workspace(request: pytest.FixtureRequest) -> Workspace:
    from parity.plugin import SESSION

    return request.config.stash[SESSION].workspaces[MODEL]


@pytest.fixture(scope="module")
def reference(workspace: Workspace) -> Reference:
    return dumping.open_reference(MODEL, workspace.checkpoint)


@pytest.fixture(scope="module")
def whole(reference: Reference) -> "YoutuForCausalLM":
    """transformers' whole model with the checkpoint's weights, loaded by their names."""
    from transformers.models.youtu.modeling_youtu import YoutuForCausalLM

    from references.youtu_vl import llm

    model = YoutuForCausalLM(llm.configuration(reference.sizes.text)).eval()
    checkpoint = reference.checkpoint
    state = {name: checkpoint.tensor(name) for name in model.state_dict() if name != "lm_head.weight"}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    model.tie_weights()
    return model


def rel_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return measure(actual.numpy(), expected.numpy()).rel_l2


def test_every_value_of_the_configuration_is_set() -> None:
    from transformers.models.youtu.configuration_youtu import YoutuConfig

    from references.youtu_vl import llm

    config, text = llm.configuration(sizes(FULL).text), sizes(FULL).text
    for name in text.__dataclass_fields__:
        if name != "rope_theta":
            assert getattr(config, name) == getattr(text, name), name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert YoutuConfig().hidden_size != config.hidden_size  # the class's defaults are another model's


def test_greedy_ids_and_logits_are_those_of_the_whole_model(
    workspace: Workspace, reference: Reference, whole: "YoutuForCausalLM"
) -> None:
    dump = workspace.dump("text_only")
    prompt = torch.tensor([dump.values["prompt_ids"]])
    found = whole.generate(
        prompt,
        max_new_tokens=24,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    assert found.sequences[0, prompt.shape[1] :].tolist() == dump.values["ids"][:24]
    logits = torch.cat(found.logits)
    assert rel_l2(torch.from_numpy(dump.tensors["logits"][:24]), logits) <= 1e-4  # 40 layers amplify fp32 noise


def test_picture_rows_go_through_the_whole_model_too(workspace: Workspace, whole: "YoutuForCausalLM") -> None:
    dump = workspace.dump("smallest")
    embeds = torch.from_numpy(dump.tensors["prefill.embeds"])[None]
    with torch.no_grad():
        logits = whole(inputs_embeds=embeds).logits[0, -1]
    assert rel_l2(torch.from_numpy(dump.tensors["logits"][0]), logits) <= 1e-4


@pytest.mark.parametrize("index", [0, 17, 39])
def test_decode_in_two_parts_equals_prefill(workspace: Workspace, reference: Reference, index: int) -> None:
    """One row more through prefill = dqkv, cache, dattn for that row."""
    from references.youtu_vl import llm

    random = torch.Generator().manual_seed(index)
    rows = torch.randn(19, reference.sizes.text.hidden_size, generator=random)
    layer = reference.module("llm.layer", index)
    cos, sin = llm.rotary_tables(llm.configuration(reference.sizes.text), 0, 19)
    with torch.no_grad():
        whole = llm.prefill(layer, rows, cos, sin, llm.causal_mask(19))
        before = llm.prefill(layer, rows[:18], cos[:, :18], sin[:, :18], llm.causal_mask(18))
        new = llm.dqkv(layer, rows[18:], cos[:, 18:], sin[:, 18:])
        key = torch.cat([before["key"], new["key"]], dim=1)
        value = torch.cat([before["value"], new["value"]], dim=1)
        last = llm.dattn(layer, rows[18:], new["query"], key, value, torch.zeros(1, 1, 19))
    assert rel_l2(last["hidden"], whole["hidden"][18:]) <= 1e-6
    assert rel_l2(key, whole["key"]) <= 1e-6


def test_running_the_reference_on_its_own_dump_gives_exactly_zero(workspace: Workspace, reference: Reference) -> None:
    dump = workspace.dump("smallest")
    with dumping.one_thread():
        for graph in workspace.graphs.values():
            inputs = {name: torch.from_numpy(value) for name, value in inputs_of(graph, dump).items()}
            for port, value in reference.run(graph, inputs).items():
                stored = dump.tensors[tensor_name(graph, port)]
                assert np.array_equal(value.numpy(), stored), f"{graph.id} {port}"


def test_two_runs_give_the_same_bytes(workspace: Workspace, tmp_path: Path) -> None:
    files = []
    for run in ("first", "second"):
        write_dump(tmp_path / run, workspace.make_dump("one_character"))
        files.append([path.read_bytes() for path in dump_paths(tmp_path / run, "one_character")])
    assert files[0] == files[1]


def test_noise_floors_are_those_of_fp32(workspace: Workspace) -> None:
    floors = workspace.dump("square").values["floors"]
    assert len(floors) == 29 + 40 * (3 + 3 + 1)
    assert all(1e-9 < floor < 2e-6 for floor in floors.values()), max(floors.items(), key=lambda item: item[1])


def test_the_committed_dump_is_what_the_reference_gives(workspace: Workspace, session: Session) -> None:
    """Made anew on this machine: tokens exact, tensors within 1e-5.

    Where the CPU's vector width is not the one that the dump was made with, sums run in another order and the 40
    decoder layers amplify that: 1.07e-5 was seen with AVX2 against AVX-512, so 3e-5 holds there.
    """
    stored, made = workspace.dump("square"), workspace.make_dump("square")
    exact = ("prompt", "prompt_ids", "grids", "image_positions", "ids", "text")
    assert {name: made.values[name] for name in exact} == {name: stored.values[name] for name in exact}
    assert made.provenance["checkpoint"] == stored.provenance["checkpoint"]
    assert set(made.tensors) == set(stored.tensors)
    limit = 1e-5 if made.provenance["made_with"]["cpu"] == stored.provenance["made_with"]["cpu"] else 3e-5
    for name, value in stored.tensors.items():
        assert made.tensors[name].dtype == value.dtype, name
        if value.any():
            assert measure(made.tensors[name], value).rel_l2 <= limit, name
        else:
            assert not made.tensors[name].any(), name
