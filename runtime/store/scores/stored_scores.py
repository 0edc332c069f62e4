"""Find and read the scores of pages, while the writer replaces and removes them.

Knows index and files. Whatever is wrong with a record of scores, it is not found again: its pages have none then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ..files import INDEX, Files, read_all
from ..index import Index
from ..index_rows import RecordRow
from ..page_key import PageKey, StoreIdentity
from ..record import Kind, MissKind
from ..segment import Segment, read_record
from ..store_state import StoreState
from .scores_record import RowScores, ScoresHeader, payload_bytes


class FoundScores(NamedTuple):
    """Scores, and the number of the first of their pages."""

    start: int
    scores: RowScores


class StoredScores:
    """Any thread may use it; `read` raises OSError and sqlite3.Error where the disk fails."""

    def __init__(self, directory: Path, identity: StoreIdentity, files: Files, state: StoreState) -> None:
        self._directory, self._identity, self._files, self._state = directory, identity, files, state

    def read(self, heads: Sequence[PageKey]) -> list[FoundScores]:
        """See `PageStore.scores`."""
        keys = [head.key for head in heads]
        with closing(Index.open_to_read(self._directory / INDEX)) as index:
            rows = index.rows_below(keys, Kind.SCORES)
        starts, stops = {head.parent_key: at for at, head in enumerate(heads)}, {k: at + 1 for at, k in enumerate(keys)}
        found: list[FoundScores] = []
        for row in sorted(rows, key=lambda row: row.place.segment):  # segments are numbered in order of time
            header = ScoresHeader.of(row.header)
            if header is None or self._state.is_bad(row.header.key):
                continue
            start, stop = starts.get(header.parent_key), stops[row.header.parent_key]
            if start is None or stop - start != header.num_pages:
                continue
            read = read_scores(self._directory, self._files, self._identity, row)
            if isinstance(read, RowScores):
                found.append(FoundScores(start, read))
            else:
                self._state.add_wrong(row.header.key, read)
        return found


def read_scores(directory: Path, files: Files, identity: StoreIdentity, row: RecordRow) -> RowScores | MissKind:
    """The scores of a row of the index, or what is wrong with their record."""
    try:
        fd = files.open(directory / Segment(row.place.segment, identity, is_single=True).name)
    except FileNotFoundError:
        return "gone"
    try:
        record = read_record(files, fd, row.place.block)
        if record is None:
            return "header"
        miss = record.unlike(identity.digest, row.header, row.place, len(row.header.details))
        header = ScoresHeader.of(row.header)
        if miss is not None or header is None:
            return miss or "header"
        if record.payload_bytes != payload_bytes(identity.kv, header.num_pages):
            return "place"
        payload = bytearray(record.payload_bytes)
        if read_all(files, fd, [payload], row.place.offset + row.header.num_bytes) < len(payload):
            return "short"
        return header.decode(identity.kv, payload) or "payload"
    finally:
        files.close(fd)
