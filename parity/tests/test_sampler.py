"""Claim: each sampling step keeps the ids and values of transformers' processor, and a seed fixes the ids.

Exact: penalty, temperature, top-k. For top-p and min-p torch's softmax is not the same to the bit: an id may differ
only where the sum or share that decides lies within NEAR of the threshold, and in few examples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime import sampler
from runtime.errors import InputError
from runtime.sampler import Sampler, Sampling, SplitMix64

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

NEAR = 1e-6  # absolute for the sum of top-p, relative for the share of min-p
RARE = 0.02  # share of examples that may hold such an id where thresholds are not put on the sums; none did so far
VOCAB = 97

CHECK = settings(max_examples=150, derandomize=True, deadline=None, database=None)

EXTREME = [0.0, -0.0, 1.0, 1.0000001, -1.0, 3.4e38, -3.4e38, 1e-4, -1e-4, -1e-40, 88.0, -104.0, 1e4]
TEMPERATURES = st.floats(0.01, 100) | st.sampled_from([0.7, 0.1, 1.0, 1e-30])
COUNTS = st.integers(1, 50)
MASSES = st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0])
SHARES = st.floats(1e-6, 1) | st.sampled_from([0.0, 0.05, 0.25, 0.5, 1.0])
PENALTIES = st.floats(0.01, 100) | st.sampled_from([1.0, 1.1, 0.5])
IDS = st.lists(st.integers(0, 60), max_size=40) | st.lists(st.integers(0, 8), min_size=6, max_size=20)


@st.composite
def small_logits(draw: st.DrawFn) -> Floats:
    """1 to 24 logits: any, with ties, or extreme."""
    values = draw(st.sampled_from([st.floats(-50, 50, width=32), st.integers(-2, 2), st.sampled_from(EXTREME)]))
    return np.array(draw(st.lists(values, min_size=1, max_size=24)), np.float32)


@st.composite
def large_logits(draw: st.DrawFn) -> Floats:
    """Up to 3000 normal logits of some width, perhaps rounded into ties."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.standard_normal(draw(st.integers(1, 3000))) * draw(st.sampled_from([0.01, 1, 4, 20]))
    return (np.round(values, 1) if draw(st.booleans()) else values).astype(np.float32)


@st.composite
def all_logits(draw: st.DrawFn) -> Floats:
    """Small or large, perhaps with entries already -inf; at least one is finite."""
    logits = draw(small_logits() | large_logits())
    if draw(st.booleans()):
        spared = draw(st.integers(0, len(logits) - 1))
        mask = np.random.default_rng(draw(st.integers(0, 2**32))).random(len(logits)) < draw(st.floats(0, 1))
        mask[spared] = False
        logits[mask] = -np.inf
    return logits


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Any steps at any values, or all steps at values where each has a say; temperature not 0."""
    if draw(st.booleans()):
        return Sampling(draw(st.floats(0.5, 2)), draw(st.integers(2, 12)), draw(st.floats(0.3, 0.9)), 0.1, 1.3)
    return Sampling(
        temperature=draw(st.just(1.0) | TEMPERATURES),
        top_k=draw(st.just(0) | COUNTS),
        top_p=draw(st.just(1.0) | MASSES),
        min_p=draw(st.just(0.0) | SHARES),
        repetition_penalty=draw(st.just(1.0) | PENALTIES),
    )


@pytest.fixture(scope="module")
def processors() -> ModuleType:
    from transformers.generation import logits_process

    return logits_process


@pytest.fixture(scope="module")
def model() -> Any:
    """A random decoder, for transformers' own generate()."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    config = LlamaConfig(vocab_size=VOCAB, **sizes, initializer_range=0.5, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def stable_sort() -> Iterator[None]:
    """torch.sort with ties in order of ids: by default their order depends on the processor."""
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=True)):
        yield


def ref_scores(processor: Callable[..., torch.Tensor], logits: Floats, ids: Sequence[int] = ()) -> Floats:
    scores: Floats = processor(torch.tensor([list(ids)], dtype=torch.long), torch.from_numpy(logits)[None])[0].numpy()
    return scores


def assert_same(actual: Floats, expected: Floats) -> None:
    __tracebackhide__ = True
    assert actual.dtype == expected.dtype == np.float32
    places = np.flatnonzero(~((actual == expected) | (np.isnan(actual) & np.isnan(expected))))
    assert not len(places), f"scores[{places}]={actual[places]}, but should be {expected[places]}"


