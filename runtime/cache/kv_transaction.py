"""Reserve the pages of a whole step, then commit it or roll it back.

Tree, sequences and pool change together in `commit`, or not at all. Knows page ids and token counts, neither what a
forward computes nor the arrays that it takes.
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
from .page_sharing import keep_state, share_full_pages, take_pages
from .radix_tree import RadixTree
from .sequence import Sequence
from .sparse_span import SparseSpan


class Reservation(NamedTuple):
    """Room for the KV of tokens `[start, stop)` of one sequence; the last of them may be a draft, which is not the
    sequence's yet.

    Their pages are the first `num_kept_pages` of the sequence's own, and after them the `new_page_ids`. `copies`
    are the row copies to do before the forward (none or one: the rows of a partial page that others own too).
    `rows` are those of the tokens' KV, counted from the sequence's first page: their positions, unless it has a
    `sparse` span. Of a recurrent model, the step reads the state in one slot and writes it to another.
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

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for this sequence."""
        return self.stop - self.start

    @property
    def decodes(self) -> bool:
        """Whether there is one token, but for a draft."""
        return self.num_tokens == 1 + len(self.draft_ids)

    @property
    def token_ids(self) -> collections.abc.Sequence[int]:
        """The tokens that the step computes; their positions are `range(start, stop)`."""
        return [*self.sequence.token_ids[self.start : self.stop], *self.draft_ids]

    @property
    def num_pages(self) -> int:
        """Pages of the KV of `[0, stop)`."""
        return self.num_kept_pages + len(self.new_page_ids)

    @property
    def page_ids(self) -> array[int]:
        """The pages of the KV of `[0, stop)`, those of the step included; int32."""
        return self.sequence.page_ids[: self.num_kept_pages] + array("i", self.new_page_ids)


class KVTransaction:
    """Pages taken for one step; they go back to the pool unless `commit` is called.

    >>> from .prefix_cache import PrefixCache
    >>> cache = PrefixCache(PagePool(num_pages=2))
    >>> sequence = cache.open(cache.match([1, 2, 3]), context_length=32)
    >>> with cache.begin() as step:
    ...     reservation = step.reserve(sequence, 3)  # run step.copies, then the forward, then step.commit()
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
        """What was reserved, in order."""
        return list(self._reservations.values())

    @property
    def copies(self) -> list[PageCopy]:
        """All row copies to do before the forward."""
        return [copy for reservation in self._reservations.values() for copy in reservation.copies]

    def reserve(
        self, sequence: Sequence, num_tokens: int, draft_ids: collections.abc.Sequence[int] = ()
    ) -> Reservation:
        """Take pages for the next `num_tokens` uncomputed tokens; the sequence changes in `commit` only.

        Behind all uncomputed tokens there may be a draft, a guess of what comes next; `accept` says how much is right.

        Evicts from the tree, least recently used first, when too few pages are free; a rollback does not
        bring those back. If the sequence's last page is partial and not its own alone, it is replaced by a
        new one and the reservation says which rows to copy; the source stays as it is until `commit`. So a
        sequence that is alone always fits a pool of `num_pages_for(context_length) + 1` pages.

        Raises:
            OutOfPages: free and evictable pages together do not suffice, or slots for states; nothing is taken, the
                transaction's other reservations stay, and `drop` gives one of them back.
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
        taken, state_out = self._take(num_pages_for(rows.stop) - num_kept)
        copies = (PageCopy(sequence.page_ids[-1], taken[0], num_rows),) if must_copy else ()
        draft, state_in = tuple(draft_ids), sequence.state.slot
        reservation = Reservation(
            sequence, start, stop, num_kept, taken, copies, rows, sparse, draft, state_in, state_out
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
        """Append the first `num_tokens` tokens of a sequence's draft to it, and give back the pages that only others
        of the draft are in. What is left of the reservation is for `commit`.

        Of a recurrent model nothing is left where a token was wrong: the state is that after all of them. The step is
        then computed again, for the tokens that were right, with the next one.
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
        """Give back what was reserved for one sequence, for instance to preempt it; the others stay."""
        num_free = self._pool.num_free
        reservation = self._reservations.pop(sequence.seq_id)
        self._pool.release(reservation.new_page_ids)
        self._release_state(reservation)
        sequence.set_reserved(False)
        if self._kv_log is not None:
            self._kv_log.write("drop", sequence, free=[num_free, self._pool.num_free])

    def commit(self) -> None:
        """Make the step's tokens computed, and share every page that is full now in the tree, unless its sequence
        has a sparse span or no namespace, or tokens of the page may be taken back.

        Where the tree has the same page of another request already, the sequence takes that and releases its
        own. Call it when the forward and the sampling have succeeded, then append the sampled tokens.
        """
        for reservation in self.reservations:
            assert not reservation.draft_ids, "a draft was neither accepted nor rejected"
            sequence, num_kept = reservation.sequence, reservation.num_kept_pages
            num_free, num_shared = self._pool.num_free, sequence.num_shareable // PAGE_SIZE
            if reservation.copies:  # their source is the sequence's no longer
                self._pool.release(sequence.page_ids[num_kept:])
            sequence.replace_kv(reservation.new_page_ids, reservation.stop, num_kept_pages=num_kept)
            if reservation.state_out:
                sequence.state.move(reservation.state_out)
                sequence.state.computed(reservation.stop)
            # its own now, and not to be rolled back, should sharing them fail
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
            if sequence.state.is_wanted_at(sequence.num_computed):
                keep_state(self._tree, sequence)

    def rollback(self) -> None:
        """Give back every page that is not committed; no effect after `commit`."""
        for reservation in self.reservations:
            self.drop(reservation.sequence)

    def abandon(self) -> None:
        """Forget what was reserved without giving it back: the pool is not used any more."""
        self._reservations.clear()

    def _take(self, num_pages: int) -> tuple[list[int], int]:
        """Pages, and of a recurrent model a slot for a state; both or none."""
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
