"""Whatever happens around a request, its tokens are those of running alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.engine.completion import PrefixReuse
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.engine.step.sampler import sample
from radixlm.runtime.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineError,
    InvalidParameter,
    StepFailed,
)
from radixlm.runtime.model.batch import Batch, Float32Array

from ..fake_model import CONTEXT_LENGTH, EOS, VOCAB_SIZE, Bench, alone, text_of, top_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)


def test_one_request_gets_the_models_tokens() -> None:
    bench = Bench()
    bench.add("a", range(20), GREEDY)
    bench.run()
    assert bench.tokens("a") == alone(range(20), GREEDY)


def test_rows_of_a_padded_embedding_are_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2 has more rows of logits than its tokenizer has tokens."""
    bench = Bench()
    unpadded = bench.model.forward
    monkeypatch.setattr(
        bench.model, "forward", lambda batch: np.pad(unpadded(batch), ((0, 0), (0, 16)), constant_values=1e4)
    )
    bench.add("a", range(20), GREEDY)
    bench.run()
    assert bench.tokens("a") == alone(range(20), GREEDY)


def test_warming_up_computes_a_token_with_logits_and_keeps_nothing() -> None:
    bench, shapes = Bench(), list[tuple[int, ...]]()
    bench.model.before = lambda batch: shapes.append(batch.shape)
    bench.core.warm_up()
    assert shapes == 2 * [(1, 1, 1, 1)]  # the second is measured
    assert bench.core.cache.pool.num_free == bench.core.cache.pool.num_pages
    assert bench.core.counters.progress == 0
    bench.core.check()
    bench.add("a", range(20), GREEDY)
    bench.run()
    assert bench.tokens("a") == alone(range(20), GREEDY)


def test_a_model_that_fails_to_warm_up_is_served() -> None:
    bench = Bench()

    def fail(batch: Batch) -> None:
        raise EngineError("out of order")

    bench.model.before = fail
    bench.core.warm_up()
    bench.core.check()
    bench.model.before = lambda batch: None
    bench.add("a", range(20), GREEDY)
    bench.run()
    assert bench.tokens("a") == alone(range(20), GREEDY)


@pytest.mark.parametrize("budget", [1, 3, 16, 17, 64])
def test_chunking_the_prompt_changes_nothing(budget: int) -> None:
    bench = Bench(policy=SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=budget))
    for name in "abc":
        bench.add(name, [ord(name) % 30] * 30, DRAWN)
    bench.run()
    for name in "abc":
        assert bench.tokens(name) == alone([ord(name) % 30] * 30, DRAWN)