def near_threshold(logits: Floats, *, top_p: float = 1.0, min_p: float = 0.0) -> Mask:
    """Ids that float32 rounding may decide: (vocab,)."""
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()).astype(np.float64))  # both subtract in float32
    order = np.argsort(logits, kind="stable")
    near = np.zeros(len(logits), np.bool_)
    near[order] = abs(np.cumsum(weights[order]) / weights.sum() - (1 - top_p)) <= NEAR
    vanish = weights < np.finfo(np.float32).tiny  # a share of 0 or not, by how a library rounds there
    return near & ((top_p < 1) | vanish) | (abs(weights - min_p) <= NEAR * min_p)


@dataclass
class Tally:
    """Examples, and how many of them held an id that float32 rounding decided otherwise."""

    examples: int = 0
    undecided: int = 0

    def judge(self, actual: Floats, expected: Floats, near: Mask) -> None:
        """Equal but for ids near the threshold, which one of the two may have removed."""
        __tracebackhide__ = True
        removed = np.isneginf(actual) ^ np.isneginf(expected)
        assert_same(np.where(removed & near, np.float32(0), actual), np.where(removed & near, np.float32(0), expected))
        self.examples += 1
        self.undecided += bool(removed.any())

    def assert_rare(self) -> None:
        __tracebackhide__ = True
        assert self.undecided <= RARE * self.examples, f"undecided={self.undecided}, but should be few of {self}"


# ---- each step


def test_repetition_penalty(processors: ModuleType) -> None:
    @CHECK
    @given(all_logits(), IDS, PENALTIES)
    def check(logits: Floats, ids: list[int], penalty: float) -> None:
        expected = ref_scores(processors.RepetitionPenaltyLogitsProcessor(penalty), logits, ids)
        assert_same(sampler.repetition_penalty(logits, ids, penalty), expected)

    check()


def test_temperature(processors: ModuleType) -> None:
    @CHECK
    @given(all_logits(), TEMPERATURES)
    def check(logits: Floats, value: float) -> None:
        assert_same(sampler.temperature(logits, value), ref_scores(processors.TemperatureLogitsWarper(value), logits))

    check()


def test_top_k(processors: ModuleType) -> None:
    @CHECK
    @given(all_logits(), COUNTS)
    def check(logits: Floats, count: int) -> None:
        assert_same(sampler.top_k(logits, count), ref_scores(processors.TopKLogitsWarper(count), logits))

    check()


@pytest.mark.usefixtures("stable_sort")
def test_top_p(processors: ModuleType) -> None:
    tally = Tally()

    @CHECK
    @given(all_logits(), MASSES)
    def check(logits: Floats, mass: float) -> None:
        expected = ref_scores(processors.TopPLogitsWarper(mass), logits)
        tally.judge(sampler.top_p(logits, mass), expected, near_threshold(logits, top_p=mass))

    check()
    tally.assert_rare()


def test_top_p_keeps_the_same_values_whatever_the_order_of_ties(processors: ModuleType) -> None:
    tally = Tally()

    @CHECK
    @given(all_logits(), MASSES)
    def check(logits: Floats, mass: float) -> None:
        actual, expected = sampler.top_p(logits, mass), ref_scores(processors.TopPLogitsWarper(mass), logits)
        tally.judge(np.sort(actual), np.sort(expected), near_threshold(np.sort(logits), top_p=mass))

    check()
    tally.assert_rare()


def test_min_p(processors: ModuleType) -> None:
    tally = Tally()

    @CHECK
    @given(all_logits(), SHARES)
    def check(logits: Floats, share: float) -> None:
        expected = ref_scores(processors.MinPLogitsWarper(share), logits)
        tally.judge(sampler.min_p(logits, share), expected, near_threshold(logits, min_p=share))

    check()
    tally.assert_rare()


@pytest.mark.usefixtures("stable_sort")
def test_a_threshold_put_on_a_sum_or_a_share_moves_only_ids_near_it(processors: ModuleType) -> None:
    @CHECK
    @given(all_logits(), st.floats(0, 1))
    def check(logits: Floats, place: float) -> None:
        probabilities = np.sort(sampler._softmax(logits))
        index = int(place * (len(logits) - 1))
        mass = min(max(float(1 - np.cumsum(probabilities, dtype=np.float64)[index]), 0.0), 1.0)
        expected = ref_scores(processors.TopPLogitsWarper(mass), logits)
        Tally().judge(sampler.top_p(logits, mass), expected, near_threshold(logits, top_p=mass))
        share = float(probabilities[index] / probabilities[-1])
        assume(share > 1e-30)  # below, float32 has fewer bits
        expected = ref_scores(processors.MinPLogitsWarper(share), logits)
        Tally().judge(sampler.min_p(logits, share), expected, near_threshold(logits, min_p=share))

    check()


