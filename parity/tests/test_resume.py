"""Claim: a reference run that was interrupted goes on behind its last piece, and its dump has the same bytes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from harness.dumps import dump_paths, write_dump
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.scratch import Scratch
from parity import building
from parity.plugin import SESSION
from parity.workspace import Choice, Workspace
from references import dumping, plan, reference
from references.reference import TextReference
from references.run import Progress

MODEL = "youtu_vl"
BROKEN = f"{MODEL}/llm.layer.03.prefill"  # the graph that the first run dies in


@pytest.fixture(scope="module")
def workspace(request: pytest.FixtureRequest) -> Workspace:
    return request.config.stash[SESSION].workspaces[MODEL]


@pytest.fixture
def case(workspace: Workspace) -> Any:
    return replace(workspace.cases["one_character"], new_tokens=3)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the graphs that were run in fp32."""
    ids: list[str] = []
    run = TextReference.run

    def counted(
        self: TextReference, graph: Graph, inputs: Mapping[str, Tensor], *, double: bool = False
    ) -> dict[str, Tensor]:
        ids.extend([] if double else [graph.id])
        return run(self, graph, inputs, double=double)

    monkeypatch.setattr(TextReference, "run", counted)
    return ids


def written(folder: Path, workspace: Workspace, case: Any, scratch: Scratch | None = None, tell: Any = None) -> Any:
    """Bytes of a case's dump."""
    write_dump(folder, dumping.build(MODEL, workspace.checkpoint, case, scratch, tell))
    return [path.read_bytes() for path in dump_paths(folder, case.name)]


def dying_behind(pieces: list[str]) -> Any:
    """A hearer that ends the run behind each of these pieces, once."""

    def tell(progress: Progress) -> None:
        if progress.piece in pieces:
            pieces.remove(progress.piece)
            raise KeyboardInterrupt

    return tell


def test_each_graph_is_run_once_however_often_the_run_breaks(
    tmp_path: Path, workspace: Workspace, case: Any, ran: list[str]
) -> None:
    whole = written(tmp_path / "whole", workspace, case)
    needed = list(ran)
    ran.clear()
    length = len(dumping.open_reference(MODEL, workspace.checkpoint).prompt(case.prompt, []).ids)
    tell = dying_behind([BROKEN, f"{MODEL}/llm.layer.20.dqkv", "greedy.000000.05", f"greedy.{length:06d}.39"])
    path = tmp_path / "run.db"
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path / "broken", workspace, case, Scratch(path), tell)
    assert not (tmp_path / "broken").exists()
    assert written(tmp_path / "resumed", workspace, case, Scratch(path), tell) == whole
    assert ran == needed
    assert len(needed) == 120  # no picture: the vision tower is not run


def test_a_run_that_dies_inside_a_graph_loses_that_graph_only(
    tmp_path: Path, workspace: Workspace, case: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counted = tmp_path / "run.db", TextReference.run

    def dying(self: TextReference, graph: Graph, *rest: Any, **options: Any) -> dict[str, Tensor]:
        outputs = counted(self, graph, *rest, **options)
        if graph.id == BROKEN and options:
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(TextReference, "run", dying)
        with pytest.raises(KeyboardInterrupt):
            dumping.build(MODEL, workspace.checkpoint, case, Scratch(path))
    assert ran[-1] == BROKEN
    dumping.build(MODEL, workspace.checkpoint, case, Scratch(path))
    assert sorted(name for name in ran if ran.count(name) == 2) == [BROKEN, BROKEN]


def test_layers_that_do_not_fit_are_streamed_and_give_the_same_bytes(
    tmp_path: Path, workspace: Workspace, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = written(tmp_path / "held", workspace, case)
    monkeypatch.setattr(reference, "LAYERS_KEPT_BYTES", 0)
    streamed = dumping.open_reference(MODEL, workspace.checkpoint)
    graphs = [workspace.graphs[f"{MODEL}/llm.layer.{index:02d}.dqkv"] for index in range(3)]
    with streamed.reading_ahead():
        for graph in graphs:
            streamed.run(graph, dumping.random_inputs(graph, 5))
            assert len(streamed.layers._held) == 1
            assert list(streamed.layers._coming) == [("llm.layer", (graph.index or 0) + 1)]
        last = ref(streamed.layers.get(("llm.layer", 2)))
    assert (last(), streamed.layers._coming) == (None, {})  # gone without the collector
    assert written(tmp_path / "streamed", workspace, case) == held


def test_the_vocabulary_in_blocks_gives_the_same_logits(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = dumping.open_reference(MODEL, workspace.checkpoint)
    hidden = dumping.random_inputs(workspace.graphs[BROKEN], 4)["hidden"]
    whole = opened.logits(hidden)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 100_000)
    assert (opened.logits(hidden) - whole).abs().max() <= 1e-4
    assert opened.logits(hidden).argmax(-1).tolist() == whole.argmax(-1).tolist()


def test_progress_ends_at_the_whole_and_tells_what_was_kept(tmp_path: Path, workspace: Workspace, case: Any) -> None:
    path = tmp_path / "run.db"
    told: list[Progress] = []
    for _ in range(2):
        dumping.build(MODEL, workspace.checkpoint, case, Scratch(path), told.append)
    first, second = told[len(told) // 2 - 1], told[-1]
    assert (first.done, first.pieces) == (second.done, second.pieces) == (120 + 3 * 40,) * 2
    assert first.share == pytest.approx(1)
    assert (first.kept, second.kept) == (0, pytest.approx(1))


# ---- what a case takes


@pytest.fixture
def needs() -> plan.Needs:
    """Of the case of the true widths, from sizes alone."""
    from references.checkpoint import Checkpoint
    from references.youtu_vl.model import Reference

    class Bare(Checkpoint):
        def __init__(self) -> None:
            self.config = Workspace(Choice(MODEL, "full")).config

    lengths = {"patches": 1288, "cells": 322, "T": 348, "L": 349}
    return plan.needs(Reference(Bare()), lengths, 4)


def test_the_true_widths_fit_into_four_gigabytes(needs: plan.Needs) -> None:
    assert 2e9 < needs.memory < 4e9
    assert 2e9 < needs.disk < 4e9


def test_too_little_room_is_told_before_the_work(
    workspace: Workspace, needs: plan.Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumping, "needs", lambda *_: {"seed": needs})
    monkeypatch.setattr("harness.resources.available_memory_bytes", lambda: 2_000_000_000)
    with pytest.raises(UnjudgedError, match=r"^python -m parity dumps .* of memory, but 2\.0 GB are free; free some"):
        building.room_for(workspace, ["one_character"], 2)
    monkeypatch.setattr("harness.resources.available_memory_bytes", lambda: 8_000_000_000)
    assert building.room_for(workspace, ["one_character"], 2) == 1  # two of them would take more than 4 GB
