"""Chunks of ordered runs kept in memory: which stay is told by how often and how lately they were used.

A chunk is kept under the number of its run's file, after its checksum agreed, and is given out only to who expects that
very checksum; it goes with its run. What makes room is the chunk that is worth least, be it new or old::

    worth = (sum of 2 ** (-age / half life) over its uses) * importance ** weight

With weight 0 that is LRFU (Lee et al., IEEE Transactions on Computers 50, 2001): half lives from nothing to for ever
lead from LRU to LFU. Uses of chunks that had to go are remembered with their run. Knows places and bytes, not files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .cached_run import CachedRun, ChunkIds
from .ordered_layout import OrderedLayout
from .ordered_run import UInt8Array

_BOOKS_SHARE: Final = 0.02  # of `max_bytes`, for the uses of runs of which no chunk is here


@dataclass(frozen=True)
class Policy:
    """What a chunk is worth beside others."""

    half_life: float  # of a use, in times that as many bytes were wanted as the cache holds
    importance: float = 0.0  # weight


LRU: Final = Policy(1e-6)
LFU: Final = Policy(1e6)
FADING: Final = Policy(4.0)  # beside LFU while the same runs are wanted, before LRU when others are: bench/LOG.md


@dataclass(frozen=True)
class ChunkCacheStats:
    """Counts since the cache was made, and what is here now."""

    num_bytes: int
    max_bytes: int
    num_hits: int
    hit_bytes: int
    num_misses: int
    num_evicted: int


class ChunkCache:
    """Chunks of the runs of one store. Any thread may use it; what it gives out nobody may write to.

    Readers may still hold chunks that have just gone; books take 33 bytes a chunk, here or not, of each run that has
    one here, and a fiftieth of `max_bytes` for others.

    >>> cache = ChunkCache(64 << 20)
    >>> run = store.open_ordered(heads, chunks=cache)

    Args:
        max_bytes: of all chunks together.

    Raises:
        StoreError: that is no room at all.
    """

    def __init__(self, max_bytes: int, *, policy: Policy = FADING) -> None:
        if max_bytes <= 0:
            raise StoreError(f"a cache of {max_bytes} bytes holds no chunk; leave it away")
        self.max_bytes = max_bytes
        self.policy = policy
        self._lock = threading.Lock()  # of all below, and of what is in them
        self._runs: dict[int, CachedRun] = {}  # by number, the one that was opened last at the end
        self._num_bytes = self._wanted_bytes = 0
        self._num_hits = self._hit_bytes = self._num_misses = self._num_evicted = 0

    def of_run(self, number: int, layout: OrderedLayout, importance: NDArray[Any] | None = None) -> RunChunks:
        """The part of it that is of the run in file `number`.

        Args:
            importance: of each chunk as it lies in the file, more than 0, for policies that weigh it; None: chunks of
                block `b` have `1 / (1 + b)`.
        """
        with self._lock:
            run = self._runs.pop(number, None)
            if run is not None and run.layout != layout:  # a file of a store that was opened anew
                self._let_go(run)
                run = None
            if run is None:
                run = CachedRun(layout, importance, self.policy.importance)
            self._runs[number] = run
            self._shorten_books()
        return RunChunks(self, run)

    def drop(self, number: int) -> None:
        """A run is gone: let go of its chunks, and keep none of what those bring who still read it."""
        with self._lock:
            run = self._runs.pop(number, None)
            if run is not None:
                self._let_go(run)

    def stats(self) -> ChunkCacheStats:
        """Counts as of now."""
        with self._lock:
            return ChunkCacheStats(
                num_bytes=self._num_bytes,
                max_bytes=self.max_bytes,
                num_hits=self._num_hits,
                hit_bytes=self._hit_bytes,
                num_misses=self._num_misses,
                num_evicted=self._num_evicted,
            )

    def check(self) -> None:
        """Assert that the books agree with what is here, and that the bound holds."""
        with self._lock:
            for run in self._runs.values():
                run.check()
            num_bytes = sum(run.num_bytes for run in self._runs.values())
            assert num_bytes == self._num_bytes <= self.max_bytes, f"{num_bytes} of {self._num_bytes} bytes"

    # By `RunChunks`.

    def take(self, run: CachedRun, ids: ChunkIds, checksums: NDArray[np.uint64]) -> list[UInt8Array | None]:
        """See `RunChunks.take`."""
        num_bytes = run.sizes(ids)
        with self._lock:
            run.use(ids, self._wanted_bytes / self.max_bytes / self.policy.half_life)
            self._wanted_bytes += int(num_bytes.sum())
            chunks, is_hit = run.find(ids, checksums)
            self._num_hits += int(is_hit.sum())
            self._num_misses += len(ids) - int(is_hit.sum())
            self._hit_bytes += int(num_bytes[is_hit].sum())
        return chunks

    def put(self, run: CachedRun, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> None:
        """See `RunChunks.put`."""
        with self._lock:
            if run.is_gone:
                return
            self._num_bytes += run.keep(ids, checksums, chunks)
            self._make_room()

    def _make_room(self) -> None:
        """Let the chunks go that are worth least of all, until the rest fits."""
        excess = self._num_bytes - self.max_bytes
        if excess <= 0:
            return
        runs = [run for run in self._runs.values() if run.num_here]
        here = [np.flatnonzero(run.is_here) for run in runs]
        worth = np.concatenate([run.worth(ids) for run, ids in zip(runs, here, strict=True)])
        num_bytes = np.concatenate([run.sizes(ids) for run, ids in zip(runs, here, strict=True)])
        enough = min(len(worth), -(-excess // int(num_bytes.min())))
        lowest = np.argpartition(worth, enough - 1)[:enough]
        lowest = lowest[np.argsort(worth[lowest], kind="stable")]
        count = int(np.searchsorted(num_bytes[lowest].cumsum(), excess)) + 1
        is_victim = np.zeros(len(worth), bool)
        is_victim[lowest[:count]] = True
        ends = np.cumsum([len(ids) for ids in here])
        for run, ids, mine in zip(runs, here, np.split(is_victim, ends[:-1]), strict=True):
            self._num_bytes -= run.let_go(ids[mine])
        self._num_evicted += count

    def _let_go(self, run: CachedRun) -> None:
        run.is_gone = True
        self._num_bytes -= run.let_go(np.flatnonzero(run.is_here))

    def _shorten_books(self) -> None:
        """Forget runs of which no chunk is here, those first that were opened longest ago."""
        without = {number: run.books_bytes for number, run in self._runs.items() if not run.num_here}
        excess = sum(without.values()) - _BOOKS_SHARE * self.max_bytes
        for number, num_bytes in list(without.items())[:-1]:  # the last one was opened now
            if excess <= 0:
                return
            self._runs.pop(number).is_gone = True
            excess -= num_bytes


@dataclass(frozen=True)
class RunChunks:
    """What a cache has of one run, for who reads it."""

    cache: ChunkCache
    run: CachedRun

    def take(self, ids: ChunkIds, checksums: NDArray[np.uint64]) -> list[UInt8Array | None]:
        """The chunks `ids`, which are all different, where they are here with these checksums; each counts as used."""
        return self.cache.take(self.run, ids, checksums)

    def put(self, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> None:
        """Keep chunks whose checksums agreed, and to which nobody will write, if they are worth it."""
        self.cache.put(self.run, ids, checksums, chunks)
