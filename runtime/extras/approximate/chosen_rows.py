"""The interface of sources of chosen rows, as the loader sees it, and their counts. Protocols and values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...cache.prefix_match import PrefixMatch
from ...prefix.disk_index import StoredPrefix
from ...prefix.loaded_prefix import LoadedRows
from .records.chunk_cache import ChunkCacheStats


@dataclass(frozen=True)
class WantedRows:
    """A prompt with more pages on disk than in memory, and the share of its rows that is enough for the request."""

    match: PrefixMatch  # the disk's match of the prompt
    prefix: StoredPrefix
    num_in_memory: int  # pages of the prefix
    share: float  # of the rows, above 0 and below 1


@dataclass(frozen=True)
class Stage:
    """A read of a row source. `run` is called in the reader's thread, and returns whether the data is valid."""

    run: Callable[[], bool]  # approximate bytes to read
    num_bytes: int = 0  # that it reads, about


class RowSource(Protocol):
    """Reads chosen rows of a stored prefix for one request, stage by stage.

    A transfer asks for a stage, has the reader thread run it, and asks for the next one when it has ended with valid
    data. `next_stage` and `run` are never called at once. Anything that raises or is invalid ends the transfer, and the
    request is served from exact pages. All other methods are called in the engine's thread, between two steps.

    Attributes:
        computes_next: `next_stage` runs a forward; at most one runs between two steps.
        is_not_enough: the last stage found that the rows are not enough for the prompt.
    """

    computes_next: bool
    is_not_enough: bool

    def next_stage(self) -> Stage | None:
        """Return the next read; None if all is read.

        Raises:
            TransferRefused: exact pages are as fast.
            OutOfPages, SparseSpanError: the forward cannot run now.
        """
        ...

    def rows(self) -> LoadedRows:
        """Return the rows, for opening the request's sequence; called once, after the last stage."""
        ...

    def late(self) -> None:
        """Record that the request has waited too long. `close` follows."""
        ...

    def close(self) -> None:
        """Close files. The transfer has ended, and the reader thread has finished its last stage."""
        ...


class TransferRefused(Exception):
    """The end of a row source's transfer because exact pages are as fast."""


class RowSources(Protocol):
    """Makes row sources, and caches what they share. All methods are called in the engine's thread."""

    @property
    def least_share(self) -> float:
        """The least share of rows: a request that allows less gets this share, and all rows if it is 1."""
        ...

    @property
    def num_read_bytes(self) -> int:
        """Bytes that closed sources requested from disk."""
        ...

    @property
    def chunks(self) -> ChunkCacheStats | None:
        """The statistics of the cache of frequently read rows; None if there is none."""
        ...

    def source(self, wanted: WantedRows) -> RowSource | None:
        """Return a source of rows for a request; None if its prompt is unsuitable."""
        ...

    def read_ahead(self) -> None:
        """Read something for later requests. Called when the disk is idle."""
        ...

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop cached data of the runs of one namespace, or of all."""
        ...

    def close(self) -> None:
        """Close files; the reader must have ended."""
        ...


@dataclass
class ChosenCounts:
    """The outcomes of requests for which a share of the rows is enough; all but the first were served exactly."""

    num_loaded: int = 0
    num_refused: int = 0  # all rows were as fast, there was no room, or the prompt is unsuitable
    num_disagreed: int = 0  # too much of the prompt's attention would have been dropped
    num_broken: int = 0  # some pages have no ordered run, or an invalid one, or there was no page
    num_late: int = 0
    num_tokens: int = 0  # of partly loaded prefixes
    num_missing_bytes: int = 0  # of their KV that was left out


@dataclass(frozen=True)
class PartStats:
    """The statistics of partly loaded prefixes since the tier was opened."""

    chosen: ChosenCounts = field(default_factory=ChosenCounts)
    num_rewritten_runs: int = 0  # stored in a better order
    num_dropped_rewrites: int = 0  # skipped, because too many were waiting
    num_promoted: int = 0  # prefixes loaded into memory whole, because parts of them were requested often
    chunks: ChunkCacheStats | None = None  # statistics of the cache of runs; None: there is none
