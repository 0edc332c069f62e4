"""A model's own head guesses: no reply changes, it writes to no row that others see, and its pages come back."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step import drafts
from radixlm.runtime.kv_log.log import KVLog
from radixlm.runtime.kv_log.replay import KVReplay
from radixlm.runtime.model.batch import NEVER_DRAFTED, Batch, Float32Array, PageCopy, TopLogits
from radixlm.runtime.speculation.draft_levels import DraftRequest
from radixlm.runtime.speculation.mtp_head import MTPHead

from ..fake_model import CONTEXT_LENGTH, POLICY, VOCAB_SIZE, Bench, FakeModel, alone, digest, logits_of, top_of
from ..traces import num_traces

SCRIBBLE = 2**51 + 7  # what the head leaves in a row; who reads it gets another reply


class FakeHead:
    """Knows the model's next token as often as is said, by the rows of the pages that it is given."""

    def __init__(self, model: FakeModel, pool: PagePool, right: float) -> None:
        self.model, self.pool, self.right = model, pool, right
        self.chance = np.random.default_rng(3)
        self.own: dict[int, int] = {}  # by slot, what the model's row would be
        self.logits = np.zeros((0, VOCAB_SIZE), np.float32)
        self.fails = False
        self.num_steps = 0
        self.num_frequent: int | None = None
        self.num_frequent_steps = 0
        self.whole_s = self.spent_s = 0.0  # of a draft among all tokens, and of all these

    def draft(self, batch: Batch, *, is_frequent: bool = False) -> Float32Array:
        assert not self.fails, "broken"
        self.num_frequent_steps += is_frequent
        self.spent_s += 0.0 if is_frequent else self.whole_s
        self.num_steps += 1
        arrays, kv = batch.arrays, self.model.kv.reshape(-1)
        found = []
        for i, token in enumerate(arrays.token_ids):
            pages, length = arrays.page_table[arrays.row_of_token[i]], int(arrays.kv_lengths[i])
            slots = [int(pages[row // PAGE_SIZE]) * PAGE_SIZE + row % PAGE_SIZE for row in range(length)]
            own = slots[-1]
            assert own == arrays.slots[i] and self.pool.is_private(own // PAGE_SIZE), "a row that others may see"
            before = [self.own[slot] if kv[slot] == SCRIBBLE else int(kv[slot]) for slot in slots[:-1]]
            self.own[own] = digest(np.array(before, np.uint64), int(token), int(arrays.positions[i]))
            kv[own] = SCRIBBLE
            found.append(logits_of(self.own[own]).copy())
        for row in found:
            if self.chance.random() >= self.right:
                self.chance.shuffle(row)
        self.logits = np.array(found)[arrays.logit_rows]
        if is_frequent:
            self.logits[:, self.num_frequent :] = NEVER_DRAFTED
        return self.logits

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        return top_of(self.logits[:num_rows, :vocab_size])

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        self.model.copy_rows(copies)


class Headed(Bench):
    """An engine core whose model has a head. A step takes a second for each eight rows, one of the head nearly none."""

    head: FakeHead
    guesses: MTPHead

    def __init__(
        self, num_pages: int, right: float, *, looks_up: bool = False, step_s: float = 1e-6, kv_log: KVLog | None = None
    ) -> None:
        ticks = itertools.count()

        def open_head(model: FakeModel, pool: PagePool) -> MTPHead:
            self.head = FakeHead(model, pool, right)
            clock = lambda: next(ticks) * step_s / 2 + self.head.spent_s  # noqa: E731
            self.guesses = MTPHead(self.head, pool, vocab_size=VOCAB_SIZE, clock=clock)
            return self.guesses

        policy = replace(POLICY, speculates=True, looks_up=looks_up)
        super().__init__(num_pages, policy=policy, open_head=open_head, kv_log=kv_log)
        self.model.before = self._take_time

    def _take_time(self, batch: Batch) -> None:
        self.now += 1.0 + (batch.shape[0] - 1) // 8


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0.9, seed=9, max_tokens=40, repetition_penalty=1.3, top_p=0.9, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_replies_are_those_without(params: SamplingParams, right: float) -> None:
    served = Headed(40, right)
    prompts = {str(number): [number, 3, 7] * (number + 1) for number in range(3)}
    for name, ids in prompts.items():
        served.add(name, ids, params)
    served.run()
    for name, ids in prompts.items():
        assert served.tokens(name) == alone(ids, params)
    drafted, accepted = served.core.counters.num_drafted_tokens, served.core.counters.num_accepted_tokens
    assert drafted > 4
    assert accepted == drafted if right == 1.0 else accepted < 0.9 * drafted
    assert right > 0 or accepted < 0.2 * drafted


def test_a_head_that_is_right_saves_steps_and_one_that_is_wrong_is_hardly_asked() -> None:
    right, wrong = Headed(40, 1.0), Headed(40, 0.0, step_s=0.2)
    for served in (right, wrong):
        served.add("a", [1, 2, 3], replace(SAMPLED, max_tokens=80))
        served.run()
        assert served.tokens("a") == alone([1, 2, 3], replace(SAMPLED, max_tokens=80))
    assert right.core.counters.num_steps < 25
    assert wrong.head.num_steps < 60 and wrong.core.counters.num_steps > 70


def test_a_head_that_fails_is_done_without() -> None:
    served = Headed(40, 1.0)
    served.add("a", [1, 2, 3], GREEDY)
    for _ in range(4):
        served.step()
    served.head.fails = True
    served.run()
    assert served.tokens("a") == alone([1, 2, 3], GREEDY)
    assert served.cache.stats().num_free_pages + served.cache.stats().num_cached_pages == 40


def test_a_reply_behind_a_shared_page_is_guessed_on_a_copy() -> None:
    """Two replies go on from the middle of one page, which neither may write to."""
    served = Headed(40, 1.0)
    ids = [number * 5 % 37 for number in range(20)]
    served.add("a", ids, replace(GREEDY, max_tokens=4))
    served.run()
    for name in ("b", "c"):
        served.add(name, [*ids, *served.tokens("a")[:2]], GREEDY)
    served.run()
    for name in ("b", "c"):
        assert served.tokens(name) == alone([*ids, *served.tokens("a")[:2]], GREEDY)


def test_without_free_pages_nothing_is_evicted_for_a_guess() -> None:
    served = Headed(7, 1.0)
    ids = [number * 5 % 37 for number in range(14)]
    served.add("old", [3] * 33, replace(GREEDY, max_tokens=2))
    served.run()
    served.add("a", ids, replace(GREEDY, max_tokens=60))
    while not served.requests["a"].is_finished:
        free = served.cache.pool.num_free
        served.step()
        assert served.cache.pool.num_free >= min(free, 0)
    assert served.tokens("a") == alone(ids, replace(GREEDY, max_tokens=60))


def test_text_of_frequent_tokens_is_drafted_among_these_only() -> None:
    num_frequent = 30
    for prompt, is_frequent in (([1, 2, 3] * 16, True), ([1, 33, 34] * 16, False)):
        served = Headed(40, 1.0)
        served.head.num_frequent = num_frequent
        served.add("a", prompt, replace(GREEDY, max_tokens=12))
        served.run()
        assert served.tokens("a") == alone(prompt, replace(GREEDY, max_tokens=12))
        assert served.head.num_steps > 3
        assert served.head.num_frequent_steps == (served.head.num_steps if is_frequent else 0)


def test_requests_with_rare_tokens_are_drafted_among_all() -> None:
    """One such request is enough, as a draft is of all requests at once."""
    served = Headed(40, 1.0)
    served.head.num_frequent = 30
    served.add("a", [1, 2, 3] * 20, GREEDY)
    served.add("b", [1, 33, 34] * 20, GREEDY)
    for _ in range(8):
        served.step()
    assert served.head.num_steps and not served.head.num_frequent_steps


def test_drafts_among_all_tokens_that_do_not_pay_leave_those_that_do() -> None:
    served = Headed(40, 1.0)
    served.head.num_frequent, served.head.whole_s = 30, 10.0
    params = replace(GREEDY, max_tokens=12)
    served.add("rare", [1, 33, 34] * 16, params)
    served.run()
    num_whole = served.head.num_steps
    assert num_whole < 6 and not served.head.num_frequent_steps
    served.add("frequent", [1, 2, 3] * 16, params)
    served.run()
    assert served.head.num_frequent_steps > 3 and served.head.num_steps == num_whole + served.head.num_frequent_steps
    assert served.tokens("frequent") == alone([1, 2, 3] * 16, params)


@pytest.mark.parametrize("name", ["_ask", "sample"])
def test_a_request_that_cannot_be_drafted_is_served_without_and_harms_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works, params = getattr(drafts, name), replace(GREEDY, seed=7)

    def broken(*arguments: Any) -> Any:
        whose = arguments[0].spec.params if name == "_ask" else arguments[2][0].params
        if whose.seed == 7:
            raise ZeroDivisionError
        return works(*arguments)

    monkeypatch.setattr(drafts, name, broken)
    served = Headed(40, 1.0)
    served.add("a", [1, 2, 3] * 4, GREEDY)
    served.add("b", [3, 2, 1] * 4, params)
    served.run()
    assert [served.tokens("a"), served.tokens("b")] == [alone([1, 2, 3] * 4, GREEDY), alone([3, 2, 1] * 4, params)]
    assert caplog.text.count("drafting for request b failed") == 1 and "not used any more" not in caplog.text
    assert served.core.counters.num_accepted_tokens > 10


@pytest.mark.parametrize(
    "changes",
    [{}, {"repetition_penalty": 1.3}, {"top_n_sigma": 2.0}, {"min_p": 0.05}, {"logit_bias": {39: 4.0, 37: -9.0}}],
    ids=str,
)
def test_a_rare_token_is_never_drafted_where_the_others_are(changes: dict[str, Any]) -> None:
    served = Headed(40, 1.0)
    served.head.num_frequent = 36
    prompt, params = [1, 2, 3] * 20, replace(SAMPLED, max_tokens=60, **changes)
    served.add("a", prompt, params)
    served.run()
    assert served.tokens("a") == alone(prompt, params)
    counters, rare = served.core.counters, sum(token >= 36 for token in served.tokens("a"))
    assert rare and served.head.num_frequent_steps
    assert 0 < counters.num_drafted_tokens - counters.num_accepted_tokens <= rare * 16


@pytest.mark.parametrize("num_frequent", [None, 36])
def test_a_rare_token_that_a_grammar_demands_is_not_drafted(
    num_frequent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logit was not computed, and that of other rare tokens is the same."""
    draft_tokens = MTPHead._draft_tokens

    def demanding(head: MTPHead, requests: Sequence[DraftRequest], *rest: Any) -> None:
        for request in requests:
            request.choose = lambda logits, top: (39, 0.9)
        draft_tokens(head, requests, *rest)

    monkeypatch.setattr(MTPHead, "_draft_tokens", demanding)
    served = Headed(40, 1.0)
    served.head.num_frequent = num_frequent
    served.add("a", [1, 2, 3] * 20, GREEDY)
    served.run()
    assert served.tokens("a") == alone([1, 2, 3] * 20, GREEDY)
    assert served.head.num_steps and bool(served.core.counters.num_drafted_tokens) == (num_frequent is None)


TRACES = given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from([0.0, 0.6, 0.95, 1.0]),
    num_pages=st.sampled_from([8, 12, 40]),
    looks_up=st.booleans(),
    num_frequent=st.sampled_from([None, 34]),
)


@settings(max_examples=60, deadline=None)
@TRACES
def test_random_requests_are_served_as_alone(
    seed: int, right: float, num_pages: int, looks_up: bool, num_frequent: int | None
) -> None:
    serve_random_requests(seed, right, num_pages, looks_up, num_frequent)


@pytest.mark.long
@settings(max_examples=num_traces(500), deadline=None, database=None)
@TRACES
def test_thousands_of_random_traces_are_served_as_alone(
    seed: int, right: float, num_pages: int, looks_up: bool, num_frequent: int | None
) -> None:
    serve_random_requests(seed + 2**33, right, num_pages, looks_up, num_frequent)


def serve_random_requests(seed: int, right: float, num_pages: int, looks_up: bool, num_frequent: int | None) -> None:
    """Requests that share prefixes, give pages back, are aborted and come again with the replies that they got."""
    chance = random.Random(seed)
    lines = io.StringIO()
    served = Headed(num_pages, right, looks_up=looks_up, kv_log=KVLog(lines))
    served.head.num_frequent = num_frequent
    prompts = [[chance.randrange(37) for _ in range(chance.randrange(1, 60))]]
    expected: dict[str, tuple[int, ...]] = {}
    for number in range(10):
        base = chance.choice(prompts)
        ids = [*base[: chance.randrange(1, len(base) + 1)], *(chance.randrange(37) for _ in range(chance.randrange(9)))]
        ids = ids[: CONTEXT_LENGTH - 20]
        greedy = chance.random() < 0.5
        params = SamplingParams(temperature=0.0 if greedy else 1.0, seed=number, max_tokens=chance.randrange(1, 20))
        name = str(number)
        expected[name] = alone(ids, params)
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
