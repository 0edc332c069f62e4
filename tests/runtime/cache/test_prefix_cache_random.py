"""Random lives of sequences over a small pool, against plain lists of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.radix_node import Node
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.errors import (
    AppendLengthError,
    ForkLengthError,
    OutOfPages,
    PopLengthError,
    SparseForkError,
    SparseSpanError,
    UnknownSequence,
)

from ..fake_pages import FakePages

CONTEXT_LENGTH = 100
TOKENS = st.integers(0, 2)
NAMESPACES = st.sampled_from([b"", b"", b"", b"a"])
RUNS = st.lists(st.tuples(TOKENS, st.integers(1, 20)), min_size=1, max_size=4).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)


def num_common(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


class SequencesOverASmallPool(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(8, 24))
    def start(self, num_pages: int) -> None:
        self.cache = PrefixCache(PagePool(num_pages))
        self.pages = FakePages()
        self.tokens: dict[int, list[int]] = {}  # the slow, obvious version: seq_id -> tokens
        self.pruned: dict[int, SparseSpan] = {}  # likewise, of those whose prefix is pruned
        self.kept: set[tuple[bytes, tuple[int, ...]]] = set()  # every run that was ever left to be found
        self.texts: list[list[int]] = [[0] * 40]
        self.is_removed = False
        self.cache.tree.eviction.before_evict = self.leave

    def leave(self, node: Node, num_pages: int) -> None:
        """What makes room still holds its rows, and no sequence needs it."""
        path = node.path()
        assert path.page_ids[-num_pages:] == node.pages[-num_pages:]
        assert all(self.cache.pool.num_users(page) == 0 for page in path.page_ids[-num_pages:])
        self.pages.check(path.namespace, np.frombuffer(path.key, ">u4").tolist(), path.page_ids)

    def pick(self, data: Any) -> Sequence:
        return self.cache.sequences.get(data.draw(st.sampled_from(sorted(self.tokens)), label="sequence"))

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Others may find these tokens, but for tainted ones."""
        if sequence.seq_id in self.pruned:
            num_tokens = min(num_tokens, self.pruned[sequence.seq_id].start)
        if num_tokens:
            self.kept.add((sequence.namespace, tuple(sequence.token_ids[:num_tokens])))

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(data=st.data(), namespace=NAMESPACES, new=RUNS)
    def open(self, data: Any, namespace: bytes, new: list[int]) -> None:
        text = data.draw(st.sampled_from(self.texts), label="begins like")
        prompt = (text[: data.draw(st.integers(0, len(text)), label="for")] + new)[:CONTEXT_LENGTH]
        num_match = data.draw(st.none() | st.integers(0, len(prompt)), label="num_match")
        match = self.cache.match(prompt, num_match=num_match, namespace=namespace)

        limit = min(len(prompt) - 1, len(prompt) if num_match is None else num_match)
        runs = [tokens for name, tokens, _ in self.cache.tree.paths() if name == namespace]
        longest = max((num_common(run, prompt[:limit]) for run in runs), default=0)
        assert match.num_tokens == longest
        if self.cache.stats().num_evicted_pages == 0 and not self.is_removed:
            kept = [list(run) for name, run in self.kept if name == namespace]
            assert longest == max((num_common(run, prompt[:limit]) for run in kept), default=0)
        why = match.why_not_more
        assert why.position == match.num_tokens
        assert (why.kind == "complete") == (match.num_tokens == limit)
        if why.kind == "differs":
            assert why.wanted_ids == tuple(prompt[why.position : why.position + 8])
            assert why.wanted_ids[0] != why.cached_ids[0]
            followed = [*prompt[: why.position], *why.cached_ids]
            assert any(run[: len(followed)] == followed for run in runs)

        sequence = self.cache.open(match, context_length=CONTEXT_LENGTH)
        assert sequence.num_computed == match.num_tokens < len(prompt)
        self.tokens[sequence.seq_id] = list(prompt)
        self.texts = [*self.texts[-7:], prompt]

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(data=st.data(), namespace=NAMESPACES, new=RUNS, is_others=st.integers(0, 9).map(lambda chance: chance == 0))
    def open_pruned(self, data: Any, namespace: bytes, new: list[int], is_others: bool) -> None:
        """A prompt some of whose prefix's rows, which are in no page so far, take the place of all."""
        text = data.draw(st.sampled_from(self.texts), label="begins like")
        prompt = (text[: data.draw(st.integers(0, len(text)), label="for")] + new)[:CONTEXT_LENGTH]
        match = self.cache.match(prompt, namespace=namespace)
        start = 16 * data.draw(st.integers(0, len(match.pages) + 1), label="start page")
        stop = data.draw(st.integers(start + 1, max(start + 1, len(prompt))), label="stop")
        pruned_ids = (*prompt, *[2] * stop)[: stop - is_others] + (1,) * is_others
        pruned = SparseSpan(start, data.draw(st.integers(1, stop - start), label="rows"), tuple(pruned_ids))
        before = self.cache.stats(), list(self.cache.sequences)
        try:
            sequence = self.cache.open(match, sparse=pruned, context_length=CONTEXT_LENGTH)
        except SparseSpanError:
            assert start > match.num_tokens or stop >= len(prompt) or list(pruned_ids) != prompt[:stop]
            assert (self.cache.stats(), list(self.cache.sequences)) == before
            return
        except OutOfPages:
            assert -(-(start + pruned.num_rows) // 16) > before[0].num_free_pages
            assert (self.cache.stats(), list(self.cache.sequences)) == before
            return
        assert start <= match.num_tokens and stop < len(prompt) and list(pruned_ids) == prompt[:stop]
        assert list(sequence.page_ids[: start // 16]) == list(match.pages[: start // 16])
        assert (sequence.num_computed, sequence.num_rows) == (stop, start + pruned.num_rows)
        self.pages.write(namespace, pruned, sequence.page_ids)
        self.tokens[sequence.seq_id], self.pruned[sequence.seq_id] = list(prompt), pruned
        self.texts = [*self.texts[-7:], prompt]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), fails=st.booleans())
    def step(self, data: Any, fails: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True), label="step")
        sequences = [self.cache.sequences.get(seq_id) for seq_id in chosen]
        parts = {
            sequence: data.draw(st.integers(1, sequence.num_uncomputed), label="tokens")
            for sequence in sequences
            if sequence.num_uncomputed
        }
        self.run(parts, fails=fails, drops=data.draw(st.booleans(), label="drop the last"))

    @rule()
    def compute_everything(self) -> None:
        sequences = [self.cache.sequences.get(seq_id) for seq_id in self.tokens]
        self.run({sequence: sequence.num_uncomputed for sequence in sequences if sequence.num_uncomputed})

    def run(self, parts: dict[Sequence, int], *, fails: bool = False, drops: bool = False) -> None:
        """One step of the engine."""
        computed = {seq_id: self.cache.sequences.get(seq_id).num_computed for seq_id in self.tokens}
        with self.cache.begin() as transaction:
            for sequence, num_tokens in parts.items():
                counts = self.cache.stats()
                try:
                    transaction.reserve(sequence, num_tokens)
                except OutOfPages:
                    assert self.cache.stats() == counts, "something was taken or evicted"
            if drops and transaction.reservations:
                transaction.drop(transaction.reservations[-1].sequence)
            reservations = transaction.reservations
            self.pages.copy(transaction.copies)
            for reservation in reservations:
                self.pages.forward(reservation)
            for reservation in reservations:
                sequence, seen = reservation.sequence, reservation.sequence.token_ids[: reservation.stop]
                self.pages.check(sequence.namespace, seen, reservation.page_ids, self.pruned.get(sequence.seq_id))
            if not fails:
                transaction.commit()
                for reservation in reservations:
                    computed[reservation.sequence.seq_id] = reservation.stop
                    self.keep(reservation.sequence, reservation.stop // 16 * 16)
        assert computed == {seq_id: self.cache.sequences.get(seq_id).num_computed for seq_id in self.tokens}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), new=RUNS)
    def append(self, data: Any, new: list[int]) -> None:
        sequence = self.pick(data)
        tokens = self.tokens[sequence.seq_id]
        if len(tokens) + len(new) > CONTEXT_LENGTH:
            with pytest.raises(AppendLengthError):
                sequence.append(new)
        else:
            sequence.append(new)
            tokens += new
            self.texts = [*self.texts[-7:], list(tokens)]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(-1, CONTEXT_LENGTH))
    def pop(self, data: Any, num_tokens: int) -> None:
        sequence = self.pick(data)
        tokens = self.tokens[sequence.seq_id]
        if 0 <= num_tokens <= len(tokens):
            computed = min(sequence.num_computed, len(tokens) - num_tokens)
            sequence.pop(num_tokens)
            del tokens[len(tokens) - num_tokens :]
            pruned = self.pruned.get(sequence.seq_id)
            if pruned is not None and len(tokens) < pruned.stop:
                computed = min(computed, pruned.start)
                del self.pruned[sequence.seq_id]
            assert sequence.num_computed == computed
        else:
            with pytest.raises(PopLengthError):
                sequence.pop(num_tokens)

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data(), at=st.integers(0, CONTEXT_LENGTH))
    def fork(self, data: Any, at: int) -> None:
        sequence = self.pick(data)
        pruned = self.pruned.get(sequence.seq_id)
        if pruned is not None and pruned.start < at < pruned.stop:
            with pytest.raises(SparseForkError):
                self.cache.fork(sequence, at)
        elif at <= sequence.num_computed:
            child = self.cache.fork(sequence, at)
            self.tokens[child.seq_id] = self.tokens[sequence.seq_id][:at]
            if pruned is not None and at >= pruned.stop:
                self.pruned[child.seq_id] = pruned
        else:
            with pytest.raises(ForkLengthError):
                self.cache.fork(sequence, at)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        sequence = self.pick(data)
        self.keep(sequence, sequence.num_computed)
        self.cache.preempt(sequence)
        self.pruned.pop(sequence.seq_id, None)
        assert sequence.num_computed == 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        sequence = self.pick(data)
        before = sequence.num_computed
        num_gained = self.cache.resume(sequence)
        assert num_gained == sequence.num_computed - before
        if num_gained:
            self.pruned.pop(sequence.seq_id, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: Any, keep: bool) -> None:
        sequence = self.pick(data)
        if keep:
            self.keep(sequence, sequence.num_computed)
        self.cache.close(sequence, keep=keep)
        del self.tokens[sequence.seq_id]
        self.pruned.pop(sequence.seq_id, None)
        with pytest.raises(UnknownSequence):
            self.cache.close(sequence)
        with pytest.raises(UnknownSequence):
            sequence.append([1])

    @precondition(lambda self: self.cache.stats().num_cached_pages > 0)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        paths = [pages for _, _, pages in self.cache.tree.paths()]
        unused = sorted({page for pages in paths for page in pages if self.cache.pool.num_users(page) == 0})
        chosen = data.draw(st.lists(st.sampled_from(unused), min_size=1, max_size=3), label="remove")
        cuts = [min([pages.index(page) for page in chosen if page in pages], default=len(pages)) for pages in paths]
        gone = {page for pages, cut in zip(paths, cuts, strict=True) for page in pages[cut:]}
        left = {page for pages, cut in zip(paths, cuts, strict=True) for page in pages[:cut]}
        removed = self.cache.tree.remove(chosen)
        assert len(removed) == len(set(removed)) and set(removed) == gone
        assert set(self.cache.tree.page_ids()) == left
        self.is_removed = True

    @precondition(lambda self: self.cache.stats().num_cached_pages > 0)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.stats().num_cached_pages == 0

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for seq_id, tokens in self.tokens.items():
            sequence = self.cache.sequences.get(seq_id)
            assert list(sequence.token_ids) == tokens
            pruned = self.pruned.get(seq_id)
            assert sequence.sparse == pruned
            self.pages.check(sequence.namespace, tokens[: sequence.num_computed], sequence.page_ids, pruned)
            if pruned is not None:  # no match finds what is tainted, however much of the prompt it may look for
                theirs = set(self.cache.match([*tokens, 0], namespace=sequence.namespace).pages)
                assert not theirs & set(sequence.page_ids[pruned.start // 16 :])
        for namespace, run, page_ids in self.cache.tree.paths():
            self.pages.check(namespace, run, page_ids)


TestSequencesOverASmallPool = SequencesOverASmallPool.TestCase
TestSequencesOverASmallPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
