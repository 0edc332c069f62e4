"""Random operations on a prefix cache of a model with sliding windows, of which memory keeps the rows of few pages.

Every row that a token reads is that of its own tokens, whatever was dropped, shared, evicted, taken back or rolled
back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.page_sharing import TreeEnd
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.window_rows import KEPT_BEFORE, WindowRows
from radixlm.runtime.errors import OutOfPages
from radixlm.runtime.model.batch import PageCopy, slots_of

CONTEXT = 200
Text = tuple[int, ...]

namespaces = st.sampled_from((b"", b"a", None))
randoms = st.integers(0, 2**30).map(random.Random)


class PlainMemory:
    """Rows of a layer that sees all tokens, and of one with a window, by slot: a row is all tokens up to its own."""

    def __init__(self) -> None:
        self.full: dict[int, Text] = {}
        self.windowed: dict[int, Text] = {}
        self.has = lambda page: True

    def write(self, slot: int, row: Text) -> None:
        self.full[slot] = self.windowed[slot] = row

    def copy_rows(self, copies: Iterable[PageCopy]) -> None:
        for copy in copies:
            for row in range(copy.num_rows):
                source, target = (page * PAGE_SIZE + row for page in (copy.src_page, copy.dst_page))
                assert self.full.get(target, self.full[source]) == self.full[source] or copy.num_rows < PAGE_SIZE
                self.write(target, self.windowed[source])

    def drop_window_rows(self, runs: Iterable[range]) -> None:
        for run in runs:
            for page in run:
                assert not self.has(page), "the memory of rows that are there is given back"
                for row in range(PAGE_SIZE):
                    self.windowed.pop(page * PAGE_SIZE + row, None)


class WindowCache(RuleBasedStateMachine):
    """The model's rows are texts, so that each row that a token reads can be compared with the tokens before it."""

    @initialize(num_pages=st.integers(14, 40), window=st.sampled_from((1, 5, 16, 17, 40)), num_more=st.integers(0, 8))
    def begin(self, num_pages: int, window: int, num_more: int) -> None:
        self.window, self.max_pages = window, -(-window // PAGE_SIZE) + 4 + num_more
        self.memory = PlainMemory()
        self.cache = PrefixCache(PagePool(num_pages, WindowRows(window, self.max_pages, self.memory)))
        self.watch()
        self.live: list[Sequence] = []
        self.texts: list[tuple[bytes | None, list[int]]] = []  # of those that were closed
        self.left: list[list[int]] = []
        self.num_reused = 0

    @property
    def windows(self) -> WindowRows:
        assert self.cache.pool.windows is not None
        return self.cache.pool.windows

    def watch(self) -> None:
        self.memory.has = self.windows.has
        self.windows.before_drop = self.leave

    def leave(self, page_ids: Iterable[int]) -> None:
        for page in page_ids:
            assert self.windows.has(page)
            if (node := self.cache.tree.node_of(page)) is not None and not node.is_tail:
                assert all(page * PAGE_SIZE + row in self.memory.windowed for row in range(PAGE_SIZE))

    def text(self, sequence: Sequence, stop: int) -> Text:
        return tuple(sequence.token_ids[:stop])

    @rule(length=st.integers(1, CONTEXT - 8), of=randoms, namespace=namespaces)
    def open(self, length: int, of: random.Random, namespace: bytes | None) -> None:
        if len(self.live) == 4:
            return
        prompt = [of.randrange(2) for _ in range(length)]
        others = [*self.texts, *((each.namespace, list(each.token_ids)) for each in self.live)]
        if others and of.random() < 0.8:  # what goes on from another, or parts from it
            namespace, text = of.choice(others)
            prompt = [*text[: of.randrange(1, len(text) + 1)], *prompt[: of.choice((1, 20, 80))]][: CONTEXT - 8]
        match = self.cache.match(prompt, namespace=namespace)
        sequence = self.cache.open(match, context_length=CONTEXT)
        assert sequence.num_computed == match.num_tokens
        self.num_reused += sequence.num_computed
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 6), num_tokens=st.sampled_from((1, 7, 16, 40, 60)), of=randoms)
    def compute_some(self, num_steps: int, num_tokens: int, of: random.Random) -> None:
        for _ in range(num_steps):
            self.step(num_tokens, of, commits=of.random() < 0.9)
            self.all_is_whole()

    def step(self, num_tokens: int, of: random.Random, commits: bool) -> None:
        chosen = [each for each in of.sample(self.live, of.randrange(1, len(self.live) + 1)) if each.num_uncomputed]
        with self.cache.begin() as transaction:
            for sequence in chosen:
                try:
                    transaction.reserve(sequence, min(num_tokens, sequence.num_uncomputed))
                except OutOfPages:
                    alone = len(self.live) == 1 and num_tokens + 1 - PAGE_SIZE <= PAGE_SIZE
                    assert not alone or self.cache.pool.num_pages < CONTEXT // PAGE_SIZE + 2, "it is alone"
            self.memory.copy_rows(transaction.copies)
            for reservation in transaction.reservations:
                sequence, start, stop = reservation.sequence, reservation.start, reservation.stop
                self.compute(sequence, start, stop, [*reservation.page_ids])
            if commits:
                transaction.commit()

    def compute(self, sequence: Sequence, start: int, stop: int, page_ids: list[int]) -> None:
        """Read what each token reads, and write its rows."""
        slots = slots_of(page_ids, range(stop))
        for position in range(start, stop):
            self.memory.write(slots[position], self.text(sequence, position + 1))
            for before in range(max(0, position + 1 - self.window), position):
                assert self.memory.windowed[slots[before]] == self.text(sequence, before + 1)
        assert [self.memory.full[slot] for slot in slots] == [self.text(sequence, at + 1) for at in range(stop)]

    @precondition(lambda self: self.live)
    @rule(token_id=st.integers(0, 1), of=randoms)
    def append(self, token_id: int, of: random.Random) -> None:
        sequence = of.choice(self.live)
        sequence.append([token_id] * min(of.randrange(1, 40), CONTEXT - len(sequence)))

    @precondition(lambda self: self.live)
    @rule(of=randoms, certain=st.booleans())
    def pop(self, of: random.Random, certain: bool) -> None:
        sequence = of.choice(self.live)
        self.cache.settle(sequence, None)
        sequence.pop(of.randrange(len(sequence)))
        if certain:
            self.cache.settle(sequence, of.randrange(sequence.num_computed, len(sequence) + 1))

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(of=randoms, token_id=st.integers(0, 1))
    def fork(self, of: random.Random, token_id: int) -> None:
        sequence = of.choice(self.live)
        child = self.cache.fork(sequence, of.randrange(sequence.num_computed + 1))
        child.append([token_id])
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(of=randoms)
    def preempt_and_resume(self, of: random.Random) -> None:
        sequence = of.choice(self.live)
        self.cache.preempt(sequence)
        assert sequence.num_computed == 0
        if of.random() < 0.8:
            self.num_reused += self.cache.resume(sequence)

    @precondition(lambda self: self.live)
    @rule(of=randoms, keep=st.booleans())
    def close(self, of: random.Random, keep: bool) -> None:
        sequence = self.live.pop(of.randrange(len(self.live)))
        self.cache.close(sequence, keep=keep)
        self.texts.append((sequence.namespace, list(sequence.token_ids)))

    @precondition(lambda self: self.texts)
    @rule(of=randoms)
    def load(self, of: random.Random) -> None:
        """Insert whole pages that the disk has, behind what can be gone on from, as a transfer does."""
        namespace, text = of.choice(self.texts)
        num_pages = len(text) // PAGE_SIZE
        match = self.cache.match([*text, 0], num_match=num_pages * PAGE_SIZE, namespace=namespace)
        start = match.num_tokens // PAGE_SIZE
        if namespace is None or start == num_pages:
            return
        last = match.pages[start - 1] if start else None
        end = TreeEnd(namespace, last, start, self.cache.tree.num_dropped)

        def write(page_ids: list[int]) -> None:
            for page, first in zip(page_ids, range(start * PAGE_SIZE, len(text), PAGE_SIZE), strict=False):
                for row in range(PAGE_SIZE):
                    self.memory.write(page * PAGE_SIZE + row, tuple(text[: first + row + 1]))

        ids = text[start * PAGE_SIZE : num_pages * PAGE_SIZE]
        if self.cache.insert_after(end, ids, bytes(len(ids)), write) is not None:
            found = self.cache.match([*text, 0], num_match=num_pages * PAGE_SIZE, namespace=namespace)
            assert found.num_tokens == num_pages * PAGE_SIZE, "it was loaded in vain"

    @rule(namespace=st.sampled_from((b"", b"a")))
    def forget(self, namespace: bytes) -> None:
        self.cache.clear(namespace)

    @precondition(lambda self: not self.live)
    @rule()
    def start_over(self) -> None:
        self.cache.start_over()
        self.watch()
        assert not self.memory.windowed

    @invariant()
    def all_is_whole(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.windows.num_with_rows <= self.max_pages
        there = {slot // PAGE_SIZE for slot in self.memory.windowed}
        assert all(map(self.windows.has, there)), "rows that are counted as dropped are there"
        for sequence in self.live:
            stop = sequence.num_computed
            slots = slots_of(sequence.page_ids, range(stop))
            assert [self.memory.full[slot] for slot in slots] == [self.text(sequence, at + 1) for at in range(stop)]
            for at in range(max(0, stop + 1 - self.window), stop):
                assert self.memory.windowed[slots[at]] == self.text(sequence, at + 1)


WindowCache.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_random_operations = pytest.mark.timeout(600)(WindowCache.TestCase)


def test_many_random_operations() -> None:
    """Hypothesis tries short runs; rows are dropped in long ones."""
    assert sum(map(num_dropped_in_a_run, range(60))) > 500


def num_dropped_in_a_run(seed: int) -> int:
    of, machine = random.Random(seed), WindowCache()
    machine.begin(of.randrange(14, 40), of.choice((1, 5, 16, 17, 40)), of.randrange(3))
    for _ in range(80):
        kind = of.choice(("open", "open", "compute", "compute", "compute", "compute", "append", "load", *"pfrc"))
        if kind == "open":
            machine.open(of.randrange(1, CONTEXT - 8), of, of.choice((b"", b"", b"a", None)))
        elif kind == "load" and machine.texts:
            machine.load(of)
        elif kind == "compute" and machine.live:
            machine.compute_some(of.randrange(1, 6), of.choice((1, 7, 16, 40, 60)), of)
        elif kind == "append" and machine.live:
            machine.append(of.randrange(2), of)
        elif kind == "p" and machine.live:
            machine.pop(of, of.random() < 0.3)
        elif kind == "f" and 0 < len(machine.live) < 4:
            machine.fork(of, of.randrange(2))
        elif kind == "r" and machine.live:
            machine.preempt_and_resume(of)
        elif kind == "c" and machine.live:
            machine.close(of, of.random() < 0.8)
        machine.all_is_whole()
    return machine.windows.num_dropped


class Conversation:
    """A cache with few window rows, and one prompt after another."""

    def __init__(self, window: int, max_pages: int, num_pages: int = 200) -> None:
        self.memory = PlainMemory()
        self.cache = PrefixCache(PagePool(num_pages, WindowRows(window, max_pages, self.memory)))
        assert self.cache.pool.windows is not None
        self.windows = self.cache.pool.windows
        self.memory.has = self.windows.has

    def run(self, text: list[int], chunk: int = 32) -> int:
        """Compute a prompt; how many of its tokens were reused."""
        sequence = self.cache.open(self.cache.match(text), context_length=10_000)
        num_reused = sequence.num_computed
        while sequence.num_uncomputed:
            with self.cache.begin() as transaction:
                reservation = transaction.reserve(sequence, min(chunk, sequence.num_uncomputed))
                self.memory.copy_rows(transaction.copies)
                slots = slots_of(reservation.page_ids, reservation.rows)
                for at, slot in enumerate(slots, reservation.start):
                    self.memory.write(slot, tuple(text[: at + 1]))
                transaction.commit()
        self.cache.close(sequence)
        self.cache.check()
        return num_reused


def test_a_long_prompt_keeps_few_rows_and_is_resumed_at_its_end() -> None:
    talk = Conversation(window=32, max_pages=30)
    text = [*range(1600)]
    assert talk.run(text) == 0
    assert talk.windows.num_with_rows == 30 and talk.cache.stats().num_free_pages == 100
    assert talk.run([*text, 5, 6, 7]) == 1600


def test_an_edit_goes_on_from_a_point_that_was_kept() -> None:
    talk = Conversation(window=32, max_pages=60)
    text = [*range(1600)]
    talk.run(text)
    every = next(iter(talk.windows.points(0, 10_000)))
    assert every == 256
    for at in (1500, 900, 500, 300):
        edited = [*text[:at], 1, 2, 3]
        why = talk.cache.match(edited).why_not_more
        assert at // every * every <= talk.run(edited) <= at
        assert why.kind in ("no_window_rows", "differs")
        assert at - PAGE_SIZE < talk.run([*text[:at], 4, 5, 6]) <= at, "where prompts part is kept"
        assert at - KEPT_BEFORE < talk.run([*text[: at - 20], 4, 5, 6]) <= at - 20


def test_no_room_for_the_rows_that_a_step_writes() -> None:
    talk = Conversation(window=32, max_pages=4)
    sequence = talk.cache.open(talk.cache.match([*range(200)]), context_length=1000)
    with talk.cache.begin() as transaction:
        with pytest.raises(OutOfPages, match=r"5 pages .* sliding windows holds 4"):
            transaction.reserve(sequence, 80)
        transaction.reserve(sequence, 64)
