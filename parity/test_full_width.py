"""Claim: at the true widths too, one vision layer and one decoder layer with all their graphs equal the reference."""

from collections.abc import Iterator

import numpy as np
import pytest

from harness.compare import compare_tensor
from harness.records import Where
from parity.checks import LIMITS, PRECISION
from parity.runners import StoreRunner
from parity.server import start
from parity.workspace import Choice, Workspace
from references import dumping
from references.youtu_vl.weights import TEXT_LAYER, VISION, VISION_LAYER

pytestmark = pytest.mark.full

MODEL = "youtu_vl"
VISION_INDEX, TEXT_INDEX = 7, 12
PARTS = (
    VISION + "embeddings.*",
    VISION + "post_layernorm.*",
    "merger.*",
    VISION_LAYER.format(index=VISION_INDEX) + "*",
    TEXT_LAYER.format(index=TEXT_INDEX) + "*",
)
GRAPHS = (
    "vision.embed",
    f"vision.layer.{VISION_INDEX:02d}",
    "vision.tail",
    *(f"llm.layer.{TEXT_INDEX:02d}.{part}" for part in ("prefill", "dqkv", "dattn")),
)
LENGTHS = (1, 37, 348)  # 348: the prompt of the published port's own test


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(Choice(MODEL, profile="full", only=PARTS))


@pytest.fixture(scope="module")
def runner(workspace: Workspace) -> Iterator[StoreRunner]:
    with start() as child:
        yield StoreRunner(workspace, child)


@pytest.fixture(scope="module")
def reference(workspace: Workspace) -> dumping.Reference:
    return dumping.open_reference(MODEL, workspace.checkpoint)


@pytest.mark.parametrize("name", GRAPHS)
def test_true_width(name: str, workspace: Workspace, runner: StoreRunner, reference: dumping.Reference) -> None:
    graph = workspace.graphs[f"{MODEL}/{name}"]
    for length in LENGTHS:
        inputs = dumping.random_inputs(graph, length)
        outputs = runner.run(graph.id, {port: value.numpy() for port, value in inputs.items()})
        for port, expected in reference.run(graph, inputs).items():
            where = Where(graph.id, port, f"length_{length}", "isolated", PRECISION)
            record = compare_tensor(
                outputs[port], np.ascontiguousarray(expected.numpy()), LIMITS.of(graph.id, "isolated"), where=where
            )
            assert record.verdict == "equal", record.detail
