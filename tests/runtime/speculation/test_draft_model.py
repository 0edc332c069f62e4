"""A second model guesses: no reply changes, its pages are its own and come back, and it is asked only where it pays."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.speculation import draft_model
from radixlm.runtime.speculation.draft_model import DraftModel

from ..fake_constraint import ChainConstraint
from ..fake_model import CONTEXT_LENGTH, POLICY, VOCAB_SIZE, Bench, FakeModel, alone
from ..traces import num_traces


class Drafted(Bench):
    """An engine core with a draft model, which is right as often as is said.

    A step takes a second for each eight rows, one of the draft model next to nothing, unless that is said.
    """

    def __init__(
        self,
        num_pages: int,
        right: float,
        *,
        num_draft_pages: int = 40,
        looks_up: bool = False,
        draft_step_s: float = 1e-6,
    ) -> None:
        self.drafts = FakeModel(num_draft_pages)
        chance = np.random.default_rng(3)

        def spoil(batch: Batch, logits: Float32Array) -> None:
            for row in logits:
                if chance.random() >= right:
                    chance.shuffle(row)

        self.drafts.after = spoil
        draft_cache = PrefixCache(PagePool(num_draft_pages))
        sizes = {"context_length": CONTEXT_LENGTH, "vocab_size": VOCAB_SIZE}
        ticks = itertools.count()
        self.guesses = DraftModel(self.drafts, draft_cache, **sizes, clock=lambda: next(ticks) * draft_step_s / 2)  # type: ignore
        policy = replace(POLICY, speculates=True, looks_up=looks_up)
        super().__init__(num_pages, policy=policy, draft_model=self.guesses)
        self.model.before = self._take_time

    def num_used(self) -> int:
        """Pages of the draft model that requests hold."""
        stats = self.guesses.stats()
        return stats.num_pages - stats.num_free_pages - stats.num_cached_pages

    def _take_time(self, batch: Batch) -> None:
        self.now += 1.0 + (batch.shape[0] - 1) // 8


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0.9, seed=9, max_tokens=40, repetition_penalty=1.3, top_p=0.9, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_replies_are_those_without(params: SamplingParams, right: float) -> None:
    served = Drafted(40, right)
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


def test_a_model_that_agrees_guesses_sampled_replies_rightly_and_many_steps_are_saved() -> None:
    served = Drafted(40, 1.0)
    request = served.add("a", [1, 2, 3], SAMPLED)
    served.run()
    assert served.tokens("a") == alone([1, 2, 3], SAMPLED)
    assert request.num_drafted == request.reply.num_accepted_drafts > 25 and served.core.counters.num_steps < 15


def test_a_model_that_is_always_wrong_is_hardly_asked() -> None:
    served = Drafted(40, 0.0, draft_step_s=0.2)
    params = replace(GREEDY, max_tokens=80)
    served.add("a", [1, 2, 3], params)
    served.run()
    assert served.guesses.num_tokens < 80 and served.core.counters.num_steps > 75


def test_a_reply_with_a_grammar_is_guessed_by_it() -> None:
    class Forked(ChainConstraint):
        def forced(self) -> tuple[int, ...]:
            return ()

        def num_allowed(self, token_ids: object) -> int:
            return 0

        def fork(self) -> Forked:
            other = Forked(self.vocab_size)
            other.seen = list(self.seen)
            return other

    served = Drafted(40, 1.0)
    request = served.add("a", [1, 2, 3], SAMPLED, constraint=Forked(VOCAB_SIZE))
    served.run()
    assert served.tokens("a") == alone([1, 2, 3], SAMPLED, constraint=ChainConstraint(VOCAB_SIZE))
    assert request.reply.num_accepted_drafts == request.num_drafted > 20


def test_pages_come_back_and_the_next_turn_is_found() -> None:
    served = Drafted(40, 1.0)
    served.add("a", list(range(30)), replace(GREEDY, max_tokens=30))
    served.run()
    before = served.guesses.num_tokens
    assert served.num_used() == 0 < served.guesses.stats().num_cached_pages
    served.add("b", [*range(30), *served.tokens("a")], replace(GREEDY, max_tokens=8))
    served.run()
    assert served.guesses.num_tokens - before < 30
    served.core.forget(b"")
    assert served.guesses.stats().num_cached_pages == 0
    served.add("c", list(range(30)), GREEDY, None)
    served.run()
    assert served.guesses.stats().num_cached_pages == 0, "a request that keeps nothing left something"


def test_what_was_rejected_is_in_no_tree() -> None:
    served = Drafted(40, 0.6)
    served.add("a", list(range(20)), SAMPLED)
    served.run()
    said = [*range(20), *served.tokens("a")]
    tree = served.guesses._cache.tree
    ahead = tree.ahead(b"", [], [], 200)
    assert ahead == tuple(said[: len(ahead)])
    assert served.guesses.stats().num_cached_pages <= -(-len(said) // 16)


def test_a_draft_model_that_fails_is_done_without() -> None:
    served = Drafted(40, 1.0)
    served.add("a", [1, 2, 3], GREEDY)
    for _ in range(4):
        served.step()

    def fail(batch: Batch) -> None:
        raise RuntimeError("broken")

    served.drafts.before = fail
    served.run()
    assert served.tokens("a") == alone([1, 2, 3], GREEDY) and served.num_used() == 0


def test_a_pool_without_room_means_no_guesses() -> None:
    served = Drafted(40, 1.0, num_draft_pages=2)
    served.add("a", list(range(30)), GREEDY)
    served.add("b", list(range(1, 30)), GREEDY)
    served.run()
    assert served.tokens("a") == alone(list(range(30)), GREEDY) and served.tokens("b") == alone(
        list(range(1, 30)), GREEDY
    )


def test_tokens_that_were_taken_back_are_popped() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match(list(range(20))), context_length=64)
    for ids in ([*range(20), 5, 6], [*range(19), 7], [*range(19)], [*range(19), 8, 9]):
        draft_model._synchronize(sequence, ids)
        assert list(sequence.token_ids) == ids and sequence.num_uncomputed >= 1
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        cache.check()


TRACES = given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from([0.0, 0.6, 0.95, 1.0]),
    num_pages=st.sampled_from([8, 12, 40]),
    num_draft_pages=st.sampled_from([2, 6, 40]),
    looks_up=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@TRACES
def test_random_requests_are_served_as_alone(
    seed: int, right: float, num_pages: int, num_draft_pages: int, looks_up: bool
) -> None:
    serve_random_requests(seed, right, num_pages, num_draft_pages, looks_up)


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))  # so that workers share them
@settings(max_examples=num_traces(500), deadline=None, database=None)
@TRACES
def test_thousands_of_random_traces_are_served_as_alone(
    part: int, seed: int, right: float, num_pages: int, num_draft_pages: int, looks_up: bool
) -> None:
    serve_random_requests(seed + part * 2**33, right, num_pages, num_draft_pages, looks_up)


def serve_random_requests(seed: int, right: float, num_pages: int, num_draft_pages: int, looks_up: bool) -> None:
    """Requests that share prefixes, give pages back, are aborted and come again with the replies that they got."""
    chance = random.Random(seed)
    served = Drafted(num_pages, right, num_draft_pages=num_draft_pages, looks_up=looks_up)
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
    assert served.num_used() == 0
