"""Drafts change no byte: replies are those without, whatever is guessed, and what was wrong is never seen again."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step import drafts
from radixlm.runtime.kv_log.log import KVLog
from radixlm.runtime.kv_log.replay import KVReplay
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from radixlm.runtime.speculation.draft import Draft
from radixlm.runtime.speculation.drafter import Drafter

from ..fake_model import CONTEXT_LENGTH, POLICY, Bench, alone
from ..guess_oracle import Oracle
from ..traces import num_traces

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
PENALIZED = SamplingParams(
    temperature=0.9, seed=9, max_tokens=40, presence_penalty=1.5, repetition_penalty=1.3, top_p=0.9
)
SHORT = SamplingParams(temperature=0.0, max_tokens=9, stop=("CAB",), min_tokens=3)
PROMPTS = ([1, 2, 3], [5] * 20, [number * number % 37 for number in range(50)], list(range(30)))


@pytest.fixture(params=[1.0, 0.7, 0.0], ids=["right", "mixed", "wrong"])
def oracle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Oracle]]:
    monkeypatch.setattr(drafts, "Drafter", Oracle)
    Oracle.replies, Oracle.right, Oracle.chance = {}, request.param, random.Random(1)
    yield Oracle


def bench(num_pages: int = 64, **changes: Any) -> Bench:
    return Bench(num_pages, policy=replace(POLICY, speculates=True, **changes))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED, SHORT], ids=["greedy", "sampled", "penalized", "short"])
def test_replies_are_those_without_drafts(oracle: type[Oracle], params: SamplingParams) -> None:
    expected = {str(number): alone(ids, params) for number, ids in enumerate(PROMPTS)}
    oracle.replies = {tuple(ids): expected[str(number)] for number, ids in enumerate(PROMPTS)}
    served = bench()
    for number, ids in enumerate(PROMPTS):
        served.add(str(number), ids, params)
    served.run()
    for name, tokens in expected.items():
        assert len(tokens) >= len(served.tokens(name)) and served.tokens(name) == tokens[: len(served.tokens(name))]
        if not params.stop:
            assert served.tokens(name) == tokens
    counters = served.core.counters
    assert counters.num_drafted_tokens > 0
    share = counters.num_accepted_tokens / counters.num_drafted_tokens
    assert share > 0.5 if oracle.right == 1.0 else share < 0.2 if oracle.right == 0.0 else share > 0.1
    for request in served.requests.values():
        assert request.num_drafted >= request.reply.num_accepted_drafts
    served.core.check()


TRACES = given(
    seed=st.integers(0, 2**32), right=st.sampled_from([0.0, 0.5, 0.9, 1.0]), num_pages=st.sampled_from([8, 12, 40])
)


@settings(max_examples=60, deadline=None)
@TRACES
def test_random_requests_with_guesses_are_served_as_alone(seed: int, right: float, num_pages: int) -> None:
    serve_random_requests(seed, right, num_pages)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))  # so that workers share them
@settings(max_examples=num_traces(500), deadline=None, database=None)
@TRACES
def test_thousands_of_random_traces_are_served_as_alone(part: int, seed: int, right: float, num_pages: int) -> None:
    serve_random_requests(seed + part * 2**33, right, num_pages)


def serve_random_requests(seed: int, right: float, num_pages: int) -> None:
    """Requests that share prefixes, give pages back, are aborted and come again with the replies that they got."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "Drafter", Oracle)
        chance = random.Random(seed)
        Oracle.replies, Oracle.right, Oracle.chance = {}, right, random.Random(seed + 1)
        lines = io.StringIO()
        served = Bench(num_pages, policy=replace(POLICY, speculates=True), kv_log=KVLog(lines))
        prompts = [[chance.randrange(37) for _ in range(chance.randrange(1, 60))]]
        expected: dict[str, tuple[int, ...]] = {}
        for number in range(12):
            base = chance.choice(prompts)
            new = [chance.randrange(37) for _ in range(chance.randrange(9))]
            ids = [*base[: chance.randrange(1, len(base) + 1)], *new][: CONTEXT_LENGTH - 20]
            greedy = chance.random() < 0.5
            params = SamplingParams(temperature=0.0 if greedy else 1.0, seed=number, max_tokens=chance.randrange(1, 20))
            name = str(number)
            expected[name] = alone(ids, params)
            Oracle.replies[tuple(ids)] = expected[name]
            served.add(name, ids, params, chance.choice([b"", b"other", None]))
            prompts.append([*ids, *expected[name][: chance.randrange(len(expected[name]) + 1)]])
            for _ in range(chance.randrange(6)):
                served.step()
            if chance.random() < 0.15:
                served.abort(name)
                del expected[name]
        served.run()
        for name, tokens in expected.items():
            assert served.tokens(name) == tokens
        replayed = KVReplay()
        replayed.run(lines.getvalue().encode().splitlines(keepends=True))
        assert replayed.owners.tree == set(served.cache.tree.page_ids())


