"""Large records beside pages: what they are found, read and stored with, and what a store asks of those who write them.

States of recurrent models are such records; extras bring kinds of their own. Each has a segment to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .files import Files
from .index_rows import RecordRow
from .page_key import PageKey, StoreIdentity
from .record import Kind, MissKind, Record, RecordHeader, SingleRecord
from .recovery import DiskGuard
from .store_state import PutResult, StoreState


@dataclass(frozen=True)
class SingleRecords:
    """What a store lends to those who keep large records in it.

    Attributes:
        guard: held while the disk is used; it turns the store off where that fails.
        put: stores a record beside pages that are there; by the thread that puts.
    """

    directory: Path
    identity: StoreIdentity
    files: Files
    state: StoreState
    guard: DiskGuard
    put: Callable[[SingleRecord, Sequence[PageKey]], PutResult]


class RecordKind(Protocol):
    """One kind of large records, for what goes through all records of a directory."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """Whether another version of radixlm wrote a record, which is found no more."""
        ...

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read the payload of a record whose header is right: how many bytes were read, and what is wrong with it."""
        ...


RecordKinds = Mapping[Kind, RecordKind]


class StorePart(Protocol):
    """Large records of an extra, attached to a store by `PageStore.attach`."""

    @property
    def kinds(self) -> RecordKinds:
        """The kinds that it writes."""
        ...

    def removed(self, segments: Sequence[int]) -> None:
        """Forget what is in memory of segments that are no more; by the thread that puts."""
        ...

    def close(self) -> None:
        """Close files; called once, before the store's own."""
        ...
