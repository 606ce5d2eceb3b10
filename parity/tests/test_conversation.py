"""A conversation over its caches says what a fresh run over the whole conversation says, and reads only what is new."""

import io
import sys
from typing import Any

import pytest

from parity.workspace import Choice, Workspace
from runtime.__main__ import main
from runtime.conversation import Conversation
from runtime.graphs import Manifest, NcnnRunner
from runtime.smollm2 import Pipeline

TURNS = ("Name two planets.", "Which one is larger?", "And which is hotter?")
COUNT = 12


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    manifest = Manifest.read(Workspace(Choice("smollm2")).exporter.model_folder())
    return Pipeline(manifest, NcnnRunner(manifest, verify=False), context=512)


def test_answers_are_those_of_a_fresh_run_and_only_new_tokens_are_read(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(rows: Any) -> Any:
        read.append(len(rows))
        return extend(rows)

    extend = pipeline.extend
    monkeypatch.setattr(pipeline, "extend", counting)
    conversation = Conversation(pipeline)
    said, prompts = [], []
    for turn in TURNS:
        prompts.append(len(pipeline.prompt(turn, (), conversation.history).ids))
        said.append([token.id for token in conversation.say(turn, COUNT)])
    steps = [rows for rows in read if rows > 1]

    assert len(steps) == len(TURNS)
    assert steps[0] == prompts[0]
    assert all(new < whole / 2 for new, whole in zip(steps[1:], prompts[1:], strict=True))

    history = conversation.history
    for number, turn in enumerate(TURNS):
        fresh = pipeline.generate([], turn, COUNT, history[: 2 * number])
        assert [token.id for token in fresh] == said[number], turn


def test_chat_reads_turns_from_standard_input(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TURNS[0]}\n{TURNS[1]}\n\nnever read\n"))
    arguments = ["smollm2", "--model", str(pipeline.folder), "--chat", "-n", str(COUNT), "--ids", "--threads", "1"]
    assert main(arguments) == 0
    conversation = Conversation(pipeline)
    wanted = [" ".join(str(token.id) for token in conversation.say(turn, COUNT)) for turn in TURNS[:2]]
    assert capsys.readouterr().out.splitlines() == wanted


def test_one_seed_gives_one_text(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["smollm2", "--model", str(pipeline.folder), "--prompt", "Tell me a joke.", "-n", "8", "--json"]
    told = []
    for seed in ("1", "1", "2"):
        assert main([*arguments, "--temperature", "1.5", "--seed", seed, "--threads", "1"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
