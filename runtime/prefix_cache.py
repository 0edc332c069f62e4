"""Find, share and keep the KV of prompts: the one object that the engine talks to about pages.

Knows token ids, page ids and namespaces. Not text, tensors or requests: the engine moves the contents, as the
reservations of a step say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as TokenIds
from dataclasses import dataclass
from typing import Literal

from .kv_transaction import KVTransaction
from .page_pool import PagePool
from .radix_tree import RadixTree
from .sequence import Sequence

MatchKind = Literal["exact"]


@dataclass(frozen=True)
class PartialPage:
    """The first `num_rows` rows of page `page_id` are reused by copying them; a reservation says when."""

    page_id: int
    num_rows: int


@dataclass(frozen=True)
class WhyNotMore:
    """Why a match ended at token `position`.

    `complete`: everything that may be reused was (the last token is always computed).
    `differs`: the cache goes on with `cached_token` where the prompt has `wanted_token`; of several, one that
    shares the most tokens.
    `evicted`: a continuation that began with `wanted_token` was cached and had to make room.
    `unseen`: nothing cached goes on here, as far as the cache remembers.
    """

    kind: Literal["complete", "differs", "evicted", "unseen"]
    position: int
    cached_token: int | None = None
    wanted_token: int | None = None


@dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt is cached. Holds no page: it is true until the cache changes.

    `pages` are the full pages that are shared, `partial` the page after them of which rows are copied.
    `num_tokens == PAGE_SIZE * len(pages) + partial.num_rows == sum(tokens_by_kind.values())`.
    """

    prompt_ids: tuple[int, ...]
    num_match: int
    namespace: bytes
    tokens_by_kind: Mapping[MatchKind, int]
    pages: tuple[int, ...]
    partial: PartialPage | None
    why_not_more: WhyNotMore
    generated: bytes  # one byte a matched token: 1 where a model made it
    version: int  # of the tree that it was found in

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that need no forward."""
        return sum(self.tokens_by_kind.values())


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

    Between transactions every full page of a live sequence is in the tree.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._tree = RadixTree(pool)

    def match(
        self, prompt_ids: TokenIds[int], *, num_match: int | None = None, namespace: bytes = b""
    ) -> PrefixMatch:
        """The longest cached prefix of `prompt_ids[:num_match]`, never the whole prompt; changes nothing.

        Raises:
            EmptyPrompt: there are no tokens.
        """
        raise NotImplementedError

    def open(self, match: PrefixMatch, *, context_length: int) -> Sequence:
        """Start a sequence of the match's prompt that shares the matched pages: `num_computed` is what was reused.

        If the cache changed since, it is matched again: call `match` right before `open` when you report it.

        Raises:
            AppendLengthError: the prompt is longer than the context; nothing is opened.
        """
        raise NotImplementedError

    def fork(self, sequence: Sequence, at: int) -> Sequence:
        """A new sequence of the first `at` computed tokens, sharing their pages; append before it computes.

        Raises:
            ForkLengthError: `at` is past the computed tokens.
            UnknownSequence: it is closed, or not of this cache.
        """
        raise NotImplementedError

    def begin(self) -> KVTransaction:
        """A transaction for one step, to be used in a `with`."""
        raise NotImplementedError

    def preempt(self, sequence: Sequence) -> None:
        """Leave all of the sequence's KV in the tree, where it can be evicted; the sequence keeps its tokens.

        It stays live with `num_computed == 0`; `resume` takes back what is still there.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        raise NotImplementedError

    def resume(self, sequence: Sequence) -> int:
        """Take from the tree what it has of the sequence's uncomputed tokens; how many tokens were gained.

        For a preempted sequence, and for one that waited while another computed the same prefix.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        raise NotImplementedError

    def close(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence: its pages are released, and with `keep` the partial last one stays in the tree too.

        Full pages are shared as soon as they are committed and stay in either case.

        Raises:
            UnknownSequence: it is closed, or not of this cache.
        """
        raise NotImplementedError

    def get(self, seq_id: int) -> Sequence:
        """The live sequence with this id.

        Raises:
            UnknownSequence: there is none.
        """
        raise NotImplementedError

    def clear(self) -> int:
        """Evict everything that no live sequence uses; how many pages became free."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        """Counts for metrics and tests."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError unless pool, tree and live sequences agree; not inside a transaction."""
        raise NotImplementedError