def test_second_request_reuses_what_the_first_computed() -> None:
    bench = Bench()
    bench.add("a", range(36), GREEDY)
    bench.run()
    bench.add("b", [*range(36), 7, 8], GREEDY)
    bench.run()
    assert bench.tokens("b") == alone([*range(36), 7, 8], GREEDY)
    completion = bench.outputs["b"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 36
    why = completion.cache_match.why_not_more
    assert completion.cache_match.kind == "exact"
    assert why is not None and (why.position, why.wanted_ids) == (36, (7, 8))


def test_uses_tell_what_a_request_found_while_it_runs_and_after() -> None:
    bench = Bench()
    bench.add("a", range(36), GREEDY)
    bench.run()
    bench.add("b", [*range(36), 7, 8], GREEDY)
    (waiting,) = bench.core.live_uses(b"")
    bench.step()
    (running,) = bench.core.live_uses(b"")
    assert bench.core.live_uses(b"other") == []
    bench.run()
    assert bench.core.live_uses(b"") == []
    ended, first = bench.core.cache.uses.ended(b"")
    assert [use.state for use in (waiting, running, ended)] == ["waiting", "running", "ended"]
    assert [sum(use.tokens_by_kind.values()) for use in (waiting, running, ended, first)] == [0, 36, 36, 0]
    assert [use.num_generated for use in (waiting, running, ended)] == [0, 1, len(bench.tokens("b"))]
    root = bench.core.cache.tree.root(b"")
    assert ended.mark is not None and root is not None
    node = ended.mark.node(bench.core.cache.tree, b"")
    assert node is not None and node.start * 16 + node.num_tokens == 38 + len(bench.tokens("b")) - 1


def test_next_turn_reuses_the_reply_too() -> None:
    bench = Bench()
    bench.add("a", range(10), DRAWN)
    bench.run()
    turn = [*range(10), *bench.tokens("a"), 3, 2, 1]
    bench.add("b", turn, DRAWN)
    bench.run()
    completion = bench.outputs["b"][-1].completion
    assert bench.tokens("b") == alone(turn, DRAWN)
    assert completion is not None and completion.usage.cached_tokens == 29  # the last of the 20 has no KV


def test_what_a_cancelled_prompt_had_computed_is_kept() -> None:
    """A client that gives up after minutes, and asks again, goes on where it was, within a page, too."""
    bench, ids = Bench(num_pages=32), [*range(3, 33), *range(5, 35)]
    cancelled = bench.add("cancelled", ids, GREEDY)
    while cancelled.sequence is None or cancelled.sequence.num_computed == 0:
        bench.step()
    num_computed = cancelled.sequence.num_computed
    assert num_computed < len(ids)
    bench.abort("cancelled")
    again = bench.add("again", ids, GREEDY)
    bench.run()
    assert again.reuse.num_tokens == num_computed and bench.model.num_tokens < len(ids) + len(bench.tokens("again"))
    assert bench.tokens("again") == alone(ids, GREEDY)


def test_namespaces_share_nothing() -> None:
    bench = Bench(num_pages=32)
    bench.add("a", range(33), GREEDY, b"one")
    bench.add("b", range(33), GREEDY, b"two")
    bench.run()
    for name in "ab":
        completion = bench.outputs[name][-1].completion
        assert completion is not None and completion.usage.cached_tokens == 0


def test_50_requests_preempted_and_cancelled_in_a_pool_that_holds_8_equal_running_alone() -> None:
    chance = random.Random(1)
    # 8 prompts fit, with a page of reply each; the replies then outgrow the pool.
    bench = Bench(num_pages=8 * 3, policy=SchedulerPolicy(max_num_seqs=16, max_num_batched_tokens=64))
    wanted = {}
    preempted_with_tokens = 0
    for i in range(50):
        ids = [
            *([1] * 16 if i % 3 else [2] * 20),
            *(chance.randrange(EOS) for _ in range(chance.randrange(1, 16))),
        ]
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=i,
            max_tokens=chance.randrange(20, 50),
            repetition_penalty=chance.choice([1.0, 1.3]),
            ignore_eos=True,
        )
        wanted[f"r{i}"] = (ids, params)
    requests = [bench.add(name, ids, params) for name, (ids, params) in wanted.items()]
    cancelled = set()
    while bench.core.has_work:
        before = {request: request.num_preemptions for request in requests}
        generated = {request: request.num_generated for request in requests}
        bench.step()
        preempted_with_tokens += sum(
            request.num_preemptions > before[request] and generated[request] > 0 for request in requests
        )
        if chance.random() < 0.05 and len(cancelled) < 10:
            name = chance.choice(list(wanted))
            if not any(output.completion for output in bench.outputs.get(name, [])):
                cancelled.add(name)
                bench.abort(name)
    assert preempted_with_tokens > 20 and len(cancelled) > 3
    for name, (ids, params) in wanted.items():
        expected = alone(ids, params)
        if name in cancelled:
            assert bench.tokens(name) == expected[: len(bench.tokens(name))]
        else:
            assert bench.tokens(name) == expected, name
    bench.cache.clear()
    assert bench.cache.pool.num_free == bench.num_pages


