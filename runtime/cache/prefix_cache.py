"""Find, share and keep the KV of prompts: the engine's only interface to pages.

Knows token ids, page ids and namespaces. Not text, tensors or requests: the engine moves the contents of pages, as the
reservations of a step say.
"""

from __future__ import annotations

import collections.abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from radixlm.tokenizer_fix import SpelledPrompt

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from ..memory import ForgetResult, Memory
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
    """Current counts of pages, sequences and nodes, and totals of tokens and evictions since the start."""

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
    """Sequences over one pool of pages, and the radix tree of all cached KV.

    The life of a request::

        match = cache.match(prompt_ids)                  # changes nothing
        sequence = cache.open(match, context_length=n)   # shares the matched pages
        with cache.begin() as transaction:               # each step, for all its sequences
            reservation = transaction.reserve(sequence, num_tokens)
            ...                                          # transaction.copies, forward, sample
            transaction.commit()                         # full pages are shared from now on
        sequence.append([token_id])
        cache.close(sequence)                            # the partial last page joins the tree, too

    Between transactions every full page of a live sequence is in the tree. If the sequence has a sparse span, only the
    pages before the span are, and no other page of it ever will be. A sequence without a namespace takes nothing from
    the tree and leaves nothing in it.

    Attributes:
        pool, tree: the pages, and the cached runs.
        states: recurrent models: the slots for states; None for all others.
        sequences: the live sequences; read only.
        aliases, uses: re-rendered replies, and the cache use of the last requests.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        states: StatePool | None = None,
        clock: Callable[[], float] = time.monotonic,
        kv_log: KVLog | None = None,
    ) -> None:
        """Create an empty cache. `kv_log` gets a line for every event of a page. A recurrent model has `states`."""
        self.pool, self.states = pool, states
        self._kv_log = kv_log
        self.aliases = ReplyAliases(clock=clock)
        self.uses = CacheUses()
        self.tree = RadixTree(pool, clock=clock, kv_log=kv_log, states=states)
        self.sequences = LiveSequences()
        if (windows := pool.windows) is not None:
            assert states is None, "a state and rows of sliding windows would have to be kept at the same tokens"
            windows.needed = partial(self.sequences.pages_read_next, windows)
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
        """Return the longest cached prefix of `prompt_ids[:num_match]`, never the whole prompt; changes nothing.

        Args:
            namespace: the part of the tree to search; None: nothing is found, and nothing of the request is kept.
            num_known: number of first ids that were found without encoding; those that match count as `seam`.
            spelled: makes the prompt's text. With it, generated runs are matched by text, too; then the match's
                `prompt_ids` can be other ids that spell the same text.

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
        """Repeat a match by ids alone in the tree as it is now; changes nothing."""
        return match_again(self.tree, match)

    def ahead(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that the namespace has after all of the sequence's tokens; changes nothing."""
        num_full = sequence.num_shareable // PAGE_SIZE
        if sequence.namespace is None:
            return ()
        above, token_ids = sequence.page_ids[:num_full], sequence.token_ids[num_full * PAGE_SIZE :]
        return self.tree.ahead(sequence.namespace, above, token_ids, most)

    def num_elsewhere(self, prompt_ids: collections.abc.Sequence[int], namespace: bytes) -> int:
        """Return the length in tokens of the longest prefix in any other namespace. Do not show it to a client."""
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
        """Start a sequence of the match's prompt that shares the matched pages, whose tokens count as computed.

        If the cache has changed since, the prompt is matched again: to report the match, call `match` right before
        `open`.

        Args:
            sparse: a span that the sequence begins with: the tokens before `sparse.stop` are computed, with fewer rows.
                Only pages before `sparse.start` are shared. The pages from `page_ids[sparse.start // PAGE_SIZE]` on are
                new and empty: write the selected rows there before using the sequence. Evicts like
                `KVTransaction.reserve`.
            request_id: written to every log line of the sequence.

        Raises:
            AppendLengthError: the prompt is longer than the context.
            OutOfPages: too few pages are free or can be evicted for the rows of `sparse`.
            SparseSpanError: `sparse` belongs to another prompt, leaves nothing to compute, or follows pages that are no
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
        sequence.want_resumable_at(limit)
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
        """Return a new sequence of the first `at` computed tokens, sharing their pages.

        Append a token to it before it computes.

        Raises:
            ForkLengthError: `at` is beyond the computed tokens.
            SparseForkError: `at` is inside a sparse span.
            UnknownSequence: it is closed, or belongs to another cache.
        """
        self.sequences.require(sequence)
        child = sequence.fork(at, seq_id=self.sequences.next_id)
        self.sequences.add(child)
        return child

    def begin(self) -> KVTransaction:
        """Return a transaction for one step, to be used in a `with`."""
        if self._kv_log is not None and self._kv_log.is_full:  # between two steps the state is consistent
            state: dict[str, object] = {"num_pages": self.pool.num_pages, "tree": self.tree.page_ids()}
            self._kv_log.rotate(**state, sequences=self.sequences.log_state())
        return KVTransaction(self.pool, self.tree, self._kv_log)

    def settle(self, sequence: Sequence, num_certain: int | None) -> None:
        """Set how many first tokens of a sequence are final, None: all; share pages that are full of them.

        Final tokens are never taken back.

        Raises:
            UnknownSequence: it is closed, or belongs to another cache.
        """
        self.sequences.require(sequence)
        first = sequence.num_shareable // PAGE_SIZE
        sequence.set_certain(num_certain)
        share_full_pages(self.pool, self.tree, sequence, first, sequence.num_shareable // PAGE_SIZE, self._kv_log)

    def preempt(self, sequence: Sequence) -> None:
        """Move all shareable KV of the sequence into the tree, where it can be evicted; the sequence keeps its tokens.

        A sparse span and all KV computed over it are dropped, so that the sequence is exact from now on. A sequence
        without a namespace loses all its KV. The sequence stays live with `num_computed == 0`; `resume` takes back the
        KV that is still cached.

        Raises:
            UnknownSequence: it is closed, or belongs to another cache.
        """
        self.sequences.require(sequence)
        leave_in_tree(self.pool, self.tree, sequence)
        keep_states(self.tree, sequence)
        sequence.preempt()

    def resume(self, sequence: Sequence, limit: int | None = None) -> int:
        """Share cached KV for the sequence's uncomputed tokens, up to token `limit`; return how many were gained.

        For a preempted sequence, and for one that waited while another computed the same prefix. Its last token is left
        to compute. A sequence that gains tokens has no sparse span afterwards.

        Raises:
            UnknownSequence: it is closed, or belongs to another cache.
        """
        self.sequences.require(sequence)
        before = sequence.num_computed
        most = len(sequence) - 1
        num_gained = reuse(self.pool, self.tree, sequence, most if limit is None else min(limit, most))
        if self._kv_log is not None:
            self._kv_log.write("resume", sequence, computed=before, pages=list(sequence.page_ids))
        return num_gained

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence and release its pages; with `keep` the partial last page also stays in the tree.

        Full pages were shared when they were committed, and stay in either case. The tokens can still be read.

        Raises:
            UnknownSequence: it is closed, or belongs to another cache.
        """
        self.sequences.require(sequence)
        if keep:
            leave_in_tree(self.pool, self.tree, sequence)
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
        """Insert pages as `page_sharing.insert_after` does; None if there is a KV log, which has no line for it."""
        if self._kv_log is not None:
            return None
        return insert_after(self.pool, self.tree, end, token_ids, generated, write)

    def clear(self, namespace: bytes | None = None) -> int:
        """Free everything that no live sequence uses, in one namespace or in all; return the number of pages freed."""
        self.aliases.forget(namespace)
        self.uses.forget(namespace)
        if namespace is not None:
            return self.tree.clear(namespace)
        return sum(map(self.tree.clear, self.tree.namespaces))

    def forget(self, namespace: bytes) -> ForgetResult:
        """Free everything that no live sequence of the namespace uses."""
        return ForgetResult(num_freed_pages=self.clear(namespace), num_kept_pages=self.tree.num_pages(namespace))

    def start_over(self) -> None:
        """Forget everything, live sequences included, in whatever state it is. All pages are free afterwards."""
        self.pool = self.pool.emptied()
        self.states = None if self.states is None else self.states.emptied()
        self.tree = self.tree.emptied(self.pool, self.states)
        self.aliases.start_over()
        self.sequences.clear()
        if self._kv_log is not None:
            self._kv_log.write("start_over")

    def drop_unused(self, since: float) -> int:
        """Free what no live sequence uses and was last used before `since`; return the number of pages.

        `since` is a time on the cache's clock.
        """
        self.aliases.forget_unused(since)
        self.uses.forget_unused(since)
        return self.tree.eviction.drop_unused(since)

    def stats(self) -> CacheStats:
        """Return counts for metrics and tests."""
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