# ---- all steps


@pytest.mark.usefixtures("stable_sort")
def test_all_steps_as_generate_lists_them(model: Any) -> None:
    from transformers import GenerationConfig

    tally = Tally()

    @CHECK
    @given(all_logits(), IDS, samplings())
    def check(logits: Floats, ids: list[int], sampling: Sampling) -> None:
        config = GenerationConfig(**options(sampling))
        steps = model._get_logits_processor(config, input_ids_seq_length=1, logits_processor=[])
        expected = ref_scores(steps, logits, ids)
        try:
            actual = Sampler(sampling).filtered(logits, ids)
        except InputError:
            tempered = ref_scores(type(steps)(steps[: number_to_temperature(sampling)]), logits, ids)
            assert not np.isfinite(tempered.max())
            assume(False)
        before = Sampler(Sampling(sampling.temperature, sampling.top_k, 1.0, 0.0, sampling.repetition_penalty))
        near = near_threshold(before.filtered(logits, ids), top_p=sampling.top_p, min_p=sampling.min_p)
        tally.judge(actual, expected, near)

    check()
    tally.assert_rare()


def options(sampling: Sampling) -> dict[str, Any]:
    """The same choice in transformers' words."""
    names = ("temperature", "top_k", "top_p", "min_p")
    warpers = {name: getattr(sampling, name) for name in names} if sampling.temperature else {}
    return {"do_sample": bool(warpers), "repetition_penalty": sampling.repetition_penalty, **warpers}


def number_to_temperature(sampling: Sampling) -> int:
    return (sampling.repetition_penalty != 1) + (sampling.temperature != 1)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(0.7, 20, 0.9, 0.02, 1.3), id="all"),
        pytest.param(Sampling(1.5, 0, 0.8, 0.0, 1.0), id="top-p"),
        pytest.param(Sampling(1.0, 5, 1.0, 0.1, 0.8), id="reward"),
        pytest.param(Sampling(repetition_penalty=1.5), id="greedy"),
    ],
)
def test_every_step_of_generate(model: Any, sampling: Sampling) -> None:
    torch.manual_seed(1)
    prompt = [5, 9, 9, 3]
    out = model.generate(
        torch.tensor([prompt]),
        **options(sampling),
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    ids = out.sequences[0].tolist()
    assert len(out.scores) == len(ids) - len(prompt) == 12
    for number, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True), len(prompt)):
        assert_same(Sampler(sampling).filtered(logits[0].numpy(), ids[:number]), scores[0].numpy())
        if sampling.temperature == 0:
            assert Sampler(sampling).choose(logits[0].numpy(), ids[:number]) == ids[number]


# ---- the choice


def chosen(sampling: Sampling, count: int, logits: Floats) -> list[int]:
    """Ids of one answer, each seeing those before it."""
    chooser, ids = Sampler(sampling), [0]
    for _ in range(count):
        ids.append(chooser.choose(logits, ids))
    return ids[1:]


LADDER = np.linspace(-2, 2, 33, dtype=np.float32)
STEPS = Sampling(temperature=0.8, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.05)


def test_greedy_takes_the_first_of_the_largest() -> None:
    @CHECK
    @given(all_logits(), IDS, st.integers(0, 5))
    def check(logits: Floats, ids: list[int], count: int) -> None:
        expected = int(torch.from_numpy(logits)[None].argmax(-1))
        assert Sampler(Sampling(top_k=count, top_p=0.5, min_p=0.1)).choose(logits, ids) == expected

    check()
    assert Sampler(Sampling()).choose(np.array([1, 3, 2, 3], np.float32), []) == 1
    assert Sampler(Sampling(repetition_penalty=1.5)).choose(np.array([1, 3, 2, 3], np.float32), [1, 1]) == 3
    assert Sampler(Sampling(repetition_penalty=1.5)).choose(np.array([-3, -2, -2.5], np.float32), [1]) == 2