def test_reply_ends_when_the_context_is_full() -> None:
    bench = Bench(num_pages=7)
    bench.add("a", [5] * (CONTEXT_LENGTH - 1), SamplingParams(temperature=0.0, ignore_eos=True))
    bench.add("b", [6] * 10, SamplingParams(temperature=0.0, ignore_eos=True))
    bench.run()
    assert len(bench.tokens("a")) == 1
    assert len(bench.tokens("b")) == CONTEXT_LENGTH - 10
    for name in "ab":
        assert bench.outputs[name][-1].delta is not None
        assert bench.outputs[name][-1].delta.finish_reason == "length"


def test_full_context_whose_last_page_is_half_cached_fits_the_smallest_pool() -> None:
    bench = Bench(num_pages=7)
    ids = [5] * (CONTEXT_LENGTH - 6)
    for name in "ab":
        bench.add(name, ids, SamplingParams(temperature=0.0, ignore_eos=True))
        bench.run()
        assert bench.tokens(name) == alone(ids, SamplingParams(temperature=0.0, ignore_eos=True))


def test_end_of_sequence_token_ends_the_reply_and_is_not_in_the_text() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})
    bench = Bench()
    bench.add("a", [1, 2, 3], params)
    bench.add(
        "b",
        [1, 2, 3],
        SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=2),
    )
    bench.run()
    completion = bench.outputs["a"][-1].completion
    assert completion is not None
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((EOS,), "", "stop")
    assert bench.tokens("b") == (EOS, EOS)


def test_stop_string_across_tokens_is_never_sent() -> None:
    ids = alone(range(9), DRAWN)
    stop = text_of(ids[6:9])
    bench = Bench()
    bench.add("a", range(9), SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=(stop,)))
    bench.run()
    assert bench.tokens("a") == ids[:9]
    completion = bench.outputs["a"][-1].completion
    assert completion is not None
    assert (completion.text, completion.finish_reason) == (text_of(ids[:6]), "stop")


def test_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    ids = alone(range(9), DRAWN)
    bench = Bench()
    stop = text_of(ids[-2:]) + "zzz"
    bench.add("a", range(9), SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=(stop,)))
    bench.run()
    assert bench.outputs["a"][-1].completion is not None
    assert bench.outputs["a"][-1].completion.text == text_of(ids)


def test_logprobs_are_those_of_the_model() -> None:
    bench = Bench()
    bench.add("a", [1, 2], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True))
    bench.run()
    completion = bench.outputs["a"][-1].completion
    assert completion is not None and completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in completion.logprobs)


def test_failing_step_fails_its_requests_and_the_engine_goes_on() -> None:
    bench = Bench(num_pages=20, policy=SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=24))
    bench.add("a", range(10), DRAWN)
    bench.add("b", range(5, 15), DRAWN)
    bench.add("waits", range(7, 30), DRAWN)
    for _ in range(5):
        bench.step()

    def fail(batch: Batch) -> None:
        raise MemoryError("no room for the workspace")

    bench.model.before = fail
    bench.step()
    bench.model.before = lambda batch: None
    bench.run()
    for name in "ab":
        assert isinstance(bench.error(name), StepFailed)
        assert "no room for the workspace" in str(bench.error(name))
    assert bench.tokens("waits") == alone(range(7, 30), DRAWN)


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    bench = Bench()
    bad = bench.add("bad", [1] * 20, DRAWN)
    bench.add("good", [2] * 20, DRAWN)

    def spoil(batch: Batch, logits: Float32Array) -> None:
        arrays = batch.arrays
        for row, index in enumerate(arrays.logit_rows):
            if arrays.page_table[arrays.row_of_token[index]][0] == bad.admitted.page_ids[0]:
                logits[row, 7] = np.nan

    for _ in range(4):
        bench.step()
    bench.model.after = spoil
    bench.step()
    bench.model.after = lambda batch, logits: None
    bench.run()
    assert isinstance(bench.error("bad"), EngineError) and "not finite" in str(bench.error("bad"))
    assert bench.tokens("good") == alone([2] * 20, DRAWN)
    bench.add("again", [1] * 20, DRAWN)
    bench.run()
    completion = bench.outputs["again"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 0, "damaged KV was kept"


def test_request_whose_decoder_fails_fails_alone() -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise UnicodeError("half a character")

        def finish(self) -> str:
            return ""

    bench = Bench()
    bench.add("bad", [1, 2], DRAWN, decoder=Broken())
    bench.add("good", [1, 2], DRAWN)
    bench.run()
    assert "UnicodeError" in str(bench.error("bad"))
    assert bench.tokens("good") == alone([1, 2], DRAWN)


@pytest.mark.parametrize(
    ("ids", "params", "error"),
    [
        ([], GREEDY, EmptyPrompt),
        ([1] * CONTEXT_LENGTH, GREEDY, ContextLengthExceeded),
        ([VOCAB_SIZE], GREEDY, InvalidParameter),
        ([-1], GREEDY, InvalidParameter),
        ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), InvalidParameter),
        ([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), InvalidParameter),
    ],
)
def test_request_that_cannot_be_served_is_refused_and_changes_nothing(
    ids: list[int], params: SamplingParams, error: type[Exception]
) -> None:
    bench = Bench()
    with pytest.raises(error):
        bench.core.limits.validate(bench.request("a", [1], params).prompt, params)
        bench.add("a", ids, params)
    assert not bench.core.has_work


