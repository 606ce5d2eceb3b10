"""Where an error is: rows, heads, channels or few values, the rest being equal."""

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import Mask, norms, rms
from harness.diagnosis.pair import Pair
from harness.diagnosis.words import are, differ, listed


def zero(pair: Pair) -> Hint | None:
    """Everything, or all that is wrong, is zero."""
    nothing = pair.noise * pair.each[1]
    if pair.each[0] <= nothing:
        return Hint("zero", f"every value is zero; the reference's rms is {rms(pair.expected) * pair.unit:.3g}")
    for axis in (pair.heads, pair.rows, pair.channels):
        if not axis.localised:
            continue
        zero = (norms(axis.actual, (1,)) <= nothing) & axis.wrong
        if (zero == axis.wrong).all():
            return Hint("zero", f"{axis.named(zero)} {are(zero)} zero; the others are equal")
    return None


def span(pair: Pair) -> Hint | None:
    """The wrong rows fill a named span, or all but it."""
    wrong = pair.rows.wrong
    for name, span in pair.spans.items():
        inside = np.zeros(len(wrong), np.bool_)
        inside[span] = True
        if not pair.rows.localised or not inside.any() or inside.all():
            continue
        for kind, part, words in (("image span", inside, "of"), ("outside image", ~inside, "outside")):
            if not (wrong & ~part).any() and 2 * (wrong & part).sum() > part.sum():
                said = f"{wrong.sum()} of the {part.sum()} rows {words} {name} differ, no other"
                return Hint(kind, f"{said} (rows {listed(np.flatnonzero(wrong))})")
    return None


def row_place(pair: Pair) -> Hint | None:
    """Only some rows are wrong."""
    rows = pair.rows
    if not rows.localised:
        return None
    kind = _row_kind(rows.wrong)
    start = int(rows.wrong.argmax())
    names = [name for name, span in pair.spans.items() if start and span.indices(len(rows.wrong))[0] == start]
    begins = f"; {names[0]} begins there" if names and kind == "last rows" else ""
    said = f"{rows.named(rows.wrong)} {differ(rows.wrong)}"
    return Hint(kind, f"{said} (relative error up to {rows.error.max():.1e}), the others are equal{begins}")


def _row_kind(wrong: Mask) -> str:
    T, count = len(wrong), int(wrong.sum())
    first, last = int(wrong.argmax()), T - 1 - int(wrong[::-1].argmax())
    run = count == last - first + 1
    if run and last == T - 1:
        return "all but first row" if first == 1 and T > 2 else "last rows"
    if run and first == 0:
        return "all but last row" if last == T - 2 and T > 2 else "first rows"
    equal = np.flatnonzero(~wrong)
    if 2 * count <= T and wrong[0] and wrong[-1] and len(equal) == equal[-1] - equal[0] + 1:
        return "border rows"
    return "row block" if run and count > 1 else "scattered rows"


def head_place(pair: Pair) -> Hint | None:
    """Only some heads are wrong."""
    heads = pair.heads
    if not heads.localised:
        return None
    error = f"(relative error up to {heads.error.max():.1e})"
    return Hint("heads", f"{heads.named(heads.wrong)} {differ(heads.wrong)} {error}, the others are equal")


def channel_place(pair: Pair) -> Hint | None:
    """Only some channels are wrong, in a period or a block."""
    channels = pair.channels
    if not channels.localised:
        return None
    wrong = channels.wrong
    places = np.flatnonzero(wrong)
    error = f"(relative error up to {channels.error.max():.1e}), the others are equal"
    block = next((b for b in range(2, len(wrong)) if len(wrong) % b == 0 and _repeats(wrong, b)), 0)
    if block:
        inner = listed(np.flatnonzero(wrong[:block]))
        return Hint("periodic channels", f"channels {inner} of every {block} differ {error}")
    run = len(places) == places[-1] - places[0] + 1
    return Hint("channel block" if run else "scattered channels", f"{channels.named(wrong)} differ {error}")


def _repeats(mask: Mask, block: int) -> bool:
    parts = mask.reshape(-1, block)
    return bool((parts == parts[0]).all())


def few_values(pair: Pair) -> Hint | None:
    """Single values are wrong."""
    off = np.abs(pair.error) > max(pair.noise * pair.size, 1e-4 * float(np.abs(pair.error).max()))
    count = int(off.sum())
    if not 0 < count <= min(16, off.size // 64):
        return None
    first = tuple(int(i) for i in np.argwhere(off.reshape(pair.shape))[0])
    return Hint("few values", f"{count} of {off.size} values differ, the first at {first}; the others are equal")
