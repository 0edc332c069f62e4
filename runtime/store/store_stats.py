"""What a store says of itself: frozen numbers, made at a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .record import MissKind


@dataclass(frozen=True)
class PutResult:
    """What became of pages that were to be stored."""

    stored: tuple[bytes, ...]  # keys of the batch that are on disk now, those that were there before among them
    evicted: tuple[bytes, ...]  # keys that are there no more


@dataclass(frozen=True)
class RecoveryReport:
    """What opening a directory found to mend; all zeros after a clean end."""

    num_adopted: int = 0  # pages behind the index's end that are whole, and are there now
    num_cut: int = 0  # records that are not whole, or whose file is gone: not there any more
    num_segments_dropped: int = 0  # files without a header that can be read
    num_unreachable: int = 0  # pages without those before them
    was_index_rebuilt: bool = False


@dataclass(frozen=True)
class StoreStats:
    """Since the directory was opened, but for its sizes."""

    num_pages: int  # of this model
    num_segments: int  # of all models, as are the bytes
    num_bytes: int  # of pages and ordered runs
    num_ordered_bytes: int  # of them, of ordered runs
    max_bytes: int
    num_pages_read: int
    read_bytes: int  # asked of the disk
    num_pages_written: int
    num_pages_evicted: int
    misses: Mapping[MissKind, int]
    read_bytes_per_s: float | None  # as measured lately; None: nothing was read yet
    recovery: RecoveryReport
    off_because: str | None  # why the store turned itself off

    @property
    def is_off(self) -> bool:
        """Whether reads find nothing and writes are dropped."""
        return self.off_because is not None


@dataclass(frozen=True)
class VerifyReport:
    """What reading everything found."""

    num_pages: int  # that are right
    num_bytes: int  # read
    bad: Mapping[MissKind, int]  # pages that are not, by what is wrong
    bad_keys: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class GCReport:
    """What collecting found."""

    num_segments_removed: int
    num_pages_moved: int
    bytes_before: int
    bytes_after: int
