"""The sampler against a slow version that follows the definition of each parameter."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import WEIGHT_BLOCK
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.draws import FIRST_CANDIDATES
from radixlm.runtime.engine.step.sampler import SampledToken, sample
from radixlm.runtime.engine.step.sampler_state import SamplerState, logarithm, relative_weights
from radixlm.runtime.model.batch import NEVER_DRAFTED, TopLogits

from ..fake_model import top_of

VOCAB_SIZE = 12
LOGIT = st.sampled_from([-9.0, -2.5, -1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 3.0])  # with ties
LOGITS = st.lists(LOGIT, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 12, 50]),
    top_p=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.373, 1.373, 2.917]),  # of such factors no logit is right at the bound
    seed=st.integers(0, 2**32),
)


def slow_distribution(
    logits: list[float], params: SamplingParams, prompt: list[int], reply: list[int]
) -> dict[int, float]:
    """Probabilities by token, most likely first, one token at a time."""
    counts = Counter(reply)
    scores = {}
    for token, logit in enumerate(logits):
        if token in prompt or token in reply:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        logit -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
        scores[token] = logit + params.logit_bias.get(token, 0.0)
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if params.temperature == 0.0:
        return {order[0]: 1.0}
    best = scores[order[0]]
    if params.top_n_sigma > 0.0:
        sigma = statistics.pstdev(score for score in scores.values() if score > -math.inf)
        order = [token for token in order if scores[token] >= best - params.top_n_sigma * sigma]
    kept = {token: math.exp((scores[token] - best) / params.temperature) for token in order}
    if params.top_k:
        kept = {token: kept[token] for token in order[: params.top_k]}
    mass, total, nucleus = 0.0, sum(kept.values()), {}
    for token, weight in kept.items():
        nucleus[token] = weight
        mass += weight
        if params.top_p < 1.0 and mass >= params.top_p * total:  # else rounding might end it
            break
    kept = {token: weight for token, weight in nucleus.items() if weight >= params.min_p}
    chances = {token: weight / sum(kept.values()) for token, weight in kept.items()}
    likely = [token for token, chance in chances.items() if chance > 0.0 and chance >= params.xtc_threshold - 1e-12]
    if len(likely) < 2:
        return chances
    rare = {token: chance for token, chance in chances.items() if token not in likely[:-1]}
    rare = {token: chance / sum(rare.values()) for token, chance in rare.items()}
    share = params.xtc_probability
    mixed = {token: (1 - share) * chance + share * rare.get(token, 0.0) for token, chance in chances.items()}
    return {token: chance for token, chance in mixed.items() if chance > 0.0}


def summed(logits: np.ndarray, error: float = 0.0) -> TopLogits:
    """The largest logits, and sums of blocks as the module has them: off by so much, some up and some down."""

    def running_sums(row: int, temperature: float) -> np.ndarray:
        weights = relative_weights(logits[row], temperature)
        blocks = [math.fsum(weights[start : start + WEIGHT_BLOCK]) for start in range(0, len(weights), WEIGHT_BLOCK)]
        return np.cumsum([block * (1 + error * (-1) ** number) for number, block in enumerate(blocks)])

    return top_of(logits)._replace(running_sums=running_sums)


def sampled_of(logits: np.ndarray, states: list[SamplerState]) -> list[SampledToken | None]:
    return sample(logits, top_of(logits), states)


def one(logits: list[float] | np.ndarray, state: SamplerState) -> int:
    sampled = sampled_of(np.array([logits], np.float32), [state])[0]
    assert sampled is not None
    return sampled.token_id


@settings(deadline=None)
@given(LOGITS, PARAMS, TOKENS, TOKENS)
def test_draws_only_what_the_definition_allows(
    logits: list[float], params: SamplingParams, prompt: list[int], reply: list[int]
) -> None:
    state = SamplerState(params, prompt, VOCAB_SIZE)
    for token in reply:
        state.record(token)
    allowed = slow_distribution(logits, params, prompt, reply)
    edge = 1e-9 < params.top_p < 1.0  # a mass of exactly top_p rounds either way: one token more may be allowed
    for _ in range(20):
        token = one(logits, state)
        assert token in allowed or (
            edge and token in slow_distribution(logits, replace_top_p(params, params.top_p + 1e-9), prompt, reply)
        )


def replace_top_p(params: SamplingParams, top_p: float) -> SamplingParams:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return SamplingParams(**{**values, "top_p": min(1.0, top_p)})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0.6, top_k=5),
        SamplingParams(seed=1, temperature=1.5, top_p=0.8),
        SamplingParams(seed=1, top_k=9, top_p=0.9, min_p=0.05),
        SamplingParams(seed=1, min_p=0.2),
        SamplingParams(seed=1, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(seed=1, xtc_probability=1.0),
        SamplingParams(seed=1, xtc_probability=0.4, xtc_threshold=0.05, top_k=6),
        SamplingParams(seed=1, xtc_probability=0.4, xtc_threshold=0.2, min_p=0.1, presence_penalty=0.3),
        SamplingParams(seed=1, top_n_sigma=1.0),
        SamplingParams(seed=1, top_n_sigma=1.5, temperature=2.0, top_p=0.8, frequency_penalty=0.2),
    ],
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    logits = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.9, 0.8, 0.1, -3.0, 1.2]
    prompt, reply = [0, 3], [1, 1, 7]
    state = SamplerState(params, prompt, VOCAB_SIZE)
    for token in reply:
        state.record(token)
    expected = slow_distribution(logits, params, prompt, reply)
    num_draws = 4000
    drawn = Counter(one(logits, state) for _ in range(num_draws))
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        error = math.sqrt(probability * (1 - probability) / num_draws)
        assert abs(drawn[token] / num_draws - probability) < 5 * error + 1e-9


@settings(deadline=None)
@given(LOGITS, PARAMS, st.integers(1, 5))
def test_a_token_takes_one_random_number_whatever_it_is_used_for(
    logits: list[float], params: SamplingParams, count: int
) -> None:
    """Drafts and banned strings go back by as many numbers as tokens."""
    state, numbers = SamplerState(params, [1], VOCAB_SIZE), SamplerState(params, [1], VOCAB_SIZE)
    for _ in range(count):
        one(logits, state)
        assert params.greedy or 0.0 <= numbers.uniform() < 1.0
    assert params.greedy or state.uniform() == numbers.uniform()


@settings(deadline=None)
@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=6), st.integers(0, 5))
def test_a_row_does_not_depend_on_its_batch(rows: list[tuple[list[float], SamplingParams]], pick: int) -> None:
    pick %= len(rows)
    states = [SamplerState(params, [1], VOCAB_SIZE) for _, params in rows]
    alone = SamplerState(rows[pick][1], [1], VOCAB_SIZE)
    batch = np.array([logits for logits, _ in rows], np.float32)
    for _ in range(3):
        together = sampled_of(batch, states)
        assert together[pick] == sampled_of(batch[pick : pick + 1], [alone])[0]


MANY = 700  # of which a few can be drawn, or most
SHARP = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 40, 64, 65, MANY - 1, MANY, MANY + 1]),
    top_p=st.sampled_from([0.0, 1e-6, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    logprobs=st.sampled_from([None, None, 2]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, MANY - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
    seed=st.integers(0, 2**32),
)


@settings(deadline=None)
@given(SHARP, st.integers(0, 2**32), st.booleans())
def test_the_largest_logits_draw_what_the_whole_row_does(params: SamplingParams, seed: int, has_ties: bool) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, MANY)).astype(np.float32) * 4
    logits = logits.round() if has_ties else logits
    top = top_of(logits)
    only_best = TopLogits(top.values[:, :1], top.token_ids[:, :1], top.is_finite)
    tops = [only_best, top, summed(logits, 1e-12)]
    states = [SamplerState(params, list(range(0, MANY, 7)), MANY) for _ in tops]
    for _ in range(10):
        drawn = [sample(logits, each, [state])[0] for each, state in zip(tops, states, strict=True)]
        assert all(isinstance(each, SampledToken) for each in drawn)
        assert len({each.token_id for each in drawn}) == 1
        for each in drawn[1:] if params.logprobs else ():
            expected = drawn[0].logprob
            assert each.logprob.rank == expected.rank and each.logprob.logprob == pytest.approx(expected.logprob)
            assert [token_id for token_id, _ in each.logprob.top] == [token_id for token_id, _ in expected.top]
        for state in states:
            state.record(drawn[0].token_id)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, top_k=40),
        SamplingParams(seed=1, top_k=64, top_p=0.9, min_p=0.01),
        SamplingParams(seed=1, temperature=0.2, top_p=0.9),
        SamplingParams(seed=1, min_p=0.2),
        SamplingParams(seed=1, top_k=MANY, min_p=0.2),
    ],
)
def test_where_the_largest_logits_decide_no_other_is_read(params: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(size=(1, MANY)).astype(np.float32) * 4
    one, other = SamplerState(params, [], MANY), SamplerState(params, [], MANY)
    for _ in range(10):
        unread = sample(np.full_like(logits, np.nan), top_of(logits), [one])
        assert unread == sample(logits, top_of(logits), [other])


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2049, 9000),
    spread=st.sampled_from([0.1, 3.0, 40.0, 400.0]),
    nudge=st.sampled_from([-1e-10, -2e-16, 0.0, 2e-16, 1e-10]),
)
def test_a_draw_from_many_weights_is_that_of_their_running_sum(
    seed: int, size: int, spread: float, nudge: float
) -> None:
    """Numbers that fall on the end of a weight, or next to it, are the ones on which two orders of sums disagree."""
    chance = np.random.default_rng(seed)
    logits = (chance.normal(size=size) * spread).astype(np.float32)
    weights = relative_weights(logits.astype(np.float64), 1.0)
    running = np.cumsum(weights)
    ends = running[chance.integers(0, size, 20)] / running[-1]
    for number in [*chance.random(20), *np.clip(ends * (1 + nudge), 0.0, 1 - 2**-53), 0.0]:
        state = SamplerState(SamplingParams(seed=1), (), size)
        state.uniform = lambda number=number: float(number)  # type: ignore[method-assign]
        expected = min(int(np.searchsorted(running, number * running[-1], side="right")), size - 1)
        for top in (top_of(logits[None]), summed(logits[None], 3e-13)):
            drawn = sample(logits[None], top, [state])[0]
            assert isinstance(drawn, SampledToken) and drawn.token_id == expected


def test_of_a_row_whose_sums_are_known_only_a_block_is_read() -> None:
    chance = np.random.default_rng(3)
    logits = chance.normal(size=(1, 5000)).astype(np.float32)
    state, other = (SamplerState(SamplingParams(seed=5, logprobs=2), [], 5000) for _ in range(2))
    for _ in range(10):
        drawn = sample(logits, summed(logits), [state])[0]
        assert isinstance(drawn, SampledToken) and drawn.logprob is not None
        start = drawn.token_id // WEIGHT_BLOCK * WEIGHT_BLOCK
        unread = np.full_like(logits, np.nan)
        unread[:, start : start + WEIGHT_BLOCK] = logits[:, start : start + WEIGHT_BLOCK]
        same = sample(unread, summed(logits), [other])[0]
        assert isinstance(same, SampledToken) and same.logprob is not None
        assert (same.token_id, same.logprob.logprob) == (drawn.token_id, drawn.logprob.logprob)


WIDE = 9000  # so many that a nucleus needs more than is sorted at first


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 1.0, 3.0]),
    top_p=st.sampled_from([1e-3, 0.3, 0.9, 0.999, 1 - 2**-53]),
    min_p=st.sampled_from([0.0, 1e-4, 0.2]),
    top_k=st.sampled_from([0, 100, 500]),
    has_ties=st.booleans(),
)
def test_cuts_of_many_tokens_are_those_of_sorting_all(
    seed: int, spread: float, top_p: float, min_p: float, top_k: int, has_ties: bool
) -> None:
    logits = (np.random.default_rng(seed).normal(size=(1, WIDE)) * spread).astype(np.float32)
    logits = logits.round(1) if has_ties else logits  # zeros of both signs among them
    params = SamplingParams(seed=seed, top_p=top_p, min_p=min_p, top_k=top_k)
    weights = relative_weights(logits[0], 1.0)
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    kept = weights[order]
    if top_p < 1.0:
        mass = kept.sum() if top_k else weights.sum()
        kept = kept[: int(np.searchsorted(np.cumsum(kept), top_p * mass)) + 1]
    kept = kept[kept >= min_p]
    tops = top_of(logits), summed(logits, 1e-12)
    states = [SamplerState(params, [], WIDE) for _ in tops]
    numbers = SamplerState(params, [], WIDE)
    for _ in range(5):
        cumulative = np.cumsum(kept)
        index = int(np.searchsorted(cumulative, numbers.uniform() * cumulative[-1], side="right"))
        for top, state in zip(tops, states, strict=True):
            drawn = sample(logits, top, [state])[0]
            assert isinstance(drawn, SampledToken) and drawn.token_id == order[min(index, len(kept) - 1)]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 100.0])
def test_top_n_sigma_drops_the_same_tokens_at_any_temperature(temperature: float) -> None:
    logits = [4.0, 3.9, 3.0, 2.9, *[0.0, -1.0] * 4]
    assert 1.0 < statistics.pstdev(logits) * 0.55 < 1.1
    state = SamplerState(SamplingParams(seed=1, top_n_sigma=0.55, temperature=temperature), [], VOCAB_SIZE)
    drawn = {one(logits, state) for _ in range(300)}
    assert drawn <= {0, 1, 2} and (drawn == {0, 1, 2} or temperature < 1.0)


@pytest.mark.parametrize("top_n_sigma", [0.373, 1.0, 2.917])
def test_top_n_sigma_takes_no_account_of_logits_that_a_draft_did_not_compute(top_n_sigma: float) -> None:
    logits = np.random.default_rng(4).normal(size=VOCAB_SIZE).astype(np.float32).tolist()
    params = SamplingParams(seed=1, top_n_sigma=top_n_sigma, temperature=2.0)
    short, long = SamplerState(params, [], VOCAB_SIZE), SamplerState(params, [], 3 * VOCAB_SIZE)
    for _ in range(100):
        assert one(logits, short) == one([*logits, *[float(NEVER_DRAFTED)] * 2 * VOCAB_SIZE], long)


@pytest.mark.parametrize(
    ("top_n_sigma", "drawn"), [(1e-300, {1, 2}), (2.0, {0, 1, 2, 3}), (1e300, {0, 1, 2, 3}), (10**400, {0, 1, 2, 3})]
)
def test_top_n_sigma_always_keeps_the_best_and_may_be_large(top_n_sigma: float, drawn: set[int]) -> None:
    params = SamplingParams(seed=1, top_n_sigma=top_n_sigma)
    logits = [0.0, 1.0, 1.0, 0.0]
    state = SamplerState(params, [], 4)
    assert {one(logits, state) for _ in range(200)} == drawn
    state = SamplerState(params, [], 4)
    assert {one([3e38, 3e38, -3e38, 3e38], state) for _ in range(200)} == {0, 1, 3}


def test_top_n_sigma_of_equal_logits_keeps_all() -> None:
    state = SamplerState(SamplingParams(seed=1, top_n_sigma=0.5), [], 4)
    assert {one([0.1] * 4, state) for _ in range(200)} == {0, 1, 2, 3}


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert one([0.0, 3.0, 3.0], SamplerState(SamplingParams(temperature=0.0), [], 3)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_none_and_the_others_are_not(bad: float) -> None:
    logits = np.zeros((3, 50), np.float32)
    logits[1, 49] = bad
    params = SamplingParams(temperature=0.0)
    sampled = sampled_of(logits, [SamplerState(params, [], 50) for _ in range(3)])
    assert [row is None for row in sampled] == [False, True, False]


def test_huge_finite_logits_are_fine() -> None:
    logits = np.full((1, 50), 3e38, np.float32)
    assert sampled_of(logits, [SamplerState(SamplingParams(temperature=1e-6, seed=1), [], 50)])[0] is not None


def test_top_p_over_more_candidates_than_are_sorted_at_first() -> None:
    size = 20 * FIRST_CANDIDATES
    logits = -np.arange(size, dtype=np.float32) / size
    state = SamplerState(SamplingParams(seed=1, top_p=0.5), [], size)
    weights = np.exp(logits.astype(np.float64))
    limit = int(np.searchsorted(np.cumsum(weights) / weights.sum(), 0.5)) + 1
    drawn = [one(logits, state) for _ in range(300)]
    assert limit > FIRST_CANDIDATES and max(drawn) < limit and max(drawn) > limit - limit // 20


def test_seed_repeats_and_its_absence_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        state = SamplerState(SamplingParams(seed=seed), [], 1000)
        return [one(np.zeros(1000), state) for _ in range(8)]

    assert draw(7) == draw(7) != draw(8)
    assert draw(-1) == draw(-1)
    assert draw(None) != draw(None)


def test_logprobs_are_a_distribution_sorted_from_the_top() -> None:
    logits = [1.0, 3.0, 2.0, 3.0, -4.0]
    state = SamplerState(SamplingParams(temperature=0.0, logprobs=5, logit_bias={4: 100.0}), [], 5)
    sampled = sampled_of(np.array([logits], np.float32), [state])[0]
    assert sampled is not None and sampled.token_id == 4 and sampled.logprob is not None
    assert [token for token, _ in sampled.logprob.top] == [1, 3, 2, 0, 4]
    assert math.isclose(sum(math.exp(logprob) for _, logprob in sampled.logprob.top), 1.0)
    assert sampled.logprob.logprob == sampled.logprob.top[-1][1]


def test_zero_logprobs_asks_for_the_generated_token_only() -> None:
    state = SamplerState(SamplingParams(temperature=0.0, logprobs=0), [], 3)
    sampled = sampled_of(np.zeros((1, 3), np.float32), [state])[0]
    assert sampled is not None and sampled.logprob is not None
    assert sampled.logprob.top == () and math.isclose(sampled.logprob.logprob, -math.log(3))


@given(st.floats(1.0, 1e300) | st.floats(5e-324, 1.0) | st.floats(0.9, 1.1))
def test_the_logarithm_is_as_near_as_libm_s(x: float) -> None:
    exact = math.log(x)
    assert abs(logarithm(x) - exact) <= 2 * math.ulp(exact) + 1e-17
    assert logarithm(1.0) == 0.0


def test_no_rows_are_no_tokens() -> None:
    assert sampled_of(np.zeros((0, 5), np.float32), []) == []
