"""What a directory has, read beside whoever writes it: models, pages, and where prompts part.

Knows index and segment headers; takes no lock, changes nothing, and reads keys and values only when asked to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreCorrupt, StoreError, StoreMismatch
from .directory import INDEX
from .files import Files, OSFiles
from .index import Index
from .index_rows import PageRow, SegmentRow
from .page_key import NO_PARENT, PageKey, StoreIdentity
from .page_reader import PageReader
from .segment import Segment, read_segment, segment_paths


@dataclass(frozen=True)
class StoredModel:
    """The pages of one model."""

    identity: StoreIdentity
    segments: tuple[SegmentRow, ...]
    pages: tuple[PageRow, ...]  # each after the one before it in its prompt
    num_bytes: int  # of its segments


@dataclass(frozen=True)
class Run:
    """Pages one behind the other, up to where prompts part or end."""

    pages: tuple[PageRow, ...]
    num_before: int  # pages from the start of the prompt to here
    depth: int  # how many runs are before it


@dataclass(frozen=True)
class Catalogue:
    """A directory as it was when `read`."""

    directory: Path
    models: tuple[StoredModel, ...]
    num_broken: int  # rows that cannot be believed, and what comes after them

    @classmethod
    def read(cls, directory: str | Path) -> Catalogue:
        """Read a directory.

        Raises:
            StoreError: there is no store.
            StoreCorrupt: its index is broken; opening it to serve makes another one.
        """
        path = Path(directory)
        if not (path / INDEX).is_file():
            raise StoreError(f"{path} is no store: it has no {INDEX}; give a directory that --store was given")
        try:
            index = Index.open_to_read(path / INDEX)
            try:
                rows, known = list(index.pages()), index.segments()
            finally:
                index.close()
        except sqlite3.Error as error:
            raise StoreCorrupt(f"{path / INDEX} cannot be read: {error}; the next server makes it again") from None
        segments = {n: segment for n, segment in read_segments(path, OSFiles()).items() if n in known}
        pages = [row for _, row in rows if row is not None and row.place.segment in segments]
        identities = {segment.identity.digest: segment.identity for segment in segments.values()}
        models = (_model(identities[digest], segments, known, pages) for digest in sorted(identities))
        return cls(path, tuple(models), len(rows) - len(pages))

    def find(self, key_prefix: str) -> tuple[StoreIdentity, list[PageKey]]:
        """The page whose key in hexadecimal digits begins so, with all before it in its prompt.

        Raises:
            StoreError: there is none, or more than one.
        """
        found = [
            (model, row.head)
            for model in self.models
            for row in model.pages
            if row.head.key.hex().startswith(key_prefix.lower())
        ]
        if len(found) != 1:
            raise StoreError(
                f"{len(found)} pages have a key that begins with {key_prefix!r}, it must be one; "
                f"`radixlm store ls {self.directory}` shows keys"
            )
        model, head = found[0]
        by_key = {row.head.key: row.head for row in model.pages}
        heads = [head]
        while heads[-1].parent_key != NO_PARENT:
            heads.append(by_key[heads[-1].parent_key])
        return model.identity, heads[::-1]


@dataclass
class StoredPages:
    """Reads keys and values of one model, beside whoever writes them."""

    directory: Path
    identity: StoreIdentity
    files: Files = field(default_factory=OSFiles)

    def read(self, heads: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        """Fill `out` with pages; how many of the first ones are right.

        Raises:
            OSError, sqlite3.Error: the disk failed.
        """
        index = Index.open_to_read(self.directory / INDEX)
        reader = PageReader(self.directory, self.files, self.identity)
        try:
            found = index.find([head.key for head in heads])
            places = [found[head.key] for head in heads if head.key in found]
            return reader.read(heads, places, out).num_read
        finally:
            reader.close()
            index.close()


def runs(pages: Sequence[PageRow]) -> Iterator[Run]:
    """The pages of a model as runs, each prompt's one after the other, those of a namespace together."""
    children: dict[bytes, list[PageRow]] = {}
    for page in pages:
        children.setdefault(page.head.parent_key, []).append(page)
    roots = sorted(children.get(NO_PARENT, []), key=lambda page: page.head.namespace)
    waiting = [(page, 0, 0) for page in reversed(roots)]
    while waiting:
        first, num_before, depth = waiting.pop()
        run = [first]
        while len(after := children.get(run[-1].head.key, [])) == 1:
            run.append(after[0])
        yield Run(tuple(run), num_before, depth)
        waiting += [(page, num_before + len(run), depth + 1) for page in reversed(after)]


def read_segments(directory: Path, files: Files) -> dict[int, Segment]:
    """The segments of a directory whose headers can be read."""
    segments = {}
    for number, path in segment_paths(directory).items():
        try:
            fd = files.open(path)
        except FileNotFoundError:
            continue  # removed just now
        try:
            segments[number] = read_segment(files, fd, path)
        except (StoreCorrupt, StoreMismatch):
            continue
        finally:
            files.close(fd)
    return segments


def _model(
    identity: StoreIdentity,
    segments: dict[int, Segment],
    known: dict[int, SegmentRow],
    pages: Sequence[PageRow],
) -> StoredModel:
    ours = {number for number, segment in segments.items() if segment.identity == identity}
    return StoredModel(
        identity,
        tuple(known[number] for number in sorted(ours)),
        tuple(page for page in pages if page.place.segment in ours),
        sum(segments[number].offset(known[number].num_records) for number in ours),
    )
