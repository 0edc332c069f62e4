"""Cache chunks of ordered runs, and parts of their pages, by how often and how recently they were used.

A chunk enters after its checksum was verified, is found only by that checksum, and leaves with its run. The chunk with
the lowest worth makes room, new or old::

    worth = (sum of 2 ** (-age / half life) over its uses) * importance ** weight

With weight 0 that is LRFU (Lee et al., IEEE Transactions on Computers 50, 2001): half lives from zero to infinity
lead from LRU to LFU. The uses of evicted chunks are remembered with their run. Knows numbers and bytes, not files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....errors import StoreError
from .ordered_layout import OrderedLayout
from .ordered_run import UInt8Array

ChunkIds = NDArray[np.int64]  # numbers of pieces by `OrderedLayout`: chunks, and parts of pages, which count as chunks
_TABLES_SHARE: Final = 0.02  # of `max_bytes`, for the uses of runs without a chunk in memory


@dataclass(frozen=True)
class Policy:
    """The parameters of a chunk's worth."""

    half_life: float  # of a use, in units of requested bytes divided by the cache's size
    importance: float = 0.0  # weight


LRU: Final = Policy(1e-6)
LFU: Final = Policy(1e6)
FADING: Final = Policy(4.0)  # like LFU while the same runs are used, better than LRU after a change: bench/LOG.md


@dataclass(frozen=True)
class ChunkCacheStats:
    """The counts since the cache was made, and its current size."""

    num_bytes: int
    max_bytes: int
    num_hits: int
    hit_bytes: int
    num_misses: int
    num_evicted: int


