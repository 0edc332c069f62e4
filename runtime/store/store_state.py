"""The state that the threads of one store share, its counts, and the reports made of them.

Knows keys and numbers, no files. Each call holds one lock for a moment. Keys of pages that were used or found bad wait
here for the writer's thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .index_rows import RecordRow
from .page_key import PageKey
from .page_reader import ChainRead
from .record import MissKind


@dataclass(frozen=True)
class PutResult:
    """The effects of a change of the store; all keys belong to pages of its model."""

    stored: tuple[bytes, ...] = ()  # pages to store that are on disk now, also those that were there before
    evicted: tuple[bytes, ...] = ()  # pages that are gone
    lost_states: tuple[bytes, ...] = ()  # pages whose state is gone; the pages themselves can exist
    num_new: int = 0
    num_removed: int = 0  # pages removed, also those that were written again at once
    num_evicted: int = 0  # removed pages that were evicted to make room
    num_moved: int = 0  # pages that were copied to another segment
    segments_removed: tuple[int, ...] = ()

    def then(self, other: PutResult) -> PutResult:
        """Combine this change with one after it; neither of them stored anything."""
        return PutResult(
            evicted=self.evicted + other.evicted,
            lost_states=self.lost_states + other.lost_states,
            num_removed=self.num_removed + other.num_removed,
            segments_removed=self.segments_removed + other.segments_removed,
        )


@dataclass(frozen=True)
class RecoveryReport:
    """The repairs when a directory was opened; all zeros after a clean shutdown."""

    num_adopted: int = 0  # undamaged records that the index lacked
    num_cut: int = 0  # records that are incomplete, or whose file is gone
    num_segments_dropped: int = 0  # files without a readable header
    num_unreachable: int = 0  # records that lack a page before them
    was_index_rebuilt: bool = False


@dataclass(frozen=True)
class StoreStats:
    """Counts since the directory was opened, and its current sizes."""

    num_pages: int  # of this model
    num_segments: int  # of all models, like the bytes
    num_bytes: int
    num_ordered_bytes: int  # the part of `num_bytes` in segments with a single record
    max_bytes: int
    read_bytes: int  # read from disk
    num_pages_written: int
    num_pages_evicted: int
    misses: Mapping[MissKind, int]
    recovery: RecoveryReport
    off_because: str | None  # why the store turned itself off; None while it works

    @property
    def is_off(self) -> bool:
        """Return whether reads find nothing and writes are dropped."""
        return self.off_because is not None


@dataclass(frozen=True)
class VerifyReport:
    """Result of verifying all records."""

    num_pages: int  # valid pages
    num_bytes: int  # bytes read
    bad: Mapping[MissKind, int]  # records that are not valid, by kind
    bad_keys: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class GCReport:
    """Result of a garbage collection."""

    num_segments_removed: int
    num_pages_moved: int
    bytes_before: int
    bytes_after: int


class StoreState:
    """Shared state since a directory was opened; any thread can use it.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, num_pages: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._off_because: str | None = None
        self._off_until = math.inf
        self._lock = threading.Lock()  # guards everything below
        self._touched: set[bytes] = set()
        self._bad: set[bytes] = set()  # keys of bad records, which the next change removes from the index
        self._segments_removed: list[int] = []  # the reader can still have their files open
        self._misses: Counter[MissKind] = Counter()
        self._num_erasures = 0  # erasures begun so far
        self._num_erasing = 0  # erasures in progress
        self._num_pages = num_pages
        self._read_bytes = self._num_written = self._num_evicted = 0

    @property
    def off_because(self) -> str | None:
        """Why the store is off, for good, for a while or because it was closed; None while it works."""
        return self._off_because if self._clock() < self._off_until else None

    def turn_off(self, because: str, *, for_s: float = math.inf) -> bool:
        """Turn the store off, for good unless `for_s` is given; return False if it is off at least as long already."""
        with self._lock:
            until = self._clock() + for_s
            if self.off_because is not None and self._off_until >= until:
                return False
            self._off_because, self._off_until = because, until
            return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that records were used."""
        with self._lock:
            self._touched.update(keys)

    def add_bad(self, keys: Iterable[bytes]) -> None:
        """Record that records are bad."""
        with self._lock:
            self._bad.update(keys)

    def add_wrong(self, key: bytes, kind: MissKind) -> None:
        """Count a record that was read and is bad; during an erasure it counts as gone."""
        with self._lock:
            if self._num_erasing:
                kind = "gone"
            else:
                self._bad.add(key)
            self._misses[kind] += 1

    def is_bad(self, key: bytes) -> bool:
        """Return whether a record was found bad and is still in the index."""
        with self._lock:
            return key in self._bad

    def add_miss(self, kind: MissKind) -> None:
        """Count a record that could not be read."""
        with self._lock:
            self._misses[kind] += 1

    def whole(self, rows: Iterable[tuple[bytes, RecordRow | None]], segments: Collection[int]) -> Iterator[RecordRow]:
        """Yield the rows of these segments; damaged rows count as misses."""
        for key, row in rows:
            if row is None:
                self.add_miss("index")
                self.add_bad([key])
            elif row.place.segment in segments:
                yield row

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Mark the time during which records are overwritten and removed from the index.

        Reads can find such records damaged.
        """
        with self._lock:
            self._num_erasures += 1
            self._num_erasing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_erasing -= 1

    def add_read(self, page_keys: Sequence[PageKey], result: ChainRead, num_erasures: int | None) -> None:
        """Count the read of a chain of pages, perhaps not to its end.

        Args:
            num_erasures: the value that `for_reader` returned before the read.
        """
        with self._lock:
            if result.bad_key is not None and num_erasures != self._num_erasures:
                result = replace(result, miss="gone", bad_key=None)  # perhaps it was overwritten during the read
            self._touched.update(
                page.key for page in page_keys[: result.num_read][-1:]
            )  # and with it all pages before it
            self._read_bytes += result.num_bytes
            if result.bad_key is not None:
                self._bad.add(result.bad_key)
            if result.miss is not None:
                self._misses[result.miss] += 1

    def add_put(self, result: PutResult) -> None:
        """Add the pages that a write added, evicted and removed to the counts, and the segments that it removed."""
        with self._lock:
            self._num_pages += result.num_new - result.num_removed
            self._num_written += result.num_new
            self._num_evicted += result.num_evicted
            self._segments_removed += result.segments_removed

    def for_reader(self) -> tuple[list[int], set[bytes], int | None]:
        """Return the segments removed since the last call, the bad keys, and the number of erasures.

        The number is None during an erasure.
        """
        with self._lock:
            removed, self._segments_removed = self._segments_removed, []
            return removed, set(self._bad), None if self._num_erasing else self._num_erasures

    def for_writer(self) -> tuple[set[bytes], set[bytes]]:
        """Return the keys that were used and those that were found bad since the last call."""
        with self._lock:
            touched, bad = self._touched, self._bad
            self._touched, self._bad = set(), set()
        return touched, bad

    def stats(
        self, *, num_segments: int, num_bytes: int, num_ordered_bytes: int, max_bytes: int, recovery: RecoveryReport
    ) -> StoreStats:
        """Return the current counts, with the sizes that the writer knows."""
        with self._lock:
            return StoreStats(
                num_pages=self._num_pages,
                num_segments=num_segments,
                num_bytes=num_bytes,
                num_ordered_bytes=num_ordered_bytes,
                max_bytes=max_bytes,
                read_bytes=self._read_bytes,
                num_pages_written=self._num_written,
                num_pages_evicted=self._num_evicted,
                misses=dict(self._misses),
                recovery=recovery,
                off_because=self.off_because,
            )
