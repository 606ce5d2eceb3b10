"""The records of a run as lines that a person reads: what was judged, how far off, and what to type next.

But: no colour, no terminal, no file; whoever prints decides on those.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from harness.ids import GraphId
from harness.origin import MEANINGS, Fate, fates
from harness.records import Record, Verdict

_VERDICTS: tuple[Verdict, ...] = ("equal", "different", "unjudged")
_SHOWN = 5  # ids and messages listed before "and N more"


def summary(
    records: Sequence[Record],
    order: Sequence[str],
    *,
    rerun: Callable[[str], str],
    rerun_all: str,
    when_green: str,
    graphs: Collection[str] | None = None,
    unreadable: Sequence[str] = (),
    notes: Sequence[str] = (),
    doubts: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Lines about the records of one run; the first names the origin where one is red, the last what to type next.

    order: every id that needs a verdict, in pipeline order. graphs: which of them are graphs (None: all).
    rerun: the command for one id, where no record says it; rerun_all: for records that are gone.
    unreadable: the messages of `read_records`. notes: lines of the caller's, behind what was measured.
    doubts: why green is not believed -> the command that mends it.
    """
    records = _in_order(records, order)
    missing = _missing(records, order)
    red = next((record for record in records if record.verdict != "equal"), None)
    if red:
        yield _origin(fates(records, order), order)
    yield _counts(records, order if graphs is None else graphs)
    yield from _stages(records)
    yield from _worst(records)
    yield from notes
    yield from _listed("unknown ids", sorted({record.where.id for record in records} - set(order)))
    yield from _listed("unreadable records", unreadable)
    yield from _listed("without a verdict", missing)
    yield from (f"could not be judged: {doubt}" for doubt in doubts or ())
    if red:
        yield f"first red: {red.detail.splitlines()[0] if red.detail else red.where.id}"
        yield f"next: {red.rerun or rerun(red.where.id)}"
    elif doubts:
        yield f"next: {next(iter(doubts.values()))}"
    elif len(missing) == 1 and not unreadable:
        yield f"next: {rerun(missing[0])}"
    else:
        yield f"next: {rerun_all if missing or unreadable else when_green}"


def _origin(found: Mapping[str, Fate], order: Sequence[str]) -> str:
    """`origin: ID; 12 carriers behind it`: the first id that is wrong on the reference's own input."""
    named = {word: [name for name, fate in found.items() if fate.word == word] for word in MEANINGS}
    origins, carriers = named["origin"], named["carrier"] + named["amplifier"]
    counts = [f"{len(carriers)} carriers"] if carriers else []
    counts += [f"{len(named['healed'])} healed"] if named["healed"] else []
    if not origins:
        first = min(carriers, key=order.index, default="an unknown id")
        return f"origin: no id is wrong on the reference's own input; the first wrong in the chain is {first}"
    more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
    return "; ".join([f"origin: {origins[0]}{more}", *counts])


def _in_order(records: Iterable[Record], order: Sequence[str]) -> list[Record]:
    """Sort by pipeline order, unknown ids last; records of one id keep their order."""
    place = {name: number for number, name in enumerate(order)}
    return sorted(records, key=lambda record: place.get(record.where.id, len(place)))


def _missing(records: Iterable[Record], order: Sequence[str]) -> list[str]:
    recorded = {record.where.id for record in records}
    return [name for name in order if name not in recorded]


def _counts(records: Sequence[Record], graphs: Collection[str]) -> str:
    judged = {record.where.id for record in records} & set(graphs)
    judged -= {record.where.id for record in records if record.verdict == "unjudged"}
    return f"{len(judged)} of {len(graphs)} graphs have a verdict; comparisons: {_tally(records)}"


def _tally(records: Sequence[Record]) -> str:
    """`12 equal, 1 different`; what is zero is left out, but for equal."""
    counts = {verdict: sum(record.verdict == verdict for record in records) for verdict in _VERDICTS}
    return ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n or verdict == "equal")


def _grouped(records: Iterable[Record], name: Callable[[Record], str]) -> Mapping[str, list[Record]]:
    """Records by what name says of them, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(name(record), []).append(record)
    return groups


def _stage(record: Record) -> str:
    """The tower of a graph, or the word of a stage that is no graph."""
    return GraphId.parse(record.where.id).tower


def _stages(records: Sequence[Record]) -> Iterator[str]:
    stages = _grouped(records, _stage)
    width = max(map(len, stages), default=0)
    for stage, inside in stages.items():
        yield f"  {stage:<{width}}  {_tally(inside)}"


def _worst(records: Sequence[Record]) -> Iterator[str]:
    """One line per mode of each stage: its largest relative L2, where, and as a multiple of the floor."""
    measured = [record for record in records if record.metrics and record.metrics.elements]
    for stage, inside in _grouped(measured, _stage).items():
        for mode, same in _grouped(inside, _mode).items():
            yield f"worst {stage} {mode}: {_error(max(same, key=_rel_l2))}"


def _mode(record: Record) -> str:
    return f"{record.where.mode} {record.where.precision}"


def _rel_l2(record: Record) -> float:
    return record.metrics.rel_l2 if record.metrics else 0.0


def _error(record: Record) -> str:
    multiple = record.floor_multiple
    times = "" if multiple is None else f", {multiple:.3g} x the noise floor"
    return f"rel_l2 {_rel_l2(record):.1e} at {record.where.id} {record.where.tensor}{times}"


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"{what} ({len(names)}): {', '.join(names[:_SHOWN])}{more}"