class ChunkCache:
    """A cache of chunks of one store's runs. For any thread; chunks are never written to.

    Readers can still hold evicted chunks. The tables of uses take 33 bytes per chunk, in memory or not, of
    each run with a chunk in memory, and a fiftieth of `max_bytes` for other runs.

    each run that has one in memory, and a fiftieth of `max_bytes` for other runs.

    >>> cache = ChunkCache(64 << 20)
    >>> run = store.open_ordered(heads, chunks=cache)

    Args:
        max_bytes: for all chunks together.

    Raises:
        StoreError: `max_bytes` is not positive.
    """

    def __init__(self, max_bytes: int, *, policy: Policy = FADING) -> None:
        if max_bytes <= 0:
            raise StoreError(f"a cache of {max_bytes} bytes holds no chunk; leave it away")
        self.max_bytes = max_bytes
        self.policy = policy
        self._lock = threading.Lock()  # guards everything below, and its content
        self._runs: dict[int, RunChunks] = {}  # by number, the most recently opened last
        self._num_bytes = self._wanted_bytes = 0
        self._num_hits = self._hit_bytes = self._num_misses = self._num_evicted = 0

    def of_run(self, number: int, layout: OrderedLayout, importance: NDArray[Any] | None = None) -> RunChunks:
        """Return the chunks of run `number`.

        Args:
            importance: of each chunk, above 0, for policies that weigh it; None: `1 / (1 + block)`, and for parts of
                pages as if they followed all blocks.
        """
        with self._lock:
            run = self._runs.pop(number, None)
            if run is not None and run.layout != layout:  # of a store that was reopened
                self._forget(run)
                run = None
            if run is None:
                run = RunChunks(self, layout, importance)
            self._runs[number] = run
            self._shorten_tables()
        return run

    def drop(self, number: int) -> None:
        """Forget a deleted run, and accept no more chunks from its readers."""
        with self._lock:
            run = self._runs.pop(number, None)
            if run is not None:
                self._forget(run)

    def stats(self) -> ChunkCacheStats:
        """Return the current counts."""
        with self._lock:
            return ChunkCacheStats(
                num_bytes=self._num_bytes,
                max_bytes=self.max_bytes,
                num_hits=self._num_hits,
                hit_bytes=self._hit_bytes,
                num_misses=self._num_misses,
                num_evicted=self._num_evicted,
            )

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of all runs, without their chunks."""
        with self._lock:
            return sum(run.table_bytes for run in self._runs.values())

    def check(self) -> None:
        """Raise AssertionError unless counts and chunks agree, and the bound holds."""
        with self._lock:
            for run in self._runs.values():
                run.check()
            num_bytes = sum(run.num_bytes for run in self._runs.values())
            assert num_bytes == self._num_bytes <= self.max_bytes, f"{num_bytes} of {self._num_bytes} bytes"

    def take(self, run: RunChunks, ids: ChunkIds, checksums: NDArray[np.uint64]) -> list[UInt8Array | None]:
        """Return the chunks of a run with these numbers and checksums; None in place of each that is not cached.

        Counts a use of all; see `RunChunks.take`.
        """
        num_bytes = run.layout.piece_bytes(ids)
        with self._lock:
            chunks, is_hit = run.use(ids, checksums, self._wanted_bytes / self.max_bytes / self.policy.half_life)
            self._wanted_bytes += int(num_bytes.sum())
            self._num_hits += int(is_hit.sum())
            self._num_misses += len(ids) - int(is_hit.sum())
            self._hit_bytes += int(num_bytes[is_hit].sum())
        return chunks

    def put(self, run: RunChunks, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> None:
        """Add verified chunks of a run, and evict those of the lowest worth if there are too many.

        See `RunChunks.put`.
        """
        with self._lock:
            if run.is_gone:
                return
            self._num_bytes += run.keep(ids, checksums, chunks)
            self._make_room()

    def _make_room(self) -> None:
        """Remove the chunks of lowest worth, until the rest fits."""
        excess = self._num_bytes - self.max_bytes
        if excess <= 0:
            return
        runs = [run for run in self._runs.values() if run.num_here]
        here = [np.flatnonzero(run.is_here) for run in runs]
        worth = np.concatenate([run.worth(ids) for run, ids in zip(runs, here, strict=True)])
        num_bytes = np.concatenate([run.layout.piece_bytes(ids) for run, ids in zip(runs, here, strict=True)])
        enough = min(len(worth), -(-excess // int(num_bytes.min())))
        lowest = np.argpartition(worth, enough - 1)[:enough]
        lowest = lowest[np.argsort(worth[lowest], kind="stable")]
        count = int(np.searchsorted(num_bytes[lowest].cumsum(), excess)) + 1
        is_victim = np.zeros(len(worth), bool)
        is_victim[lowest[:count]] = True
        ends = np.cumsum([len(ids) for ids in here])
        for run, ids, mine in zip(runs, here, np.split(is_victim, ends[:-1]), strict=True):
            self._num_bytes -= run.remove(ids[mine])
        self._num_evicted += count

    def _forget(self, run: RunChunks) -> None:
        run.is_gone = True
        self._num_bytes -= run.remove(np.flatnonzero(run.is_here))

    def _shorten_tables(self) -> None:
        """Forget runs without a chunk in memory, the least recently opened first."""
        without = {number: run.table_bytes for number, run in self._runs.items() if not run.num_here}
        excess = sum(without.values()) - _TABLES_SHARE * self.max_bytes
        for number, num_bytes in list(without.items())[:-1]:  # the last one was just opened
            if excess <= 0:
                return
            self._runs.pop(number).is_gone = True
            excess -= num_bytes


class RunChunks:
    """The chunks of one run in memory, and the uses of all of its chunks. Readers call `take` and `put`.

    The cache calls the rest under its lock. The uses of a chunk are the logarithm of a growing sum, to which each use
    adds `2 ** (time in half lives)`: so the order of two chunks changes only when one of them is used.

    Attributes:
        is_here: by chunk, whether it is in memory.
        num_here: number of chunks in memory.
        num_bytes: bytes of these.
        is_gone: the cache has forgotten the run for good.
    """

    def __init__(self, cache: ChunkCache, layout: OrderedLayout, importance: NDArray[Any] | None) -> None:
        self.layout = layout
        self._cache = cache
        num_chunks = layout.num_pieces
        if importance is None:
            importance = 1 / (1 + np.minimum(np.arange(num_chunks) // layout.num_groups, layout.num_blocks))
        assert importance.shape == (num_chunks,) and importance.min() > 0
        self.is_here = np.zeros(num_chunks, np.bool_)
        self.num_here = self.num_bytes = 0
        self.is_gone = False
        self._importance = cache.policy.importance * np.log2(importance)
        self._uses = np.full(num_chunks, -np.inf)
        self._checksums = np.zeros(num_chunks, np.uint64)
        self._chunks = np.full(num_chunks, None, object)

    def take(self, ids: ChunkIds, checksums: NDArray[np.uint64]) -> list[UInt8Array | None]:
        """Return the chunks `ids`, all different, that are in memory with these checksums; each counts as used."""
        return self._cache.take(self, ids, checksums)

    def put(self, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> None:
        """Add verified chunks, if their worth is high enough; the caller must not write to them any more."""
        self._cache.put(self, ids, checksums, chunks)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables, without any chunk."""
        arrays = (self.is_here, self._importance, self._uses, self._checksums, self._chunks)
        return sum(array.nbytes for array in arrays)

    def worth(self, ids: ChunkIds) -> NDArray[np.float64]:
        """Return the logarithm of the worth of each chunk."""
        worth: NDArray[np.float64] = self._uses[ids] + self._importance[ids]
        return worth

    def use(
        self, ids: ChunkIds, checksums: NDArray[np.uint64], time: float
    ) -> tuple[list[UInt8Array | None], NDArray[np.bool_]]:
        """Count a use of each, at a time in half lives; return the chunks with these checksums, and which were hits."""
        self._uses[ids] = np.logaddexp2(self._uses[ids], time)
        is_hit: NDArray[np.bool_] = self.is_here[ids] & (self._checksums[ids] == checksums)
        chunks = self._chunks[ids]
        chunks[~is_hit] = None
        return chunks.tolist(), is_hit

    def keep(self, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> int:
        """Add chunks; return by how many bytes the total grows."""
        before = self.num_bytes
        self.remove(ids[self.is_here[ids]])
        for i, chunk in zip(ids.tolist(), chunks, strict=True):
            self._chunks[i] = chunk
        self._checksums[ids] = checksums
        self.is_here[ids] = True
        self.num_here += len(ids)
        self.num_bytes += int(self.layout.piece_bytes(ids).sum())
        return self.num_bytes - before

    def remove(self, ids: ChunkIds) -> int:
        """Remove chunks that are in memory; return their bytes."""
        num_bytes = int(self.layout.piece_bytes(ids).sum())
        self._chunks[ids] = None
        self.is_here[ids] = False
        self.num_here -= len(ids)
        self.num_bytes -= num_bytes
        return num_bytes

    def check(self) -> None:
        """Raise AssertionError unless counts and chunks agree."""
        chunks = {i: chunk for i, chunk in enumerate(self._chunks) if chunk is not None}
        assert list(chunks) == np.flatnonzero(self.is_here).tolist() and len(chunks) == self.num_here
        assert sum(chunk.nbytes for chunk in chunks.values()) == self.num_bytes
        assert not self.is_gone
