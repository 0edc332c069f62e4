"""What a disk tier counts, and what an extra adds to one: it offers requests rows to begin with, and observes prompts.

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
from .loaded_prefix import Wanted


@dataclass
class LoadCounts:
    """What became of transfers since the start."""

    num_loads: int = 0  # begun
    num_loads_from_end: int = 0  # of those, beside a request that computed the beginning
    num_loads_late: int = 0  # not there in time: the rest was computed
    num_loads_cut: int = 0  # turned out slower than computing
    num_loads_broken: int = 0  # met a page that was not right, or found no room
    num_loads_refused: int = 0  # prefixes on disk that computing had as quickly
    num_loaded_pages: int = 0  # inserted into memory


@dataclass(kw_only=True)
class TierStats(LoadCounts):
    """The tier's state now, and what it did since it was opened; pages are of `PAGE_SIZE` tokens."""

    off_because: str | None  # why the store turned itself off; None: it works
    num_pages: int  # that can be found on disk
    num_bytes: int  # of the store's files
    max_bytes: int
    num_waiting: int  # requests that wait for a load
    num_read_bytes: int
    num_saved_pages: int
    num_dropped_pages: int  # were to be saved, and the queue was full
    num_written_bytes: int
    num_queued_bytes: int  # to be written
    num_evicted_pages: int  # made room on disk
    disk_bytes_per_s: float | None  # as measured; None: not yet
    num_states: int = 0  # of a recurrent model, that can be found on disk
    num_saved_states: int = 0
    num_dropped_states: int = 0  # were to be saved, and the queue was full
    misses_by_kind: Mapping[MissKind, int] = field(default_factory=dict)
    extra: object | None = None  # what the tier's extra counts; None: there is none


class Offers(Protocol):
    """Offers rows of a stored prefix, for a sequence to begin with instead of the prefix's pages."""

    def begin(self, wanted: Wanted) -> bool:
        """Return whether the request is to wait for rows. Then it goes on with them by `DiskTier.go_on`, or without by
        `DiskTier.load_pages`.
        """
        ...

    def abandon(self, name: str) -> None:
        """Drop the offer to a request that has ended."""
        ...

    def end(self, namespace: bytes | None = None) -> None:
        """Drop the offers to the requests of a namespace, or all; the requests go on before the next step."""
        ...

    def read_ahead(self) -> None:
        """Read something for later requests, if the disk has nothing to read."""
        ...

    def close(self) -> None:
        """Close files; the reader has ended."""
        ...


class Observer(Protocol):
    """Learns which rows prompts attend to, and stores what it learned while nothing else is to be written."""

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to store, and the writer is idle."""
        ...

    def advance(self) -> None:
        """Have the writer store the next part of what was learned. Called when no page waits to be saved."""
        ...

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        """Note that the prompt of a sequence is computed: it begins with offered rows, or else its first `num_reused`
        tokens were found. One without a namespace does not share anything.
        """
        ...

    def leaving(self, node: Node) -> None:
        """Have stored what was learned of a node that is about to leave memory."""
        ...

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits to be stored, of one namespace or all."""
        ...

    def close(self) -> None:
        """Have stored what was learned and is not; the last call."""
        ...


class TierExtra(Protocol):
    """Both hooks, for one tier."""

    @property
    def offers(self) -> Offers: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def num_read_bytes(self) -> int:
        """Bytes that it asked of the disk itself."""
        ...

    def stats(self) -> object:
        """Counts as of now, for whoever knows the extra; from any thread."""
        ...
