"""Reserve the pages of a whole step, then commit it or roll it back.

Tree, sequences and pool change together in `commit`, or not at all. Knows page ids and token counts; neither the
forward's results nor its input arrays.
"""

from __future__ import annotations

import collections.abc
from array import array
from types import TracebackType
from typing import NamedTuple

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfPages
from ..kv_log.log import KVLog
from ..model.batch import PageCopy
from ..states.state_pool import NO_STATE
from .page_pool import PagePool, num_pages_for
from .page_sharing import keep_state, keep_windows, share_full_pages, take_pages
from .radix_tree import RadixTree
from .sequence import Sequence
from .sparse_span import SparseSpan


class Reservation(NamedTuple):
    """Room for the KV of tokens `[start, stop)` of one sequence.

    The last of these tokens can be draft tokens, which the sequence does not contain yet.

    Attributes:
        num_kept_pages: the first pages are this many of the sequence's own; `new_page_ids` follow.
        copies: row copies to do before the forward: one if a partial page is shared with other owners, else none.
        rows: the rows of the tokens' KV, counted from the sequence's first page. They equal the positions, unless the
            sequence has a `sparse` span.
        state_in, state_out: recurrent models: the step reads the state in one slot and writes it to the other.
        num_recomputed: first tokens that a step computed before without leaving a state; they are computed again.
    """

    sequence: Sequence
    start: int
    stop: int
    num_kept_pages: int
    new_page_ids: list[int]
    copies: tuple[PageCopy, ...]
    rows: range
    sparse: SparseSpan | None
    draft_ids: tuple[int, ...] = ()
    state_in: int = NO_STATE
    state_out: int = NO_STATE
    num_recomputed: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes for this sequence."""
        return self.stop - self.start

    @property
    def decodes(self) -> bool:
        """Return whether the step computes a single new token, not counting draft tokens and recomputed ones."""
        return self.num_tokens == 1 + self.num_recomputed + len(self.draft_ids)

    @property
    def token_ids(self) -> collections.abc.Sequence[int]:
        """Tokens that the step computes; their positions are `range(start, stop)`."""
        return [*self.sequence.token_ids[self.start : self.stop], *self.draft_ids]

    @property
    def num_pages(self) -> int:
        """Number of pages that the KV of `[0, stop)` takes."""
        return self.num_kept_pages + len(self.new_page_ids)

    @property
    def page_ids(self) -> array[int]:
        """Page ids of the KV of `[0, stop)`, new pages included; int32."""
        return self.sequence.page_ids[: self.num_kept_pages] + array("i", self.new_page_ids)


class KVTransaction:
    """Pages taken for one step; they return to the pool unless `commit` is called.

    >>> from .prefix_cache import PrefixCache
    >>> cache = PrefixCache(PagePool(num_pages=2))
    >>> sequence = cache.open(cache.match([1, 2, 3]), context_length=32)
    >>> with cache.begin() as transaction:  # then do transaction.copies, run the forward, and commit
    ...     reservation = transaction.reserve(sequence, 3)
    >>> cache.pool.num_free  # not committed: rolled back
    2
    """

    def __init__(self, pool: PagePool, tree: RadixTree, kv_log: KVLog | None = None) -> None:
        self._pool = pool
        self._kv_log = kv_log
        self._tree = tree
        self._reservations: dict[int, Reservation] = {}  # by seq_id, in order

    def __enter__(self) -> KVTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rollback()

    @property
    def reservations(self) -> list[Reservation]:
        """All reservations, in order."""
        return list(self._reservations.values())

    @property
    def copies(self) -> list[PageCopy]:
        """All row copies to do before the forward."""
        return [copy for reservation in self._reservations.values() for copy in reservation.copies]

    def reserve(
        self, sequence: Sequence, num_tokens: int, draft_ids: collections.abc.Sequence[int] = ()
    ) -> Reservation:
        """Take pages for the next `num_tokens` uncomputed tokens; the sequence changes in `commit` only.

        After all uncomputed tokens, `draft_ids` can follow; `accept` then says how many of them were accepted.

        Evicts from the tree, least recently used first, if too few pages are free. A rollback does not bring evicted
        pages back. If the sequence's last page is partial and shared, a new page replaces it. The reservation says
        which rows to copy, and the source stays unchanged until `commit`. So a sequence that is alone always fits a
        pool of `num_pages_for(context_length) + 1` pages.

        Raises:
            OutOfPages: too few free and evictable pages, or slots for states. Nothing is taken and the transaction's
                other reservations stay; `drop` returns one of them.
            UnknownSequence: the sequence is closed.
        """
        sequence.require_open()
        assert not sequence.is_reserved, f"{sequence} is reserved already"
        assert 0 < num_tokens <= sequence.num_uncomputed, f"{num_tokens} tokens of {sequence}"
        assert not draft_ids or num_tokens == sequence.num_uncomputed, "a draft comes behind all tokens"
        assert len(sequence) + len(draft_ids) <= sequence.context_length, "a draft ends in the context"
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens + len(draft_ids)
        sparse = sequence.sparse
        rows = range(start, stop) if sparse is None else range(start - sparse.num_missing, stop - sparse.num_missing)
        num_kept, num_rows = len(sequence.page_ids), rows.start % PAGE_SIZE
        must_copy = num_rows > 0 and not self._pool.is_private(sequence.page_ids[-1])
        num_kept -= must_copy
        taken, state_out = self._take_pages(num_pages_for(rows.stop) - num_kept)
        copies = (PageCopy(sequence.page_ids[-1], taken[0], num_rows),) if must_copy else ()
        draft, state_in = tuple(draft_ids), sequence.state.slot
        reservation = Reservation(
            sequence,
            start,
            stop,
            num_kept,
            taken,
            copies,
            rows,
            sparse,
            draft,
            state_in,
            state_out,
            sequence.num_recomputed,
        )
        self._reservations[sequence.seq_id] = reservation
        sequence.set_reserved(True)
        if self._kv_log is not None:
            copied = [[copy.src_page, copy.dst_page, copy.num_rows] for copy in copies]
            num_free = self._pool.num_free
            reserved, free = [start, stop], [num_free + len(taken), num_free]  # after evictions, which have lines
            more = {"draft": len(draft)} if draft else {}
            self._kv_log.write("reserve", sequence, reserved=reserved, pages=taken, copies=copied, free=free, **more)
        return reservation

    def accept(self, sequence: Sequence, num_tokens: int) -> None:
        """Append the first `num_tokens` draft tokens to their sequence, and release pages that only rejected ones used.

        The rest of the reservation waits for `commit`. With a recurrent model nothing is left after a rejected token,
        because the state is the one after the whole draft. The next step then computes the accepted tokens again, with
        the next token and a new draft.
        """
        before = self._reservations[sequence.seq_id]
        num_rejected = len(before.draft_ids) - num_tokens
        assert num_rejected >= 0, f"{num_tokens} tokens of a draft of {len(before.draft_ids)}"
        is_lost = bool(num_rejected and before.state_out)
        num_dropped = len(before.rows) if is_lost else num_rejected
        rows, state_out = before.rows[: len(before.rows) - num_dropped], before.state_out
        if is_lost:
            self._release_state(before)
            state_out = NO_STATE
        num_pages, num_free = num_pages_for(rows.stop) - before.num_kept_pages, self._pool.num_free
        sequence.append(before.draft_ids[:num_tokens])
        kept, rejected = before.new_page_ids[:num_pages], before.new_page_ids[num_pages:]
        self._pool.release(rejected)
        self._reservations[sequence.seq_id] = before._replace(
            stop=before.stop - num_dropped, new_page_ids=kept, rows=rows, draft_ids=(), state_out=state_out
        )
        if self._kv_log is not None:
            self._kv_log.write("accept", sequence, pages=kept, free=[num_free, self._pool.num_free])

    def drop(self, sequence: Sequence) -> None:
        """Release everything reserved for one sequence, for instance to preempt it; other reservations stay."""
        num_free = self._pool.num_free
        reservation = self._reservations.pop(sequence.seq_id)
        self._pool.release(reservation.new_page_ids)
        self._release_state(reservation)
        sequence.set_reserved(False)
        if self._kv_log is not None:
            self._kv_log.write("drop", sequence, free=[num_free, self._pool.num_free])

    def commit(self) -> None:
        """Mark the step's tokens as computed, and share every page that is now full in the tree.

        A page is not shared if its sequence has a sparse span or no namespace, or if tokens of the page can be taken
        back. If the tree already has the same page from another request, the sequence uses that one and releases its
        own. Call it when the forward and the sampling have succeeded, then append the sampled tokens.
        """
        for reservation in self.reservations:
            assert not reservation.draft_ids, "a draft was neither accepted nor rejected"
            sequence, num_kept = reservation.sequence, reservation.num_kept_pages
            num_free, num_shared = self._pool.num_free, sequence.num_shareable // PAGE_SIZE
            if reservation.copies:  # the sequence no longer uses the source page
                self._pool.release(sequence.page_ids[num_kept:])
            sequence.replace_kv(reservation.new_page_ids, reservation.stop, num_kept_pages=num_kept)
            if reservation.stop == reservation.start:  # a rejected draft left no state
                sequence.set_recomputed()
            if self._pool.windows is not None:
                self._pool.windows.settle(reservation.new_page_ids)
            if reservation.state_out:
                sequence.state.move(reservation.state_out)
                sequence.state.computed(reservation.stop)
            # the pages belong to the sequence now: a failure while sharing must not roll them back
            del self._reservations[sequence.seq_id]
            sequence.set_reserved(False)
            if self._kv_log is not None:
                free, pages = [num_free, self._pool.num_free], reservation.new_page_ids
                before = reservation.start
                self._kv_log.write(
                    "commit", sequence, computed=before, kept=num_kept, pages=pages, free=free, **sequence.state.logged
                )
            last = sequence.num_shareable // PAGE_SIZE
            share_full_pages(self._pool, self._tree, sequence, num_shared, last, self._kv_log)
            keep_windows(self._pool, sequence, reservation.start)
            if sequence.state.is_wanted_at(sequence.num_computed):
                keep_state(self._tree, sequence)

    def rollback(self) -> None:
        """Return every page that is not committed to the pool; no effect after `commit`."""
        for reservation in self.reservations:
            self.drop(reservation.sequence)

    def abandon(self) -> None:
        """Forget all reservations without releasing their pages, because the pool is no longer used."""
        self._reservations.clear()

    def _take_pages(self, num_pages: int) -> tuple[list[int], int]:
        """Take pages and, for a recurrent model, a slot for a state; both or none."""
        states = self._tree.states
        slot = NO_STATE if states is None else states.allocate()
        try:
            return take_pages(self._pool, self._tree, num_pages), slot
        except OutOfPages:
            if states is not None:
                states.release(slot)
            raise

    def _release_state(self, reservation: Reservation) -> None:
        if self._tree.states is not None:
            self._tree.states.release(reservation.state_out)
