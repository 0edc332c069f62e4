"""Make index and segments agree again, whatever ended the process before: the segments are right.

Knows both. Records that the index lacks are taken in if they are whole, and the file is cut behind the last that is.
One that is not may lie before others that are: it was being overwritten because somebody discarded it. Pages whose
record is gone leave the index, and all that come after them with them.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import StoreCorrupt
from .directory import INDEX
from .files import Files
from .index import Index, is_broken
from .index_rows import PageRow, SegmentRow
from .record import KIND_PAGE
from .segment import Segment, read_segment, segment_paths
from .segment_log import SegmentLog
from .store_state import RecoveryReport

_LOGGER = logging.getLogger(__name__)


def recover(
    directory: Path, files: Files, log_of: Callable[[], SegmentLog], clock: Callable[[], float] = time.time
) -> tuple[Index, SegmentLog, RecoveryReport]:
    """The index of a directory and its segments, after they were made to agree.

    Args:
        log_of: a new log of the directory.

    Raises:
        StoreCorrupt, OSError, sqlite3.Error: the disk failed.
    """
    try:
        return _recover(directory, files, log_of(), clock, was_index_rebuilt=False)
    except (StoreCorrupt, sqlite3.Error) as error:
        if not is_broken(error):
            raise
        _LOGGER.warning("the index in %s is made again: %s", directory, error)
        remove_index(directory)
        return _recover(directory, files, log_of(), clock, was_index_rebuilt=True)


def remove_index(directory: Path) -> None:
    """Let the next one who opens the directory make a new index."""
    for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
        (directory / name).unlink(missing_ok=True)


def _recover(
    directory: Path, files: Files, log: SegmentLog, clock: Callable[[], float], *, was_index_rebuilt: bool
) -> tuple[Index, SegmentLog, RecoveryReport]:
    if not (directory / INDEX).exists():
        remove_index(directory)  # what SQLite kept beside one that is no more
    index = Index.open(directory / INDEX)
    try:
        recovery = Recovery(log, index, files, was_index_rebuilt=was_index_rebuilt, clock=clock)
        return index, log, recovery.run()
    except BaseException:
        index.close()
        raise


class Recovery:
    """One pass over a directory. `report` says what it found to mend."""

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

    def run(self) -> RecoveryReport:
        """Fill the log with the segments that are there, and the index with their pages.

        Raises:
            OSError, sqlite3.Error: the disk failed.
        """
        paths = segment_paths(self._log.directory)
        known = self._index.segments()
        with self._index.transaction():
            for number, path in paths.items():
                self._take(path, known.get(number), is_newest=number == max(paths))
            for number in known.keys() - self._log.segments.keys():
                self._cut(self._index.num_pages().get(number, 0))
                self._index.remove_segment(number)
            if self.report != RecoveryReport():
                self._count(num_unreachable=self._index.remove_unreachable())
            self._index.put_segments(self._log.take_changed())
        return self.report

    def _take(self, path: Path, known: SegmentRow | None, *, is_newest: bool) -> None:
        if known is not None and known.is_doomed:
            self._files.unlink(path)
            return
        fd = self._files.open(path)
        try:
            segment = read_segment(self._files, fd, path)
            num_known = known.num_records if known is not None else 0
            num_records = self._scan(segment, fd, num_known, payloads=is_newest)
        except StoreCorrupt as error:
            _LOGGER.warning("%s", error)
            self._count(num_segments_dropped=1)
            self._files.unlink(path)
            return
        finally:
            self._files.close(fd)
        sealed_at = known.sealed_at if known is not None else None
        if sealed_at is None and not is_newest:
            sealed_at = self._index.last_use()
        begun_at = known.begun_at if known is not None else self._clock()
        self._log.adopt(segment, SegmentRow(segment.number, num_records, sealed_at, False, begun_at))

    def _scan(self, segment: Segment, fd: int, num_known: int, *, payloads: bool) -> int:
        """Take in what the index does not know of a segment; where the last record ends that is whole.

        In all but the newest segment everything is known to have been written: what broke there, a read will tell.
        """
        num_there = segment.num_records(self._files.size(fd))
        if num_there < num_known:
            self._cut(num_known - num_there)
            self._index.cut_segment(segment.number, num_there)
            return num_there
        use, num_records = self._index.last_use(), num_known
        for number, header in enumerate(segment.scan(self._files, fd, num_known, payloads=payloads), num_known):
            if header is None:
                self._cut(1)
                continue
            num_records = number + 1
            if header.kind == KIND_PAGE:
                self._index.put([PageRow(header.head, header.place, use)])
                self._count(num_adopted=1)
        return num_records

    def _cut(self, num_records: int) -> None:
        self._count(num_cut=num_records)

    def _count(
        self, *, num_adopted: int = 0, num_cut: int = 0, num_unreachable: int = 0, num_segments_dropped: int = 0
    ) -> None:
        old = self.report
        self.report = replace(
            old,
            num_adopted=old.num_adopted + num_adopted,
            num_cut=old.num_cut + num_cut,
            num_unreachable=old.num_unreachable + num_unreachable,
            num_segments_dropped=old.num_segments_dropped + num_segments_dropped,
        )
