"""Transfer pages of a stored prefix from disk into a cache's tree, from the front or from the back.

Knows one prefix, the reader and the cache; not which requests need it, nor whether it is worthwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..cache.page_sharing import TreeEnd
from ..cache.prefix_cache import PrefixCache
from ..cache.sequence import Sequence
from ..errors import OutOfPages
from ..model.batch import PageIO, StateIO, UInt8Array
from .disk_index import StoredPrefix
from .disk_reader import DiskReader, Read


@dataclass(frozen=True)
class PageInserter:
    """Puts loaded pages into a cache's tree and pool, as if they had been computed: all of them, or none."""

    cache: PrefixCache
    io: PageIO
    states: StateIO | None = None

    def num_there(self, prefix: StoredPrefix) -> int:
        """Return the number of first pages of a prefix after which memory can resume.

        With a recurrent model this is up to its last state. If rows of sliding windows were dropped, it is up to pages
        that have them.
        """
        found = self.cache.tree.find_resumable(prefix.namespace, prefix.key)
        return found.num_tokens // PAGE_SIZE

    def insert(self, prefix: StoredPrefix, start: int, pages: UInt8Array, state: UInt8Array | None = None) -> bool:
        """Insert pages `[start, start + len(pages))` of a prefix, and the state after them if the model is recurrent.

        Return False, with nothing changed, if the pages before them are no longer in the tree, or there is no room.
        """
        return self.insert_after(None, prefix, start, pages, state) is not None

    def insert_after(
        self,
        end: TreeEnd | None,
        prefix: StoredPrefix,
        start: int,
        pages: UInt8Array,
        state: UInt8Array | None = None,
    ) -> TreeEnd | None:
        """Insert pages like `insert`; return their end in the tree, or None.

        If `end` shows that the pages before are still in the tree, they are not looked up: a long prefix comes in many
        pieces.
        """
        stop = start + len(pages)
        if end is not None and end.num_pages == start and self.states is None:
            tokens = slice(start * PAGE_SIZE, stop * PAGE_SIZE)
            ids, generated = prefix.token_ids[tokens], prefix.generated[tokens]
            found = self.cache.insert_after(end, ids, generated, lambda page_ids: self.io.write_pages(page_ids, pages))
            if found is not None:
                return found
        num_tokens = stop * PAGE_SIZE
        token_ids = prefix.token_ids[: num_tokens + 1]
        match = self.cache.match(token_ids, num_match=num_tokens, namespace=prefix.namespace)
        sequence = self.cache.open(match, context_length=len(token_ids))
        try:
            first = sequence.num_computed // PAGE_SIZE
            if first < start:
                return None
            if first == stop:  # another request has computed them in the meantime
                return self._end_of(sequence, stop)
            sequence.inherit_generated(prefix.generated[:num_tokens])
            with self.cache.begin() as transaction:
                reservation = transaction.reserve(sequence, num_tokens - sequence.num_computed)
                assert len(reservation.new_page_ids) == stop - first
                self.io.write_pages(reservation.new_page_ids, pages[first - start :])
                if state is not None and self.states is not None:
                    self.states.write_state(reservation.state_out, state)
                transaction.commit()
            return self._end_of(sequence, stop)
        except OutOfPages:
            return None
        finally:
            self.cache.close(sequence, keep=False)

    def _end_of(self, sequence: Sequence, num_pages: int) -> TreeEnd:
        """Return the end in the tree of the first `num_pages` pages of a sequence."""
        assert sequence.namespace is not None
        last = sequence.page_ids[num_pages - 1] if num_pages else None
        return TreeEnd(sequence.namespace, last, num_pages, self.cache.tree.num_dropped)


