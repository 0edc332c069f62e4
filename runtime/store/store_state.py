"""What the threads of one store tell each other, what the store counts, and the reports that it makes of that.

Knows keys and numbers, no files. Each call holds one lock for a moment. Which pages were used and which were found
bad waits here for the writer thread.
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
    """What a change of the store did; all keys are of pages of its model."""

    stored: tuple[bytes, ...] = ()  # of the pages to store: those on disk now, also those that were there before
    evicted: tuple[bytes, ...] = ()  # pages that are gone
    lost_states: tuple[bytes, ...] = ()  # pages whose state is gone; they may be there
    num_new: int = 0
    num_removed: int = 0  # also those that were written again at once
    num_evicted: int = 0  # of the removed: for want of room
    num_moved: int = 0  # pages that were copied to another segment
    segments_removed: tuple[int, ...] = ()

    def then(self, other: PutResult) -> PutResult:
        """This change and another after it, of which neither stored anything."""
        return PutResult(
            evicted=self.evicted + other.evicted,
            lost_states=self.lost_states + other.lost_states,
            num_removed=self.num_removed + other.num_removed,
            segments_removed=self.segments_removed + other.segments_removed,
        )


@dataclass(frozen=True)
class RecoveryReport:
    """What opening a directory found to mend; all zeros after a clean end."""

    num_adopted: int = 0  # whole records that the index lacked
    num_cut: int = 0  # records that are not whole, or whose file is gone
    num_segments_dropped: int = 0  # files without a readable header
    num_unreachable: int = 0  # records without the pages before them
    was_index_rebuilt: bool = False


@dataclass(frozen=True)
class StoreStats:
    """Counts since the directory was opened, and its sizes now."""

    num_pages: int  # of this model
    num_segments: int  # of all models, as are the bytes
    num_bytes: int
    num_ordered_bytes: int  # of them, of ordered runs
    max_bytes: int
    read_bytes: int  # asked of the disk
    num_pages_written: int
    num_pages_evicted: int
    misses: Mapping[MissKind, int]
    recovery: RecoveryReport
    off_because: str | None  # why the store turned itself off

    @property
    def is_off(self) -> bool:
        """Whether reads find nothing and writes are dropped."""
        return self.off_because is not None


@dataclass(frozen=True)
class VerifyReport:
    """What reading everything found."""

    num_pages: int  # that are right
    num_bytes: int  # read
    bad: Mapping[MissKind, int]  # records that are not right, by what is wrong
    bad_keys: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class GCReport:
    """What a collection did."""

    num_segments_removed: int
    num_pages_moved: int
    bytes_before: int
    bytes_after: int


class StoreState:
    """The state since a directory was opened; any thread may use it.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, num_pages: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._off_because: str | None = None
        self._off_until = math.inf
        self._lock = threading.Lock()  # of all below
        self._touched: set[bytes] = set()
        self._bad: set[bytes] = set()  # keys of wrong records, which leave the index with the next change
        self._segments_removed: list[int] = []  # the reader may still have their files open
        self._misses: Counter[MissKind] = Counter()
        self._num_erasures = 0  # begun, of records that the index still has
        self._num_erasing = 0
        self._num_pages = num_pages
        self._read_bytes = self._num_written = self._num_evicted = 0

    @property
    def off_because(self) -> str | None:
        """Why the store turned itself off, for good or for a while, or that it was closed; None while it works."""
        return self._off_because if self._clock() < self._off_until else None

    def turn_off(self, because: str, *, for_s: float = math.inf) -> bool:
        """Turn the store off, for good unless it says for how long; False if it is off as long already."""
        with self._lock:
            until = self._clock() + for_s
            if self.off_because is not None and self._off_until >= until:
                return False
            self._off_because, self._off_until = because, until
            return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that records were used."""
        with self._lock:
            self._touched.update(keys)

    def add_bad(self, keys: Iterable[bytes]) -> None:
        """Note that records are wrong."""
        with self._lock:
            self._bad.update(keys)

    def add_wrong(self, key: bytes, kind: MissKind) -> None:
        """Count a record that was read and is wrong; one that is being erased is gone."""
        with self._lock:
            if self._num_erasing:
                kind = "gone"
            else:
                self._bad.add(key)
            self._misses[kind] += 1

    def is_bad(self, key: bytes) -> bool:
        """Whether a record was found wrong and is still in the index."""
        with self._lock:
            return key in self._bad

    def add_miss(self, kind: MissKind) -> None:
        """Count a record that could not be read."""
        with self._lock:
            self._misses[kind] += 1

    def whole(self, rows: Iterable[tuple[bytes, RecordRow | None]], segments: Collection[int]) -> Iterator[RecordRow]:
        """The rows of these segments; those that broke are misses."""
        for key, row in rows:
            if row is None:
                self.add_miss("index")
                self.add_bad([key])
            elif row.place.segment in segments:
                yield row

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """Held while records are overwritten and leave the index: a read meanwhile may find them wrong."""
        with self._lock:
            self._num_erasures += 1
            self._num_erasing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_erasing -= 1

    def add_read(self, heads: Sequence[PageKey], result: ChainRead, num_erasures: int | None) -> None:
        """Count a chain that was read, perhaps not to its end.

        Args:
            num_erasures: what `for_reader` returned before the read.
        """
        with self._lock:
            if result.bad_key is not None and num_erasures != self._num_erasures:
                result = replace(result, miss="gone", bad_key=None)  # perhaps it was overwritten during the read
            self._touched.update(head.key for head in heads[: result.num_read][-1:])  # and so those before it
            self._read_bytes += result.num_bytes
            if result.bad_key is not None:
                self._bad.add(result.bad_key)
            if result.miss is not None:
                self._misses[result.miss] += 1

    def add_put(self, result: PutResult) -> None:
        """Count pages that came and went."""
        with self._lock:
            self._num_pages += result.num_new - result.num_removed
            self._num_written += result.num_new
            self._num_evicted += result.num_evicted
            self._segments_removed += result.segments_removed

    def for_reader(self) -> tuple[list[int], set[bytes], int | None]:
        """Segments that were removed since the last call, keys that the reader must not find, and the number of
        erasures; None during one."""
        with self._lock:
            removed, self._segments_removed = self._segments_removed, []
            return removed, set(self._bad), None if self._num_erasing else self._num_erasures

    def for_writer(self) -> tuple[set[bytes], set[bytes]]:
        """The keys that were used and those that were found bad since the last call."""
        with self._lock:
            touched, bad = self._touched, self._bad
            self._touched, self._bad = set(), set()
        return touched, bad

    def stats(
        self, *, num_segments: int, num_bytes: int, num_ordered_bytes: int, max_bytes: int, recovery: RecoveryReport
    ) -> StoreStats:
        """The counts now, with the sizes that the writer knows."""
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
