"""Store KV pages on disk, and find them by everything that they depend on; never return a wrong page.

Knows bytes, keys and files; no engine, tree or pool. A page that cannot be read, for any reason, is a miss, counted by
kind. When the disk fails the store turns itself off and logs that once; its owner continues without it. One thread
puts, discards and collects. Another one reads. Any thread can call `touch` and `stats`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreCorrupt, StoreOff, StoreUnusable
from .catalogue import verify
from .files import INDEX, Files, OSFiles, StoreLock, read_secret
from .index import Index
from .index_rows import RecordRow
from .page_key import PageKey, StoreIdentity
from .page_reader import ChainReader
from .record import Kind, RecordHeader, SingleRecord
from .record_writer import RecordWriter
from .recovery import DiskGuard
from .single_records import RecordKinds, SingleRecords, StoredStates, StorePart
from .small_record import SmallRecord, StoredAlias, StoredCall
from .store_state import GCReport, PutResult, StoreState, StoreStats, VerifyReport

AnySmallRecord = TypeVar("AnySmallRecord", bound=SmallRecord)
_LOGGER = logging.getLogger(__name__)


class PageStore:
    """A directory of stored pages of one model; create it with `open`.

    Pages of other models in the directory count towards its size and are evicted like any.
    """

    def __init__(self, directory: Path, lock: StoreLock, writer: RecordWriter) -> None:
        self.directory, self.identity, self.files = directory, writer.identity, writer.files
        self.secret = read_secret(directory)  # 32 bytes of this directory, for CacheNamespaces
        self._lock = lock
        self._writer = writer
        self._write = threading.RLock()
        self._read = threading.Lock()
        self._state = StoreState(writer.num_pages())
        self._guard = DiskGuard(directory, self._state)
        self._reader = ChainReader(directory, self.files, self.identity)
        self.parts: list[StorePart] = []  # large records of extras, which `close` closes
        self.singles = SingleRecords(
            directory, self.identity, self.files, self._state, self._guard, put=self._put_single
        )
        self.states = StoredStates(self.singles)
        self._is_closed = False

    @classmethod
    def open(
        cls,
        directory: str | Path,
        identity: StoreIdentity,
        *,
        max_bytes: int,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> PageStore:
        """Open the store of a directory, after recovery from a crash; create the directory if it does not exist.

        Args:
            max_bytes: the most bytes of all segments together, limited to the size of the disk. The index, about a
                thousandth, comes on top.
            files: where pages are read and written; None: `OSFiles`.
            clock: seconds since 1970, for people to read; nothing depends on it.

        Raises:
            StoreBusy: another process has it open.
            StoreUnusable: its disk is full, read-only or broken, or another user owns it.
            StoreCorrupt: the directory cannot be used at all.
            StoreMismatch: a radixlm with another format wrote it.
            StoreError: not one page fits into `max_bytes`.
        """
        path, files = Path(directory), OSFiles() if files is None else files
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as stack:
                lock = StoreLock.take(path)
                stack.callback(lock.release)
                store = cls(path, lock, RecordWriter.open(path, identity, files, max_bytes=max_bytes, clock=clock))
                stack.pop_all()
                return store
        except (OSError, sqlite3.Error) as error:
            kind = StoreCorrupt if isinstance(error, FileExistsError | NotADirectoryError) else StoreUnusable
            raise kind(f"{path} cannot hold a store: {error}; give another directory") from error

    def page_keys(self) -> Iterator[PageKey]:
        """Return an iterator over all pages of this model.

        Each page comes after its parent, and right after it unless prompts diverge there.
        """
        return (row.header.page for row in self._rows(Index.reachable) if row.header.kind == Kind.PAGE)

    def aliases(self) -> Iterator[StoredAlias]:
        """Return an iterator over all aliases of this model, the least recently used first."""
        return self._small_records(StoredAlias)

    def calls(self) -> Iterator[StoredCall]:
        """Return an iterator over all tool calls of this model, the least recently used first."""
        return self._small_records(StoredCall)

    def pages_with_state(self) -> Iterator[bytes]:
        """Return an iterator over the keys of this model's pages that have a stored state after them."""
        rows = self._rows(lambda index: index.rows_of_kind(Kind.STATE).items())
        return (row.header.parent_key for row in rows)

    def put(self, page_keys: Sequence[PageKey], payload: NDArray[np.uint8], *, evicts: bool = True) -> PutResult:
        """Store pages. Readers find all of them at once, as soon as they survive a power loss.

        Pages whose parent is neither stored nor among `page_keys` before them are left out, because they could not be
        found. After a crash, the first few of them can exist.

        Args:
            page_keys: keys of this store's identity, each parent before its children.
            payload: `[len(page_keys), page_bytes]`.
            evicts: whether stored pages can be evicted to make room; if not, new pages without room are left out.
        """
        assert payload.shape == (len(page_keys), self.identity.page_bytes) and payload.dtype == np.uint8
        rows = np.ascontiguousarray(payload)
        records = [(RecordHeader.of_page(page), row.data) for page, row in zip(page_keys, rows, strict=True)]
        return self._apply(partial(self._writer.put, records, evicts=evicts))

    def put_small(self, record: SmallRecord) -> PutResult:
        """Store an alias or a tool call, if its page is stored. It is evicted, dropped and discarded with that page."""
        header = record.header(self.identity)
        return PutResult() if header is None else self._apply(partial(self._writer.put, [(header, b"")]))

    def read(self, page_keys: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        """Read a chain of pages, or a part of one, and record its use; return how many first pages are valid.

        The page after them is a miss. If it was damaged or wrong, neither it nor the pages after it are found again.

        Args:
            out: `[at least len(page_keys), page_bytes]`; rows contiguous, and undefined after the valid ones.
        """
        assert out.shape[0] >= len(page_keys) and out.shape[1:] == (self.identity.page_bytes,) and out.dtype == np.uint8
        if not page_keys:
            return 0
        with self._read, self._guard():
            if self._state.off_because is None:
                removed, bad, num_erasures = self._state.for_reader()
                self._reader.forget(removed)
                result = self._reader.read(page_keys, out, bad)
                self._state.add_read(page_keys, result, num_erasures)
                return result.num_read
            self._state.add_miss("off")
            return 0
        self._state.add_miss("io")
        return 0

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of pages, and of those before them in their prompts, so that they are evicted later."""
        self._state.touch(keys)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove pages that are wrong or long unused, with all pages after them; return their keys.

        Their bytes on disk are overwritten. For the thread that puts.
        """
        with self._state.erasing():
            return list(self._apply(partial(self._writer.drop, set(keys)), must_change=True).evicted)

    def discard(self, namespace: bytes) -> list[bytes]:
        """Remove all pages of a namespace, and overwrite them on disk; return their keys. For the thread that puts.

        Pages that were computed with LoRA adapters within the namespace are removed, too.

        Raises:
            StoreOff: the store is off, and some of the pages can still exist.
        """
        with self._state.erasing():
            discarded = list(self._apply(partial(self._writer.discard, namespace), must_change=True).evicted)
        if self._state.off_because is not None:
            raise StoreOff(
                "the store is off, as /health says why: pages may still be on disk; "
                "restart when the disk is well, and clear them again"
            )
        return discarded

    def gc(self) -> GCReport:
        """Free the disk space of removed records. For the thread that puts."""
        before = self._writer.log.num_bytes
        result = self._apply(partial(self._writer.collect, self._record_kinds))
        return GCReport(len(result.segments_removed), result.num_moved, before, self._writer.log.num_bytes)

    def verify(self) -> VerifyReport:
        """Read all records of this model; those that are not valid are not found again. For any thread."""
        with self._guard():
            if self._state.off_because is None:
                report = verify(self.directory, self.files, self.identity, kinds=self._record_kinds)
                self._state.add_bad(report.bad_keys)
                return report
        return VerifyReport(0, 0, {})

    def stats(self) -> StoreStats:
        """Return the current counts."""
        return self._state.stats(
            num_segments=self._writer.num_segments,
            num_bytes=self._writer.log.num_bytes,
            num_ordered_bytes=self._writer.log.num_single_bytes,
            max_bytes=self._writer.max_bytes,
            recovery=self._writer.recovery,
        )

    def close(self) -> None:
        """Save the uses of records, and unlock the directory for other processes."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._write, self._read:
            self._apply(self._writer.finish)
            open_parts: list[StorePart | ChainReader | RecordWriter] = [*self.parts, self._reader, self._writer]
            for part in open_parts:
                try:
                    part.close()
                except (OSError, sqlite3.Error) as error:
                    _LOGGER.warning("the store in %s did not close: %s", self.directory, error)
            self._lock.release()
            self._state.turn_off("it was closed")

    def abandon(self) -> None:
        """Turn the store off without closing it, because a read or a write hangs; `close` then does nothing."""
        self._is_closed = True
        self._state.turn_off("its disk hangs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, rows_of: Callable[[Index], Iterable[tuple[bytes, RecordRow | None]]]) -> Iterator[RecordRow]:
        """Yield rows of this model, read through a new connection; damaged rows count as misses."""
        if self._state.off_because is not None:
            return
        with self._guard(), closing(Index.open_to_read(self.directory / INDEX)) as index:
            yield from self._state.whole(rows_of(index), self._writer.segments())

    def _small_records(self, kind: type[AnySmallRecord]) -> Iterator[AnySmallRecord]:
        """Return an iterator over the small records of a kind, the least recently used first."""
        rows = self._rows(lambda index: index.rows_of_kind(kind.kind).items())
        return (record for row in rows if (record := kind.of(row.header)) is not None)

    def _put_single(self, record: SingleRecord, page_keys: Sequence[PageKey]) -> PutResult:
        """Store a large record of these pages, if all of them are stored, in place of the record that it replaces."""
        return self._apply(partial(self._writer.put_single, record, [page.key for page in page_keys]))

    def _apply(self, change: Callable[[set[bytes], set[bytes]], PutResult], *, must_change: bool = False) -> PutResult:
        """Call `change` with the keys that were used and those that are bad; return its effects, all of them counted.

        First, segments are removed if the disk lacks space for any change of the index. Nothing is done if the store is
        off.
        """
        made = PutResult()
        with self._write, self._guard(must_change=must_change):
            if self._state.off_because is None:
                made = self._count_effects(self._writer.keep_reserve())
                result = self._count_effects(change(*self._state.for_writer()))
                return replace(
                    result,
                    evicted=(*(key for key in made.evicted if key not in result.stored), *result.evicted),
                    lost_states=made.lost_states + result.lost_states,
                )
        return made

    def _count_effects(self, result: PutResult) -> PutResult:
        """Count the effects of a change, tell the parts about removed segments, and return the effects."""
        self._state.add_put(result)
        for part in self.parts:
            part.removed(result.segments_removed)
        return result

    @property
    def _record_kinds(self) -> RecordKinds:
        """The kinds of records of all parts."""
        return {kind: about for part in self.parts for kind, about in part.kinds.items()}
