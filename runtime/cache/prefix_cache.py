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
from ..kv_log.log import KVLog
from ..memory import Forgotten, Memory
from ..states.sequence_state import turn_start
from ..states.state_pool import StatePool
from .cache_uses import CacheUses
from .kv_transaction import KVTransaction
from .page_pool import PagePool
from .page_sharing import (
    LiveSequences,
    TreeEnd,
    begin_sparse,
    forget_states,
    insert_after,
    keep_states,
    leave_in_tree,
    reuse,
    share_full_pages,
)
from .prefix_match import PrefixMatch, match_again, match_prompt
from .radix_node import encode_key
from .radix_tree import RadixTree
from .reply_alias import ReplyAliases
from .sequence import Sequence
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


class PrefixCache(Memory):
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
    before the span are; no other page of it ever is. A sequence without a namespace takes nothing from the tree and
    leaves nothing in it.

    Attributes:
        pool, tree: the pages, and the runs that are cached.
        states: of a recurrent model, the slots of states; None: it keeps none.
        sequences: those that are live, to be read.
        aliases, uses: what is remembered of replies, and of the last requests.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        states: StatePool | None = None,
        clock: Callable[[], float] = time.monotonic,
        kv_log: KVLog | None = None,
    ) -> None:
        """An empty cache; `kv_log` gets a line for everything that happens to pages. A recurrent model has `states`."""
        self.pool, self.states = pool, states
        self._kv_log = kv_log
        self.aliases = ReplyAliases(clock=clock)
        self.uses = CacheUses()
        self.tree = RadixTree(pool, clock=clock, kv_log=kv_log, states=states)
        self.sequences = LiveSequences()
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
            namespace: the part of the tree that is searched; None: none, and nothing is kept of what is opened on it.
            num_known: the first ids that were found without encoding; those that are matched count as `seam`.
            spelled: what the prompt spells. With it, runs that the model generated are matched by text, too; then the
                match's `prompt_ids` may be other ids that spell the same.

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

    def match_again(self, match: PrefixMatch) -> PrefixMatch:
        """The same match by ids alone, of the tree as it is now; changes nothing."""
        return match_again(self.tree, match)

    def ahead(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` tokens that the sequence's namespace has behind all of its tokens; changes nothing."""
        num_full = sequence.num_shareable // PAGE_SIZE
        if sequence.namespace is None:
            return ()
        above, token_ids = sequence.page_ids[:num_full], sequence.token_ids[num_full * PAGE_SIZE :]
        return self.tree.ahead(sequence.namespace, above, token_ids, most)

    def num_elsewhere(self, prompt_ids: collections.abc.Sequence[int], namespace: bytes) -> int:
        """The longest prefix of these ids, in tokens, that any other namespace has. Do not tell a client."""
        key = encode_key(prompt_ids[:-1])
        others = (other for other in self.tree.namespaces if other != namespace)
        return max((self.tree.find_resumable(other, key).num_tokens for other in others), default=0)

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
            self.sequences.next_id,
            match.prompt_ids,
            pool=self.pool,
            context_length=context_length,
            namespace=match.namespace,
            request_id=request_id,
            kv_log=self._kv_log,
            states=self.states,
        )
        limit = min(match.num_match, len(sequence) - 1)
        assert sparse is None or self.states is None, "a state stands for all tokens"
        if sparse is None:
            num_reused = reuse(self.pool, self.tree, sequence, limit)
            event: str = "open"
            fields: dict[str, object] = {"private": sequence.namespace is None}
        else:
            num_own = begin_sparse(self.pool, self.tree, sequence, limit, sparse)
            num_reused, free = sparse.start, self.pool.num_free
            rows = [sparse.start, sparse.stop, sparse.num_rows]
            event, fields = "open_pruned", {"pruned": rows, "free": [free + num_own, free]}
        sequence.state.want_at(limit)
        if self.states is not None and self.states.is_stored:
            sequence.state.want_at(limit // PAGE_SIZE * PAGE_SIZE)
        if self.states is not None and (start := turn_start(sequence.token_ids, self.states.special_ids)) is not None:
            sequence.state.want_at(start)
        self.sequences.add(sequence)
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
        self.sequences.require(sequence)
        child = sequence.fork(at, seq_id=self.sequences.next_id)
        self.sequences.add(child)
        return child

    def begin(self) -> KVTransaction:
        """A transaction for one step, to be used in a `with`."""
        if self._kv_log is not None and self._kv_log.is_full:  # between two steps all is whole
            state: dict[str, object] = {"num_pages": self.pool.num_pages, "tree": self.tree.page_ids()}
            self._kv_log.turn(**state, sequences=self.sequences.log_state())
        return KVTransaction(self.pool, self.tree, self._kv_log)

    def settle(self, sequence: Sequence, num_certain: int | None) -> None:
        """Say how many first tokens of a sequence are never taken back any more, None: all of them, and share the pages
        that are full of these.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self.sequences.require(sequence)
        first = sequence.num_shareable // PAGE_SIZE
        sequence.set_certain(num_certain)
        share_full_pages(self.pool, self.tree, sequence, first, sequence.num_shareable // PAGE_SIZE, self._kv_log)

    def preempt(self, sequence: Sequence) -> None:
        """Leave all KV of the sequence that may be shared in the tree, where it can be evicted; it keeps its tokens.

        A sparse span, and all KV that was computed over it, is dropped: from here on the sequence is exact. All KV of a
        sequence without a namespace is dropped, too. The sequence stays live with `num_computed == 0`; `resume` takes
        back what is still there.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self.sequences.require(sequence)
        leave_in_tree(self.tree, sequence)
        keep_states(self.tree, sequence)
        sequence.preempt()

    def resume(self, sequence: Sequence, limit: int | None = None) -> int:
        """Take from the tree what it has of the sequence's uncomputed tokens, of the first `limit` at most; returns how
        many tokens were gained.

        For a preempted sequence, and for one that waited while another computed the same prefix. Its last
        token is left to compute. A sequence that gains tokens has no sparse span afterwards.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        self.sequences.require(sequence)
        before = sequence.num_computed
        most = len(sequence) - 1
        num_gained = reuse(self.pool, self.tree, sequence, most if limit is None else min(limit, most))
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
        self.sequences.require(sequence)
        if keep:
            leave_in_tree(self.tree, sequence)
            keep_states(self.tree, sequence)
        else:
            forget_states(self.tree, sequence)
        sequence.close()
        self.sequences.remove(sequence)

    def insert_after(
        self,
        end: TreeEnd,
        token_ids: collections.abc.Sequence[int],
        generated: bytes,
        write: Callable[[list[int]], None],
    ) -> TreeEnd | None:
        """See `page_sharing.insert_after`; None, too, where each change of a sequence is logged: there is none."""
        if self._kv_log is not None:
            return None
        return insert_after(self.pool, self.tree, end, token_ids, generated, write)

    def clear(self, namespace: bytes | None = None) -> int:
        """Free everything that no live sequence uses, of one namespace or of all; returns how many pages."""
        self.aliases.forget(namespace)
        self.uses.forget(namespace)
        if namespace is not None:
            return self.tree.clear(namespace)
        return sum(map(self.tree.clear, self.tree.namespaces))

    def forget(self, namespace: bytes) -> Forgotten:
        """Free what no live sequence of the namespace uses."""
        return Forgotten(num_freed_pages=self.clear(namespace), num_kept_pages=self.tree.num_pages(namespace))

    def start_over(self) -> None:
        """Forget everything, live sequences too, in whatever state it is: all pages are free."""
        self.pool = PagePool(self.pool.num_pages)
        self.states = None if self.states is None else self.states.emptied()
        self.tree = self.tree.emptied(self.pool, self.states)
        self.aliases.start_over()
        self.sequences.clear()
        if self._kv_log is not None:
            self._kv_log.write("start_over")

    def drop_unused(self, since: float) -> int:
        """Free what no live sequence uses and what was last used before `since`; returns how many pages.

        `since` is a time on the cache's clock.
        """
        self.aliases.forget_unused(since)
        self.uses.forget_unused(since)
        return self.tree.eviction.drop_unused(since)

    def stats(self) -> CacheStats:
        """Counts for metrics and tests."""
        return CacheStats(
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_cached_pages=self.pool.num_cached,
            num_in_use_pages=self.pool.num_in_use,
            num_sequences=len(self.sequences),
            num_nodes=self.tree.num_nodes,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
            num_evicted_pages=self.tree.eviction.num_evicted_pages,
        )

    def check(self) -> None:
        """Raise AssertionError unless pool, tree and live sequences agree; not inside a transaction."""
        self.pool.check([sequence.page_ids for sequence in self.sequences], self.tree.page_ids())
        self.tree.check()
        self.sequences.check(self.pool)
        if self.states is not None:
            self.states.check([slot for sequence in self.sequences for slot in sequence.state.slots])
