"""Encode the scores of the rows of pages as a record: how much attention each row got, and for how long.

Knows numbers and bytes, not their use. A record belongs to consecutive pages, and is rewritten when scores change; its
parent is the last of them, with which it is removed. The payload is float32, with one checksum::

    history   layer 0 head 0: tokens as in the text | layer 0 head 1 | ...
    first     likewise
    weight    of each token

An invalid record is not used again: its pages have no scores then.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....artifact.manifest import PAGE_SIZE, KVLayout
from ....errors import StoreError
from ....store.files import INDEX, Buffer, Files
from ....store.index import Index
from ....store.index_rows import RecordRow
from ....store.page_key import KEY_BYTES, PageKey, StoreIdentity
from ....store.record import CHECKSUM_BYTES, Kind, MissKind, RecordHeader, SingleRecord, checksum, padded
from ....store.single_records import SingleRecords, read_single
from ....store.store_state import PutResult

_VERSION: Final = 1  # of details and payload; others are ignored
_DETAILS: Final = struct.Struct(f"<HHIQQ{KEY_BYTES}s{CHECKSUM_BYTES}s")  # version, 0, pages, uses, next, key, checksum
_ITEM_BYTES: Final = 4
Float32Array = NDArray[np.float32]


@dataclass(frozen=True)
class RowScores:
    """The scores of the rows of whole pages, so that learning can continue after a restart.

    >>> scores = RowScores(history, first, weight, num_uses=9, next_at=16)
    >>> store.scores.put(page_keys, scores)
    >>> [(start, again)] = store.scores.read(page_keys)
    """

    history: Float32Array  # [layers, kv_heads, tokens]: attention of later prompts, faded by age
    first: Float32Array  # [layers, kv_heads, tokens]: of the prompt that computed the rows; never fades
    weight: Float32Array  # [tokens]: of the uses in the history, faded alike
    num_uses: int = 0  # prompts that found the first of the pages
    next_at: int = 1  # the count of uses at which the rows are stored in a better order

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the pages."""
        return len(self.weight)


@dataclass(frozen=True)
class ScoresHeader:
    """The header of a record of scores."""

    parent_key: bytes  # of the page before the first
    num_pages: int
    num_uses: int
    next_at: int
    checksum: bytes  # of the payload

    @classmethod
    def of(cls, header: RecordHeader) -> ScoresHeader | None:
        """Read the header of a record; None if it has no scores, or another version."""
        if header.kind != Kind.SCORES or len(header.details) != _DETAILS.size:
            return None
        version, _, num_pages, num_uses, next_at, parent_key, digest = _DETAILS.unpack(header.details)
        return cls(parent_key, num_pages, num_uses, next_at, digest) if version == _VERSION and num_pages else None

    def decode(self, kv: KVLayout, payload: Buffer) -> RowScores | None:
        """Decode the scores; None if the bytes are damaged."""
        if len(payload) != payload_bytes(kv, self.num_pages) or checksum(payload) != self.checksum:
            return None
        num_tokens = self.num_pages * PAGE_SIZE
        shape = kv.num_layers, kv.num_kv_heads, num_tokens
        numbers = np.frombuffer(payload, "<f4").astype(np.float32)
        history, first, weight = np.split(numbers, [num_rows := int(np.prod(shape)), 2 * num_rows])
        return RowScores(history.reshape(shape), first.reshape(shape), weight, self.num_uses, self.next_at)


def payload_bytes(kv: KVLayout, num_pages: int) -> int:
    """Return the bytes of the scores of this many pages."""
    return (2 * kv.num_layers * kv.num_kv_heads + 1) * num_pages * PAGE_SIZE * _ITEM_BYTES


