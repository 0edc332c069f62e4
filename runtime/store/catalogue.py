"""Read a store's directory while a server can be writing it: models, pages, runs of pages, and damage.

Knows index, segment headers and readers. Takes no lock, changes nothing, and reads KV only on request.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreCorrupt, StoreError
from .files import INDEX, Files, OSFiles
from .index import Index
from .index_rows import RecordRow, SegmentRow
from .page_key import NO_PARENT, PageKey, StoreIdentity
from .page_reader import ChainReader, PageReader
from .record import Kind, MissKind
from .segment import Segment, read_record, read_segments
from .single_records import RecordKinds, read_state
from .store_state import VerifyReport

_BYTES_AT_ONCE: Final = 32 << 20
NO_KINDS: Final[RecordKinds] = {}


@dataclass(frozen=True)
class StoredModel:
    """The segments and pages of one model."""

    identity: StoreIdentity
    segments: tuple[SegmentRow, ...]
    pages: tuple[PageKey, ...]  # each after its parent, the previous page of its prompt

    @property
    def num_bytes(self) -> int:
        """Size of its segments in bytes."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True)
class Run:
    """Consecutive pages, up to where prompts diverge or end."""

    pages: tuple[PageKey, ...]
    num_before: int  # pages from the start of the prompt to here
    depth: int  # number of runs before it


@dataclass(frozen=True)
class Catalogue:
    """The contents of a directory at the time of `read`."""

    directory: Path
    models: tuple[StoredModel, ...]
    num_broken: int  # damaged rows, and the rows below them

    @classmethod
    def read(cls, directory: str | Path) -> Catalogue:
        """Read a directory.

        Raises:
            StoreError: the directory has no store.
            StoreMismatch: a radixlm with another format wrote it.
            StoreCorrupt: its index is damaged; the next server that opens it rebuilds the index.
        """
        path = Path(directory)
        if not (path / INDEX).is_file():
            raise StoreError(f"{path} is no store: it has no {INDEX}; give a directory that --store was given")
        found = read_segments(path, OSFiles())
        try:
            index = Index.open_to_read(path / INDEX)
            try:
                rows, known = list(index.reachable()), index.segments()
            finally:
                index.close()
        except sqlite3.Error as error:
            raise StoreCorrupt(f"{path / INDEX} cannot be read: {error}; the next server makes it again") from None
        segments = {n: segment for n, segment in found.items() if n in known and segment is not None}
        pages: dict[StoreIdentity, list[PageKey]] = {segment.identity: [] for segment in segments.values()}
        num_broken = 0
        for _, row in rows:
            if row is None or row.place.segment not in segments:
                num_broken += 1
            elif row.header.kind == Kind.PAGE:
                pages[segments[row.place.segment].identity].append(row.header.page)
        models = tuple(
            StoredModel(
                identity,
                tuple(known[n] for n, segment in segments.items() if segment.identity == identity),
                tuple(pages[identity]),
            )
            for identity in sorted(pages, key=lambda identity: identity.digest)
        )
        return cls(path, models, num_broken)

    def find(self, key_prefix: str) -> tuple[StoreIdentity, list[PageKey]]:
        """Return the page whose key, in hexadecimal, begins with `key_prefix`, after all pages before it in its prompt.

        Raises:
            StoreError: no page has such a key, or more than one has.
        """
        found = [
            (model, page)
            for model in self.models
            for page in model.pages
            if page.key.hex().startswith(key_prefix.lower())
        ]
        if len(found) != 1:
            raise StoreError(
                f"{len(found)} pages have a key that begins with {key_prefix!r}, it must be one; "
                f"`radixlm store ls {self.directory}` shows keys"
            )
        model, page = found[0]
        by_key = {page.key: page for page in model.pages}
        pages = [page]
        while pages[-1].parent_key != NO_PARENT:
            pages.append(by_key[pages[-1].parent_key])
        return model.identity, pages[::-1]


