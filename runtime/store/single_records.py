"""Large records of pages, each in a segment of its own: states of recurrent models, and kinds added by extras.

Defines how they are found, read and stored, and the interface for extras that write them. Knows index and files, not
the contents of a state. A state that is not valid is not found again; the tokens after its page are then computed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .files import INDEX, Buffer, Files, read_all
from .index import Index
from .index_rows import RecordRow
from .page_key import KEY_BYTES, PageKey, StoreIdentity
from .record import CHECKSUM_BYTES, Kind, MissKind, Record, RecordHeader, SingleRecord, checksum, padded
from .recovery import DiskGuard
from .segment import Segment, read_record
from .store_state import PutResult, StoreState


@dataclass(frozen=True)
class SingleRecords:
    """The parts of a store that writers of large records need.

    Attributes:
        guard: held while the disk is used; it turns the store off if the disk fails.
        put: stores a record of pages that are stored; for the thread that puts.
    """

    directory: Path
    identity: StoreIdentity
    files: Files
    state: StoreState
    guard: DiskGuard
    put: Callable[[SingleRecord, Sequence[PageKey]], PutResult]


class RecordKind(Protocol):
    """One kind of large records, for code that visits all records of a directory."""

    def is_outdated(self, header: RecordHeader) -> bool:
        """Return whether another version of radixlm wrote the record, so that it is never found."""
        ...

    def check(
        self, directory: Path, files: Files, identity: StoreIdentity, row: RecordRow, record: Record
    ) -> tuple[int, MissKind | None]:
        """Read the payload of a record whose header is valid; return the bytes read and the fault, if any."""
        ...


RecordKinds = Mapping[Kind, RecordKind]


class StorePart(Protocol):
    """The large records of an extra, in the `parts` of a `PageStore`."""

    @property
    def kinds(self) -> RecordKinds:
        """The kinds of records that it writes."""
        ...

    def removed(self, segments: Sequence[int]) -> None:
        """Forget data in memory about segments that were removed; called by the thread that puts."""
        ...

    def close(self) -> None:
        """Close files; called once, before the store closes its own."""
        ...


_VERSION: Final = 1  # of details and payload; records of other versions are ignored
_DETAILS: Final = struct.Struct(f"<HHIQ{CHECKSUM_BYTES}s")  # version, 0, 0, bytes of the payload, their checksum


class StoredStates:
    """The recurrent states in a store."""

    def __init__(self, singles: SingleRecords) -> None:
        self._directory, self._identity, self._files = singles.directory, singles.identity, singles.files
        self._state, self._guard, self._put = singles.state, singles.guard, singles.put

    def put(self, page: PageKey, state: NDArray[np.uint8]) -> PutResult:
        """Store the recurrent state after a stored page; it is removed with that page, or before.

        For the thread that puts. All states take at most half of the store.
        """
        return self._put(state_record(self._identity, page, state), [page])

    def read(self, page: PageKey, out: NDArray[np.uint8]) -> bool:
        """Read the state after a page and record its use; return whether there is a valid one of this size.

        For any thread.
        """
        with self._guard():
            if self._state.off_because is None:
                return self._read(page, out)
        return False

    def _read(self, page: PageKey, out: NDArray[np.uint8]) -> bool:
        """Read the state after a page, and count a miss if there is none or if it is bad; see `read`."""
        key = state_key(self._identity, page.key)
        with closing(Index.open_to_read(self._directory / INDEX)) as index:
            row = next((row for row in index.rows_below([page.key], Kind.STATE) if row.header.key == key), None)
        if row is None or self._state.is_bad(key):
            self._state.add_miss("absent")
            return False
        if (miss := read_state(self._directory, self._files, self._identity, row, out)) is not None:
            self._state.add_wrong(key, miss)
            return False
        self._state.touch([key, page.key])
        return True


def state_key(identity: StoreIdentity, page_key: bytes) -> bytes:
    """Return the key of the state after a page."""
    return blake2b(identity.digest + page_key, digest_size=KEY_BYTES, person=b"radixlm/state/1").digest()


def state_record(identity: StoreIdentity, page: PageKey, state: NDArray[np.uint8]) -> SingleRecord:
    """Return the record that stores the model's state, as it is after the tokens of a page."""
    payload = np.ascontiguousarray(state).data
    details = _DETAILS.pack(_VERSION, 0, 0, state.nbytes, checksum(payload))
    header = RecordHeader(Kind.STATE, state_key(identity, page.key), page.key, page.namespace, details)

    def body_of(_: int) -> Iterator[list[Buffer]]:
        yield [payload, bytes(padded(state.nbytes) - state.nbytes)]

    return SingleRecord(header, state.nbytes, body_of)


def read_state(
    directory: Path,
    files: Files,
    identity: StoreIdentity,
    row: RecordRow,
    out: NDArray[np.uint8] | None = None,
) -> MissKind | None:
    """Read a state into `out`, or only verify it; return what is wrong with its record, None if nothing is."""
    header = row.header
    if header.kind != Kind.STATE or len(header.details) != _DETAILS.size:
        return "header"
    version, _, _, num_bytes, digest = _DETAILS.unpack(header.details)
    if version != _VERSION or header.key != state_key(identity, header.parent_key):
        return "header"
    payload = read_single(directory, files, identity, row, num_bytes, out)
    if isinstance(payload, str):
        return payload
    return None if checksum(payload.data) == digest else "payload"


def read_single(
    directory: Path,
    files: Files,
    identity: StoreIdentity,
    row: RecordRow,
    num_bytes: int,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8] | MissKind:
    """Read the payload of a single record, `num_bytes` bytes, into `out` if given; return it, or what is wrong."""
    try:
        fd = files.open(directory / Segment(row.place.segment, identity, is_single=True).name)
    except FileNotFoundError:
        return "gone"
    try:
        record = read_record(files, fd, row.place.block)
        if record is None:
            return "header"
        if (miss := record.unlike(identity.digest, row.header, row.place, len(row.header.details))) is not None:
            return miss
        if record.payload_bytes != num_bytes or (out is not None and out.nbytes != num_bytes):
            return "place"
        payload = np.empty(num_bytes, np.uint8) if out is None else out
        num_read = read_all(files, fd, [payload.data], row.place.offset + row.header.num_bytes)
        return "short" if num_read < num_bytes else payload
    finally:
        files.close(fd)
