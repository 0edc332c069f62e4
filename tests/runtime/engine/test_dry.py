"""DRY sampling against a slow version that compares all beginnings with the end, one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.dry import _LONGEST, Dry
from radixlm.runtime.engine.step.sampler_state import SamplerState

VOCAB_SIZE = 6
BREAKER = 5
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
PARAMS = st.builds(
    SamplingParams,
    dry_multiplier=st.sampled_from([0.5, 2.0]),
    dry_base=st.sampled_from([1.0, 1.75]),
    dry_allowed_length=st.integers(1, 4),
    dry_penalty_last_n=st.sampled_from([-1, 0, 1, 7, 100]),
)


def slow_penalties(params: SamplingParams, ids: list[int]) -> list[float]:
    """What is taken from the logit of each token."""
    ids = ids if params.dry_penalty_last_n < 0 else ids[max(0, len(ids) - params.dry_penalty_last_n) :]
    longest = [0] * VOCAB_SIZE
    for place in range(1, len(ids)):  # of the next token
        length = 0
        while length < place and ids[place - 1 - length] == ids[-1 - length] != BREAKER:
            length += 1
        longest[ids[place]] = max(longest[ids[place]], length)
    allowed = params.dry_allowed_length
    powers = [params.dry_base ** (min(length, allowed + _LONGEST) - allowed) for length in longest]
    penalties = [params.dry_multiplier * power for power in powers]
    return [
        penalty if length >= allowed and token_id != BREAKER else 0.0
        for token_id, (length, penalty) in enumerate(zip(longest, penalties, strict=True))
    ]


def penalties(dry: Dry) -> list[float]:
    found = dry.penalties()
    return [found.get(token_id, 0.0) for token_id in range(VOCAB_SIZE)]


@given(PARAMS, TOKENS, TOKENS, st.data())
def test_repetitions_are_penalized_as_the_definition_says(
    params: SamplingParams, prompt: list[int], reply: list[int], data: st.DataObject
) -> None:
    dry = Dry(params, prompt, np.array([BREAKER]), VOCAB_SIZE)
    ids = list(prompt)
    for token_id in reply:
        dry.record(token_id)
        ids.append(token_id)
        if data.draw(st.booleans(), "goes back") and len(ids) > len(prompt):
            num = data.draw(st.integers(0, len(ids) - len(prompt)), "by")
            ahead = dry.copy()
            ahead.take_back(num)
            ahead.record(0)  # is not seen by the other
            dry.take_back(num)
            ids = ids[: len(ids) - num]
        assert penalties(dry) == pytest.approx(slow_penalties(params, ids))


def test_a_long_repetition_takes_no_more_steps_than_is_penalized() -> None:
    params = SamplingParams(dry_multiplier=1.0)
    [most] = {*penalties(Dry(params, [0] * 100_000, np.array([BREAKER]), VOCAB_SIZE))} - {0.0}
    assert most == pytest.approx(1.75**_LONGEST)


def test_a_state_that_goes_ahead_repeats_by_itself() -> None:
    state = SamplerState(SamplingParams(dry_multiplier=1.0), [1, 2, 3, 1], VOCAB_SIZE)
    ahead = state.ahead()
    ahead.record(2)
    logits = np.zeros(VOCAB_SIZE, np.float32)
    assert state.penalized(logits).ids.tolist() == []
    assert [each.tolist() for each in ahead.penalized(logits)] == [[3], [-1.0]]


def test_a_model_that_repeats_itself_does_not_any_more(smollm2_artifact: Path) -> None:
    """And the same bytes come from the cache, and with drafts."""
    prompt = "the cat sat on the mat, the cat sat on the mat, the cat sat on the mat, the cat"
    greedy = SamplingParams(temperature=0, max_tokens=24)
    dry = SamplingParams(temperature=0, max_tokens=24, dry_multiplier=4.0)
    broken = SamplingParams(temperature=0, max_tokens=24, dry_multiplier=4.0, dry_sequence_breakers=(" ",))
    with Engine(smollm2_artifact, kv_cache_bytes=1 << 26, num_threads=1) as engine:
        plain = engine.generate(prompt, greedy).text
        replies = [engine.generate(prompt, dry, speculate=drafts).text for drafts in (True, False, True)]
        assert engine.generate(prompt, broken).text == plain
    assert " sat on the mat, the cat" in plain
    assert len({*replies}) == 1 and "sat on the mat" not in replies[0]