@dataclass
class StoredPages:
    """Reads the KV of one model while a server can be writing the store."""

    directory: Path
    identity: StoreIdentity
    files: Files = field(default_factory=OSFiles)

    def read(self, pages: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        """Fill `out` with pages; return how many of the first ones are valid.

        Raises:
            OSError, sqlite3.Error: the disk failed.
        """
        reader = ChainReader(self.directory, self.files, self.identity)
        try:
            return reader.read(pages, out, frozenset()).num_read
        finally:
            reader.close()


def runs(pages: Sequence[PageKey]) -> Iterator[Run]:
    """Yield the pages of a model as runs, those of a prompt in order, and those of a namespace together."""
    children: dict[bytes, list[PageKey]] = {}
    for page in pages:
        children.setdefault(page.parent_key, []).append(page)
    roots = sorted(children.get(NO_PARENT, []), key=lambda page: page.namespace)
    waiting = [(page, 0, 0) for page in reversed(roots)]
    while waiting:
        first, num_before, depth = waiting.pop()
        run = [first]
        while len(after := children.get(run[-1].key, [])) == 1:
            run.append(after[0])
        yield Run(tuple(run), num_before, depth)
        waiting += [(page, num_before + len(run), depth + 1) for page in reversed(after)]


def verify(
    directory: Path, files: Files, identity: StoreIdentity | None = None, *, kinds: RecordKinds = NO_KINDS
) -> VerifyReport:
    """Verify all records in the index.

    Args:
        identity: verify the records of this model only.
        kinds: kinds of large records whose payload is read, too.

    Raises:
        StoreMismatch: a radixlm with another format wrote the directory.
        OSError, sqlite3.Error: the disk failed.
    """
    index = Index.open_to_read(directory / INDEX)
    try:
        verification = _Verification(directory, files, index, kinds)
        segments = read_segments(directory, files)
        for number in index.segments():
            segment = segments.get(number)
            if identity is None or (segment is not None and segment.identity == identity):
                verification.read(number, segment)
        return verification.report()
    finally:
        index.close()


class _Verification:
    """Reads all records of a store, and collects those that are bad."""

    def __init__(self, directory: Path, files: Files, index: Index, kinds: RecordKinds) -> None:
        self._directory = directory
        self._files = files
        self._index = index
        self._kinds = kinds
        self._num_pages = self._num_bytes = 0
        self._bad: dict[bytes, MissKind] = {}

    def report(self) -> VerifyReport:
        """Return the numbers of pages and bytes read so far, and the bad records."""
        return VerifyReport(self._num_pages, self._num_bytes, Counter(self._bad.values()), frozenset(self._bad))

    def read(self, number: int, segment: Segment | None) -> None:
        """Verify the records of a segment; None is a segment whose header cannot be read."""
        rows = self._index.rows_in(number)
        self._bad.update((key, "index") for key, row in rows.items() if row is None)
        whole = [row for row in rows.values() if row is not None]
        if segment is None:
            self._add_bad(whole, "gone")
        else:
            self._verify_pages(segment, [row for row in whole if row.header.kind == Kind.PAGE])
            self._verify_others(segment, [row for row in whole if row.header.kind != Kind.PAGE])

    def _verify_pages(self, segment: Segment, rows: list[RecordRow]) -> None:
        """Read the pages of a segment; count them and their bytes, and collect those that are bad."""
        reader = PageReader(self._directory, self._files, segment.identity)
        page_bytes = segment.identity.page_bytes
        out, first = np.empty((max(1, min(len(rows), _BYTES_AT_ONCE // page_bytes)), page_bytes), np.uint8), 0
        try:
            while first < len(rows):
                some = rows[first : first + len(out)]
                result = reader.read([row.header.page for row in some], [row.place for row in some], out)
                self._num_pages += result.num_read
                self._num_bytes += result.num_bytes
                first += result.num_read
                if result.miss is not None:
                    self._add_bad(rows[first : first + 1], result.miss)
                    first += 1
        finally:
            reader.close()

    def _verify_others(self, segment: Segment, rows: list[RecordRow]) -> None:
        """Read the records of a segment that are not pages, and collect those that are bad."""
        if not rows:
            return
        try:
            fd = self._files.open(self._directory / segment.name)
        except FileNotFoundError:
            self._add_bad(rows, "gone")
            return
        try:
            for row in rows:
                miss = self._fault_of(segment, fd, row)
                if miss is not None:
                    self._add_bad([row], miss)
        finally:
            self._files.close(fd)

    def _fault_of(self, segment: Segment, fd: int, row: RecordRow) -> MissKind | None:
        """Read a record that is not a page; return what is wrong with it, None if it is valid."""
        record = read_record(self._files, fd, row.place.block)
        if record is None:
            return "header"
        digest = segment.identity.digest
        if (miss := record.unlike(digest, row.header, row.place, len(row.header.details))) is not None:
            return miss
        self._num_bytes += row.header.num_bytes
        if row.header.kind == Kind.STATE:
            self._num_bytes += record.payload_bytes
            return read_state(self._directory, self._files, segment.identity, row)
        if (kind := self._kinds.get(row.header.kind)) is None:
            return None
        try:
            _ = segment.identity.kv
        except StoreError:  # a KV layout of an older radixlm
            return "identity"
        num_bytes, miss = kind.check(self._directory, self._files, segment.identity, row, record)
        self._num_bytes += num_bytes
        return miss

    def _add_bad(self, rows: list[RecordRow], kind: MissKind) -> None:
        """Collect records as bad for a reason, unless the index has removed or moved them meanwhile."""
        now = self._index.find([row.header.key for row in rows])
        self._bad.update((row.header.key, kind) for row in rows if now.get(row.header.key) == row.place)
