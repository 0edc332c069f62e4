"""What a reply must keep to holds on every path of the sampler, and through all that happens to a request."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.token_constraint import allowed_of
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.engine.step.sampler import Refusal, SampledToken, sample
from radixlm.runtime.engine.step.sampler_state import SamplerState
from radixlm.runtime.errors import ConstraintFailed
from radixlm.runtime.model.batch import TopLogits

from ..engine.test_sampler import LOGITS, PARAMS, TOKENS, slow_distribution, summed
from ..engine.test_sampler import VOCAB_SIZE as FEW
from ..fake_constraint import ChainConstraint, mask_of
from ..fake_model import EOS, VOCAB_SIZE, Bench, alone, top_of


class Fixed:
    """Always the same tokens."""

    is_finished = False

    def __init__(self, allowed: set[int], vocab_size: int) -> None:
        self._mask = mask_of(allowed, vocab_size)

    def mask(self) -> np.ndarray:
        return self._mask

    def accept(self, token_id: int) -> None:
        assert allowed_of(self._mask, 10**6)[token_id]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100])
def test_a_mask_has_a_bit_for_each_token_and_allows_none_beyond(vocab_size: int) -> None:
    allowed = {i for i in range(vocab_size) if i % 3 == 0 or i == vocab_size - 1}
    mask = mask_of(allowed, vocab_size)
    assert set(np.flatnonzero(allowed_of(mask, vocab_size))) == allowed
    assert set(np.flatnonzero(allowed_of(mask, vocab_size + 70))) == allowed


@settings(deadline=None)
@given(LOGITS, PARAMS, TOKENS, st.sets(st.integers(0, FEW - 1), min_size=1))
@example(
    [-9.0] * FEW, SamplingParams(temperature=0.3, xtc_probability=0.0, xtc_threshold=0.0, top_k=0, seed=0), [], {0}
)
@example(
    [-9.0] * FEW, SamplingParams(temperature=0.3, xtc_probability=1.0, xtc_threshold=0.0, top_k=0, seed=0), [], {0}
)
def test_draws_are_those_of_a_vocabulary_without_the_other_tokens(
    logits: list[float], params: SamplingParams, prompt: list[int], allowed: set[int]
) -> None:
    others = {token: -np.inf for token in range(FEW) if token not in allowed}
    masked = [others.get(token, logit) for token, logit in enumerate(logits)]
    wanted = slow_distribution(masked, params, prompt, [])
    wanted = {token: p for token, p in wanted.items() if p > 0}
    state = SamplerState(params, prompt, FEW, Fixed(allowed, FEW))
    row = np.array([logits], np.float32)
    drawn = [sample(row, top_of(row), [state])[0] for _ in range(20)]
    assert all(isinstance(token, SampledToken) for token in drawn)
    found = {token.token_id for token in drawn if isinstance(token, SampledToken)}
    assert found <= allowed
    if params.top_p in (1e-6, 1.0):  # elsewhere a mass of exactly top_p rounds either way
        assert found <= set(wanted)


LARGE = 3000
CHANGES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, LARGE - 1), st.sampled_from([-100.0, 3.0, 100.0]), max_size=3),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5]),
    seed=st.integers(0, 2**32),
)


@settings(deadline=None, max_examples=60)
@given(CHANGES, st.sampled_from([None, 0, 1, 30, 2500, LARGE - 1]), st.sampled_from([0.5, 3.0]), st.integers(0, 2**32))
def test_draws_of_changed_rows_are_those_of_all_weights(
    params: SamplingParams, num_forbidden: int | None, spread: float, seed: int
) -> None:
    """Sums of the module are those of the row as it was, without penalties and masks."""
    chance = np.random.default_rng(seed)
    logits = (chance.normal(size=(1, LARGE)) * spread).astype(np.float32)
    allowed = None if num_forbidden is None else {*chance.permutation(LARGE)[num_forbidden:].tolist()}
    prompt = [*chance.integers(0, LARGE, 500).tolist(), int(logits.argmax())]
    states = [SamplerState(params, prompt, LARGE, None if allowed is None else Fixed(allowed, LARGE)) for _ in range(2)]
    for _ in range(8):
        drawn = [sample(logits, top, [s])[0] for top, s in zip((top_of(logits), summed(logits)), states, strict=True)]
        assert drawn[0] == drawn[1] and isinstance(drawn[0], SampledToken)
        assert allowed is None or drawn[0].token_id in allowed
        for state in states:
            state.record(drawn[0].token_id)


@pytest.mark.parametrize("num_top", [1, 4, 64])
def test_what_the_largest_logits_decide_is_what_the_whole_row_says(num_top: int) -> None:
    chance = np.random.default_rng(num_top)
    for seed in range(150):
        logits = np.round(chance.normal(size=(1, 300)) * 4, 1).astype(np.float32)  # with ties
        allowed = {int(i) for i in chance.integers(0, 300, int(chance.integers(1, 200)))}
        params = SamplingParams(
            temperature=float(chance.choice([0.0, 0.4, 1.0])),
            top_k=int(chance.choice([0, 3, 40])),
            top_p=float(chance.choice([0.3, 0.9, 1.0])),
            min_p=float(chance.choice([0.0, 0.1])),
            top_n_sigma=float(chance.choice([0.0, 0.0, 1.0])),
            seed=seed,
        )
        whole, part = top_of(logits), top_of(logits)
        part = TopLogits(part.values[:, :num_top], part.token_ids[:, :num_top], part.is_finite)
        states = [SamplerState(params, (), 300, Fixed(allowed, 300)) for _ in range(2)]
        assert sample(logits, whole, states[:1]) == sample(logits, part, states[1:])


def test_a_tie_goes_to_the_lowest_allowed_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 3.0]], np.float32)
    state = SamplerState(SamplingParams(temperature=0.0), (), 4, Fixed({0, 2, 3}, 4))
    assert sample(logits, top_of(logits), [state]) == [SampledToken(2)]


def test_logprobs_are_those_of_the_model_whatever_may_come() -> None:
    logits = np.array([[0.0, 2.0, 1.0, -1.0]], np.float32)
    params = SamplingParams(temperature=0.0, logprobs=2)
    free, bound = SamplerState(params, (), 4), SamplerState(params, (), 4, Fixed({2}, 4))
    [left], [right] = sample(logits, top_of(logits), [free]), sample(logits, top_of(logits), [bound])
    assert isinstance(left, SampledToken) and isinstance(right, SampledToken)
    assert left.logprob is not None and right.logprob is not None
    assert (left.token_id, right.token_id) == (1, 2)
    assert left.logprob.top == right.logprob.top
    assert dict(left.logprob.top)[2] == right.logprob.logprob


def test_a_bias_cannot_bring_back_what_may_not_come() -> None:
    logits = np.zeros((1, 4), np.float32)
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0, 3: 5.0})
    state = SamplerState(params, (), 4, Fixed({1, 3}, 4))
    assert sample(logits, top_of(logits), [state]) == [SampledToken(3)]


def test_rows_without_a_constraint_draw_what_they_draw_alone() -> None:
    chance = np.random.default_rng(3)
    logits = chance.normal(size=(3, 50)).astype(np.float32)
    params = SamplingParams(seed=9)
    states = [SamplerState(params, (), 50), SamplerState(params, (), 50, Fixed({4}, 50)), SamplerState(params, (), 50)]
    first, second, third = sample(logits, top_of(logits), states)
    assert second == SampledToken(4)
    for row, token in ((0, first), (2, third)):
        one = logits[row : row + 1]
        assert sample(one, top_of(one), [SamplerState(params, (), 50)]) == [token]


def test_a_failing_constraint_refuses_its_row_and_no_other() -> None:
    logits = np.random.default_rng(0).normal(size=(2, VOCAB_SIZE)).astype(np.float32)
    states = [
        SamplerState(SamplingParams(temperature=0.0), (), VOCAB_SIZE, ChainConstraint(VOCAB_SIZE, fails_after=0)),
        SamplerState(SamplingParams(temperature=0.0), (), VOCAB_SIZE),
    ]
    refused, sampled = sample(logits, top_of(logits), states)
    assert isinstance(refused, Refusal) and isinstance(refused.error, ConstraintFailed)
    assert sampled == SampledToken(int(logits[1].argmax()))


# In the engine.

DRAWN = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)


def test_a_complete_reply_ends_without_another_step() -> None:
    bench = Bench()
    request = bench.add("a", range(20), DRAWN, constraint=ChainConstraint(VOCAB_SIZE, num_tokens=6))
    bench.run()
    assert bench.tokens("a") == alone(range(20), DRAWN, constraint=ChainConstraint(VOCAB_SIZE, num_tokens=6))
    assert request.num_generated == 6
    completion = bench.outputs["a"][-1].completion
    assert completion is not None and completion.finish_reason == "stop"


def test_a_constraint_that_fails_ends_its_request_alone_with_its_error() -> None:
    bench = Bench()
    bench.add("a", range(20), DRAWN)
    bench.add("b", range(5, 20), DRAWN, constraint=ChainConstraint(VOCAB_SIZE, fails_after=4))
    bench.add("c", range(9, 20), DRAWN, constraint=ChainConstraint(VOCAB_SIZE))
    bench.run()
    assert isinstance(bench.error("b"), ConstraintFailed)
    assert len(bench.outputs["b"]) == 5  # four tokens, and the error
    assert bench.tokens("a") == alone(range(20), DRAWN)
    assert bench.tokens("c") == alone(range(9, 20), DRAWN, constraint=ChainConstraint(VOCAB_SIZE))
    bench.add("d", range(5, 20), DRAWN)
    bench.run()
    assert bench.tokens("d") == alone(range(5, 20), DRAWN)


def test_a_warm_constrained_reply_is_the_cold_one() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name, range(33), DRAWN, constraint=ChainConstraint(VOCAB_SIZE))
        bench.run()
    assert bench.tokens("a") == bench.tokens("b") == alone(range(33), DRAWN, constraint=ChainConstraint(VOCAB_SIZE))
    completion = bench.outputs["b"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 32


def test_preempted_cancelled_and_batched_constrained_requests_equal_running_alone() -> None:
    chance = random.Random(2)
    bench = Bench(num_pages=8 * 3, policy=SchedulerPolicy(max_num_seqs=16, max_num_batched_tokens=64))
    wanted: dict[str, tuple[list[int], SamplingParams, bool]] = {}
    constraints: dict[str, ChainConstraint] = {}
    for i in range(40):
        ids = [*([1] * 16 if i % 3 else [2] * 20), *(chance.randrange(EOS) for _ in range(chance.randrange(1, 16)))]
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]), seed=i, max_tokens=chance.randrange(20, 50), ignore_eos=True
        )
        wanted[f"r{i}"] = (ids, params, i % 2 == 0)
        constraint = ChainConstraint(VOCAB_SIZE) if i % 2 == 0 else None
        if constraint is not None:
            constraints[f"r{i}"] = constraint
        bench.add(f"r{i}", ids, params, constraint=constraint)
    cancelled = set()
    while bench.core.has_work:
        bench.step()
        if chance.random() < 0.05:
            name = f"r{chance.randrange(40)}"
            if not any(output.completion for output in bench.outputs.get(name, [])):
                bench.abort(name)
                cancelled.add(name)
    assert bench.core.num_preemptions > 0 and cancelled
    kinds: Counter[bool] = Counter()
    for name, (ids, params, is_bound) in wanted.items():
        tokens = bench.tokens(name)
        expected = alone(ids, params, constraint=ChainConstraint(VOCAB_SIZE) if is_bound else None)
        assert tokens == (expected[: len(tokens)] if name in cancelled else expected)
        if is_bound:
            assert constraints[name].seen == list(tokens)  # no token twice, none that was not accepted
        kinds[is_bound] += name not in cancelled
    assert kinds[True] > 5 and kinds[False] > 5
