"""What the disk tier tells of itself: for metrics, `/health` and the curious."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class LoadCounts:
    """What became of transfers since the start."""

    num_loads: int = 0  # begun
    num_from_end: int = 0  # of those, from the back
    num_late: int = 0  # not there in time: the rest was computed
    num_cut: int = 0  # turned out slower than computing
    num_broken: int = 0  # met a page that was not right, or found no room
    num_refused: int = 0  # prefixes on disk that computing had as quickly
    num_pages: int = 0  # inserted into memory


@dataclass(frozen=True)
class TierStats:
    """The tier's state now, and what it did since it was opened; pages are of `PAGE_SIZE` tokens."""

    off_because: str | None  # why the store turned itself off; None: it works
    num_pages: int  # that can be found on disk
    num_bytes: int  # of the store's files
    max_bytes: int
    num_waiting: int  # requests that wait for a load
    num_loads: int
    num_loads_from_end: int  # of those, beside a request that computed the beginning
    num_loads_late: int  # not there in time: the rest was computed
    num_loads_cut: int  # turned out slower than computing
    num_loads_broken: int  # met a page that was not right, or found no room
    num_loads_refused: int  # computing was as quick
    num_loaded_pages: int
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
    misses_by_kind: Mapping[str, int] = field(default_factory=dict)
    extra: object | None = None  # what the tier's extra counts; None: there is none
