"""A reply that took tokens back goes on as one that never had them: text, grammar, penalties, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.token_constraint import allowed_of
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.reply import Reply
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.sampler import SampledToken

from ..server.scripted import VOCAB_SIZE, Scripted
from ..thought_templates import HYBRID

MESSAGES = [{"role": "user", "content": "Say it."}]
THOUGHT = "<think>\nI think so.\n</think>\n\n"
GRAMMAR = Grammar("regex", "([a-c]{1,3} ?){2,12}!")
PARAMS = SamplingParams(
    seed=3, min_tokens=4, repetition_penalty=1.2, presence_penalty=0.5, banned_strings=("ab", "ca", "cc b")
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Scripted.serving(HYBRID) as served:
        yield served.engine


def fresh(engine: Engine, params: SamplingParams, *, is_held: bool) -> Reply:
    prompt = engine.prompts.chat(MESSAGES)
    return engine.prompts.reply(prompt, params, GRAMMAR if is_held else None, is_chat=True)


def told(reply: Reply, token_ids: list[int]) -> list[str]:
    return [reply.accept(SampledToken(each), 0.0, is_full=False).text for each in token_ids]


def state(reply: Reply) -> object:
    """What decides all that comes next."""
    sampler = reply.sampler
    logits = np.linspace(-1.0, 1.0, VOCAB_SIZE)
    penalized = sampler.penalized(logits.astype(np.float32))
    logits[penalized.ids] = penalized.values
    mask = None if sampler.constraint is None else sampler.constraint.mask()
    allowed = None if mask is None else allowed_of(mask, VOCAB_SIZE).tobytes()
    (decoder, splitter, stops, *_), *counts = reply._text.state()
    assert sampler._generator is not None
    number = sampler._generator.bit_generator.state["state"]
    return logits.tobytes(), allowed, decoder, splitter, stops, counts, number


def test_what_a_reply_took_back_it_never_had(engine: Engine) -> None:
    taken_back: list[int] = []

    @settings(deadline=None, max_examples=30)
    @given(seed=st.integers(0, 2**32), is_held=st.booleans(), thinks=st.booleans())
    def check(seed: int, is_held: bool, thinks: bool) -> None:
        taken_back.append(num_taken_back(engine, seed, is_held=is_held, thinks=thinks))

    check()
    assert sum(taken_back) > 20


def num_taken_back(engine: Engine, seed: int, *, is_held: bool, thinks: bool) -> int:
    """Compare a random reply with one that never had what it took back; how many tokens that were."""
    chance = random.Random(seed)
    reply = fresh(engine, PARAMS, is_held=is_held)
    begun = engine.encode(THOUGHT, add_bos=False) if thinks else []
    letters = [engine.encode(each, add_bos=False)[0] for each in ("a", "b", "c", "ab", "cab", " ", "bc", " b", "ba")]
    count = 0
    for number in range(60):
        if number < len(begun):
            token_id = begun[number]
        else:
            mask = None if reply.sampler.constraint is None else reply.sampler.constraint.mask()
            allowed = np.ones(VOCAB_SIZE, np.bool_) if mask is None else allowed_of(mask, VOCAB_SIZE)
            usable = [each for each in letters if allowed[each] and each not in reply.sampler.banned_ids]
            if not usable:
                break
            token_id = chance.choice(usable)
        before = len(reply.token_ids)
        reply.sampler.uniform()
        reply.accept(SampledToken(token_id), 0.0, is_full=False)
        if reply.finish_reason is not None:
            break
        count += before + 1 - len(reply.token_ids)
        other = fresh(engine, replace(PARAMS, banned_strings=()), is_held=is_held)
        for each in reply.token_ids:
            other.sampler.uniform()
            other.accept(SampledToken(each), 0.0, is_full=False)
        assert state(reply) == state(other)
        assert other.text.startswith(reply.text) and other.thought.startswith(reply.thought)
    assert not any(each in reply.text for each in PARAMS.banned_strings)
    return count


def test_a_banned_string_in_a_thought_is_let_be(engine: Engine) -> None:
    reply = fresh(engine, replace(PARAMS, banned_strings=("think so",)), is_held=False)
    told(reply, engine.encode(THOUGHT, add_bos=False))
    assert reply.thought == "I think so."
    assert told(reply, engine.encode("I think so", add_bos=False))[-1] == ""
    assert reply.text == "I"
