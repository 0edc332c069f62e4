"""Counts of a disk tier, and the hooks for its extra, which offers rows to requests and observes prompts.

Values and protocols only. Without an extra the tier loads and saves whole pages. All methods of the protocols are
called in the engine's thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..cache.radix_node import Node
from ..cache.sequence import Sequence
from ..store.record import MissKind
from .loaded_prefix import PrefixLookup


@dataclass
class LoadCounts:
    """Counts of transfers since the start."""

    num_loads: int = 0  # begun
    num_loads_from_end: int = 0  # begun from the back, while a request computed the beginning
    num_loads_late: int = 0  # past the deadline: the rest was computed
    num_loads_cut: int = 0  # turned out slower than computing
    num_loads_broken: int = 0  # ended by an invalid page, or for lack of room
    num_loads_refused: int = 0  # prefixes on disk that could be computed as fast
    num_loaded_pages: int = 0  # inserted into memory


@dataclass(kw_only=True)
class TierStats(LoadCounts):
    """Current state of the tier, and counts since it was opened; pages have `PAGE_SIZE` tokens."""

    off_because: str | None  # why the store turned itself off; None while it works
    num_pages: int  # pages that can be found on disk
    num_bytes: int  # size of the store's files
    max_bytes: int
    num_waiting: int  # requests that wait for a load
    num_read_bytes: int
    num_saved_pages: int
    num_dropped_pages: int  # not saved, because the queue was full
    num_written_bytes: int
    num_queued_bytes: int  # waiting to be written
    num_evicted_pages: int  # evicted from disk
    disk_bytes_per_s: float | None  # measured; None if not measured yet
    num_states: int = 0  # recurrent models: states that can be found on disk
    num_saved_states: int = 0
    num_dropped_states: int = 0  # not saved, because the queue was full
    misses_by_kind: Mapping[MissKind, int] = field(default_factory=dict)
    extra: object | None = None  # counts of the tier's extra; None without an extra


class RowOffers(Protocol):
    """Offers rows of a stored prefix, with which a sequence can begin instead of the prefix's pages."""

    def begin(self, wanted: PrefixLookup) -> bool:
        """Return whether the request waits for rows.

        It then continues with them by `DiskTier.go_on`, or without them by `DiskTier.load_pages`.
        """
        ...

    def abandon(self, name: str) -> None:
        """Drop the offer to a request that has ended."""
        ...

    def end(self, namespace: bytes | None = None) -> None:
        """Drop the offers to requests of a namespace, or all; the requests continue before the next step."""
        ...

    def read_ahead(self) -> None:
        """Read data for later requests, if the disk is idle."""
        ...

    def close(self) -> None:
        """Close files; the reader has ended."""
        ...


class Observer(Protocol):
    """Observes which rows prompts attend to, and stores its observations while nothing else is to be written."""

    @property
    def is_ready(self) -> bool:
        """Return whether `advance` has something to store, and the writer is idle."""
        ...

    def advance(self) -> None:
        """Pass the next part of the observations to the writer. Called when no page waits to be saved."""
        ...

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        """Record that a sequence's prompt was computed, and how much of its cached beginning it reused.

        The first `num_reused` tokens were found in the cache, unless the sequence began with offered rows.

        A sequence without a namespace shares nothing.
        """
        ...

    def leaving(self, node: Node) -> None:
        """Store observations of a node that is about to be evicted from memory."""
        ...

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop observations that wait to be stored, of one namespace or all."""
        ...

    def close(self) -> None:
        """Store the remaining observations; the last call."""
        ...


class TierExtra(Protocol):
    """The extra of one tier, with both hooks."""

    @property
    def offers(self) -> RowOffers: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def num_read_bytes(self) -> int:
        """Bytes that the extra itself read from disk."""
        ...

    def stats(self) -> object:
        """Return current counts, for callers that know the extra; from any thread."""
        ...
