"""Find the ordered runs of a store in its index and open them, while the writer replaces and removes runs.

Knows index, files and headers. A run is a copy of exact pages: if anything in it is invalid, it is not found again, and
the caller reads those pages instead.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ....store.catalogue import StoredPages
from ....store.files import INDEX, read_all
from ....store.index import Index
from ....store.page_key import PageKey
from ....store.record import BlockRange, Kind, MissKind, Record
from ....store.segment import Segment
from ....store.single_records import SingleRecords
from .chunk_cache import ChunkCache, RunChunks
from .ordered_layout import OrderedLayout
from .ordered_reader import OpenRun
from .ordered_record import RunHeader, RunTables, run_key
from .ordered_run import OrderedRun, PackProbe
from .page_parts import PageParts


class OrderedRuns:
    """The ordered runs of a store, for any thread; `open` raises OSError and sqlite3.Error if the disk fails."""

    def __init__(self, singles: SingleRecords) -> None:
        self._directory = singles.directory
        self._identity = singles.identity
        self._files = singles.files
        self._state = singles.state
        self._on_error = singles.guard.turn_off  # called if the disk fails while an open run is read
        self._lock = threading.Lock()  # guards everything below
        self._index = Index.open_to_read(singles.directory / INDEX)
        self._caches: WeakSet[ChunkCache] = WeakSet()  # of opened runs; they are told of removed runs

    def open(
        self, page_keys: Sequence[PageKey], *, tables: RunTables | None = None, chunks: ChunkCache | None = None
    ) -> OpenRun | None:
        """Open the longest valid run that these pages begin with; None if there is none.

        See `RowRecords.open_ordered`.
        """
        found = self._find(page_keys)
        if found is None:
            return None
        num_pages, key, place = found
        segment = Segment(place.segment, self._identity, is_single=True)
        try:
            fd = self._files.open(self._directory / segment.name, is_scattered=True)
        except FileNotFoundError:
            self._note_miss(key, place, "gone")
            return None
        try:
            run = self._open_at(fd, page_keys[:num_pages], key, place, tables, chunks)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.close(fd)
            raise
        if run is None:
            self._files.close(fd)
        else:
            self._state.touch([key])
        return run

    def ordered(
        self,
        page_keys: Sequence[PageKey],
        scores: NDArray[Any],
        num_ranks: int | None,
        probe_head: int,
        pack_probe: PackProbe | None,
    ) -> OrderedRun | None:
        """Read exact pages and order them by `scores`; None if one is missing or invalid."""
        pages = np.empty((len(page_keys), self._identity.page_bytes), np.uint8)
        if StoredPages(self._directory, self._identity, self._files).read(page_keys, pages) < len(page_keys):
            return None
        kv = self._identity.kv
        return OrderedRun.of_pages(kv, pages, scores, num_ranks=num_ranks, probe_head=probe_head, pack_probe=pack_probe)

    def removed(self, segments: Sequence[int]) -> None:
        """Make caches of chunks forget the runs in these segments, which were removed."""
        with self._lock:
            caches = list(self._caches) if segments else []
        for cache in caches:
            for number in segments:
                cache.drop(number)

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._index.close()

    def _find(self, page_keys: Sequence[PageKey]) -> tuple[int, bytes, BlockRange] | None:
        """Return the number of pages, the key and the place of the longest run that these pages begin with.

        None if the index has none, or only invalid ones.
        """
        with self._lock:
            below = self._index.find_below([page.key for page in page_keys], Kind.RUN)
        there = {key: place for key, place in below.items() if not self._state.is_bad(key)}
        for num_pages in range(len(page_keys), 0, -1) if there else ():
            key = run_key(page_keys[0].parent_key, page_keys[num_pages - 1].key)
            if key in there:
                return num_pages, key, there[key]
        return None

    def _open_at(
        self,
        fd: int,
        page_keys: Sequence[PageKey],
        key: bytes,
        place: BlockRange,
        tables: RunTables | None,
        chunks: ChunkCache | None,
    ) -> OpenRun | None:
        """Read the header at `place` of an open file, and open the run that it describes.

        Returns None if that is not the run of these pages with this key, or is invalid: then `_note_miss` was called.

        Args:
            tables: cached orders and checksums of the run; None: they are read again.
            chunks: the cache of chunks; None: nothing is cached.
        """
        start = bytearray(RunHeader.num_bytes(len(page_keys), self._identity.kv))
        got = read_all(self._files, fd, [start], place.offset)
        record = Record.decode(start) if got == len(start) else None
        header = None if record is None else RunHeader.of(record)
        if record is None or header is None:
            self._note_miss(
                key, place, "header" if record is None else "gone"
            )  # overwritten, and then the process ended
            return None
        miss = "identity" if record.identity_digest != self._identity.digest else header.first_difference(page_keys)
        layout = header.layout(self._identity.kv)
        if miss is None and (record.place != place or layout.num_bytes != record.payload_bytes):
            miss = "place"
        if miss is not None:
            self._note_miss(key, place, miss)
            return None
        keys = [page.key for page in page_keys]
        run = OpenRun(
            self._files,
            fd,
            layout,
            header,
            start=place.offset + len(start),
            pages=PageParts(self._directory, self._files, self._identity, layout, keys, self._find_pages),
            tables=tables,
            chunks=None if chunks is None else self._chunks_of(key, place, layout, chunks),
            on_miss=partial(self._note_miss, key, place),
        )
        run.counts.num_bytes += len(start)
        run.counts.num_reads += 1
        return run

    def _chunks_of(self, key: bytes, place: BlockRange, layout: OrderedLayout, cache: ChunkCache) -> RunChunks | None:
        """Return the run's chunks in the cache.

        None if the run was removed since it was found: the cache would not be told.
        """
        with self._lock:
            self._caches.add(cache)
        chunks = cache.of_run(place.segment, layout)
        if self._is_there(key, place):
            return chunks
        cache.drop(place.segment)
        return None

    def _find_pages(self, keys: Sequence[bytes]) -> dict[bytes, BlockRange]:
        """Return the places of pages, by key, without missing ones."""
        with self._lock:
            return self._index.find(keys)

    def _note_miss(self, key: bytes, place: BlockRange, kind: MissKind, error: Exception | None = None) -> None:
        """Count a miss of this kind, mark the run so that it is not used again, and drop its cached chunks.

        A run that the index lost meanwhile counts as `gone`. An `error` of the disk is reported, too.
        """
        try:
            if self._is_there(key, place):
                self._state.add_wrong(key, kind)
            else:
                self._state.add_miss("gone")
        except sqlite3.Error as broken:
            self._on_error(broken)
        self.removed([place.segment])
        if error is not None:
            self._on_error(error)

    def _is_there(self, key: bytes, place: BlockRange) -> bool:
        with self._lock:
            return self._index.find([key]).get(key) == place
