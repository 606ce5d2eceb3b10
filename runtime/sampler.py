"""The next id from logits: penalty, temperature, top-k, top-p, min-p, then a seeded draw.

Each step follows its processor in transformers/generation/logits_process.py (5.24), operation by operation in
float32; their order is that of GenerationMixin._get_logits_processor. Only IEEE basic operations, sums in order: the
same logits and seed give the same id on any machine, and in a port built without FMA contraction.
But: no beams (min_tokens_to_keep is 1), no n-gram or length rules; torch's softmax is followed to 1e-6, not to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "seed": (0, 2**64 - 1),
}
INTEGERS = ("top_k", "seed")
WORD = 2**64 - 1

# ln 2 in two parts: the high one times any exponent of a double is exact
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 do nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_value(field.name, getattr(self, field.name))


class Sampler:
    """Chooses ids; holds the state of the draw, so one sampler serves one answer."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.random = SplitMix64(sampling.seed)

    def choose(self, logits: Floats, previous_ids: Sequence[int]) -> int:
        """The next id: (vocab,) and all ids so far, prompt included. Greedy takes the first of the largest.

        Raises InputError when the logits hold NaN or +Inf, or nothing to choose from.
        """
        scores = self.filtered(logits, previous_ids)
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        return draw(scores, self.random.uniform())

    def filtered(self, logits: Floats, previous_ids: Sequence[int]) -> Floats:
        """All steps that are set, in order: (vocab,) -> (vocab,), removed ids -inf. Greedy only has the penalty."""
        sampling, scores = self.sampling, logits
        if sampling.repetition_penalty != 1:
            scores = repetition_penalty(scores, previous_ids, sampling.repetition_penalty)
        if sampling.temperature not in (0, 1):
            scores = temperature(scores, sampling.temperature)
        _check_scores(scores, sampling)
        if sampling.temperature == 0:
            return scores
        if sampling.top_k:
            scores = top_k(scores, sampling.top_k)
        if sampling.top_p < 1:
            scores = top_p(scores, sampling.top_p)
        if sampling.min_p:
            scores = min_p(scores, sampling.min_p)
        return scores


# ---- the steps; from top-k on, at least one logit is finite and none NaN or +inf


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def repetition_penalty(logits: Floats, previous_ids: Sequence[int], penalty: float) -> Floats:
    """Ids seen before, once each: negative logits times the penalty, others divided by it: (vocab,) -> (vocab,).

    Ids beyond the logits are passed over: an embedding may have more rows than the head.
    """
    ids = np.unique(np.asarray(previous_ids, np.int64))
    if len(ids) and ids[0] < 0:
        raise InputError(f"previous_ids hold {ids[0]}, but should hold ids from 0")
    ids = ids[ids < len(logits)]
    seen, factor = logits[ids], np.float32(penalty)
    scores = logits.copy()
    scores[ids] = np.where(seen < 0, seen * factor, seen / factor)
    return scores


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def temperature(logits: Floats, value: float) -> Floats:
    """Logits divided by the temperature, which is not 0: (vocab,) -> (vocab,)."""
    scores: Floats = logits / np.float32(value)
    return scores


def top_k(logits: Floats, count: int) -> Floats:
    """The `count` largest, and all that tie with the last of them: (vocab,) -> (vocab,)."""
    place = len(logits) - min(count, len(logits))
    return _remove(logits, logits < np.partition(logits, place)[place])


def top_p(logits: Floats, mass: float) -> Floats:
    """The fewest most probable ids that hold `mass`, at least one: (vocab,) -> (vocab,).

    Of equal logits the lower ids go first, as in torch's stable sort; its default sort leaves that to the processor.
    """
    ids = np.flatnonzero(logits > -np.inf)  # the others weigh nothing, and sorting them takes the most time
    order = ids[np.argsort(logits[ids], kind="stable")]
    # torch sums float32 in float64, rounds every partial sum, and compares with a float32 threshold
    cumulative = np.cumsum(_softmax(logits[order]), dtype=np.float64).astype(np.float32)
    tail = cumulative <= np.float32(1 - mass)
    tail[-1] = False
    remove = np.ones(len(logits), np.bool_)
    remove[order] = tail
    return _remove(logits, remove)


def min_p(logits: Floats, share: float) -> Floats:
    """Ids at least `share` as probable as the most probable one: (vocab,) -> (vocab,)."""
    probabilities = _softmax(logits)
    return _remove(logits, probabilities < np.float32(share) * probabilities.max())


# ---- the draw


class SplitMix64:
    """Steele, Lea and Flood's generator (OOPSLA 2014): one 64-bit word of state, any seed."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        """64 random bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & WORD
        word = self.state
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
        return word ^ (word >> 31)

    def uniform(self) -> float:
        """A multiple of 2 ** -53 in [0, 1)."""
        return (self.next() >> 11) * 2.0**-53


def draw(scores: Floats, uniform: float) -> int:
    """The id at `uniform` of the summed probabilities, ids ascending: (vocab,) -> id.

    `uniform` < 1 keeps the product under the sum after rounding too, so there always is one, never one of weight 0.
    """
    ids = np.flatnonzero(scores > -np.inf)
    kept = scores[ids].astype(np.float64)
    cumulative = np.cumsum(_exp(kept - kept.max()))
    return int(ids[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


# ---- parts


def _softmax(logits: Floats) -> Floats:
    with np.errstate(over="ignore"):  # two finite logits may lie more than float32 apart: -inf is right
        weights = _exp((logits - logits.max()).astype(np.float64))
    probabilities: Doubles = weights / np.cumsum(weights)[-1]  # cumsum: np.sum's order depends on the processor
    return probabilities.astype(np.float32)


def _exp(x: Doubles) -> Doubles:
    """e ** x of x <= 0 by a Taylor series; np.exp may differ in its last bit between processors."""
    x = np.maximum(x, -750.0)  # 0 from -746 on
    exponent = np.rint(x * INVERSE_LN2)
    rest = (x - exponent * LN2_HIGH) - exponent * LN2_LOW  # at most ln 2 / 2
    series = np.ones_like(rest)
    for n in range(14, 0, -1):
        series = 1 + series * rest / n
    return np.ldexp(series, exponent.astype(np.int32))


def _remove(logits: Floats, mask: NDArray[np.bool_]) -> Floats:
    return np.where(mask, np.float32(-np.inf), logits)


def _check_value(name: str, value: object) -> None:
    (low, high), kind = RANGES[name], "an integer" if name in INTEGERS else "a number"
    types = int if name in INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        raise InputError(f"{name}={value!r}, but should be {kind} from {low} to {high}")


def _check_scores(scores: Floats, sampling: Sampling) -> None:
    largest = scores.max(initial=-np.inf)  # NaN if there is one
    if not np.isfinite(largest):
        what = "no finite logit is left" if largest < 0 else "the logits hold NaN or +Inf"
        raise InputError(
            f"{what} after repetition_penalty={sampling.repetition_penalty} and temperature={sampling.temperature}; "
            "pass values nearer to 1, or if they are, find the graph: python -m parity run MODEL"
        )
