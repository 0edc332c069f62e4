"""Find and read the scores of pages, while the writer replaces and removes them.

Knows index and files. Whatever is wrong with a record of scores, it is not found again: its pages have none then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ....store.files import INDEX, Files, read_all
from ....store.index import Index
from ....store.index_rows import RecordRow
from ....store.page_key import PageKey, StoreIdentity
from ....store.record import Kind, MissKind
from ....store.segment import Segment, read_record
from ....store.single_records import SingleRecords
from ....store.store_state import PutResult
from .scores_record import RowScores, ScoresHeader, payload_bytes, scores_record


class FoundScores(NamedTuple):
    """Scores, and the number of the first of their pages."""

    start: int
    scores: RowScores


class StoredScores:
    """What a store knows of its pages' rows."""

    def __init__(self, singles: SingleRecords) -> None:
        self._directory, self._identity, self._files = singles.directory, singles.identity, singles.files
        self._state, self._guard, self._put = singles.state, singles.guard, singles.put

    def put(self, heads: Sequence[PageKey], scores: RowScores) -> PutResult:
        """Store what was learned of pages that are there, in place of what is known of them alone; see
        `RowRecords.put_ordered`.

        Raises:
            StoreError: the scores are not of those pages.
        """
        return self._put(scores_record(self._identity.kv, heads, scores), heads)

    def read(self, heads: Sequence[PageKey]) -> list[FoundScores]:
        """What was learned of pages, the latest last: of the same page the later ones count. By any thread.

        Args:
            heads: from the start of a prompt, or of what is looked for, on.
        """
        with self._guard():
            if self._state.off_because is None and heads:
                return self._read(heads)
        return []

    def _read(self, heads: Sequence[PageKey]) -> list[FoundScores]:
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
