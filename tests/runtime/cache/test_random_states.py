"""Random operations on a prefix cache of a model that keeps states: every state and every row that a sequence goes on
from is that of its own tokens, whatever was shared, evicted, taken back or rolled back."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.errors import OutOfPages
from radixlm.runtime.model.batch import slots_of
from radixlm.runtime.states.state_pool import StatePool

CONTEXT = 80
Text = tuple[int, ...]

namespaces = st.sampled_from((b"", b"a", None))
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class RecurrentCache(RuleBasedStateMachine):
    """The model is a recurrence whose state is all tokens so far; so is a row of keys and values."""

    @initialize(num_pages=st.integers(6, 24), num_slots=st.integers(6, 16), is_stored=st.booleans())
    def begin(self, num_pages: int, num_slots: int, is_stored: bool) -> None:
        self.cache = PrefixCache(PagePool(num_pages), states=StatePool(num_slots, special_ids={0}, is_stored=is_stored))
        self.states: dict[int, Text] = {0: ()}
        self.rows: dict[int, Text] = {}
        self.live: list[Sequence] = []
        self.texts: list[tuple[bytes | None, list[int]]] = []  # of those that were closed
        self.popped: set[Text] = set()
        self.num_reused = 0

    def text(self, sequence: Sequence, stop: int) -> Text:
        return tuple(sequence.token_ids[:stop])

    @rule(prompt=tokens, more=tokens, of=st.randoms(use_true_random=False), namespace=namespaces)
    def open(self, prompt: list[int], more: list[int], of: random.Random, namespace: bytes | None) -> None:
        if len(self.live) == 4:
            return
        others = [*self.texts, *((each.namespace, list(each.token_ids)) for each in self.live)]
        if others and of.random() < 0.8:  # what goes on from another, or parts from it
            namespace, text = of.choice(others)
            prompt = [*text[: of.randrange(1, len(text) + 1)], *more][: CONTEXT - 8]
        match = self.cache.match(prompt, namespace=namespace)
        sequence = self.cache.open(match, context_length=CONTEXT)
        assert sequence.num_computed == match.num_tokens
        self.num_reused += sequence.num_computed
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(num_tokens=st.integers(1, 40), of=st.randoms(use_true_random=False), commits=st.booleans())
    def step(self, num_tokens: int, of: random.Random, commits: bool) -> None:
        chosen = [each for each in of.sample(self.live, of.randrange(1, len(self.live) + 1)) if each.num_uncomputed]
        with self.cache.begin() as transaction:
            for sequence in chosen:
                stop = sequence.state.next_stop(sequence.num_computed) or CONTEXT
                few = min(num_tokens, sequence.num_uncomputed, stop - sequence.num_computed)
                if of.random() < 0.5:  # a step that ends with a page
                    few = min(few, PAGE_SIZE - sequence.num_computed % PAGE_SIZE)
                try:
                    transaction.reserve(sequence, few)
                except OutOfPages:
                    continue
            for copy in transaction.copies:
                for row in range(copy.num_rows):
                    self.rows[copy.dst_page * PAGE_SIZE + row] = self.rows[copy.src_page * PAGE_SIZE + row]
            for reservation in transaction.reservations:
                sequence, start, stop = reservation.sequence, reservation.start, reservation.stop
                assert self.states[reservation.state_in] == self.text(sequence, start)
                assert reservation.state_out not in (0, reservation.state_in)
                self.states[reservation.state_out] = self.text(sequence, stop)
                slots = slots_of(reservation.page_ids, reservation.rows)
                for position, slot in zip(range(start, stop), slots, strict=True):
                    self.rows[slot] = self.text(sequence, position + 1)
            if commits:
                transaction.commit()

    @precondition(lambda self: any(each.num_uncomputed for each in self.live))
    @rule(draft=st.lists(st.integers(0, 2), min_size=1, max_size=20), of=st.randoms(use_true_random=False))
    def draft(self, draft: list[int], of: random.Random) -> None:
        """Tokens behind all others, of which the first are right; the rows of those that are computed again stay."""
        sequence = of.choice([each for each in self.live if each.num_uncomputed])
        draft = draft[: CONTEXT - len(sequence) - 1]
        if not draft or sequence.state.next_stop(sequence.num_computed) is not None:
            return
        with self.cache.begin() as transaction:
            try:
                reservation = transaction.reserve(sequence, sequence.num_uncomputed, draft)
            except OutOfPages:
                return
            for copy in transaction.copies:
                for row in range(copy.num_rows):
                    self.rows[copy.dst_page * PAGE_SIZE + row] = self.rows[copy.src_page * PAGE_SIZE + row]
            text, start, stop = (*sequence.token_ids, *draft), reservation.start, reservation.stop
            assert len(text) == stop and self.states[reservation.state_in] == text[:start]
            self.states[reservation.state_out] = text
            for position, slot in enumerate(slots_of(reservation.page_ids, reservation.rows), start):
                self.rows[slot] = text[: position + 1]
            num_right = of.randrange(len(draft) + 1)
            transaction.accept(sequence, num_right)
            transaction.commit()
        num_recomputed = stop - start - len(draft) + num_right if num_right < len(draft) else 0
        assert sequence.num_recomputed == num_recomputed == sequence.num_uncomputed
        sequence.append([of.randrange(3)])
        assert sequence.decodes and sequence.num_recomputed == num_recomputed

    @invariant()
    def rows_of_tokens_that_are_computed_again_are_there(self) -> None:
        for sequence in self.live:
            first = sequence.num_rows
            there = range(first, min(first + sequence.num_recomputed, len(sequence.page_ids) * PAGE_SIZE))
            for position, slot in zip(there, slots_of(sequence.page_ids, there), strict=True):
                assert self.rows[slot] == self.text(sequence, position + 1)

    @precondition(lambda self: self.live)
    @rule(token_id=st.integers(0, 2), of=st.randoms(use_true_random=False))
    def append(self, token_id: int, of: random.Random) -> None:
        sequence = of.choice(self.live)
        sequence.append([token_id] * min(of.randrange(1, 9), CONTEXT - len(sequence)))

    @precondition(lambda self: self.live)
    @rule(of=st.randoms(use_true_random=False))
    def pop(self, of: random.Random) -> None:
        sequence = of.choice(self.live)
        num_tokens = of.randrange(len(sequence))
        self.popped |= {self.text(sequence, len(sequence) - number) for number in range(num_tokens)}
        sequence.pop(num_tokens)

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(of=st.randoms(use_true_random=False), token_id=st.integers(0, 2))
    def fork(self, of: random.Random, token_id: int) -> None:
        sequence = of.choice(self.live)
        child = self.cache.fork(sequence, of.randrange(sequence.num_computed + 1))
        child.append([token_id])
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(of=st.randoms(use_true_random=False))
    def preempt_and_resume(self, of: random.Random) -> None:
        sequence = of.choice(self.live)
        self.cache.preempt(sequence)
        assert sequence.num_computed == 0
        if of.random() < 0.8:
            self.num_reused += self.cache.resume(sequence)

    @precondition(lambda self: self.live)
    @rule(of=st.randoms(use_true_random=False), keep=st.booleans())
    def close(self, of: random.Random, keep: bool) -> None:
        sequence = self.live.pop(of.randrange(len(self.live)))
        self.cache.close(sequence, keep=keep)
        self.texts = [*self.texts[-5:], (sequence.namespace, list(sequence.token_ids))]

    @rule(namespace=namespaces)
    def clear(self, namespace: bytes | None) -> None:
        self.cache.clear(namespace)

    @rule()
    def drop_unused(self) -> None:
        self.cache.drop_unused(time.monotonic() + 1)

    @invariant()
    def every_state_is_found(self) -> None:
        """A snapshot is found by its tokens, or will be when a live sequence leaves them; or they were popped."""
        if not hasattr(self, "cache"):
            return
        assert self.cache.states is not None
        live = {self.text(each, stop) for each in self.live for stop in range(each.num_computed + 1)}
        for slot in self.cache.states._snapshots:
            text = self.states[slot]
            found = max(self.cache.tree.find(name, text).num_tokens for name in (b"", b"a"))
            assert found == len(text) or text in live | self.popped

    @invariant()
    def all_is_of_its_own_tokens(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for sequence in self.live:
            assert self.states[sequence.state.slot] == self.text(sequence, sequence.num_computed)
            for position in range(sequence.num_computed):
                slot = sequence.page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                assert self.rows[slot] == self.text(sequence, position + 1)


RecurrentCache.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRecurrentCache = RecurrentCache.TestCase


@pytest.mark.parametrize("is_stored", [False, True])
def test_states_are_reused_by_these_operations(is_stored: bool) -> None:
    chance, num_reused = random.Random(7), 0
    for _ in range(20):
        machine = RecurrentCache()
        machine.begin(num_pages=24, num_slots=16, is_stored=is_stored)
        for _ in range(80):
            seed = random.Random(chance.random())
            machine.open([chance.randrange(3) for _ in range(9)], [chance.randrange(3)], seed, b"")
            machine.step(chance.randrange(1, 40), seed, True)
            machine.append(chance.randrange(3), seed)
            machine.step(chance.randrange(1, 40), seed, True)
            if chance.random() < 0.2:
                machine.pop(seed)
            if chance.random() < 0.4:
                machine.close(seed, True)
            machine.all_is_of_its_own_tokens()
        num_reused += machine.num_reused
    assert num_reused > 300, num_reused


@pytest.mark.parametrize("num_pages", [9, 24])
def test_no_snapshot_stays_of_tokens_that_are_gone(num_pages: int) -> None:
    chance = random.Random(3)
    for _ in range(20):
        machine = RecurrentCache()
        machine.begin(num_pages=num_pages, num_slots=16, is_stored=False)
        for _ in range(40):
            seed = random.Random(chance.random())
            machine.open([chance.randrange(3) for _ in range(9)], [chance.randrange(3)], seed, b"")
            machine.step(chance.randrange(1, 40), seed, True)
            machine.every_state_is_found()
            if len(machine.live) > 2 or chance.random() < 0.4:
                machine.close(seed, chance.random() < 0.7)
            machine.every_state_is_found()
            if chance.random() < 0.1:
                machine.drop_unused()
            machine.every_state_is_found()


class Whole(random.Random):
    """Steps of it end where they are told to."""

    def random(self) -> float:
        return 0.9


def test_the_state_at_a_page_end_is_gone_when_its_tokens_are_popped() -> None:
    machine, whole = RecurrentCache(), Whole(1)
    machine.begin(num_pages=24, num_slots=16, is_stored=True)
    machine.open([1] * 20, [], whole, b"")
    [sequence] = machine.live
    sequence.append([1] * 12)
    while sequence.num_uncomputed:
        machine.step(40, whole, True)
    assert sequence.state.num_page_tokens == 32
    sequence.pop(20)
    sequence.append([2] * 28)
    while sequence.num_uncomputed:
        machine.step(40, whole, True)
    text = list(sequence.token_ids)
    machine.close(whole, True)
    match = machine.cache.match([*text[:34], 0])
    machine.live.append(machine.cache.open(match, context_length=CONTEXT))
    machine.all_is_of_its_own_tokens()
