"""Logprobs of a prompt's own tokens: those of the model alone, whatever was cached, beside it or in its way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from radixlm.runtime.engine.completion import Completion, PromptLogprobs, TokenLogprob
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy, StepPlan
from radixlm.runtime.engine.step.prompt_logprobs import PromptLogprobsReader
from radixlm.runtime.engine.step.sampler_state import logarithm
from radixlm.runtime.errors import EngineError, InvalidParameter
from radixlm.runtime.model.batch import Batch, Float32Array

from ..fake_model import Bench, alone, digest, logits_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
NONE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
FEW_LOGITS = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=32, max_num_logits=5)


def prompt_of(length: int, seed: float = 0) -> list[int]:
    return random.Random(seed).choices(range(8, 39), k=length)


def oracle(ids: Sequence[int], num_top: int, vocab_size: int) -> list[TokenLogprob | None]:
    """Teacher-forced, one row after another, with all logits sorted."""
    rows, told = np.zeros(0, np.uint64), [None]
    for position, (token_id, following) in enumerate(pairwise(ids)):
        rows = np.append(rows, np.uint64(digest(rows, token_id, position)))
        logits = logits_of(int(rows[-1]), vocab_size).astype(np.float64)
        logprobs = logits - logits.max() - logarithm(float(np.exp(logits - logits.max()).sum()))
        order = np.argsort(-logits, kind="stable").tolist()
        top = tuple((each, float(logprobs[each])) for each in order[:num_top])
        told.append(TokenLogprob(following, float(logprobs[following]), top, order.index(following) + 1))
    return told


def completion(bench: Bench, name: str) -> Completion:
    found = bench.outputs[name][-1].completion
    assert found is not None, bench.outputs[name][-1].error
    return found


def assert_told(bench: Bench, name: str, ids: Sequence[int], num_top: int = 2) -> None:
    told = completion(bench, name).prompt_logprobs
    assert told is not None and list(told) == oracle(ids, num_top, bench.vocab_size)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 70])
def test_a_prompt_has_the_logprobs_of_the_model_alone(length: int) -> None:
    bench, ids = Bench(policy=FEW_LOGITS), prompt_of(length)
    bench.add("one", ids, SCORED)
    bench.run()
    assert_told(bench, "one", ids)
    assert completion(bench, "one").token_ids == alone(ids, GREEDY)


def test_no_step_has_more_rows_of_logits_than_the_model_takes() -> None:
    bench, most = Bench(policy=FEW_LOGITS, num_pages=40), 0

    def count(batch: Batch) -> None:
        nonlocal most
        most = max(most, batch.shape[3])

    bench.model.before = count
    for number in range(6):
        bench.add(f"{number}", prompt_of(40, number), SCORED if number % 2 else GREEDY)
    bench.run()
    assert most == 5
    for number in range(6):
        ids = prompt_of(40, number)
        assert completion(bench, f"{number}").token_ids == alone(ids, GREEDY)
        if number % 2:
            assert_told(bench, f"{number}", ids)


def test_cached_rows_are_computed_again_and_stay_as_they_are() -> None:
    bench, ids = Bench(), prompt_of(70)
    bench.add("cold", ids, SCORED)
    bench.run()
    cached = bench.cache.match([*ids, 2])
    before = bench.model.kv[list(cached.pages)].copy()
    assert cached.num_tokens >= 64
    bench.add("warm", ids, SCORED)
    bench.run()
    assert_told(bench, "warm", ids)
    assert completion(bench, "warm").usage.cached_tokens == 0
    after = bench.cache.match([*ids, 2])
    assert after.pages == cached.pages and (bench.model.kv[list(after.pages)] == before).all()
    bench.add("reused", [*ids, 2], GREEDY)
    bench.run()
    assert completion(bench, "reused").usage.cached_tokens >= 64  # what was scored is found by others
    bench.core.check()


def test_a_prompt_alone_is_scored_without_a_reply() -> None:
    bench, ids = Bench(), prompt_of(33)
    bench.add("one", ids, NONE)
    bench.run()
    assert_told(bench, "one", ids)
    ended = completion(bench, "one")
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.usage.completion_tokens) == ((), "", "length", 0)
    assert ended.timings.time_to_first_token_s is None
    bench.core.check()
    bench.add("next", [*ids, 2], GREEDY)
    bench.run()
    assert completion(bench, "next").usage.cached_tokens == 33


def test_they_come_with_the_first_delta() -> None:
    bench = Bench()
    bench.add("one", prompt_of(20), SCORED)
    bench.add("none", prompt_of(20), NONE)
    bench.run()
    deltas = [output.delta for output in bench.outputs["one"] if output.delta is not None]
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True, False, False]
    [only] = [output.delta for output in bench.outputs["none"] if output.delta is not None]
    assert only.prompt_logprobs is not None and len(only.prompt_logprobs) == 20


def test_company_preemption_and_a_small_pool_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share beginnings, some scored, in a pool that does not hold them: they give their pages back."""
    num_cut = 0  # gave their pages back when some rows were read, and others not
    preempted, reserve = Request.preempted, StepPlan.reserve

    def count(request: Request) -> None:
        nonlocal num_cut
        for asked in [reader.logprobs for reader in request.readers if isinstance(reader, PromptLogprobsReader)]:
            num_cut += not asked.is_complete and asked.num_rows > 0
        preempted(request)

    def lack(plan: StepPlan, request: Request, share: float = 1.0) -> bool:
        return (not plan.scheduled or rng.random() > 0.1) and reserve(plan, request, share)

    monkeypatch.setattr(Request, "preempted", count)
    monkeypatch.setattr(StepPlan, "reserve", lack)  # pages are short more often than they are
    for seed in range(30):
        rng = random.Random(seed)
        run_in_company(rng)
    assert num_cut > 10


