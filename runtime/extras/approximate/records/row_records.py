"""The records that approximate loading keeps in a store besides pages: rows by importance, and scores of rows.

Knows a store and its large records, not engines or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from ....store.files import Files
from ....store.index_rows import RecordRow
from ....store.page_key import PageKey, StoreIdentity
from ....store.page_store import PageStore
from ....store.record import Kind, MissKind, Record, RecordHeader
from ....store.segment import Segment
from ....store.single_records import RecordKinds
from ....store.store_state import PutResult
from .chunk_cache import ChunkCache
from .ordered_reader import OpenRun
from .ordered_record import RunHeader, RunTables, is_outdated, ordered_record
from .ordered_run import OrderedRun, PackProbe
from .ordered_runs import OrderedRuns
from .scores_record import RowScores, StoredScores, read_scores


class RowRecords:
    """The records attached to a store, which closes them; see `StorePart`. `of` attaches them once per store.

    Attributes:
        store: the store.
        scores: the stored scores of rows.
    """

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._singles = store.singles
        self._runs = OrderedRuns(store.singles)
        self.scores = StoredScores(store.singles)
        store.parts.append(self)

    @classmethod
    def of(cls, store: PageStore) -> RowRecords:
        """Return the records that are attached to a store, attaching them if necessary."""
        return next((part for part in store.parts if isinstance(part, cls)), None) or cls(store)

    @property
    def kinds(self) -> RecordKinds:
        """The kinds of records that are written here."""
        return KINDS

    def put_ordered(self, page_keys: Sequence[PageKey], run: OrderedRun, *, chunk_size: int = 16) -> PutResult:
        """Store the most important rows of stored pages as a run, replacing an older order.

        Nothing is stored if one of the pages is missing. Ordered runs take at most half of the store, and of the room
        that pages leave: only the least recently used runs make room for one.

        Raises:
            StoreError: the run has other pages.
        """
        return self._singles.put(ordered_record(self.store.identity.kv, page_keys, run, chunk_size), page_keys)

    def rewrite(
        self,
        page_keys: Sequence[PageKey],
        scores: NDArray[Any],
        *,
        chunk_size: int = 16,
        num_ranks: int | None = None,
        probe_head: int = 0,
        pack_probe: PackProbe | None = None,
    ) -> PutResult:
        """Read stored pages and store their rows ordered by `scores`, `[layers, kv_heads, 16 len(page_keys)]`.

        Nothing is stored if one of the pages is missing or invalid. `num_ranks` and `pack_probe` as in
        `OrderedRun.of_pages`. For the thread that writes.

        Raises:
            StoreError: the scores have other pages.
        """
        run = None
        with self._singles.guard():
            run = self._runs.ordered(page_keys, scores, num_ranks, probe_head, pack_probe)
        return PutResult() if run is None else self.put_ordered(page_keys, run, chunk_size=chunk_size)

    def open_ordered(
        self, page_keys: Sequence[PageKey], *, tables: RunTables | None = None, chunks: ChunkCache | None = None
    ) -> OpenRun | None:
        """Open the longest ordered run that the pages begin with; None if there is none, or it is invalid.

        For any thread. One thread can read the run until it is closed, even if it is removed meanwhile.

        Args:
            tables: cached tables of that run.
            chunks: a cache of this store's chunks only; it drops those of removed runs. Any thread can share it.
        """
        with self._singles.guard():
            if self._singles.state.off_because is None and page_keys:
                return self._runs.open(page_keys, tables=tables, chunks=chunks)
        return None

    def removed(self, segments: Sequence[int]) -> None:
        """Make caches of chunks forget the runs of removed segments."""
        self._runs.removed(segments)

    def close(self) -> None:
        """Close the index of runs."""
        self._runs.close()


class _Runs:
    """The kind of ordered runs; see `RecordKind`."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """Return whether another version of radixlm wrote the run."""
        return is_outdated(header)

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read a whole run to verify it; return the number of bytes read, and the first fault, None if there is none.

        A run of another version is not read: that is no fault.
        """
        if (header := RunHeader.of(record)) is None:
            return 0, None
        try:
            fd = files.open(directory / Segment(row.place.segment, identity, is_single=True).name)
        except FileNotFoundError:
            return 0, "gone"
        try:
            misses: list[MissKind] = []
            start = row.place.offset + row.header.num_bytes
            run = OpenRun(
                files,
                fd,
                header.layout(identity.kv),
                header,
                start=start,
                on_miss=lambda kind, error: misses.append(kind),
            )
            is_right = run.check()
            return run.counts.num_bytes, None if is_right else misses[0]
        finally:
            files.close(fd)


class _Scores:
    """The kind of scores of rows; see `RecordKind`."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """Return False: there is only one version."""
        return False

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read a record of scores to verify it. Returns the bytes read, and what is invalid; None if nothing is."""
        read = read_scores(directory, files, identity, row)
        return record.payload_bytes, None if isinstance(read, RowScores) else read


KINDS: Final[RecordKinds] = {Kind.RUN: _Runs(), Kind.SCORES: _Scores()}
