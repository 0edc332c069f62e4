"""Reserve the pages of a whole step, then commit it or roll it back.

Tree, sequences and pool change together in `commit`, or not at all. Knows page ids and token counts, not what a
forward computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from .batch import PageCopy
from .errors import OutOfPages
from .manifest import PAGE_SIZE
from .page_pool import PagePool
from .radix_tree import RadixTree
from .sequence import Sequence, num_pages_for


@dataclass(frozen=True)
class Reservation:
    """Room for the KV of tokens `[start, stop)` of one sequence.

    `page_ids` are the pages of `[0, stop)`, those of the step included, and `copies` are the row copies to do before
    the forward (none or one: the rows of a partial page that others own too).
    """

    sequence: Sequence
    start: int
    stop: int
    page_ids: tuple[int, ...]
    copies: tuple[PageCopy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for this sequence."""
        return self.stop - self.start

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the step computes; their positions are `range(start, stop)`."""
        return list(self.sequence.token_ids[self.start : self.stop])

    @property
    def slots(self) -> list[int]:
        """Where each token's KV is written: `page_id * PAGE_SIZE + row`."""
        return [
            self.page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for position in range(self.start, self.stop)
        ]


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

    def __init__(self, pool: PagePool, tree: RadixTree) -> None:
        self._pool = pool
        self._tree = tree
        self._reservations: dict[int, tuple[Reservation, list[int]]] = {}

    def __enter__(self) -> KVTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rollback()

    @property
    def reservations(self) -> list[Reservation]:
        """What was reserved, in order."""
        return [reservation for reservation, _ in self._reservations.values()]

    @property
    def copies(self) -> list[PageCopy]:
        """All row copies to do before the forward."""
        return [copy for reservation in self.reservations for copy in reservation.copies]

    def reserve(self, sequence: Sequence, num_tokens: int) -> Reservation:
        """Take pages for the next `num_tokens` uncomputed tokens; the sequence itself changes in `commit` only.

        Evicts from the tree, least recently used first, when too few pages are free; a rollback does not bring those
        back. If the sequence's last page is partial and not its own, it is replaced by a new one and the reservation
        says which rows to copy; the source stays as it is until `commit`.

        Raises:
            OutOfPages: free and evictable pages together do not suffice; nothing is taken or evicted, the
                transaction's other reservations stay, and `drop` gives one of them back.
            UnknownSequence: it is closed.
        """
        raise NotImplementedError

    def drop(self, sequence: Sequence) -> None:
        """Give back what was reserved for one sequence, for instance to preempt it; the others stay."""
        raise NotImplementedError

    def commit(self) -> None:
        """Make the step's tokens computed, and share every page that is full now in the tree.

        Where the tree has the same page of another request already, the sequence takes that and releases its own. Call
        it when the forward (and the sampling) has succeeded, then append the sampled tokens.
        """
        raise NotImplementedError

    def rollback(self) -> None:
        """Give back every page that is not committed; no effect after `commit`."""
        raise NotImplementedError
