"""The bytes of a record: a header in blocks of 4 KiB, then the payload.

Knows layouts and checksums, not files. A record contains its own place, so that one that was moved or left over is
never taken for another. Its kind defines its details and its payload::

    0     magic, format version, kind, bytes of the details, bytes of the payload, segment, block where it begins
    40    digest of the identity, key, parent's key, checksum of the payload, length of the namespace, the namespace
    410   the details of its kind
          zeros, to a multiple of 4096 less 16
          checksum of all before
          the payload, and zeros up to a multiple of 4096

Removing a page also removes every record that names it as its parent. The parent is the page before it in the prompt,
or the last page that the record depends on. Checksums are XXH3-128: they detect damage, at 34 GB/s instead of BLAKE2b's
1.4. The key must not be forged, so it is a BLAKE2b hash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

from xxhash import xxh3_128_digest

from ..errors import StoreMismatch
from .files import Buffer
from .page_key import KEY_BYTES, MAX_NAMESPACE_BYTES, NO_PARENT, PAGE_DETAILS_BYTES, PageKey, pack_tokens, unpack_tokens

BLOCK: Final = 4096  # bytes; the least that disks read
FORMAT_VERSION: Final = 2  # one version of records, segments and the index
CHECKSUM_BYTES: Final = 16
MAX_DETAILS_BYTES: Final = 1 << 20
_MAGIC: Final = b"RLXRECD\n"
_FIELDS: Final = struct.Struct(f"<8sHHIQQQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{CHECKSUM_BYTES}sH{MAX_NAMESPACE_BYTES}s")

# Why a record cannot be read. `absent`: the index lacks it. `gone`: it was evicted or discarded just now. `short`: the
# file ends before it. `header`: its header is missing or damaged. `place`: it belongs elsewhere. `identity`,
# `namespace`, `parent`, `tokens`, `key`: it is another, undamaged record. `payload`: its KV is damaged. `index`: its
# row in the index is damaged. `io`: the disk failed. `off`: the store is off.
MissKind = Literal[
    "absent", "gone", "short", "header", "place", "identity", "namespace", "parent", "tokens", "key", "payload",
    "index", "io", "off",
]  # fmt: skip


class Kind(IntEnum):
    """The kinds of records."""

    PAGE = 1  # the KV of 16 tokens; its parent is the page before
    DISCARDED = 2  # an erased record
    RUN = 3  # the KV rows of several pages by importance; its parent is the last of these pages
    ALIAS = 4  # a re-rendered reply; its parent is the last full page of prompt and reply
    CALL = 5  # a tool call that a client received; its parent is the last full page of prompt and reply
    SCORES = 6  # scores of the KV rows of several pages; its parent is the last of these pages
    STATE = 7  # a state of a recurrent model after a page, which is its parent


@dataclass(frozen=True)
class BlockRange:
    """The place of a record: blocks of 4 KiB of a segment's file."""

    segment: int
    block: int
    num_blocks: int

    @property
    def stop(self) -> int:
        """The block after it."""
        return self.block + self.num_blocks

    @property
    def offset(self) -> int:
        """Offset in the file in bytes."""
        return self.block * BLOCK


@dataclass(frozen=True)
class RecordHeader:
    """The identity of a record of any kind, the same in its header blocks and in the index."""

    kind: Kind
    key: bytes
    parent_key: bytes
    namespace: bytes
    details: bytes

    @classmethod
    def of_page(cls, page: PageKey) -> RecordHeader:
        """Return the header of a page."""
        details = pack_tokens(page.token_ids) + page.generated
        return cls(Kind.PAGE, page.key, page.parent_key, page.namespace, details)

    @property
    def page(self) -> PageKey:
        """The key of the page that this header describes."""
        assert self.kind == Kind.PAGE
        tokens, generated = unpack_tokens(self.details[:64]), self.details[64:]
        return PageKey(self.key, self.parent_key, self.namespace, tokens, generated)

    @property
    def num_bytes(self) -> int:
        """Bytes before the payload, in whole blocks."""
        return header_bytes(len(self.details))

    def num_blocks(self, payload_bytes: int) -> int:
        """Return the number of blocks of a record with this header."""
        return (self.num_bytes + padded(payload_bytes)) // BLOCK


@dataclass(frozen=True)
class SingleRecord:
    """A large record to write, which gets a segment of its own."""

    header: RecordHeader
    payload_bytes: int
    body_of: Callable[[int], Iterable[Sequence[Buffer]]]  # makes the payload in parts, given the segment's number
    replaces: Callable[[RecordHeader], bool] | None = None  # whether it replaces a record of its kind and pages

    @property
    def num_bytes(self) -> int:
        """Bytes of header and payload, in whole blocks."""
        return self.header.num_blocks(self.payload_bytes) * BLOCK


