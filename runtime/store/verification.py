"""Read everything that a directory says it has, and tell what is not right. Beside a server too: nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from .catalogue import read_segments
from .directory import INDEX
from .files import Files
from .index import Index
from .index_rows import PageRow
from .page_key import StoreIdentity
from .page_reader import PageReader
from .record import MissKind
from .segment import Segment
from .store_state import VerifyReport

_BYTES_AT_ONCE: Final = 32 << 20


def verify(directory: Path, files: Files, identity: StoreIdentity | None = None) -> VerifyReport:
    """What is right and what is not of all pages in the index.

    Args:
        identity: look at this model's alone.

    Raises:
        OSError, sqlite3.Error: the disk failed.
    """
    index = Index.open_to_read(directory / INDEX)
    try:
        verification = _Verification(directory, files, index)
        segments = read_segments(directory, files)
        for number in index.segments():
            segment = segments.get(number)
            if identity is None or (segment is not None and segment.identity == identity):
                verification.read(number, segment)
        return verification.report()
    finally:
        index.close()


class _Verification:
    def __init__(self, directory: Path, files: Files, index: Index) -> None:
        self._directory = directory
        self._files = files
        self._index = index
        self._num_pages = self._num_bytes = 0
        self._bad: dict[bytes, MissKind] = {}

    def report(self) -> VerifyReport:
        """What was found so far."""
        return VerifyReport(self._num_pages, self._num_bytes, Counter(self._bad.values()), frozenset(self._bad))

    def read(self, number: int, segment: Segment | None) -> None:
        """Read the pages of a segment; None is one whose header cannot be read."""
        pages = self._index.pages_in(number)
        self._bad.update((key, "index") for key, row in pages.items() if row is None)
        rows = [row for row in pages.values() if row is not None]
        if segment is None:
            self._note(rows, "gone")
        else:
            self._read(segment, rows)

    def _read(self, segment: Segment, rows: list[PageRow]) -> None:
        reader = PageReader(self._directory, self._files, segment.identity)
        num_pages = max(1, min(len(rows), _BYTES_AT_ONCE // segment.record_bytes))
        out, first = np.empty((num_pages, segment.identity.page_bytes), np.uint8), 0
        try:
            while first < len(rows):
                some = rows[first : first + num_pages]
                result = reader.read([row.head for row in some], [row.place for row in some], out)
                self._num_pages += result.num_read
                self._num_bytes += result.num_bytes
                first += result.num_read
                if result.miss is not None:
                    self._note(rows[first : first + 1], result.miss)
                    first += 1
        finally:
            reader.close()

    def _note(self, rows: list[PageRow], kind: MissKind) -> None:
        """Count pages as bad that the index still has in that place."""
        now: Mapping[bytes, object] = self._index.find([row.head.key for row in rows])
        self._bad.update((row.head.key, kind) for row in rows if now.get(row.head.key) == row.place)
