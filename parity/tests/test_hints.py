"""Proof: of a planted fault the wrong tensor is told to look like that fault, and of a green graph none is."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.diagnosis import KINDS
from parity.blobs import Files, start
from parity.checks import inputs_of
from parity.drill import drill
from parity.explain import explain
from parity.faults import FAULTS, Port
from parity.filediff import Changed
from parity.hints import MOST, of_blob, of_weights
from parity.plugin import Session
from parity.recording import heads_behind, record
from parity.witnesses import conservative_options
from references.checkpoint import Checkpoint

pytestmark = pytest.mark.proof


@pytest.mark.parametrize(
    ("name", "place", "kind", "evidence"),
    [
        ("o_proj transposed", "self_attn.o_proj.weight", "axes", r"permuted by \(1, 0\)"),
        (
            "gate_proj and up_proj swapped",
            "mlp.gate_proj.weight",
            "another tensor",
            r"model\.layers\.12\.mlp\.up_proj\.weight's",
        ),
        ("decoder layers 10 and 11 swapped", "input_layernorm.weight", "another tensor", r"model\.layers\.11\."),
        ("one head of vision layer 13 zeroed", "self_attn.v_proj.weight", "zero", "head 0 of 4 is zero"),
        ("query heads tiled", "self_attn.q_proj.weight", "head order", "head 1 holds head 3"),
        ("NaN in the weights", "mlp.fc1.weight", "non-finite", "3 NaN"),
        ("attention not scaled", r"blob \d+", "all but first row", r""),
        ("patches of a cell by columns", "input hidden", "row order", "row 1 holds row 2"),
        ("cache row lost", "input key", "zero", "row 148 of 150"),
        ("oldest rows overwritten in one layer", "input key", "first rows", "rows 0-14"),
        ("decode position + 1", "input cos and sin", "rotary", "positions are off"),
    ],
)
def test_the_first_hint_is_the_fault(
    name: str, place: str, kind: str, evidence: str, session: Session, tmp_path: Path
) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    workspace = session.workspaces[fault.model]
    port = Port(workspace, tmp_path / "model")
    fault.plant(port)
    found = explain(
        workspace, f"{fault.model}/{fault.expected}", fault.case, folder=port.folder, pipeline=port.pipeline
    )
    where, hint = found.hints[0]
    assert re.fullmatch(place, where), found.lines()
    assert hint.kind == kind, found.lines()
    assert re.search(evidence, hint.evidence), found.lines()
    (line, *_) = [line for line in found.lines() if "hint: " in line]
    assert line.endswith(f"{kind}: {hint.evidence}")


def test_a_drill_beside_nothing_says_what_the_blob_looks_like(session: Session, tmp_path: Path) -> None:
    """Without a clean graph the expected tensor is the rewritten layer's."""
    name = "youtu_vl/llm.layer.05.prefill"
    workspace = session.workspaces["youtu_vl"]
    graph, folder = workspace.graphs[name], tmp_path / "exported"
    workspace.exporter.copy_graph(name, folder)
    text = (folder / "graph.param").read_text(encoding="utf-8")
    (tmp_path / "graph.param").write_text(text.replace("1 1 59 60 10=-1", "1 1 59 60 0=1.5 10=-1"), encoding="utf-8")
    files = Files(tmp_path / "graph.param", folder / "graph.bin", conservative_options())
    with start() as bench:
        module, inputs = workspace.exporter.rewritten(graph), inputs_of(graph, workspace.dump("square"))
        found = drill(bench, graph, module, inputs, files)
    assert found.guilty is not None
    assert [hint.kind for hint in found.guilty.hints] == ["scale"]
    assert found.lines()[-1].startswith("  hint: scale: every value is 1.5 x the reference's")


# ---- the parts


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.other = nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).reshape(1, -1, 3, 4).transpose(1, 2) * self.other(x).sum()


def test_heads_are_counted_where_the_layer_makes_them() -> None:
    values = record(Heads().requires_grad_(False), {"x": random(5, 6)}).values
    assert heads_behind(values, "project.weight") == 3
    assert heads_behind(values, "other.weight") == 1
    assert heads_behind(values, "absent.weight") == 1


def test_a_weight_is_seen_by_heads_only_where_whole_heads_are_wrong() -> None:
    values = record(Heads().requires_grad_(False), {"x": random(5, 6)}).values
    weight = random(12, 6)
    by_heads = weight.reshape(3, 4, 6)[[1, 0, 2]].reshape(12, 6)
    by_rows = weight[[5, 3, 1, 0, 2, 4, 6, 7, 8, 9, 10, 11]]
    ((_, first),) = of_weights([Changed("project.weight", "", by_heads, weight)], values)
    ((_, second),) = of_weights([Changed("project.weight", "", by_rows, weight)], values)
    assert (first.kind, second.kind) == ("head order", "row order")


def test_a_layer_of_wrong_tensors_is_told_by_a_few() -> None:
    changed = [Changed(f"{number}.weight", "", random(3), random(3), whose="other.weight") for number in range(20)]
    hints = of_weights(changed, [])
    assert len(hints) == MOST
    assert {hint.kind for _, hint in hints} == {"another tensor"} <= set(KINDS)


def test_a_mask_hides_no_blob_and_an_equal_one_has_no_hint() -> None:
    scores = random(6, 6)
    mask = np.triu(np.full((6, 6), -1e9, np.float32), 1)
    assert [hint.kind for hint in of_blob(np.where(mask < 0, mask, 2 * scores), np.where(mask < 0, mask, scores), 1)]
    assert not of_blob(scores + mask, scores + mask, 1)


def test_a_checkpoint_knows_whose_numbers_these_are(session: Session) -> None:
    checkpoint = Checkpoint(session.workspaces["youtu_vl"].checkpoint)
    name = "model.layers.3.self_attn.o_proj.weight"
    assert checkpoint.holder(checkpoint.tensor(name)) == name
    assert checkpoint.holder(checkpoint.tensor(name) + 1) is None
