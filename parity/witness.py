"""Seams judged alone: on the reference's own inputs, and on what the port's run hands them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.compare import compare_tensor
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.records import Record
from parity.checks import LIMITS, Subject, inputs_of
from parity.hybrid import PortRecorder, as_tensors
from parity.probing import first_line, reason
from parity.seams import Seam
from parity.workspace import tensor_name
from references.dumping import one_thread
from runtime.graphs import Arrays


class Witness:
    """Judges seams alone."""

    def __init__(self, subject: Subject, reference: Any, seams: Sequence[Seam], port: PortRecorder) -> None:
        self.subject, self.reference, self.seams, self.port = subject, reference, seams, port
        self.said: dict[int, tuple[str, str]] = {}  # place -> the red id or "", and the line for a person

    def red(self, place: int) -> bool:
        """Whether a seam is red on the reference's own inputs."""
        if place not in self.said:
            self.said[place] = self._judge(self.seams[place])
        return bool(self.said[place][0])

    def name(self, place: int) -> str:
        """The id to name: the first red one of the seam, the seam itself where none is."""
        return (place in self.said and self.said[place][0]) or self.seams[place].id

    def line(self, place: int) -> str:
        """What its isolated run says; "" where there was none."""
        return self.said[place][1] if place in self.said else ""

    def on_own_inputs(self, place: int) -> str:
        """What is wrong in front of or in a graph that is right on the reference's inputs; "" where nothing is."""
        graph = self.seams[place].graph
        if graph is None:
            return ""
        if graph.id not in self.port.outputs and self.port.failure:
            return f"but the port's own run breaks there: {first_line(self.port.failure[1])}"
        return self._handed_over(graph) or self._computed(graph)

    def _judge(self, seam: Seam) -> tuple[str, str]:
        for name in seam.names:
            try:
                records = self._alone(name, seam.graph)
            except UnjudgedError:
                raise
            except Exception as error:
                return name, f"{name} alone breaks: {first_line(error)}"
            red = next((record for record in records if record.verdict != "equal"), None)
            if red is not None:
                return name, f"{name} alone differs: {red.where.tensor} {reason(red)}"
        return "", f"{seam.id} alone is equal{_worst(records)}"

    def _alone(self, name: str, graph: Graph | None) -> list[Record]:
        return self.subject.isolated(graph) if graph else self.subject.stage(name.partition("/")[2])

    def _handed_over(self, graph: Graph) -> str:
        """The first input that is not what the port's graphs before, or the reference's glue, would give."""
        recorded = {
            tensor_name(before, port): value
            for name, before in self.subject.graphs.items()
            for port, value in self.port.outputs.get(name, {}).items()
        }
        before = replace(self.subject.dump, tensors={**self.subject.dump.tensors, **recorded})
        records = self._compare(graph, self.port.inputs[graph.id], inputs_of(graph, before), "chained")
        red = next((record for record in records if record.verdict != "equal"), None)
        if red is None:
            return ""
        return f"but the runtime hands it another {red.where.tensor}: {reason(red)}"

    def _computed(self, graph: Graph) -> str:
        """Whether the graph is wrong on the port's inputs only."""
        with one_thread():
            outputs = self.reference.run(graph, as_tensors(self.port.inputs[graph.id]))
        expected = {name: value.numpy() for name, value in outputs.items()}
        records = self._compare(graph, self.port.outputs[graph.id], expected, "isolated")
        red = next((record for record in records if record.verdict != "equal"), None)
        return "" if red is None else f"but on the port's own inputs it differs: {red.where.tensor} {reason(red)}"

    def _compare(self, graph: Graph, actual: Arrays, expected: Arrays, mode: str) -> Iterator[Record]:
        limits = LIMITS.of(graph.id, mode)
        for name, value in actual.items():
            yield compare_tensor(value, expected[name], limits, where=self.subject.where(graph.id, name, mode))


def _worst(records: Sequence[Record]) -> str:
    errors = [record.metrics.rel_l2 for record in records if record.metrics]
    return f" (rel_l2 {max(errors):.1e})" if errors else ""
