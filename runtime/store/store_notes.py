"""What the threads of one store tell each other, and what it counts: each call holds one lock for a moment.

Knows keys and numbers, no files. What was used and what was found bad waits here for the thread that writes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from .bandwidth import Bandwidth
from .chain_reader import ChainRead
from .page_head import PageHead
from .page_writer import Written
from .record import MissKind
from .store_stats import RecoveryReport, StoreStats


class StoreNotes:
    """Notes since a directory was opened; any thread may add and take.

    Attributes:
        off_because: why the store turned itself off, or that it was closed; None: it works.
    """

    def __init__(self, num_pages: int) -> None:
        self.off_because: str | None = None
        self._lock = threading.Lock()  # of all below
        self._touched: set[bytes] = set()
        self._bad: set[bytes] = set()  # keys of pages that were not right; they leave the index with the next put
        self._removed: list[int] = []  # segments whose files the reader may still have open
        self._misses: Counter[MissKind] = Counter()
        self._num_erasures = 0  # begun, of pages that the index still has
        self._num_erasing = 0
        self._num_pages = num_pages
        self._num_read = self._read_bytes = self._num_written = self._num_evicted = 0
        self._bandwidth = Bandwidth()

    def turn_off(self, because: str) -> bool:
        """Note that the store is off from here on; False if it was already."""
        with self._lock:
            if self.off_because is not None:
                return False
            self.off_because = because
            return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Pages were used."""
        with self._lock:
            self._touched.update(keys)

    def add_bad(self, keys: Iterable[bytes]) -> None:
        """Pages are not right."""
        with self._lock:
            self._bad.update(keys)

    def add_miss(self, kind: MissKind) -> None:
        """A page could not be had."""
        with self._lock:
            self._misses[kind] += 1

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Around overwriting pages and taking them out of the index: who reads meanwhile may find them wrong."""
        with self._lock:
            self._num_erasures += 1
            self._num_erasing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_erasing -= 1

    def add_read(self, heads: Sequence[PageHead], result: ChainRead, seconds: float, num_erasures: int | None) -> None:
        """The first pages of a chain were read, and perhaps one after them was missed.

        Args:
            num_erasures: what `for_reader` said before.
        """
        with self._lock:
            if result.bad_key is not None and num_erasures != self._num_erasures:
                result = replace(result, miss="gone", bad_key=None)  # overwritten while it was read, as far as we know
            self._touched.update(head.key for head in heads[: result.num_read])
            self._num_read += result.num_read
            self._read_bytes += result.num_bytes
            self._bandwidth.add(result.num_bytes, seconds)
            if result.bad_key is not None:
                self._bad.add(result.bad_key)
            if result.miss is not None:
                self._misses[result.miss] += 1

    def add_written(self, written: Written) -> None:
        """Pages came and went."""
        with self._lock:
            self._num_pages += written.num_new - len(written.removed)
            self._num_written += written.num_new
            self._num_evicted += written.num_evicted
            self._removed += written.segments_removed

    def for_reader(self) -> tuple[list[int], set[bytes], int | None]:
        """Segments that were removed since the last time, keys that the index still has and must not have, and how
        often pages were erased; None while they are."""
        with self._lock:
            removed, self._removed = self._removed, []
            return removed, set(self._bad), None if self._num_erasing else self._num_erasures

    def for_writer(self) -> tuple[set[bytes], set[bytes]]:
        """What was used, and what was found bad, since the last time."""
        with self._lock:
            touched, bad = self._touched, self._bad
            self._touched, self._bad = set(), set()
        return touched, bad

    def stats(
        self, *, num_segments: int, num_bytes: int, num_ordered_bytes: int, max_bytes: int, recovery: RecoveryReport
    ) -> StoreStats:
        """The counts as of now, with the sizes that others know."""
        with self._lock:
            return StoreStats(
                num_pages=self._num_pages,
                num_segments=num_segments,
                num_bytes=num_bytes,
                num_ordered_bytes=num_ordered_bytes,
                max_bytes=max_bytes,
                num_pages_read=self._num_read,
                read_bytes=self._read_bytes,
                num_pages_written=self._num_written,
                num_pages_evicted=self._num_evicted,
                misses=dict(self._misses),
                read_bytes_per_s=self._bandwidth.bytes_per_s,
                recovery=recovery,
                off_because=self.off_because,
            )
