"""Proof: a planted fault is found by halving, within the bound of probes, and a green port is let go."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import UnjudgedError
from parity import bisect
from parity.bisect import Bisection
from parity.checks import Subject, inputs_of
from parity.faults import FAULTS, Floats, Port
from parity.plugin import Session
from parity.probing import Prober, judged
from parity.seams import seams_of
from parity.witness import Witness
from parity.workspace import Choice, Workspace
from references.dumping import open_reference
from runtime.errors import InputError
from runtime.graphs import Arrays

pytestmark = pytest.mark.proof

MODEL, CASE = "youtu_vl", "square"
# One of every kind of place; the rest of the corpus is the scoreboard's.
NAMES = (
    "blue channel first",
    "default system prompt missing",
    "inverse used as window order",
    "h and w swapped in the vision rotary",
    "causal mask off by one",
    "image rows in reversed order",
    "full layer 7 windowed",
    "one head of vision layer 13 zeroed",
    "window order not undone",
    "gate_proj and up_proj swapped",
    "decode position + 1",
    "cache row lost",
    "final norm without its weight",
    "second best id chosen",
)
Change = Callable[[Mapping[str, Floats], Arrays], Arrays]  # inputs and outputs -> other outputs


def bisected(workspace: Workspace, port: Port, case: str = CASE) -> Bisection:
    reference = open_reference(workspace.model, workspace.checkpoint)
    found = bisect.bisect(Subject.of(workspace, case, port), reference)
    assert len(found.probes) <= math.ceil(math.log2(found.seams)) + 2
    return found


@pytest.fixture
def port(session: Session, tmp_path: Path) -> Port:
    return Port(session.workspaces[MODEL], tmp_path / "model")


def change_outputs(port: Port, changes: Mapping[str, Change]) -> None:
    """Some graphs give something else than ncnn computed."""
    run = port.runner.run

    def changed(graph_id: str, inputs: Mapping[str, Floats]) -> Arrays:
        outputs = run(graph_id, inputs)
        return changes[graph_id](inputs, outputs) if graph_id in changes else outputs

    port.runner.run = changed


def zigzag(by: float, width: int) -> Floats:
    """What a norm does not take away again, as it would one number for all channels."""
    return (by * (np.arange(width) % 2)).astype(np.float32)


def shifted(by: float) -> Change:
    return lambda inputs, outputs: outputs | {"hidden": outputs["hidden"] + zigzag(by, outputs["hidden"].shape[-1])}


def plant(port: Port, name: str) -> None:
    next(fault for fault in FAULTS if fault.name == name).plant(port)


# ---- what is found


@pytest.mark.parametrize("name", NAMES, ids=[name.replace(" ", "_") for name in NAMES])
def test_fault_is_found(name: str, session: Session, port: Port) -> None:
    plant(port, name)
    found = bisected(session.workspaces[MODEL], port)
    expected = next(fault.expected for fault in FAULTS if fault.name == name)
    assert found.guilty == f"{MODEL}/{expected}"
    assert found.confirmed
    assert not found.widened
    assert found.exit_code == 1


def _up_proj_doubled(port: Port) -> None:
    def change(weights: dict[str, Floats]) -> None:
        weights["mlp.up_proj.weight"] *= 2

    port.edit("smollm2/llm.layer.15.prefill", change)


def _decode_position_plus_one(port: Port) -> None:
    rotary = port.pipeline.rotary
    port.pipeline.rotary = lambda start, count: rotary(start + (start > 0), count)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(_up_proj_doubled, "llm.layer.15.prefill"), (_decode_position_plus_one, "llm.layer.00.dqkv")],
    ids=["weight", "position"],
)
def test_fault_is_found_in_a_model_without_pictures(
    change: Callable[[Port], None], expected: str, session: Session, tmp_path: Path
) -> None:
    workspace = session.workspaces["smollm2"]
    faulty = Port(workspace, tmp_path / "model")
    change(faulty)
    found = bisected(workspace, faulty, "capital")
    assert found.guilty == f"smollm2/{expected}"
    assert found.confirmed


def test_a_fault_that_the_ids_do_not_show_is_found_by_the_logits(session: Session, port: Port) -> None:
    plant(port, "norm epsilon of a vision layer")
    found = bisected(session.workspaces[MODEL], port)
    assert found.guilty == f"{MODEL}/vision.layer.03"
    assert all(probe.detail.endswith("the ids are the same") for probe in found.probes if not probe.matches)


def test_a_healed_error_does_not_hide_a_later_one(session: Session, port: Port) -> None:
    """The end matches again behind layer 6, so the error is not monotone over the seams."""
    layers = [f"{MODEL}/vision.layer.{index:02d}" for index in (5, 6)]
    change_outputs(port, {layers[0]: shifted(0.1), layers[1]: _undone(port, layers[1], 0.1)})
    plant(port, "gate_proj and up_proj swapped")
    workspace = session.workspaces[MODEL]
    assert bisected(workspace, port).guilty == f"{MODEL}/llm.layer.12.prefill"

    subject = Subject.of(workspace, CASE, port)
    prober = Prober(subject, open_reference(MODEL, workspace.checkpoint), list(seams_of(subject)))
    behind = [seam.id for seam in prober.seams].index(layers[0]) + 1
    assert [prober.matches(behind + step) for step in (-1, 0, 1)] == [True, False, True]


def test_an_error_that_is_healed_before_the_end_is_not_guilty(session: Session, port: Port) -> None:
    workspace = session.workspaces[MODEL]
    layers = [f"{MODEL}/vision.layer.{index:02d}" for index in (5, 6)]
    change_outputs(port, {layers[0]: shifted(0.1), layers[1]: _undone(port, layers[1], 0.1)})
    found = bisected(workspace, port)
    (record,) = Subject.of(workspace, CASE, port).isolated(workspace.graphs[layers[0]])
    assert record.verdict == "different"
    assert found.exit_code == 0
    assert found.command == f"python -m parity run {MODEL} --case {CASE}"


def _undone(port: Port, graph_id: str, by: float) -> Change:
    """What the graph gives when the shift of its input is taken back."""
    run = port.runner.run
    return lambda inputs, outputs: run(
        graph_id, {**inputs, "hidden": inputs["hidden"] - zigzag(by, inputs["hidden"].shape[-1])}
    )


# ---- how it is confirmed


def test_wrong_inputs_of_a_right_graph_are_named(session: Session, port: Port) -> None:
    plant(port, "cache row lost")
    found = bisected(session.workspaces[MODEL], port)
    assert found.evidence[0].startswith(f"{MODEL}/llm.layer.00.dattn alone is equal (rel_l2 ")
    assert "), but the runtime hands it another key: cosine 0.9" in found.evidence[0]
    assert found.evidence[1].startswith(f"{MODEL}/llm.layer.00.dqkv alone is equal")


def test_a_graph_that_is_wrong_on_the_ports_inputs_only(session: Session, port: Port) -> None:
    workspace = session.workspaces[MODEL]
    graph = workspace.graphs[f"{MODEL}/llm.layer.08.prefill"]
    known = inputs_of(graph, workspace.dump(CASE))["hidden"]

    def wrong(inputs: Mapping[str, Floats], outputs: Arrays) -> Arrays:
        return outputs if np.array_equal(inputs["hidden"], known) else shifted(0.1)(inputs, outputs)

    change_outputs(port, {graph.id: wrong})
    found = bisected(workspace, port)
    assert found.guilty == graph.id
    assert "but on the port's own inputs it differs: hidden " in found.evidence[0]


def test_a_run_that_breaks_in_a_graph(session: Session, port: Port) -> None:
    def broken(inputs: Mapping[str, Floats], outputs: Arrays) -> Arrays:
        raise InputError("no memory\nfor it")

    change_outputs(port, {f"{MODEL}/vision.layer.20": broken})
    found = bisected(session.workspaces[MODEL], port)
    assert found.guilty == f"{MODEL}/vision.layer.20"
    assert found.probes[0].detail == "the run breaks: InputError: no memory"


def test_a_run_that_breaks_between_graphs(session: Session, port: Port) -> None:
    def broken(embeds: Floats) -> Floats:
        raise KeyError("length")

    port.pipeline.extend = broken
    found = bisected(session.workspaces[MODEL], port)
    assert found.guilty == f"{MODEL}/llm.layer.00.dqkv"
    assert "but the port's own run breaks there: KeyError: 'length'" in found.evidence[0]


class FakeWitness:
    """Says of ten seams which are red."""

    def __init__(self, *red: int) -> None:
        self.seams, self._red = range(10), red

    def red(self, place: int) -> bool:
        return place in self._red

    def name(self, place: int) -> str:
        return str(place)

    line = name

    def on_own_inputs(self, place: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("red", "guilty", "confirmed", "widened"),
    [
        ((5,), "5", True, False),
        ((4, 5), "4", True, True),  # the one before did not change the end alone
        ((7, 9), "7", True, True),  # the nearest neighbour
        ((0, 8), "8", True, True),
        ((0,), "0", True, True),  # beyond the neighbours
        ((), "5", False, True),
    ],
)
def test_the_search_widens_where_isolated_runs_disagree(
    red: tuple[int, ...], guilty: str, confirmed: bool, widened: bool
) -> None:
    witness: Any = FakeWitness(*red)
    found: Any = bisect._confirmed(witness, 5, told)
    assert (found["guilty"], found["confirmed"], found["widened"]) == (guilty, confirmed, widened)


def told(guilty: str, **rest: Any) -> Any:
    return {"guilty": guilty, **rest}


def test_a_wider_search_over_a_green_port_finds_nothing(session: Session, port: Port) -> None:
    """As if luck had named layer 20."""
    workspace = session.workspaces[MODEL]
    subject = Subject.of(workspace, CASE, port)
    prober = Prober(subject, open_reference(MODEL, workspace.checkpoint), list(seams_of(subject)))
    place = [seam.id for seam in prober.seams].index(f"{MODEL}/vision.layer.20")
    witness = Witness(subject, prober.reference, prober.seams, prober.port)
    found: Any = bisect._confirmed(witness, place, told)
    assert (found["guilty"], found["confirmed"], found["widened"]) == (f"{MODEL}/vision.layer.20", False, True)
    assert found["evidence"][0].startswith(
        f"the end changes at {MODEL}/vision.layer.20, but {MODEL}/vision.layer.20 alone"
    )
    assert found["evidence"][1] == "and so are all 162"


# ---- nothing to find, nothing to say


def test_a_green_port_takes_one_probe(session: Session) -> None:
    """Over the store, as the verb does it."""
    found = bisect.bisect_case(session.workspaces[MODEL], CASE)
    assert (found.guilty, found.exit_code, len(found.probes)) == (None, 0, 1)
    assert next(bisect.lines(found)).startswith(f"nothing is guilty [{MODEL}, {CASE}]: the end matches: logits rel_l2 ")


def test_a_green_port_without_pictures(session: Session, tmp_path: Path) -> None:
    workspace = session.workspaces["smollm2"]
    assert bisected(workspace, Port(workspace, tmp_path / "model"), "capital").exit_code == 0


def test_a_dump_that_the_reference_does_not_reach_is_unjudged(session: Session, port: Port) -> None:
    workspace = session.workspaces[MODEL]
    subject = Subject.of(workspace, CASE, port)
    dump = subject.dump
    subject.dump = replace(dump, tensors={**dump.tensors, "logits": dump.tensors["logits"] * np.float32(1.01)})
    with pytest.raises(UnjudgedError, match=f"does not reach the dump .* python -m parity dumps {MODEL}"):
        bisect.bisect(subject, open_reference(MODEL, workspace.checkpoint))


def test_a_near_tie_is_no_mismatch(session: Session, port: Port) -> None:
    subject = Subject.of(session.workspaces[MODEL], CASE, port)
    rows = subject.dump.tensors["logits"][:2].copy()
    ids = subject.dump.values["ids"]
    rows[0, 5] = rows[0, ids[0]] - np.float32(1e-6)
    subject.dump = replace(subject.dump, tensors={**subject.dump.tensors, "logits": rows})
    subject.dump.values["margins"][0] = 1e-6
    logits = rows.copy()
    logits[0, 5] += np.float32(2e-6)
    matches, detail = judged(subject, logits, [5, ids[1]])
    assert matches
    assert detail.endswith(f"but should be {ids[:2]}: a near-tie")
    assert not judged(subject, logits, [6, ids[1]])[0]  # not the largest logit
    subject.dump.values["margins"][0] = 1e-3
    assert not judged(subject, logits, [5, ids[1]])[0]  # more than noise


def test_what_a_person_reads(session: Session, port: Port) -> None:
    plant(port, "one head of vision layer 13 zeroed")
    found = bisected(session.workspaces[MODEL], port)
    guilty = f"{MODEL}/vision.layer.13"
    told = list(bisect.lines(found))
    assert told[0] == f"{guilty} is the first guilty one [{CASE}]: confirmed by isolated runs"
    assert told[1].startswith(f"  {guilty} alone differs: hidden cosine 0.99")
    assert told[2].startswith(f"  {MODEL}/vision.layer.12 alone is equal (rel_l2 ")
    assert told[3].startswith(f"{len(found.probes)} probes over {found.seams} seams, ")
    assert any(line.startswith("  nothing ") and "the end matches: logits rel_l2 " in line for line in told)
    assert told[-1] == f"next: python -m parity explain {guilty} --case {CASE}"


def test_a_stage_is_judged_again_by_pytest(session: Session, port: Port) -> None:
    plant(port, "second best id chosen")
    told = list(bisect.lines(bisected(session.workspaces[MODEL], port)))
    assert told[-1] == f"next: pytest -k '{MODEL}/sampling.ids and {CASE}'"


def test_the_next_command_chooses_the_same_checkpoint(port: Port) -> None:
    subject = Subject.of(Workspace(Choice(MODEL, "tiny", cases=(CASE,))), CASE, port)
    layer, stage = f"{MODEL}/vision.layer.13", f"{MODEL}/sampling.ids"
    assert [bisect._command(subject, guilty) for guilty in (None, layer, stage)] == [
        f"python -m parity run {MODEL} --profile tiny --case {CASE}",
        f"python -m parity explain {layer} --case {CASE} --profile tiny",
        f"pytest -k '{stage} and {CASE}' --model {MODEL} --profile tiny --case {CASE}",
    ]


def test_seams_stand_in_pipeline_order(session: Session, port: Port) -> None:
    subject = Subject.of(session.workspaces[MODEL], CASE, port)
    names = [seam.id for seam in seams_of(subject)]
    place = partial(list.index, names)
    assert names[0] == f"{MODEL}/image.pixel_values"
    assert place(f"{MODEL}/fusion.embeds") + 1 == place(f"{MODEL}/vision.embed")
    assert names[-2:] == [f"{MODEL}/head.logits", f"{MODEL}/sampling.ids"]
    assert len([seam for seam in seams_of(subject) if seam.graph]) == 149