def run_in_company(rng: random.Random) -> None:
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=24, max_num_logits=rng.choice([4, 7, 24]))
    bench, shared = Bench(policy=policy, num_pages=9, context_length=128), prompt_of(60, rng.random())
    for number in range(8):
        ids = [*shared[: rng.choice([0, 20, 48])], *prompt_of(rng.randint(1, 40), rng.random())]
        params = rng.choice([SCORED, SCORED, NONE, GREEDY])
        bench.add(f"{number}", ids, replace(params, max_tokens=params.max_tokens and rng.randint(1, 40)))
        for _ in range(rng.randint(0, 6)):
            bench.step()
    bench.run()
    for name, request in bench.requests.items():
        ids, params = request.prompt.ids, request.spec.params
        if params.prompt_logprobs is not None:
            assert_told(bench, name, ids)
        if params.max_tokens:
            expected = alone(ids, replace(GREEDY, max_tokens=params.max_tokens), context_length=128)
            assert completion(bench, name).token_ids == expected
    bench.core.check()


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    bench = Bench(policy=FEW_LOGITS)

    def spoil(batch: Batch, logits: Float32Array) -> None:
        if 7 in batch.arrays.token_ids and len(logits) > 1:
            logits[0, 3] = np.nan

    bench.model.after = spoil
    bench.add("bad", [7, *prompt_of(30)], SCORED)
    while "bad" not in bench.outputs or bench.outputs["bad"][-1].error is None:
        bench.step()
    assert isinstance(bench.outputs["bad"][-1].error, EngineError)
    ids = prompt_of(30, 1)
    bench.add("good", ids, SCORED)
    bench.run()
    assert_told(bench, "good", ids)


def test_more_logprobs_than_a_request_may_ask_for_are_refused() -> None:
    bench = Bench(context_length=MAX_PROMPT_LOGPROBS, num_pages=MAX_PROMPT_LOGPROBS // 16 + 1)
    with pytest.raises(
        InvalidParameter, match=r"prompt_logprobs=2 are 150000 logprobs; one request may ask for 131072"
    ):
        bench.add("one", [2] * 50_000, SCORED)
    with pytest.raises(InvalidParameter, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)


def test_they_are_a_sequence() -> None:
    told = PromptLogprobs([5, 6, 7], 2)
    assert (list(told), told.is_complete, told.next_id) == ([None], False, 6)
    told.append(TokenLogprob(6, -0.5, ((6, -0.5), (1, -1.0)), 1))
    told.append(TokenLogprob(7, -3.0, ((1, -0.1), (2, -0.2)), 9))
    assert told.is_complete and len(told) == 3
    assert told[-1] == told[2] == TokenLogprob(7, -3.0, ((1, -0.1), (2, -0.2)), 9)
    assert told[:2] == [None, TokenLogprob(6, -0.5, ((6, -0.5), (1, -1.0)), 1)]
    with pytest.raises(IndexError):
        told[3]