def test_request_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("a", [1], GREEDY)
    with pytest.raises(InvalidParameter):
        bench.add("a", [2], GREEDY)
    bench.run()
    assert bench.tokens("a") == alone([1], GREEDY)


def test_pool_too_small_for_the_context_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="needs 7 pages, the pool has 6"):
        Bench(num_pages=6)


def test_abort_of_a_finished_or_unknown_request_is_harmless() -> None:
    bench = Bench()
    bench.add("a", [1], GREEDY)
    bench.run()
    assert bench.core.abort("a") is None
    assert bench.core.abort("nobody") is None


TRACE = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 2),  # which of three prefixes
            st.integers(0, 34),  # how much of it
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8),
            st.integers(1, 40),  # max_tokens
            st.sampled_from([0.0, 0.8]),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(TRACE, st.integers(7, 14), st.integers(1, 40), st.integers(1, 6))
def test_any_trace_of_add_abort_and_step_equals_running_alone(
    trace: list[tuple], num_pages: int, budget: int, max_num_seqs: int
) -> None:
    bench = Bench(num_pages, policy=SchedulerPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget))
    wanted = {}
    aborted = set()
    for operation, *arguments in trace:
        if operation == "add":
            prefix, length, tail, max_tokens, temperature = arguments
            name, ids = f"r{len(wanted)}", [*([prefix] * length), *tail]
            params = SamplingParams(temperature=temperature, seed=len(wanted), max_tokens=max_tokens)
            wanted[name] = (ids, params)
            bench.add(name, ids, params)
        elif operation == "abort":
            aborted.add(f"r{arguments[0]}")
            bench.abort(f"r{arguments[0]}")
        else:
            for _ in range(arguments[0]):
                bench.now += 0.1
                bench.step()
    bench.run()
    for name, (ids, params) in wanted.items():
        tokens, expected = bench.tokens(name), alone(ids, params)
        assert tokens == (expected[: len(tokens)] if name in aborted else expected)
    bench.cache.clear()
    assert bench.cache.pool.num_free == num_pages


def test_the_repetition_penalty_is_by_the_ids_that_are_used() -> None:
    bench = Bench()
    request = bench.request("a", [1, 2], SamplingParams(temperature=0.0, repetition_penalty=2.0))
    match = replace(bench.cache.match([1, 2]), prompt_ids=(3, 2))  # as if the cache had the same text in other ids
    request.admit(bench.cache.open(match, context_length=CONTEXT_LENGTH), match, PrefixReuse())
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, [1, 3]] = 2.0, 3.0
    assert [token.token_id for token in sample(logits, top_of(logits), [request.reply.sampler]) if token] == [1]