@pytest.mark.parametrize("oracle", [1.0], indirect=True, ids=["right"])
def test_a_guess_that_ends_a_reply_is_counted_as_right_everywhere(oracle: type[Oracle]) -> None:
    """Usage counted it, and the engine's own sums, which `/metrics` shows, did not."""
    free = alone([1, 2, 3], GREEDY)
    ends = replace(GREEDY, stop_token_ids=(free[12],))
    oracle.replies = {(1, 2, 3): free}
    counted = set()
    for number in range(20):
        served = bench()
        served.add(str(number), [1, 2, 3], ends)
        served.run()
        last, counters = served.outputs[str(number)][-1], served.core.counters
        assert last.completion is not None and last.delta is not None
        usage = last.completion.usage
        assert counters.num_accepted_tokens == usage.accepted_tokens
        assert counters.num_drafted_tokens == usage.drafted_tokens
        assert counters.num_computed_tokens == 3 + usage.completion_tokens - 1, "the last token has no KV"
        counted.add(last.delta.guessed)
    assert counted == {(True,), (False,)}, "the last token was a guess, and was not"


def test_a_script_is_said_as_it_is_whatever_is_guessed() -> None:
    """The row behind a guess that was right says the next id; rows behind a wrong one are not asked for."""
    runner = ScriptedRunner(10)
    runner.script.extend([7, 8, 9, 1])
    fed, rows = np.array([5, 7, 8, 3], np.int32), np.arange(4, dtype=np.int32)
    runner.forward(Batch(fed, rows, rows, 0 * rows, np.zeros((1, 1), np.int32), rows + 1, rows))
    assert runner.top_logits(4, 10).token_ids[:3, 0].tolist() == [7, 8, 9] and list(runner.script) == [1]


def test_a_request_that_cannot_be_drafted_is_served_without_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    propose = Drafter.propose

    def broken(drafter: Drafter, *arguments: Any, **more: Any) -> Draft:
        if drafter.token_ids[0] == 9:
            raise ZeroDivisionError
        return propose(drafter, *arguments, **more)

    monkeypatch.setattr(Drafter, "propose", broken)
    served, params = bench(), GREEDY
    prompts = {"good": [1, 2, 3] * 5, "bad": [9, 2, 3] * 5}
    for request_id, ids in prompts.items():
        served.add(request_id, ids, params)
    served.run()
    for request_id, ids in prompts.items():
        assert served.tokens(request_id) == alone(ids, params)
    assert caplog.text.count("drafting for request bad failed") == 1 and "request good" not in caplog.text


def test_drafts_leave_every_request_its_own_token_in_a_small_step(oracle: type[Oracle]) -> None:
    """The first of eight requests took all tokens of the step for its guesses, and others stood still."""
    expected = {str(number): alone([number + 1], GREEDY) for number in range(8)}
    oracle.replies = {(number + 1,): expected[str(number)] for number in range(8)}
    served = bench(max_num_batched_tokens=10)
    for number in range(8):
        served.add(str(number), [number + 1], GREEDY)
    while any(not request.num_generated for request in served.requests.values()):
        served.step()
    while not any(request.is_finished for request in served.requests.values()):
        before = {name: request.num_generated for name, request in served.requests.items()}
        served.step()
        assert all(request.num_generated > before[name] for name, request in served.requests.items())
    served.run()
    for name, tokens in expected.items():
        assert served.tokens(name) == tokens


def test_a_stream_with_guesses_keeps_half_of_its_speed_beside_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had no guesses while a prompt was computed, and steps with guesses counted as if they brought one token."""
    params = replace(GREEDY, max_tokens=1900)
    told = Bench(256, context_length=2000)
    told.add("", [1, 2, 3], params)
    told.run()
    monkeypatch.setattr(drafts, "Drafter", Oracle)
    Oracle.replies, Oracle.right, Oracle.chance = {(1, 2, 3): told.tokens("")}, 1.0, random.Random(1)
    served = Bench(256, context_length=2000, policy=replace(POLICY, speculates=True, prompts_s=0.05))
    forward = served.model.forward

    def timed(batch: Batch) -> Any:
        served.now += 0.01 + 0.002 * len(batch.arrays.token_ids)
        return forward(batch)

    served.model.forward = timed  # type: ignore[method-assign]
    stream = served.add("stream", [1, 2, 3], params)
    while stream.num_generated < 600:
        served.step()
    alone_per_s, began, before = stream.num_generated / served.now, served.now, stream.num_generated
    served.add("long", [5] * 1500, SHORT)
    while not served.requests["long"].num_generated:
        served.step()
    assert not stream.is_finished
    assert (stream.num_generated - before) / (served.now - began) > 0.45 * alone_per_s
