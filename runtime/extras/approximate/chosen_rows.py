"""What reads chosen rows of stored prefixes, as the loader sees it, and counts of them. Protocols and values only."""

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
    """A prompt of which the disk has more than memory, and the share of its rows that is enough for the request."""

    match: PrefixMatch  # what the disk has of the prompt
    prefix: StoredPrefix
    num_in_memory: int  # pages of the prefix
    share: float  # of the rows, above 0 and below 1


@dataclass(frozen=True)
class Stage:
    """A read of a row source. `run` is called in the reader's thread, and returns whether what it read is right."""

    run: Callable[[], bool]
    num_bytes: int = 0  # that it reads, about


class RowSource(Protocol):
    """Reads chosen rows of a stored prefix for one request, stage by stage.

    A transfer asks for a stage, has the reader thread run it, and asks for the next one when it has ended and was
    right. `next_stage` and `run` are never called at once. Whatever raises or is not right ends the transfer, and the
    request is served from exact pages. All other methods are called in the engine's thread, between two steps.

    Attributes:
        computes_next: `next_stage` runs a forward; at most one does between two steps.
        is_not_enough: the last stage found that the rows are not enough for the prompt.
    """

    computes_next: bool
    is_not_enough: bool

    def next_stage(self) -> Stage | None:
        """What to read next; None: all is read.

        Raises:
            TransferRefused: exact pages are as quick.
            OutOfPages, SparseSpanError: the forward cannot run now.
        """
        ...

    def rows(self) -> LoadedRows:
        """What was read, for the engine to open the request's sequence with; asked once, after the last stage."""
        ...

    def late(self) -> None:
        """Note that the request has waited too long. `close` follows."""
        ...

    def close(self) -> None:
        """Close files. The transfer has ended, and the reader thread is done with its last stage."""
        ...


class TransferRefused(Exception):
    """A row source's transfer ends, because exact pages are as quick."""


class RowSources(Protocol):
    """Makes row sources, and keeps in memory what they share. All methods are called in the engine's thread."""

    @property
    def least_share(self) -> float:
        """Of the rows: a request that asks for less gets as many, and all if it is 1."""
        ...

    @property
    def num_read_bytes(self) -> int:
        """Bytes that closed sources asked of the disk."""
        ...

    @property
    def chunks(self) -> ChunkCacheStats | None:
        """What memory keeps of rows that are read often; None: nothing is kept."""
        ...

    def source(self, wanted: WantedRows) -> RowSource | None:
        """What reads rows for a request; None: its prompt does not suit."""
        ...

    def read_ahead(self) -> None:
        """Read something for later requests. Called when the disk has nothing to read."""
        ...

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what memory keeps of the runs of one namespace, or of all."""
        ...

    def close(self) -> None:
        """Close files; the reader has ended."""
        ...


@dataclass
class ChosenCounts:
    """What became of the requests for which a share of the rows is enough; all but the first were served exactly."""

    num_loaded: int = 0
    num_refused: int = 0  # all was as quick, there was no room, or the prompt does not suit
    num_disagreed: int = 0  # too much of the prompt's attention would have been dropped
    num_broken: int = 0  # some pages have no ordered run, or one that is not right, or there was no page
    num_late: int = 0
    num_tokens: int = 0  # of the prefixes that were loaded in part
    num_missing_bytes: int = 0  # of their keys and values, what was left out


@dataclass(frozen=True)
class PartStats:
    """What became of parts of prefixes since the tier was opened."""

    chosen: ChosenCounts = field(default_factory=ChosenCounts)
    num_rewritten_runs: int = 0  # stored in a better order, too
    num_dropped_rewrites: int = 0  # were to be, and too many waited
    num_promoted: int = 0  # prefixes that came to memory whole, because parts of them were asked for often
    chunks: ChunkCacheStats | None = None  # what memory keeps of runs; None: nothing
