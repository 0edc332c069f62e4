"""The ordered runs of a directory, each a file of its own beside the segments that hold the same pages exactly.

Knows which run is found by which pages, and which was used longest ago; no index, for there is one file to a run and
not to a page. They are copies: whatever is wrong with one, it is removed, and the exact pages do. A run is written
again, under a new number, whenever there is a better order; the old file goes after that. What a crash leaves is whole,
or is removed at `open`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from weakref import WeakSet

from ..artifact.manifest import KVLayout
from ..errors import StoreError
from .chunk_cache import ChunkCache, RunChunks
from .files import Files
from .ordered_file import RunHeader
from .ordered_layout import OrderedLayout
from .ordered_reader import BlockHeads, OpenRun
from .ordered_run import OrderedRun
from .page_key import PageKey, StoreIdentity
from .record import MissKind
from .run_files import RunFile, RunFiles


class OrderedStore:
    """Any thread may find, read and ask; one puts and removes, as with pages. Raises OSError where the disk fails.

    Make one with `open`.

    Attributes:
        num_bytes: of all files, also those of other models.
        on_error: told of a disk that fails while an open run is read.
    """

    def __init__(self, directory: Path, identity: StoreIdentity, files: Files) -> None:
        self.identity = identity
        self.num_bytes = 0
        self.on_error: Callable[[OSError], None] = lambda error: None
        self._files = files
        self._run_files = RunFiles(directory, identity, files)
        self._lock = threading.Lock()  # of all below
        self._entries: dict[tuple[bytes, bytes], RunFile] = {}  # by what is before the run and its last page
        self._others: dict[int, RunFile] = {}  # of other models, by number
        self._broken: list[RunFile] = []  # found no more; their files go with the next change
        self._next_number = 1
        self._use = 0
        self._misses: Counter[MissKind] = Counter()
        self._caches: WeakSet[ChunkCache] = WeakSet()  # that runs were opened with; told of each that goes

    @classmethod
    def open(cls, directory: Path, identity: StoreIdentity, files: Files) -> OrderedStore:
        """The runs of a directory; what a crash left of others is removed. By whoever holds the directory's lock."""
        store = cls(directory, identity, files)
        for number, path in store._run_files.numbered():
            store._adopt(number, path)
        return store

    @property
    def kv(self) -> KVLayout:
        """How a page of this model lies in memory; raises StoreError where the identity does not say."""
        return self._run_files.kv

    @property
    def num_runs(self) -> int:
        """Of this model."""
        return len(self._entries)

    def misses(self) -> dict[MissKind, int]:
        """By kind, since the directory was opened."""
        with self._lock:
            return dict(self._misses)

    def bytes_for(self, num_pages: int, chunk_size: int) -> int:
        """How much a run of so many pages takes."""
        return OrderedLayout(self.kv, num_pages * self.kv.page_size, chunk_size).num_bytes

    def find(self, heads: Sequence[PageKey]) -> int:
        """How many of the first pages of `heads` are the longest run that is there; 0: none is."""
        entry = self._find(heads)
        return 0 if entry is None else entry.header.num_pages

    def open_run(
        self, heads: Sequence[PageKey], *, block_heads: BlockHeads | None = None, chunks: ChunkCache | None = None
    ) -> OpenRun | None:
        """The run that `find` finds, to read from until it is closed, also when it is removed meanwhile; None if there
        is none, or it is not what it should be.

        Args:
            block_heads: of this very run, if the caller kept them.
            chunks: of this store's runs alone: what is in there is not read again, and what is read goes there.
        """
        entry = self._find(heads)
        if entry is None:
            self._missed(None, "absent")
            return None
        try:
            fd = self._files.open(entry.path, is_scattered=True)
        except FileNotFoundError:
            self._missed(entry, "gone")
            return None
        try:
            layout = self._run_files.layout(entry.header)
            miss = self._wrong(self._run_files.header_on_disk(fd, layout), entry, heads)
            if miss is not None:
                self._missed(entry, miss)
                self._files.close(fd)
                return None
            run = OpenRun(
                self._files,
                fd,
                layout,
                entry.header,
                block_heads=block_heads,
                chunks=None if chunks is None else self._cached(entry, layout, chunks),
                on_miss=partial(self._missed, entry),
            )
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.close(fd)
            raise
        run.counts.num_bytes += layout.header_bytes
        run.counts.num_reads += 1
        with self._lock:
            self._use += 1
            entry.last_used = self._use
        return run

    def put(self, heads: Sequence[PageKey], run: OrderedRun, *, chunk_size: int = 16) -> int:
        """Write a run of the pages `heads`, in place of the one that was there; the bytes that it takes.

        Raises:
            StoreError: the run is not of those pages.
            OSError: it is not there, and what was there before still is.
        """
        layout = OrderedLayout(self.kv, run.rows.shape[2], chunk_size)
        chained = all(head.parent_key == before.key for before, head in pairwise(heads))
        if run.kv != self.kv or layout.num_pages != len(heads) or not chained:
            raise StoreError(f"{len(heads)} heads and a run of {layout.num_pages} pages are not of the same pages")
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            broken = list(self._broken)
        self._remove(broken)
        entry = self._run_files.write(number, heads, run, layout)
        with self._lock:
            old = self._entries.get(entry.place)
            self._use += 1
            entry.last_used = self._use
            self._entries[entry.place] = entry
            self.num_bytes += entry.num_bytes
        if old is not None:
            self._unlink(old)
        return entry.num_bytes

    def forget(self, keys: Iterable[bytes], *, erases: bool = False) -> None:
        """Remove the runs that hold one of these pages, for those are gone; with `erases`, overwrite them first."""
        gone = set(keys)
        leaving = [entry for entry in self._all() if not gone.isdisjoint(entry.page_keys)]
        if erases:
            self._erase(leaving)
        else:
            self._remove(leaving)

    def discard(self, namespace: bytes) -> None:
        """Overwrite and remove all runs of a namespace, also those of other models."""
        self._erase([entry for entry in self._all() if entry.header.namespace == namespace])

    def shrink(self, max_bytes: int) -> None:
        """Remove what was used longest ago until the rest has at most `max_bytes`; broken ones first."""
        for entry in sorted(self._all(), key=lambda entry: (entry not in self._broken, entry.last_used)):
            if self.num_bytes <= max_bytes:
                return
            self._remove([entry])

    def _all(self) -> list[RunFile]:
        with self._lock:
            return [*self._broken, *self._others.values(), *self._entries.values()]

    def _find(self, heads: Sequence[PageKey]) -> RunFile | None:
        if not heads:
            return None
        with self._lock:
            for head in reversed(heads):
                entry = self._entries.get((heads[0].parent_key, head.key))
                if entry is not None:
                    return entry
        return None

    def _wrong(self, header: RunHeader | None, entry: RunFile, heads: Sequence[PageKey]) -> MissKind | None:
        if header is None:
            return "header"
        unlike = header.unlike(self.identity.digest, heads[: header.num_pages])
        if unlike is not None:
            return unlike
        return None if header == entry.header else "place"

    def _cached(self, entry: RunFile, layout: OrderedLayout, cache: ChunkCache) -> RunChunks | None:
        """What a cache has of a run; None if the run was removed meanwhile, and nobody would tell the cache."""
        with self._lock:
            self._caches.add(cache)
        chunks = cache.of_run(entry.header.number, layout)
        with self._lock:
            if self._entries.get(entry.place) is entry:
                return chunks
        cache.drop(entry.header.number)
        return None

    def _uncache(self, entry: RunFile) -> None:
        with self._lock:
            caches = list(self._caches)
        for cache in caches:
            cache.drop(entry.header.number)

    def _missed(self, entry: RunFile | None, kind: MissKind, error: OSError | None = None) -> None:
        """Count a miss, and never find that run again."""
        with self._lock:
            self._misses[kind] += 1
            if entry is not None and self._entries.get(entry.place) is entry:
                self._broken.append(self._entries.pop(entry.place))
        if entry is not None:
            self._uncache(entry)
        if error is not None:
            self.on_error(error)

    def _adopt(self, number: int, path: Path) -> None:
        """Take in a file; a later one of the same run takes the place of an earlier."""
        self._next_number = max(self._next_number, number + 1)
        entry = self._run_files.take_in(number, path)
        if entry is None:
            return
        if entry.header.identity_digest != self.identity.digest:
            self._others[number] = entry
        else:
            old = self._entries.get(entry.place)
            self._entries[entry.place] = entry
            if old is not None:
                self._unlink(old)
        self.num_bytes += entry.num_bytes

    def _erase(self, entries: Iterable[RunFile]) -> None:
        for entry in entries:
            self._run_files.erase(entry)
            self._remove([entry])

    def _remove(self, entries: Iterable[RunFile]) -> None:
        for entry in entries:
            with self._lock:
                if self._entries.get(entry.place) is entry:
                    del self._entries[entry.place]
                self._others.pop(entry.header.number, None)
                self._broken = [one for one in self._broken if one is not entry]
            self._unlink(entry)

    def _unlink(self, entry: RunFile) -> None:
        self._uncache(entry)
        self._run_files.remove(entry)
        with self._lock:
            self.num_bytes -= entry.num_bytes
