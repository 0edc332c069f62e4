"""Find, share and keep the KV of prompts: the one object that the engine talks to about pages.

Knows token ids, page ids and namespaces. Not text, tensors or requests: the engine moves the contents, as the
reservations of a step say.
"""

from __future__ import annotations

import collections.abc
import time
from collections.abc import Callable
from dataclasses import dataclass

from radixlm.tokenizer_fix import SpelledPrompt

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfPages, SparseSpanError, UnknownSequence
from ..kv_log.log import KVLog
from .cache_uses import CacheUses
from .kv_transaction import KVTransaction, take_pages
from .page_pool import PagePool
from .prefix_match import PrefixMatch, match_prompt
from .radix_tree import RadixTree
from .reply_alias import ReplyAliases
from .sequence import Sequence, num_pages_for
from .sparse_span import SparseSpan


@dataclass(frozen=True)
class CacheStats:
    """Counts of now (pages, sequences, nodes), and since the start (tokens, evictions)."""

    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_in_use_pages: int
    num_sequences: int
    num_nodes: int
    num_prompt_tokens: int
    num_reused_tokens: int
    num_evicted_pages: int


class PrefixCache:
    """Sequences over one pool of pages, and the tree of everything that was computed.

    The life of a request::

        match = cache.match(prompt_ids)                  # looks only
        sequence = cache.open(match, context_length=n)   # shares the matched pages
        with cache.begin() as step:                      # each step, for all its sequences
            reservation = step.reserve(sequence, num_tokens)
            ...                                          # step.copies, forward, sample
            step.commit()                                # full pages are shared from here on
        sequence.append([token_id])
        cache.close(sequence)                            # the rest stays in the tree

    Between transactions every full page of a live sequence is in the tree. Of a sequence with a sparse span only those
    before the span are; no other page of it ever is. A sequence without a namespace takes
    nothing from the tree and leaves nothing in it.
    """

    def __init__(
        self, pool: PagePool, *, clock: Callable[[], float] = time.monotonic, kv_log: KVLog | None = None
    ) -> None:
        """Nothing is cached yet; `kv_log` is told of everything that happens to pages."""
        self.pool = pool
        self._kv_log = kv_log
        self.aliases = ReplyAliases(clock=clock)
        self.uses = CacheUses()
        self.tree = RadixTree(pool, clock=clock, kv_log=kv_log)
        self._sequences: dict[int, Sequence] = {}
        self._next_seq_id = 0
        if kv_log is not None:
            kv_log.write("begin", num_pages=pool.num_pages)
        self._num_prompt_tokens = 0
        self._num_reused_tokens = 0

    def match(
        self,
        prompt_ids: collections.abc.Sequence[int],
        *,
        num_match: int | None = None,
        namespace: bytes | None = b"",
        num_known: int = 0,
        spelled: Callable[[], SpelledPrompt] | None = None,
    ) -> PrefixMatch:
        """The longest cached prefix of `prompt_ids[:num_match]`, never the whole prompt; changes nothing.

        Args:
            namespace: whose part of the tree is looked at; None: nobody's, and nothing is kept of what is opened on it.
            num_known: so many ids were found without encoding: matched, they count as `seam`.
            spelled: what the prompt spells; given it, runs that the model generated are matched by text too, and
                then the match's `prompt_ids` are others, which spell the same.

        Raises:
            EmptyPrompt: there are no tokens.
        """
        return match_prompt(
            self.tree,
            self.aliases,
            prompt_ids,
            num_match=num_match,
            namespace=namespace,
            num_known=num_known,
            spelled=spelled,
        )

    def num_elsewhere(self, prompt_ids: collections.abc.Sequence[int], namespace: bytes) -> int:
        """The longest prefix that another namespace has of these ids, in tokens; no client may learn that."""
        others = (other for other in self.tree.namespaces if other != namespace)
        return max((self.tree.find(other, prompt_ids[:-1]).num_tokens for other in others), default=0)

    def open(
        self,
        match: PrefixMatch,
        *,
        context_length: int,
        sparse: SparseSpan | None = None,
        request_id: str | None = None,
    ) -> Sequence:
        """Start a sequence of the match's prompt that shares the matched pages: their tokens are computed.

        If the cache changed since, the prompt is matched again: call `match` right before `open` to report the match.

        Args:
            sparse: the sequence begins with this span: the tokens before `sparse.stop` are computed, with fewer rows.
                It then shares only pages before `sparse.start`. From `page_ids[sparse.start // PAGE_SIZE]` on its pages
                are its own and empty: write the chosen rows there before anything else is done with it. Evicts as
                `KVTransaction.reserve` does.
            request_id: the log has it on each line of the sequence.

        Raises:
            AppendLengthError: the prompt is longer than the context.
            OutOfPages: too few pages are free or can be evicted for the rows of `sparse`.
            SparseSpanError: `sparse` is of another prompt, leaves nothing to compute, or follows pages that are no
                longer cached. In each case nothing is opened, taken or evicted.
        """
        sequence = Sequence(
            self._next_seq_id,
            match.prompt_ids,
            pool=self.pool,
            context_length=context_length,
            namespace=match.namespace,
            request_id=request_id,
            kv_log=self._kv_log,
        )
        if sparse is None:
            num_reused = self._reuse(sequence, min(match.num_match, len(sequence) - 1))
            event: str = "open"
            fields: dict[str, object] = {"private": sequence.namespace is None}
        else:
            num_own = self._begin_sparse(sequence, match, sparse)
            num_reused, free = sparse.start, self.pool.num_free
            rows = [sparse.start, sparse.stop, sparse.num_rows]
            event, fields = "open_pruned", {"pruned": rows, "free": [free + num_own, free]}
        self._next_seq_id += 1
        self._sequences[sequence.seq_id] = sequence
        self._num_prompt_tokens += len(sequence)
        self._num_reused_tokens += num_reused
        if self._kv_log is not None:
            self._kv_log.write(event, sequence, length=0, computed=0, pages=list(sequence.page_ids), **fields)
        return sequence

    def fork(self, sequence: Sequence, at: int) -> Sequence:
        """A new sequence of the first `at` computed tokens, sharing their pages; append before it computes.

        Raises:
            ForkLengthError: `at` is past the computed tokens.
            SparseForkError: `at` is inside a sparse span.
            UnknownSequence: it is closed, or not of this cache.
        """
        self._require(sequence)
        child = sequence.fork(at, seq_id=self._next_seq_id)
        self._next_seq_id += 1
        self._sequences[child.seq_id] = child
        return child

    def begin(self) -> KVTransaction:
        """A transaction for one step, to be used in a `with`."""
        if self._kv_log is not None and self._kv_log.is_full:  # between two steps it can be said what there is
            self._kv_log.turn(**self._state())
        return KVTransaction(self.pool, self.tree, self._kv_log)

    def preempt(self, sequence: Sequence) -> None:
        """Leave all of the sequence's KV in the tree, where it can be evicted; the sequence keeps its tokens.

        A sparse span, and all KV that was computed over it, is dropped: from here on the sequence is exact. All KV of a
        sequence without a namespace is dropped, too. The sequence stays live with `num_computed == 0`; `resume` takes
        back what is still there.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self._require(sequence)
        self._leave_in_tree(sequence)
        self._give_back(sequence, "preempt")

    def resume(self, sequence: Sequence) -> int:
        """Take from the tree what it has of the sequence's uncomputed tokens; how many tokens were gained.

        For a preempted sequence, and for one that waited while another computed the same prefix. Its last
        token is left to compute. A sequence that gains tokens has no sparse span afterwards.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self._require(sequence)
        before = sequence.num_computed
        num_gained = self._reuse(sequence, len(sequence) - 1)
        if self._kv_log is not None:
            self._kv_log.write("resume", sequence, computed=before, pages=list(sequence.page_ids))
        return num_gained

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence: its pages are released, and with `keep` the partial last one stays in the tree too.

        Full pages are shared as soon as they are committed and stay in either case. The tokens can still be
        read.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self._require(sequence)
        if keep:
            self._leave_in_tree(sequence)
        self._give_back(sequence, "close")
        sequence.mark_closed()
        del self._sequences[sequence.seq_id]

    def get(self, seq_id: int) -> Sequence:
        """The live sequence with this id.

        Raises:
            UnknownSequence: there is none.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise UnknownSequence(f"no live sequence has the id {seq_id}; {len(self._sequences)} are live")
        return sequence

    def clear(self, namespace: bytes | None = None) -> int:
        """Free everything that no live sequence uses, of a namespace or of all; how many pages became free."""
        self.aliases.forget(namespace)
        self.uses.forget(namespace)
        if namespace is not None:
            return self.tree.clear(namespace)
        return sum(map(self.tree.clear, self.tree.namespaces))

    def start_over(self) -> None:
        """Forget everything in whatever state it is, live sequences too: all pages are free, whoever had them."""
        self.pool = PagePool(self.pool.num_pages)
        self.tree = self.tree.emptied(self.pool)
        self.aliases.forget(None)
        self._sequences.clear()
        if self._kv_log is not None:
            self._kv_log.write("start_over")

    def drop_unused(self, since: float) -> int:
        """Free what no live sequence uses and nobody used since then, on the cache's clock; how many pages."""
        self.aliases.forget_unused(since)
        self.uses.forget_unused(since)
        return self.tree.drop_unused(since)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are live, in the order in which they were opened."""
        return list(self._sequences.values())

    @property
    def num_unused_request_rows(self) -> int:
        """Rows of live sequences' pages that no token is in, yet; from another thread about so many."""
        return sum(max(0, len(each.page_ids) * PAGE_SIZE - each.num_rows) for each in self.sequences)

    def stats(self) -> CacheStats:
        """Counts for metrics and tests."""
        return CacheStats(
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_cached_pages=self.pool.num_cached,
            num_in_use_pages=self.pool.num_in_use,
            num_sequences=len(self._sequences),
            num_nodes=self.tree.num_nodes,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
            num_evicted_pages=self.tree.num_evicted_pages,
        )

    def check(self) -> None:
        """Raise AssertionError unless pool, tree and live sequences agree; not inside a transaction."""
        self.pool.check([sequence.page_ids for sequence in self._sequences.values()], self.tree.page_ids())
        self.tree.check()
        for seq_id, sequence in self._sequences.items():
            sequence.check()
            assert sequence.seq_id == seq_id and not sequence.is_closed and not sequence.is_reserved
            num_full = sequence.num_shareable // PAGE_SIZE
            full, rest = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
            assert all(map(self.pool.is_in_tree, full)), f"{sequence} has full pages that nobody can find"
            is_private = sequence.sparse is not None or sequence.namespace is None
            assert not (is_private and any(map(self.pool.is_in_tree, rest))), f"anybody can find pages of {sequence}"

    def _state(self) -> dict[str, object]:
        """All there is, for a log that begins here."""
        sequences = [
            {
                "request": each.request_id,
                "seq": each.seq_id,
                "length": len(each),
                "computed": each.num_computed,
                "pages": list(each.page_ids),
                "pruned": None if (span := each.sparse) is None else [span.start, span.stop, span.num_rows],
                "private": each.namespace is None,
            }
            for each in self._sequences.values()
        ]
        return {"num_pages": self.pool.num_pages, "tree": self.tree.page_ids(), "sequences": sequences}

    def _begin_sparse(self, sequence: Sequence, match: PrefixMatch, sparse: SparseSpan) -> int:
        """Give a new sequence the pages before the span, and its own for the span's rows; returns how many are its own.

        Raises:
            OutOfPages, SparseSpanError: as `open`.
        """
        limit = min(match.num_match, len(sequence) - 1)
        if sparse.stop > limit or match.prompt_ids[: sparse.stop] != sparse.token_ids:
            raise SparseSpanError(
                f"{sparse!r} has rows of {sparse.stop} tokens, and not the first of the {limit} that this prompt may "
                f"reuse; open it without"
            )
        found = self.tree.find(match.namespace, match.prompt_ids[: sparse.start])
        if found.num_tokens < sparse.start:
            raise SparseSpanError(
                f"{sparse!r} goes on from {sparse.start} tokens, {found.num_tokens} are cached; open it without"
            )
        self.pool.retain(found.pages)  # or the span's pages might evict them
        try:
            own = take_pages(self.pool, self.tree, num_pages_for(sparse.start + sparse.num_rows) - len(found.pages))
        except OutOfPages:
            self.pool.release(found.pages)
            raise
        sequence.replace_kv([*found.pages, *own], sparse.stop, sparse=sparse)
        sequence.inherit_generated(found.generated)
        sequence.inherit_generated(sparse.generated)
        self.tree.touch(found.pages)
        return len(own)

    def _reuse(self, sequence: Sequence, limit: int) -> int:
        """Share what the tree has of the first `limit` tokens, if that is more than is computed; the gain."""
        assert not sequence.is_reserved, f"{sequence} is reserved"
        before = sequence.num_computed
        if limit <= before:
            return 0
        found = self.tree.find(sequence.namespace, sequence.token_ids[:limit])
        if found.num_tokens <= before:
            return 0
        page_ids = found.pages if found.partial_page is None else [*found.pages, found.partial_page]
        self.pool.retain(page_ids)
        self.pool.release(sequence.page_ids)
        sequence.replace_kv(page_ids, found.num_tokens)
        sequence.inherit_generated(found.generated)
        self.tree.touch(found.pages)  # not the partial page: one common row does not make a run recent
        return found.num_tokens - before

    def _leave_in_tree(self, sequence: Sequence) -> None:
        """Keep the rows of the partial last page; the full pages are there already."""
        num_full = sequence.num_shareable // PAGE_SIZE
        full, tail = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
        if not tail or sequence.sparse is not None or sequence.namespace is None:  # the tail may not be shared
            self.tree.touch(full)
            return
        tokens = slice(num_full * PAGE_SIZE, sequence.num_computed)  # may be there: found there, or popped to
        self.tree.insert_tail(sequence.namespace, full, sequence.token_ids[tokens], tail[0], sequence.generated[tokens])

    def _give_back(self, sequence: Sequence, event: str) -> None:
        assert not sequence.is_reserved, f"{sequence} is reserved"
        before, num_free = sequence.num_computed, self.pool.num_free
        self.pool.release(sequence.page_ids)
        sequence.replace_kv([], 0)
        if self._kv_log is not None:
            self._kv_log.write(event, sequence, computed=before, free=[num_free, self.pool.num_free])

    def _require(self, sequence: Sequence) -> None:
        if self.get(sequence.seq_id) is not sequence:
            raise UnknownSequence(f"sequence {sequence.seq_id} is of another cache")
