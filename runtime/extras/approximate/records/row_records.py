"""What approximate loading keeps in a store beside pages: their rows by importance, and what was learned of rows.

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
    """Attaches itself to a store, which closes it; see `StorePart`. `of` does so once for each store.

    Attributes:
        store: the store.
        scores: what was learned of rows.
    """

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._singles = store.singles
        self._runs = OrderedRuns(store.singles)
        self.scores = StoredScores(store.singles)
        store.parts.append(self)

    @classmethod
    def of(cls, store: PageStore) -> RowRecords:
        """Return those that are attached to a store, or attach some."""
        return next((part for part in store.parts if isinstance(part, cls)), None) or cls(store)

    @property
    def kinds(self) -> RecordKinds:
        """The kinds that are written here."""
        return KINDS

    def put_ordered(self, heads: Sequence[PageKey], run: OrderedRun, *, chunk_size: int = 16) -> PutResult:
        """Store the rows of pages that are there which matter most, too, in place of an older order.

        Nothing is stored if one of the pages is not there. Ordered runs take at most half of the store, and of the room
        that pages leave: only runs that were used longest ago make room for one.

        Raises:
            StoreError: the run is not of those pages.
        """
        return self._singles.put(ordered_record(self.store.identity.kv, heads, run, chunk_size), heads)

    def rewrite(
        self,
        heads: Sequence[PageKey],
        scores: NDArray[Any],
        *,
        chunk_size: int = 16,
        num_ranks: int | None = None,
        probe_head: int = 0,
        pack_probe: PackProbe | None = None,
    ) -> PutResult:
        """Read stored pages and store their rows ordered by `scores`, `[layers, kv_heads, 16 len(heads)]`, too.

        Nothing is stored if one of the pages is not there, or not right. `num_ranks` and `pack_probe` as in
        `OrderedRun.of_pages`. By the thread that puts.

        Raises:
            StoreError: the scores are not of those pages.
        """
        run = None
        with self._singles.guard():
            run = self._runs.ordered(heads, scores, num_ranks, probe_head, pack_probe)
        return PutResult() if run is None else self.put_ordered(heads, run, chunk_size=chunk_size)

    def open_ordered(
        self, heads: Sequence[PageKey], *, tables: RunTables | None = None, chunks: ChunkCache | None = None
    ) -> OpenRun | None:
        """The longest ordered run that `heads` begin with, to read from by one thread until it is closed, also when it
        is removed meanwhile; None if there is none, or it is not right. By any thread.

        Args:
            tables: of that run, if they were kept.
            chunks: a cache of this store's chunks alone; those of a run go with it. Any thread may share it.
        """
        with self._singles.guard():
            if self._singles.state.off_because is None and heads:
                return self._runs.open(heads, tables=tables, chunks=chunks)
        return None

    def removed(self, segments: Sequence[int]) -> None:
        """Have caches of chunks forget the runs of segments that are no more."""
        self._runs.removed(segments)

    def close(self) -> None:
        """Close the index of runs."""
        self._runs.close()


class _Runs:
    """Ordered runs, as a `RecordKind`."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """Whether a run has another version."""
        return is_outdated(header)

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read all of a run."""
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
    """What was learned of rows, as a `RecordKind`."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """No other version was ever written."""
        return False

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read scores."""
        read = read_scores(directory, files, identity, row)
        return record.payload_bytes, None if isinstance(read, RowScores) else read


KINDS: Final[RecordKinds] = {Kind.RUN: _Runs(), Kind.SCORES: _Scores()}
