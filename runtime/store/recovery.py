"""Make index and segments consistent, however the last process ended. The segments are authoritative.

Knows both. Undamaged records that the index lacks are added, and the file is cut after the last one. A damaged record
can come before undamaged ones: a discard was overwriting it. Missing records are removed from the index, with all
below them.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..errors import StoreCorrupt, StoreMismatch
from .evictor import FULL_S, is_full
from .files import INDEX, Files
from .index import Index, is_broken
from .index_rows import RecordRow, SegmentRow
from .record import BLOCK, Kind
from .segment import Segment, read_segments, segment_paths
from .segment_log import SegmentLog
from .store_state import RecoveryReport, StoreState

_LOGGER = logging.getLogger(__name__)


def recover(
    directory: Path, files: Files, log_of: Callable[[], SegmentLog], clock: Callable[[], float] = time.time
) -> tuple[Index, SegmentLog, RecoveryReport]:
    """Return the index of a directory and its segments, after making them consistent.

    Args:
        log_of: makes a new log of the directory.

    Raises:
        StoreMismatch: a radixlm with another format wrote it; nothing was changed.
        StoreCorrupt, OSError, sqlite3.Error: the disk failed.
    """
    segments = read_segments(directory, files)
    try:
        return _open_and_recover(directory, files, log_of(), segments, clock, was_index_rebuilt=False)
    except (StoreCorrupt, StoreMismatch, sqlite3.Error) as error:
        if not segments if isinstance(error, StoreMismatch) else not is_broken(error):
            raise  # an index of another format, without segments of ours: the directory belongs to the other version
        fault = "has another version" if isinstance(error, StoreMismatch) else "is broken"
        _LOGGER.warning("%s %s; it is made again from the segments, whose pages stay", directory / INDEX, fault)
        remove_index(directory)
        return _open_and_recover(directory, files, log_of(), segments, clock, was_index_rebuilt=True)


def remove_index(directory: Path) -> None:
    """Remove the index, so that the next start builds a new one."""
    for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
        (directory / name).unlink(missing_ok=True)


class DiskGuard:
    """Turns a store off if its disk fails, instead of raising; the next start repairs its index.

    A full disk, with nothing of the store's to remove, turns it off for a minute only.
    """

    def __init__(self, directory: Path, state: StoreState) -> None:
        self._directory, self._state = directory, state

    @contextmanager
    def __call__(self, *, must_change: bool = False) -> Iterator[None]:
        """Guard the use of the disk; with `must_change`, a full disk also turns the store off for good."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if must_change or not is_full(error):
                self.turn_off(error)
            elif self._state.turn_off(f"{type(error).__name__}: {error}", for_s=FULL_S):
                _LOGGER.warning("the store in %s is off for %.0f s: %s", self._directory, FULL_S, error)

    def turn_off(self, error: Exception) -> None:
        """Turn the store off after an error of the disk, and log it once."""
        if not self._state.turn_off(f"{type(error).__name__}: {error}"):
            return
        if is_broken(error):
            remove_index(self._directory)  # it was damaged during use; the segments are intact
        _LOGGER.error("the store in %s is off from here on: %s; restart when the disk is well", self._directory, error)


def _open_and_recover(
    directory: Path,
    files: Files,
    log: SegmentLog,
    segments: dict[int, Segment | None],
    clock: Callable[[], float],
    *,
    was_index_rebuilt: bool,
) -> tuple[Index, SegmentLog, RecoveryReport]:
    """Open the index, which is created if missing, and make it consistent with the segments; see `recover`."""
    if not (directory / INDEX).exists():
        remove_index(directory)  # SQLite's other files of a removed index
    index = Index.open(directory / INDEX)
    try:
        recovery = Recovery(log, index, files, was_index_rebuilt=was_index_rebuilt, clock=clock)
        return index, log, recovery.run(segments)
    except BaseException:
        index.close()
        raise


class Recovery:
    """One recovery of a directory; `report` lists the repairs."""

    def __init__(
        self,
        log: SegmentLog,
        index: Index,
        files: Files,
        *,
        was_index_rebuilt: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._index = index
        self._files = files
        self._clock = clock
        self.report = RecoveryReport(was_index_rebuilt=was_index_rebuilt)

    def run(self, segments: dict[int, Segment | None]) -> RecoveryReport:
        """Fill the log with the existing segments, and the index with their records.

        Raises:
            OSError, sqlite3.Error: the disk failed.
        """
        known, paths = self._index.segments(), segment_paths(self._log.directory)
        newest = max((n for n, segment in segments.items() if segment is not None and not segment.is_single), default=0)
        with self._index.transaction():
            for number, segment in segments.items():
                row = known.get(number)
                if segment is None or (row is not None and row.is_doomed):
                    self._remove_segment(paths[number], was_broken=segment is None)
                else:
                    self._adopt_segment(paths[number], segment, row, is_newest=number == newest)
            for number in known.keys() - self._log.segments.keys():
                self._count(num_cut=self._index.cut_segment(number, 0)[0])
                self._index.remove_segment(number)
            if self.report != RecoveryReport():
                self._count(num_unreachable=self._index.remove_unreachable())
            self._index.put_segments(self._log.take_changed())
        return self.report

    def _remove_segment(self, path: Path, *, was_broken: bool) -> None:
        """Remove a segment that is broken, or whose removal had begun."""
        if was_broken:
            _LOGGER.warning("%s has no header that says whose pages it holds; its pages are lost", path)
            self._count(num_segments_dropped=1)
        self._files.unlink(path)

    def _adopt_segment(self, path: Path, segment: Segment, known: SegmentRow | None, *, is_newest: bool) -> None:
        """Add a segment to the log, and its records to the index."""
        fd = self._files.open(path)
        try:
            num_known = known.num_blocks if known is not None else segment.num_header_blocks
            num_blocks = self._scan_segment(segment, fd, num_known, payloads=is_newest)
        finally:
            self._files.close(fd)
        sealed_at = known.sealed_at if known is not None else None
        if sealed_at is None and not is_newest:
            sealed_at = self._index.last_use()
        begun_at = known.begun_at if known is not None else self._clock()
        self._log.adopt(segment, SegmentRow(segment.number, num_blocks, sealed_at, False, begun_at))

    def _scan_segment(self, segment: Segment, fd: int, num_known: int, *, payloads: bool) -> int:
        """Add the records of a segment that the index lacks; return the block after its last undamaged record.

        All records of older segments are known to have been written completely. Reads will find any damage in them.
        """
        num_there = self._files.size(fd) // BLOCK
        if num_there < num_known:
            num_cut, stop = self._index.cut_segment(segment.number, num_there)
            self._count(num_cut=num_cut)
            return max(stop, segment.num_header_blocks)
        use, num_blocks = self._index.last_use(), num_known
        for record in segment.scan(self._files, fd, num_known, payloads=payloads):
            if record is None:
                self._count(num_cut=1)
                continue
            num_blocks = record.place.stop
            if record.header.kind != Kind.DISCARDED:
                self._index.put([RecordRow(record.header, record.place, use)])
                self._count(num_adopted=1)
        return num_blocks

    def _count(
        self, *, num_adopted: int = 0, num_cut: int = 0, num_unreachable: int = 0, num_segments_dropped: int = 0
    ) -> None:
        """Add to the counts of the report."""
        old = self.report
        self.report = replace(
            old,
            num_adopted=old.num_adopted + num_adopted,
            num_cut=old.num_cut + num_cut,
            num_unreachable=old.num_unreachable + num_unreachable,
            num_segments_dropped=old.num_segments_dropped + num_segments_dropped,
        )