def test_a_seed_fixes_the_ids() -> None:
    first, again, other = (chosen(replace(STEPS, seed=seed), 40, LADDER) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert len({tuple(chosen(replace(STEPS, seed=seed), 12, LADDER)) for seed in range(50)}) == 50


def test_the_ids_of_a_seed_never_change() -> None:
    assert chosen(replace(STEPS, seed=2**64 - 1), 12, LADDER) == [32, 32, 24, 27, 30, 31, 32, 24, 31, 15, 15, 31]


def test_splitmix64_gives_the_published_words() -> None:
    random = SplitMix64(1234567)
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [random.next() for _ in words] == words
    assert SplitMix64(0).uniform() == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_the_draw_is_a_plain_walk_up_the_sum() -> None:
    @CHECK
    @given(all_logits(), st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]))
    def check(scores: Floats, uniform: float) -> None:
        token = sampler.draw(scores, uniform)
        weights = [math.exp(float(score) - float(scores.max())) for score in scores]
        total = math.fsum(weights)
        assert weights[token] > 0
        assert math.fsum(weights[:token]) <= uniform * total * (1 + 1e-12)
        assert math.fsum(weights[: token + 1]) >= uniform * total * (1 - 1e-12)

    check()


def test_the_draw_follows_the_probabilities() -> None:
    shares, count = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]), 8000
    chooser = Sampler(Sampling(temperature=2.0, seed=3))
    logits = (2 * np.log(np.insert(shares, 3, 1e-300))).astype(np.float32)  # id 3 is next to impossible
    counts = np.bincount([chooser.choose(logits, []) for _ in range(count)], minlength=9)
    assert counts[3] == 0
    statistic = float(((np.delete(counts, 3) - count * shares) ** 2 / (count * shares)).sum())
    assert statistic < 24.32, f"chi2={statistic:.1f}, but should be < 24.32 (7 degrees of freedom, p 0.001)"


def test_exp_is_within_two_ulp() -> None:
    x = -np.concatenate([np.linspace(0, 2, 5001), np.linspace(2, 700, 5001)])
    assert max(abs(sampler._exp(x) / np.exp(x) - 1)) < 2**-51
    assert sampler._exp(np.array([0.0, -800.0, -np.inf])).tolist() == [1, 0, 0]


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "a number from 0 to 100"),
        ("temperature", math.nan, "a number from 0 to 100"),
        ("temperature", math.inf, "a number from 0 to 100"),
        ("temperature", "1", "a number from 0 to 100"),
        ("top_k", -1, "an integer from 0 to 2147483647"),
        ("top_k", 2.0, "an integer from 0 to 2147483647"),
        ("top_k", True, "an integer from 0 to 2147483647"),
        ("top_p", 1.01, "a number from 0 to 1"),
        ("top_p", -0.01, "a number from 0 to 1"),
        ("min_p", 1.5, "a number from 0 to 1"),
        ("min_p", None, "a number from 0 to 1"),
        ("repetition_penalty", 0.0, "a number from 0.01 to 100"),
        ("repetition_penalty", -1.0, "a number from 0.01 to 100"),
        ("seed", -1, "an integer from 0 to 18446744073709551615"),
        ("seed", 2**64, "an integer from 0 to 18446744073709551615"),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any, expected: str) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(InputError) as caught:
        Sampling(**values)
    assert str(caught.value) == f"{name}={value!r}, but should be {expected}"


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        pytest.param([1.0, math.nan], "the logits hold NaN or +Inf", id="nan"),
        pytest.param([1.0, math.inf], "the logits hold NaN or +Inf", id="inf"),
        pytest.param([-math.inf, -math.inf], "no finite logit is left", id="none"),
    ],
)
def test_logits_without_a_choice_are_refused(logits: list[float], message: str, temperature: float) -> None:
    with pytest.raises(InputError, match=f"^{message.replace('+', '.')} after repetition_penalty=1.0 and temperature="):
        Sampler(Sampling(temperature=temperature)).choose(np.array(logits, np.float32), [])


def test_a_temperature_that_overflows_is_refused() -> None:
    with pytest.raises(InputError, match="temperature=1e-40; pass values nearer to 1"):
        Sampler(Sampling(temperature=1e-40)).choose(np.array([1, 2], np.float32), [])


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(InputError, match="previous_ids hold -1, but should hold ids from 0"):
        Sampler(Sampling(repetition_penalty=1.1)).choose(LADDER, [3, -1])


def test_the_logits_are_left_as_they_were() -> None:
    logits = LADDER.copy()
    chosen(STEPS, 3, logits)
    assert_same(logits, LADDER)
