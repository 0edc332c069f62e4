"""Pages of keys and values on disk, found again by everything that they depend on; never a wrong one.

Knows bytes, keys and files; no engine, tree or pool. A page that cannot be had, for whatever reason, is a miss, counted
by kind; when the disk fails the store turns itself off, says so once, and its owner goes on without it.

Three threads may use one store: one puts, discards and collects; one reads; any touches and asks for `stats`.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ..artifact.manifest import KVLayout
from ..errors import StoreCorrupt, StoreError
from .chunk_cache import ChunkCache
from .directory import INDEX, StoreLock, read_secret
from .files import Files, OSFiles
from .index import Index, is_broken
from .ordered_reader import BlockHeads, OpenRun
from .ordered_run import OrderedRun
from .ordered_store import OrderedStore
from .page_key import PageKey, StoreIdentity
from .page_reader import ChainReader
from .page_writer import PageWriter
from .recovery import recover, remove_index
from .segment import Segment
from .segment_log import NO_SPACE, SegmentLog
from .store_state import GCReport, PutResult, RecoveryReport, StoreState, StoreStats, VerifyReport
from .verification import verify

_LOGGER = logging.getLogger(__name__)
_MAX_SEGMENT_BYTES: Final = 256 << 20
_MIN_SEGMENTS: Final = 8  # that a full store has, so that one of them is not much of it


class PageStore:
    """A directory of pages of one model; those of others in it take room, and are evicted like any.

    Make one with `open`.
    """

    def __init__(
        self,
        directory: Path,
        identity: StoreIdentity,
        *,
        lock: StoreLock,
        secret: bytes,
        writer: PageWriter,
        ordered: OrderedStore,
        recovery: RecoveryReport,
        files: Files,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.secret = secret  # 32 bytes of this directory, for CacheNamespaces
        self._lock = lock
        self._writer = writer
        self._ordered = ordered
        ordered.on_error = self._turn_off
        self._recovery = recovery
        self.files = files
        self._write = threading.RLock()
        self._read = threading.Lock()
        self._reader = ChainReader(directory, files, identity)
        self._state = StoreState(writer.num_pages())
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
        """The store of a directory, which is made if it is not there; what a crash left is mended first.

        Args:
            max_bytes: of all segments together, at most what the disk has; the index, a thousandth, comes on top.
            files: where pages are read and written; None: `OSFiles`.
            clock: seconds since 1970, for people to read; nothing depends on it.

        Raises:
            StoreBusy: another process has it open.
            StoreCorrupt: the directory cannot be used at all.
            StoreMismatch: another version of radixlm wrote it.
            StoreError: not one page fits into `max_bytes`.
        """
        path, files = Path(directory), OSFiles() if files is None else files
        smallest = Segment(1, identity)
        if max_bytes < smallest.offset(1):
            raise StoreError(
                f"a store of {max_bytes} bytes holds no page, one takes {smallest.offset(1)} with its segment; "
                f"raise --store-gb"
            )
        lock = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = StoreLock.take(path)
            max_bytes = min(max_bytes, shutil.disk_usage(path).total)  # owners keep books for as many pages as fit
            secret = read_secret(path)
            segment_bytes = max(smallest.offset(1), min(_MAX_SEGMENT_BYTES, max_bytes // _MIN_SEGMENTS))
            new_log = partial(SegmentLog, path, files, segment_bytes=segment_bytes, clock=clock)
            index, log, recovery = recover(path, files, new_log, clock)
            ordered = OrderedStore.open(path, identity, files)
            writer = PageWriter(
                identity,
                index,
                log,
                files,
                max_bytes=max_bytes,
                bytes_beside=lambda: ordered.num_bytes,
                shrink_beside=ordered.shrink,
            )
            return cls(
                path,
                identity,
                lock=lock,
                secret=secret,
                writer=writer,
                ordered=ordered,
                recovery=recovery,
                files=files,
            )
        except (OSError, sqlite3.Error) as error:
            if lock is not None:
                lock.release()
            raise StoreCorrupt(f"{path} cannot hold a store: {error}; give another directory") from error
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def heads(self) -> Iterator[PageKey]:
        """All pages of this model, each after the one before it in its prompt."""
        if self._state.off_because is not None:
            return
        index = None
        try:
            index = Index.open_to_read(self.directory / INDEX)
            ours = self._writer.segments()
            for key, row in index.pages():
                if row is None:
                    self._state.add_miss("index")
                    self._state.add_bad([key])
                elif row.place.segment in ours:
                    yield row.head
        except sqlite3.Error as error:
            self._turn_off(error)
        finally:
            if index is not None:
                index.close()

    def put(self, heads: Sequence[PageKey], payload: NDArray[np.uint8], *, evicts: bool = True) -> PutResult:
        """Store pages; readers find all of them at once, when they outlive a loss of power.

        Pages whose parent is neither stored nor before them here are left out: nobody could find them. After a crash
        the first few of them may be there.

        Args:
            heads: of this store's identity, each parent before its children.
            payload: `[len(heads), page_bytes]`.
            evicts: whether pages that are there go where there is no room; else those that find none are left out.
        """
        assert payload.shape == (len(heads), self.identity.page_bytes) and payload.dtype == np.uint8
        with self._write, self._guarded():
            if self._state.off_because is None:
                payload, noted = np.ascontiguousarray(payload), self._state.for_writer()
                return self._count(self._writer.put(heads, payload, *noted, evicts=evicts))
        return PutResult()

    def read(self, heads: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        """Read a chain, or a part of one, and count it as used; how many of its first pages are right.

        The page after them is a miss. If it was wrong or broken, it and what comes after it are found no more.

        Args:
            out: `[at least len(heads), page_bytes]`; rows contiguous, and rubbish behind the right ones.
        """
        assert out.shape[0] >= len(heads) and out.shape[1:] == (self.identity.page_bytes,) and out.dtype == np.uint8
        if not heads:
            return 0
        with self._read, self._guarded():
            if self._state.off_because is None:
                return self._read_chain(heads, out)
            self._state.add_miss("off")
            return 0
        self._state.add_miss("io")
        return 0

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count pages, and those before them in their prompts, as used now: they are evicted later."""
        self._state.touch(keys)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Take out pages that are wrong, or unused for too long, and all that come after them, and overwrite them on
        disk; their keys. By the thread that puts."""
        with self._write, self._guarded(), self._state.erasing():
            if self._state.off_because is None:
                dropped = self._writer.drop(set(keys), *self._state.for_writer())
                self._ordered.forget(dropped.evicted, erases=True)
                return list(self._count(dropped).evicted)
        return []

    def discard(self, namespace: bytes) -> list[bytes]:
        """Take out all pages of a namespace, and overwrite them on disk; their keys. By the thread that puts."""
        with self._write, self._guarded(), self._state.erasing():
            if self._state.off_because is None:
                self._ordered.discard(namespace)
                return list(self._count(self._writer.discard(namespace, *self._state.for_writer())).evicted)
        return []

    @property
    def kv(self) -> KVLayout:
        """How a page lies in memory; raises StoreError where the identity does not say."""
        return self._ordered.kv

    def put_ordered(self, heads: Sequence[PageKey], run: OrderedRun, *, chunk_size: int = 16) -> PutResult:
        """Store pages that are there in the order of importance, too, in place of an older order; nothing if they are
        not, or if ordered runs would take more than half of the store, or of the room that pages leave: for a copy no
        page makes room, only copies that were not used for longer. By the thread that puts.

        Raises:
            StoreError: the run is not of those pages.
        """
        with self._write, self._guarded():
            if self._state.off_because is not None:
                return PutResult()
            num_bytes, keys = self._ordered.bytes_for(len(heads), chunk_size), [head.key for head in heads]
            max_bytes = self._writer.max_bytes
            room = min(max_bytes // 2, max_bytes - self._writer.num_bytes) - num_bytes
            if room < 0 or not self._writer.are_there(keys):
                return PutResult()
            self._ordered.shrink(room)
            try:
                self._ordered.put(heads, run, chunk_size=chunk_size)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                return PutResult()
            return PutResult(tuple(keys))
        return PutResult()

    def open_ordered(
        self, heads: Sequence[PageKey], *, block_heads: BlockHeads | None = None, chunks: ChunkCache | None = None
    ) -> OpenRun | None:
        """The longest ordered run that `heads` begin with, to read from by one thread until it is closed; None if there
        is none, or it is not right. By any thread.

        Args:
            block_heads: of that run, if they were kept.
            chunks: a cache of this store's chunks alone; those of a run go with it. Any thread may share it.
        """
        with self._guarded():
            if self._state.off_because is None:
                return self._ordered.open_run(heads, block_heads=block_heads, chunks=chunks)
        return None

    def gc(self) -> GCReport:
        """Give the room of pages back that are there no more. By the thread that puts."""
        with self._write, self._guarded():
            if self._state.off_because is None:
                written, report = self._writer.collect(*self._state.for_writer())
                self._count(written)
                return report
        return GCReport(0, 0, self._writer.num_bytes, self._writer.num_bytes)

    def verify(self) -> VerifyReport:
        """Read all pages of this model, and find those no more that are not right. By any thread."""
        with self._guarded():
            if self._state.off_because is None:
                report = verify(self.directory, self.files, self.identity)
                self._state.add_bad(report.bad_keys)
                return report
        return VerifyReport(0, 0, {})

    def stats(self) -> StoreStats:
        """Counts as of now."""
        num_ordered_bytes = self._ordered.num_bytes
        return self._state.stats(
            num_segments=self._writer.num_segments,
            num_bytes=self._writer.num_bytes + num_ordered_bytes,
            num_ordered_bytes=num_ordered_bytes,
            max_bytes=self._writer.max_bytes,
            recovery=self._recovery,
        )

    def close(self) -> None:
        """Note what was used, and let others have the directory."""
        with self._write, self._read:
            if self._is_closed:
                return
            self._is_closed = True
            if self._state.off_because is None:
                with self._guarded():
                    self._count(self._writer.settle(*self._state.for_writer()))
            for part in (self._reader, self._writer):
                try:
                    part.close()
                except (OSError, sqlite3.Error) as error:
                    _LOGGER.warning("the store in %s did not close: %s", self.directory, error)
            self._lock.release()
            self._state.turn_off("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_chain(self, heads: Sequence[PageKey], out: NDArray[np.uint8]) -> int:
        begun = time.perf_counter()
        removed, bad, num_erasures = self._state.for_reader()
        self._reader.forget(removed)
        result = self._reader.read(heads, out, bad)
        self._state.add_read(heads, result, time.perf_counter() - begun, num_erasures)
        return result.num_read

    def _count(self, result: PutResult) -> PutResult:
        """Count what the writer did, and remove the ordered runs whose pages are gone."""
        self._ordered.forget(result.evicted)
        self._state.add_put(result)
        return result

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn the store off where the disk fails, instead of raising."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        if not self._state.turn_off(f"{type(error).__name__}: {error}"):
            return
        if is_broken(error):
            remove_index(self.directory)  # it broke while it was used; the segments are whole
        _LOGGER.error("the store in %s is off from here on: %s; restart when the disk is well", self.directory, error)
