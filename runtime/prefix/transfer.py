"""Bring pages of a stored prefix from disk into a cache's tree, from the front or from the back.

Knows one prefix, the reader and the cache; not which requests want it, nor whether it is worth it.
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
    """Puts pages that were read into a cache's tree and pool, as if they had been computed: all, or none."""

    cache: PrefixCache
    io: PageIO
    states: StateIO | None = None

    def num_there(self, prefix: StoredPrefix) -> int:
        """How many first pages of a prefix the tree has."""
        return len(self.cache.tree.find_key(prefix.namespace, prefix.key).pages)

    def num_computed(self, prefix: StoredPrefix) -> int:
        """Behind how many first pages of a prefix memory goes on: of a recurrent model behind its last state."""
        found = self.cache.tree.find_resumable(prefix.namespace, prefix.key)
        return found.num_tokens // PAGE_SIZE

    def insert(self, prefix: StoredPrefix, start: int, pages: UInt8Array, state: UInt8Array | None = None) -> bool:
        """Insert pages `[start, start + len(pages))` of a prefix, and of a recurrent model the state after them. False,
        with nothing changed, if those before are no longer there, or there is no room.
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
        """The same; returns where they end, or None. Where `end` says that the pages before are still there, these are
        not looked up: a long prefix comes in many pieces.
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
            if first == stop:  # another request has computed them meanwhile
                return self._end_of(sequence, stop)
            sequence.inherit_generated(prefix.generated[:num_tokens])
            with self.cache.begin() as step:
                reservation = step.reserve(sequence, num_tokens - sequence.num_computed)
                assert len(reservation.new_page_ids) == stop - first
                self.io.write_pages(reservation.new_page_ids, pages[first - start :])
                if state is not None and self.states is not None:
                    self.states.write_state(reservation.state_out, state)
                step.commit()
            return self._end_of(sequence, stop)
        except OutOfPages:
            return None
        finally:
            self.cache.close(sequence, keep=False)

    def _end_of(self, sequence: Sequence, num_pages: int) -> TreeEnd:
        """Where so many pages of a sequence end, which are in the tree."""
        assert sequence.namespace is not None
        last = sequence.page_ids[num_pages - 1] if num_pages else None
        return TreeEnd(sequence.namespace, last, num_pages, self.cache.tree.num_dropped)


class Transfer:
    """Pages `[start, stop)` of a stored prefix on their way into the tree::

        front   [0, start) in memory    [start, arrived) in the tree           [arrived, stop) being read
        back    [0, there) in the tree  [there, arrived) a request computes it  [arrived, stop) read

    From the front, each batch of pages is inserted when it arrives, in buffers of the reader's. From the back, batches
    stay in room of the transfer's own, until `meet` finds that all before them is in the tree. So do those of a
    recurrent model, until the state after the last page is there, too: it goes on from nowhere else.

    Args:
        piece_pages: pages of a batch.
        state_bytes: of the state after the last page, which is read then; only from the front.
        arrived: called in the engine's thread with the first page of each batch and its read, until `end`; it calls
            `take`.

    Attributes:
        arrived: see above; pages.
        is_broken: a page was not right, or there was no room for it: nothing more arrives.
        lost_key: of the first page that was not right.
        has_lost_state: the state was not right.
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
        self.prefix, self.start, self.stop, self.direction = prefix, start, len(prefix.heads), direction
        self._inserter, self._reader = inserter, reader
        self.there = start
        self.arrived = start if direction == "front" else self.stop
        self.is_broken = self.is_over = False
        self.lost_key: bytes | None = None
        self.has_lost_state = False
        self._end: TreeEnd | None = None  # of what was inserted from the front
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
            self._reads.append(reader.read_state(prefix.heads[-1], self._state, partial(arrived, self, self.stop)))

    @property
    def room_bytes(self) -> int:
        """Bytes of memory that batches stay in."""
        return 0 if self._room is None else self._room.nbytes

    @property
    def is_staged(self) -> bool:
        """Whether it comes into memory as a whole."""
        return self._state is not None

    def has(self, page: int, prefix: StoredPrefix) -> bool:
        """Whether this prefix has the pages of another one, up to and with `page`."""
        return page < self.stop and self.prefix.heads[page].key == prefix.heads[page].key

    def take(self, first: int, read: Read) -> None:
        """Take in a batch that arrived, which begins with page `first`."""
        if self.is_broken:
            return
        if first == self.stop:
            self.has_lost_state = not read.is_right
            assert self._room is not None
            is_in = read.is_right and self._inserter.insert(self.prefix, self.start, self._room, self._state)
            self.is_broken, self.arrived = not is_in, self.stop if is_in else self.arrived
            return
        if not read.is_right:
            self.is_broken, self.lost_key = True, self.prefix.heads[first + read.num_right].key
        if self.direction == "back":
            self.arrived = self.arrived if self.is_broken else first
        elif read.num_right and read.pages is not None and not self.is_staged:
            pages = read.pages[: read.num_right]
            self._end = self._inserter.insert_after(self._end, self.prefix, first, pages)
            self.arrived = self.arrived if self._end is None else first + len(pages)
            self.is_broken = self.is_broken or self._end is None

    def meet(self) -> bool:
        """From the back: look how far the tree is by now, and insert what was read once it is met; whether it was.
        What cannot be inserted leaves the transfer broken.
        """
        self.there = self._inserter.num_there(self.prefix)
        if self._room is None or not self.arrived <= self.there < self.stop:
            return False
        self.is_broken = not self._inserter.insert(self.prefix, self.there, self._room[self.there - self.start :])
        return not self.is_broken

    def end(self) -> None:
        """Read no more, and drop what was read and not inserted."""
        self.is_over, self._room = True, None
        self._reader.cancel(self._reads)

    def _read(self, first: int, num_pages: int, arrived: Callable[[Transfer, int, Read], None]) -> Read:
        stop, first = first + num_pages, max(first, self.start)
        into = None if self._room is None else self._room[first - self.start : stop - self.start]
        return self._reader.read_pages(self.prefix.heads[first:stop], partial(arrived, self, first), into=into)
