"""Which part of the port is the first to break its end: the port up to a seam, the reference beyond, halved.

A seam is a graph or a stage, in pipeline order. `parity.probing` runs to the end with the port up to a seam;
`parity.witness` judges the found seam alone, and its neighbours where that one turns out to be right.
But: graphs are driven one by one, so what only the joined nets of a resident pipeline get wrong is not seen here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from harness.errors import UnjudgedError
from parity import runners
from parity.checks import Subject
from parity.probing import Probe, Prober
from parity.seams import seams_of
from parity.verdict import DIFFERENT, EQUAL
from parity.witness import Witness
from parity.workspace import Workspace
from references.dumping import open_reference

NEIGHBOURS = 4  # seams on each side that are judged first when the found one turns out to be right


@dataclass(frozen=True)
class Bisection:
    """What was found. `confirmed`: isolated runs agree; `widened`: only after other seams than the found one."""

    guilty: str | None
    probes: tuple[Probe, ...]
    confirmed: bool
    widened: bool
    seconds: float
    model: str
    case: str
    seams: int
    evidence: tuple[str, ...]
    command: str  # what to type next

    @property
    def exit_code(self) -> int:
        """0 nothing guilty, 1 guilty found."""
        return EQUAL if self.guilty is None else DIFFERENT


def bisect_case(workspace: Workspace, case: str) -> Bisection:
    """Bisect the port of a workspace over one of its cases, graphs out of the store. Raises UnjudgedError."""
    port = runners.Port(workspace)
    try:
        subject = Subject.of(workspace, case, port, generate=port.generate)
        return bisect(subject, open_reference(workspace.model, workspace.checkpoint))
    finally:
        port.close()


def bisect(subject: Subject, reference: Any) -> Bisection:
    """The first guilty seam of a subject, in at most ceil(log2 seams) + 2 probes.

    Raises UnjudgedError when the reference alone does not reach the subject's dump, or the port cannot be built.
    """
    begin = time.perf_counter()
    seams = list(seams_of(subject))
    prober = Prober(subject, reference, seams)
    finish = partial(_finished, prober, begin)
    if prober.matches(len(seams)):
        return finish(None, confirmed=True, widened=False)
    if not prober.matches(0):
        raise UnjudgedError(
            f"the reference alone does not reach the dump of {subject.model}, case {subject.dump.case}: "
            f"{prober.probes[-1].detail}; write the dump again: python -m parity dumps {subject.choice.arguments()}"
        )
    good, bad = 0, len(seams)  # seams that may be the port's, and one more than may
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if prober.matches(middle) else (good, middle)
    return _confirmed(Witness(subject, reference, seams, prober.port), good, finish)


def lines(found: Bisection) -> Iterator[str]:
    """What a person reads: the guilty id, the evidence, the probes, what to type next."""
    count = len(found.probes)
    cost = f"{count} probe{'s' if count > 1 else ''} over {found.seams} seams, {found.seconds:.1f} s"
    if found.guilty is None:
        yield f"nothing is guilty [{found.model}, {found.case}]: the end matches: {found.probes[0].detail}; {cost}"
    else:
        word = "confirmed by isolated runs" if found.confirmed else "not confirmed"
        wider = ", in a wider search" if found.widened else ""
        yield f"{found.guilty} is the first guilty one [{found.case}]: {word}{wider}"
        yield from (f"  {line}" for line in found.evidence)
        yield f"{cost}; with the port up to and including"
        yield from _table(found.probes)
    yield f"next: {found.command}"


def _table(probes: Sequence[Probe]) -> Iterator[str]:
    names = [probe.seam or "nothing" for probe in probes]
    width = max(map(len, names))
    for name, probe in zip(names, probes, strict=True):
        yield f"  {name:{width}}  the end {'matches' if probe.matches else 'differs'}: {probe.detail}"


# ---- isolated runs around the found seam


def _confirmed(witness: Witness, found: int, finish: Callable[..., Bisection]) -> Bisection:
    """Isolated runs at the found seam and before it; a wider search where they disagree with the probes."""
    why = "" if witness.red(found) else witness.on_own_inputs(found)
    if not witness.red(found) and not why:
        return _searched_wider(witness, found, finish)
    first = found
    while first > 0 and witness.red(first - 1):
        first -= 1
    said = {place: witness.line(place) for place in (first, found, first - 1) if place >= 0}
    said[found] += f", {why}" if why else ""
    return finish(witness.name(first), confirmed=True, widened=first != found, evidence=list(said.values()))


def _searched_wider(witness: Witness, found: int, finish: Callable[..., Bisection]) -> Bisection:
    evidence = [f"the end changes at {witness.name(found)}, but {witness.line(found)}"]
    red = next((place for place in _outward(found, len(witness.seams)) if witness.red(place)), None)
    if red is None:
        evidence.append(f"and so are all {len(witness.seams)}")
        return finish(witness.name(found), confirmed=False, widened=True, evidence=evidence)
    return finish(witness.name(red), confirmed=True, widened=True, evidence=[witness.line(red), *evidence])


def _outward(found: int, count: int) -> Iterator[int]:
    """Neighbours by their distance, then all others in pipeline order; without the found place itself."""
    near = [place for step in range(1, NEIGHBOURS + 1) for place in (found - step, found + step)]
    near = [place for place in near if 0 <= place < count]
    return chain(near, (place for place in range(count) if place != found and place not in near))


def _finished(
    prober: Prober,
    begin: float,
    guilty: str | None,
    *,
    confirmed: bool,
    widened: bool,
    evidence: Sequence[str] = (),
) -> Bisection:
    subject = prober.subject
    return Bisection(
        guilty,
        tuple(prober.probes),
        confirmed,
        widened,
        time.perf_counter() - begin,
        model=subject.model,
        case=subject.dump.case,
        seams=len(prober.seams),
        evidence=tuple(evidence),
        command=_command(subject, guilty),
    )


def _command(subject: Subject, guilty: str | None) -> str:
    if guilty is None:
        return f"python -m parity run {subject.choice.arguments()} --case {subject.dump.case}"
    if guilty in subject.graphs:
        return f"python -m parity explain {guilty} --case {subject.dump.case}{subject.choice.flags()}"
    return subject.rerun(guilty)
