"""Rows of the index: a page and where it lies, a segment and how full it is.

Knows values, not SQL. A page's row has a checksum, for SQLite has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_digest

from .page_key import PageKey, pack_tokens, unpack_tokens
from .record import Place


@dataclass(frozen=True)
class PageRow:
    """A page, where it lies, and the count of uses when it was used last."""

    head: PageKey
    place: Place
    last_used: int

    def values(self) -> tuple[bytes | int, ...]:
        """The columns."""
        head, place = self.head, self.place
        columns = (head.key, head.parent_key, head.namespace, pack_tokens(head.token_ids), head.generated)
        where = (place.segment, place.number)
        return *columns, *where, self.last_used, _row_check(columns, where)

    @classmethod
    def of(cls, values: Sequence[Any]) -> PageRow | None:
        """The row that `values` are; None if they broke."""
        columns, where, last_used, row_check = values[:5], values[5:7], values[7], values[8]
        if not all(isinstance(value, bytes) for value in columns) or not isinstance(last_used, int):
            return None
        if not all(isinstance(value, int) for value in where) or row_check != _row_check(columns, where):
            return None
        key, parent, namespace, tokens, generated = columns
        return cls(PageKey(key, parent, namespace, unpack_tokens(tokens), generated), Place(*where), last_used)


@dataclass(frozen=True)
class SegmentRow:
    """A segment, and how far its pages are in the index."""

    number: int
    num_records: int
    sealed_at: int | None
    is_doomed: bool
    begun_at: float


def _row_check(columns: Sequence[bytes], where: Sequence[int]) -> bytes:
    framed = b"".join(len(column).to_bytes(4, "little") + column for column in columns)
    return xxh3_64_digest(
        framed + where[0].to_bytes(8, "little", signed=True) + where[1].to_bytes(8, "little", signed=True)
    )