@dataclass(frozen=True)
class Record:
    """The decoded header blocks of a record."""

    header: RecordHeader
    segment: int
    block: int
    identity_digest: bytes
    payload_bytes: int
    payload_checksum: bytes

    @property
    def place(self) -> BlockRange:
        """The place that the record itself states."""
        return BlockRange(self.segment, self.block, self.header.num_blocks(self.payload_bytes))

    def encode(self) -> bytes:
        """Encode the header blocks."""
        header = self.header
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            header.kind,
            len(header.details),
            self.payload_bytes,
            self.segment,
            self.block,
            self.identity_digest,
            header.key,
            header.parent_key,
            self.payload_checksum,
            len(header.namespace),
            header.namespace,
        )
        return sealed(fields + header.details, header.num_bytes)

    @staticmethod
    def num_header_bytes(start: Buffer) -> int | None:
        """Return the bytes of the header that begins with the block `start`; None if no record begins there."""
        magic, version, _, details_bytes, *_ = _FIELDS.unpack_from(start)
        if magic != _MAGIC or version != FORMAT_VERSION or details_bytes > MAX_DETAILS_BYTES:
            return None
        return header_bytes(details_bytes)

    @classmethod
    def decode(cls, blocks: Buffer) -> Record | None:
        """Decode the header blocks of a record; None if they are not valid."""
        if len(blocks) < BLOCK or cls.num_header_bytes(blocks) != len(blocks) or not is_sealed(blocks):
            return None
        _, _, kind, details_bytes, payload_bytes, segment, block, *rest = _FIELDS.unpack_from(blocks)
        identity, key, parent, payload_checksum, namespace_bytes, namespace = rest
        is_page = kind == Kind.PAGE
        if kind not in list(Kind) or namespace_bytes > MAX_NAMESPACE_BYTES:
            return None
        if is_page and details_bytes != PAGE_DETAILS_BYTES:
            return None
        details = bytes(blocks[_FIELDS.size : _FIELDS.size + details_bytes])
        header = RecordHeader(Kind(kind), key, parent, namespace[:namespace_bytes], details)
        return cls(header, segment, block, identity, payload_bytes, payload_checksum)

    def unlike(
        self, identity_digest: bytes, wanted: RecordHeader, place: BlockRange, num_compared: int
    ) -> MissKind | None:
        """Compare this record with the wanted one; return the first difference, None if there is none.

        Args:
            num_compared: bytes of the details that must be equal. A page's flags are left out, because its KV does not
                depend on them.
        """
        header = self.header
        if header.kind != wanted.kind:
            return "gone"
        if self.identity_digest != identity_digest:
            return "identity"
        if header.namespace != wanted.namespace:
            return "namespace"
        if header.parent_key != wanted.parent_key:
            return "parent"
        if header.details[:num_compared] != wanted.details[:num_compared]:
            return "tokens"
        if header.key != wanted.key:
            return "key"
        return None if self.place == place else "place"


def header_bytes(details_bytes: int) -> int:
    """Return the bytes before the payload of a record with details of this length, in whole blocks."""
    return padded(_FIELDS.size + details_bytes + CHECKSUM_BYTES)


def discarded(place: BlockRange, identity_digest: bytes) -> Record:
    """Return the record that replaces an erased one and contains nothing of it."""
    nothing = RecordHeader(Kind.DISCARDED, bytes(KEY_BYTES), NO_PARENT, b"", b"")
    payload_bytes = (place.num_blocks - 1) * BLOCK
    return Record(nothing, place.segment, place.block, identity_digest, payload_bytes, bytes(CHECKSUM_BYTES))


def mismatch(path: Path, version: int) -> StoreMismatch:
    """Return the error for a segment or an index that a radixlm with another format wrote."""
    return StoreMismatch(
        f"{path} has version {version}, this radixlm reads {FORMAT_VERSION}; give --store another directory, or remove "
        f"this one: its pages are computed again"
    )


def checksum(payload: Buffer) -> bytes:
    """Return a checksum of 16 bytes over a payload."""
    return xxh3_128_digest(payload)


def sealed(content: bytes, num_bytes: int) -> bytes:
    """Return `content`, zeros, and at the end of `num_bytes` a checksum of both."""
    body = content.ljust(num_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxh3_128_digest(body)


def is_sealed(block: Buffer) -> bool:
    """Return whether a block ends with the checksum of the bytes before it."""
    view = memoryview(block)
    return view[-CHECKSUM_BYTES:] == xxh3_128_digest(view[:-CHECKSUM_BYTES])


def padded(num_bytes: int) -> int:
    """Round up to a multiple of the block size.

    >>> padded(1), padded(4096)
    (4096, 4096)
    """
    return -(-num_bytes // BLOCK) * BLOCK