class Transfer:
    """The transfer of pages `[start, stop)` of a stored prefix into the tree::

        front   [0, start) in memory    [start, arrived) in the tree           [arrived, stop) being read
        back    [0, there) in the tree  [there, arrived) a request computes it  [arrived, stop) read

    From the front, each batch of pages is inserted when it arrives, in buffers of the reader's. From the back, batches
    stay in memory of the transfer's own, until `meet` finds that all pages before them are in the tree. So do the pages
    of a recurrent model, until the state after the last page has arrived, because it can only resume there.

    Args:
        piece_pages: pages of a batch.
        state_bytes: bytes of the state after the last page, which is read then; only from the front.
        arrived: called in the engine's thread with the first page of each batch and its read, until `end`; it calls
            `take`.

    Attributes:
        arrived: see above; in pages.
        is_broken: a page was not valid, or there was no room for it: nothing more arrives.
        lost_key: key of the first page that was not valid.
        has_lost_state: the state was not valid.
        is_over: `end` was called.
    """

    def __init__(
        self,
        prefix: StoredPrefix,
        start: int,
        direction: Literal["front", "back"],
        inserter: PageInserter,
        reader: DiskReader,
        *,
        piece_pages: int,
        arrived: Callable[[Transfer, int, Read], None],
        state_bytes: int = 0,
    ) -> None:
        self.prefix, self.start, self.stop, self.direction = prefix, start, len(prefix.page_keys), direction
        self._inserter, self._reader = inserter, reader
        self.there = start
        self.arrived = start if direction == "front" else self.stop
        self.is_broken = self.is_over = False
        self.lost_key: bytes | None = None
        self.has_lost_state = False
        self._end: TreeEnd | None = None  # of the pages inserted from the front
        self._room: UInt8Array | None = None
        self._state = np.empty(state_bytes, np.uint8) if state_bytes else None
        firsts = range(start, self.stop, piece_pages)
        if direction == "back":
            self._room = np.empty((self.stop - start, reader.page_bytes), np.uint8)
            firsts = range(self.stop - piece_pages, start - piece_pages, -piece_pages)
        elif self._state is not None:
            self._room = np.empty((self.stop - start, reader.page_bytes), np.uint8)
        self._reads = [self._read(first, piece_pages, arrived) for first in firsts]
        if self._state is not None:
            self._reads.append(reader.read_state(prefix.page_keys[-1], self._state, partial(arrived, self, self.stop)))

    @property
    def room_bytes(self) -> int:
        """Bytes of memory that hold batches."""
        return 0 if self._room is None else self._room.nbytes

    @property
    def is_staged(self) -> bool:
        """Return whether all pages are inserted at once at the end."""
        return self._state is not None

    def has(self, page: int, prefix: StoredPrefix) -> bool:
        """Return whether this transfer has the same pages as `prefix`, up to and including `page`."""
        return page < self.stop and self.prefix.page_keys[page].key == prefix.page_keys[page].key

    def take(self, first: int, read: Read) -> None:
        """Process a batch that arrived and begins with page `first`."""
        if self.is_broken:
            return
        if first == self.stop:
            self.has_lost_state = not read.is_right
            assert self._room is not None
            is_in = read.is_right and self._inserter.insert(self.prefix, self.start, self._room, self._state)
            self.is_broken, self.arrived = not is_in, self.stop if is_in else self.arrived
            return
        if not read.is_right:
            self.is_broken, self.lost_key = True, self.prefix.page_keys[first + read.num_right].key
        if self.direction == "back":
            self.arrived = self.arrived if self.is_broken else first
        elif read.num_right and read.pages is not None and not self.is_staged:
            pages = read.pages[: read.num_right]
            self._end = self._inserter.insert_after(self._end, self.prefix, first, pages)
            self.arrived = self.arrived if self._end is None else first + len(pages)
            self.is_broken = self.is_broken or self._end is None

    def meet(self) -> bool:
        """Insert the pages read from the back if the tree has all pages before them; return whether it did.

        If they cannot be inserted, the transfer is broken.
        """
        self.there = self._inserter.num_there(self.prefix)
        if self._room is None or not self.arrived <= self.there < self.stop:
            return False
        self.is_broken = not self._inserter.insert(self.prefix, self.there, self._room[self.there - self.start :])
        return not self.is_broken

    def end(self) -> None:
        """Stop reading, and drop pages that were read and not inserted."""
        self.is_over, self._room = True, None
        self._reader.cancel(self._reads)

    def _read(self, first: int, num_pages: int, arrived: Callable[[Transfer, int, Read], None]) -> Read:
        stop, first = first + num_pages, max(first, self.start)
        into = None if self._room is None else self._room[first - self.start : stop - self.start]
        return self._reader.read_pages(self.prefix.page_keys[first:stop], partial(arrived, self, first), into=into)