def scores_record(kv: KVLayout, page_keys: Sequence[PageKey], scores: RowScores) -> SingleRecord:
    """Return the record of the scores of the given pages.

    Raises:
        StoreError: they belong to other pages, or are not finite.
    """
    shape = kv.num_layers, kv.num_kv_heads, len(page_keys) * PAGE_SIZE
    parts = scores.history, scores.first, scores.weight
    is_chain = all(page.parent_key == before.key for before, page in pairwise(page_keys))
    if not page_keys or not is_chain or [part.shape for part in parts] != [shape, shape, shape[2:]]:
        raise StoreError(
            f"{len(page_keys)} page keys and scores of {scores.num_tokens} tokens are not of the same pages"
        )
    if not all(np.isfinite(part).all() for part in parts):
        raise StoreError("some scores are not numbers; score the pages again")
    first, last = page_keys[0], page_keys[-1]
    payload = np.concatenate([part.astype("<f4").reshape(-1) for part in parts]).tobytes()
    fields = _VERSION, 0, len(page_keys), scores.num_uses, scores.next_at, first.parent_key, checksum(payload)
    hashed = blake2b(first.parent_key + last.key, digest_size=KEY_BYTES, person=b"radixlm/score/1")
    header = RecordHeader(Kind.SCORES, hashed.digest(), last.key, first.namespace, _DETAILS.pack(*fields))

    inside = {first.parent_key, *(page.key for page in page_keys)}

    def body_of(_: int) -> Iterator[list[Buffer]]:
        yield [payload, bytes(padded(len(payload)) - len(payload))]

    def replaces(other: RecordHeader) -> bool:
        """Return whether other scores belong to a part of these pages."""
        old = ScoresHeader.of(other)
        return old is not None and old.parent_key in inside

    return SingleRecord(header, len(payload), body_of, replaces)


class FoundScores(NamedTuple):
    """The scores of pages, and the index of the first one."""

    start: int
    scores: RowScores


class StoredScores:
    """The stored scores of pages' rows."""

    def __init__(self, singles: SingleRecords) -> None:
        self._directory, self._identity, self._files = singles.directory, singles.identity, singles.files
        self._state, self._guard, self._put = singles.state, singles.guard, singles.put

    def put(self, page_keys: Sequence[PageKey], scores: RowScores) -> PutResult:
        """Store scores of stored pages, replacing older ones of these pages; see `RowRecords.put_ordered`.

        Raises:
            StoreError: the scores belong to other pages.
        """
        return self._put(scores_record(self._identity.kv, page_keys, scores), page_keys)

    def read(self, page_keys: Sequence[PageKey]) -> list[FoundScores]:
        """Read the attention scores that are stored for runs of these pages, the latest last.

        For the same page the later ones count. For any thread.

        Args:
            page_keys: from the start of a prompt, or of the searched pages.
        """
        with self._guard():
            if self._state.off_because is None and page_keys:
                return self._read(page_keys)
        return []

    def _read(self, page_keys: Sequence[PageKey]) -> list[FoundScores]:
        """Return the valid scores of pages among these, in the order in which they were written."""
        keys = [page.key for page in page_keys]
        with closing(Index.open_to_read(self._directory / INDEX)) as index:
            rows = index.rows_below(keys, Kind.SCORES)
        starts, stops = (
            {page.parent_key: at for at, page in enumerate(page_keys)},
            {k: at + 1 for at, k in enumerate(keys)},
        )
        found: list[FoundScores] = []
        for row in sorted(rows, key=lambda row: row.place.segment):  # segments are numbered in order of time
            header = ScoresHeader.of(row.header)
            if header is None or self._state.is_bad(row.header.key):
                continue
            start, stop = starts.get(header.parent_key), stops[row.header.parent_key]
            if start is None or stop - start != header.num_pages:
                continue
            read = read_scores(self._directory, self._files, self._identity, row)
            if isinstance(read, RowScores):
                found.append(FoundScores(start, read))
            else:
                self._state.add_wrong(row.header.key, read)
        return found


def read_scores(directory: Path, files: Files, identity: StoreIdentity, row: RecordRow) -> RowScores | MissKind:
    """Read the record of scores that a row of the store's index locates. Returns what is wrong if it is invalid."""
    header = ScoresHeader.of(row.header)
    if header is None:
        return "header"
    payload = read_single(directory, files, identity, row, payload_bytes(identity.kv, header.num_pages))
    return payload if isinstance(payload, str) else header.decode(identity.kv, payload.data) or "payload"
