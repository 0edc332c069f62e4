"""A prompt that is fed without its last space gets it back with the reply, so that the text is what it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.runtime.chat.reply_start import LeadingSpace, SpaceTokens, given_reply
from radixlm.runtime.chat.token_constraint import allowed_of, mask_of
from radixlm.runtime.engine.engine import Completion, Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.errors import InvalidParameter

from ..fake_artifact import FakeArtifact, fake_artifact
from ..fake_constraint import ChainConstraint
from ..fake_model import EOS, VOCAB_SIZE, Bench, FakeModel, alone

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tokenizers" / "tiny_spm.json"
VOCAB = 500
END = 2
PROMPT = "The answer is: "
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/] {% endfor %}"
MESSAGES = [{"role": "user", "content": "Why?"}]
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def artifact() -> FakeArtifact:
    text = TOKENIZER.read_text(encoding="utf-8")
    return fake_artifact(text, TEMPLATE, vocab_size=VOCAB, bos_token_id=1, eos_token_id=END)


def open_engine(artifact: Any, **options: Any) -> Engine:
    return Engine(artifact, open_runner=lambda _, num_pages, __: FakeModel(num_pages, VOCAB), max_num_seqs=8, **options)


@pytest.fixture
def engine(artifact: FakeArtifact) -> Iterator[Engine]:
    with open_engine(artifact) as engine:
        yield engine


def token(engine: Engine, text: str) -> int:
    [token_id] = engine.tokenizer.encode_inside(text)
    return token_id


def prompt_text(engine: Engine, completion: Completion) -> str:
    """The text that the model was fed, and what it said to it."""
    return engine.tokenizer.decode((*completion.prompt_token_ids, *completion.token_ids))


def test_every_sampled_reply_begins_with_the_space_and_is_sent_without(engine: Engine) -> None:
    ids = tuple(engine.encode(PROMPT))
    asked = [*(replace(DRAWN, seed=seed) for seed in range(60)), replace(DRAWN, temperature=0.0)]
    asked += [replace(DRAWN, seed=seed, top_k=3, presence_penalty=1.0, logit_bias={7: 3.0}) for seed in range(20)]
    for stream in [engine.stream(PROMPT, params) for params in asked]:
        deltas = list(stream)
        completion = stream.result()
        assert completion.prompt_token_ids == stream.prompt_token_ids == ids[:-1]
        assert engine.tokenizer.token_bytes(completion.token_ids[0])[:1] == b" "
        assert prompt_text(engine, completion) == PROMPT + completion.text
        assert "".join(delta.text for delta in deltas) == completion.text
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids) - 1, len(completion.token_ids))


def test_a_reply_may_end_at_once_instead(engine: Engine) -> None:
    bias = {END: 100.0}
    for params in (
        SamplingParams(temperature=0.0, logit_bias=bias),
        SamplingParams(temperature=0.0, logit_bias={60: 100.0}, stop_token_ids=(60,), ignore_eos=True),
    ):
        completion = engine.generate(PROMPT, params)
        assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("", "stop", 1)
    going_on = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias=bias))
    assert going_on.token_ids[1:] == (END, END)
    assert engine.tokenizer.token_bytes(going_on.token_ids[0])[:1] == b" "


def test_only_the_first_token_is_bound(engine: Engine) -> None:
    letter = token(engine, "x")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={letter: 100.0})
    assert engine.generate(PROMPT, params).token_ids[1:] == (letter,) * 3
    assert engine.generate(PROMPT[:-1], params).token_ids == (letter,) * 4


def test_stop_strings_see_the_text_as_it_is_sent(engine: Engine) -> None:
    the = token(engine, " the")
    params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={the: 100.0})
    assert engine.generate(PROMPT, params).text == "the the the the the"
    assert engine.generate(PROMPT, replace(params, stop=(" the",))).text == "the"
    assert engine.generate(PROMPT, replace(params, stop=("the",))).text == ""
    assert engine.generate(PROMPT[:-1], replace(params, stop=(" the",))).text == ""


def test_log_probabilities_are_the_models_and_of_its_own_tokens(engine: Engine) -> None:
    free = engine.generate(PROMPT[:-1], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
    bound = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
    assert free.logprobs is not None and bound.logprobs is not None
    assert free.prompt_token_ids == bound.prompt_token_ids
    assert free.logprobs[0].top == bound.logprobs[0].top
    assert free.logprobs[0].token_id != bound.logprobs[0].token_id == bound.token_ids[0]


def test_a_seeds_reply_is_the_same_cold_warm_and_in_company(engine: Engine) -> None:
    params = replace(DRAWN, seed=7)
    cold = engine.generate(PROMPT, params)
    streams = [engine.stream(PROMPT, replace(DRAWN, seed=seed)) for seed in (5, 6, 7, 8)]
    assert streams[2].result().token_ids == cold.token_ids
    assert len({stream.result().token_ids for stream in streams}) > 1


class Chain:
    """Where the replies of a grammar begin."""

    def start(self) -> ChainConstraint:
        return ChainConstraint(VOCAB)


def test_with_a_grammar_a_prompt_is_fed_as_it_is(engine: Engine) -> None:
    for strip_suffix in (None, True):
        completion = engine.generate(PROMPT, DRAWN, constraint=Chain(), strip_suffix=strip_suffix)
        assert list(completion.prompt_token_ids) == engine.encode(PROMPT)
        assert completion.num_swallowed == 0


@pytest.mark.parametrize(
    ("policy", "strips"),
    [
        ("text", {"chat": True, "text": True, "ids": False}),
        ("always", {"chat": True, "text": True, "ids": True}),
        ("never", {"chat": False, "text": False, "ids": False}),
    ],
)
def test_the_engine_says_which_prompts_are_stripped_and_a_request_may_say_otherwise(
    artifact: FakeArtifact, policy: Any, strips: dict[str, bool]
) -> None:
    with open_engine(artifact, strip_suffix=policy) as engine:
        suffix, ids = engine.tokenizer.profile.suffix_ids[0], engine.encode(PROMPT)
        assert strips == {
            "chat": engine.chat(MESSAGES, DRAWN).prompt_token_ids[-1] != suffix,
            "text": engine.generate(PROMPT, DRAWN).prompt_token_ids[-1] != suffix,
            "ids": engine.generate(ids, DRAWN).prompt_token_ids[-1] != suffix,
        }
        assert engine.encode_chat(MESSAGES) == list(engine.chat(MESSAGES, DRAWN).prompt_token_ids)
        for prompt in (PROMPT, ids):
            assert engine.generate(prompt, DRAWN, strip_suffix=True).prompt_token_ids == tuple(ids[:-1])
            assert engine.generate(prompt, DRAWN, strip_suffix=False).prompt_token_ids == tuple(ids)


def test_a_policy_that_there_is_not_is_refused(artifact: FakeArtifact) -> None:
    with pytest.raises(InvalidParameter, match="strip_suffix is 'ids'; use one of text, always, never"):
        open_engine(artifact, strip_suffix="ids")


def test_a_given_reply_that_lacks_the_space_gets_its_token_first(engine: Engine) -> None:
    tokenizer, (suffix,) = engine.tokenizer, engine.tokenizer.profile.suffix_ids
    fed, stripped = engine.prompts.completion(PROMPT[:-1]), engine.prompts.completion(PROMPT)
    letter, the = token(engine, "x"), token(engine, " the")
    assert given_reply(stripped, [letter, END], tokenizer, (END,)) == (suffix, letter, END)
    for prompt, reply in (
        (stripped, (the, END)),
        (stripped, (suffix, letter)),
        (stripped, (END,)),
        (stripped, ()),
        (fed, (letter, END)),
        (engine.prompts.chat(MESSAGES), (letter, END)),
    ):
        assert given_reply(prompt, reply, tokenizer, (END,)) == reply


@pytest.mark.parametrize("vocab_size", [300, 411, 412])
def test_tokens_that_begin_with_a_space_and_those_that_end_a_reply_may_come_first(
    engine: Engine, vocab_size: int
) -> None:
    mask = SpaceTokens(engine.tokenizer, vocab_size).start([END, 100_000]).mask()
    assert mask is not None
    special = engine.tokenizer.profile.special_ids
    spaces = {i for i in range(vocab_size) if engine.tokenizer.token_bytes(i)[:1] == b" " and i not in special}
    assert set(np.flatnonzero(allowed_of(mask, vocab_size))) == spaces | {END}


def test_a_preempted_request_is_bound_in_its_first_token_only() -> None:
    chance = random.Random(3)
    bench = Bench(num_pages=8 * 3, policy=SchedulerPolicy(max_num_seqs=16, max_num_batched_tokens=64))
    first = mask_of(np.arange(VOCAB_SIZE) % 9 == 4)
    wanted: dict[str, tuple[int, ...]] = {}
    requests = []
    for i in range(30):
        ids = [*([1] * 16 if i % 3 else [2] * 20), *(chance.randrange(EOS) for _ in range(chance.randrange(1, 16)))]
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=chance.randrange(20, 50), ignore_eos=True)
        wanted[f"r{i}"] = alone(ids, params, constraint=LeadingSpace(first))
        requests.append(bench.add(f"r{i}", ids, params, constraint=LeadingSpace(first)))
    num_preempted_with_tokens = 0
    while bench.core.has_work:
        before = [(request.num_preemptions, request.num_generated) for request in requests]
        bench.step()
        num_preempted_with_tokens += sum(
            request.num_preemptions > num_preemptions and num_generated > 0
            for request, (num_preemptions, num_generated) in zip(requests, before, strict=True)
        )
    assert num_preempted_with_tokens > 5
    assert {name: bench.tokens(name) for name in wanted} == wanted
    assert all(tokens[0] % 9 == 4 for tokens in wanted.values())
    assert any(token_id % 9 != 4 for tokens in wanted.values() for token_id in tokens[1:])
