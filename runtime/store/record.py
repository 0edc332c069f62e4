"""The bytes of a record: blocks of 4 KiB that say all about it, then its payload.

Knows layouts and checksums, not files. A record says where it belongs, so that one that was moved or left behind is
never taken for another. Its kind says what the details are, and what the payload is::

    0     magic, format version, kind, bytes of the details, bytes of the payload, segment, block where it begins
    40    digest of the identity, key, parent's key, checksum of the payload, length of the namespace, the namespace
    410   the details of its kind
          zeros, to a multiple of 4096 less 16
          checksum of all before
          the payload, and zeros up to a multiple of 4096

To remove a page removes every record that names it as its parent: the page before it in the prompt, or the last page
that the record depends on. Checksums are XXH3-128: they find what broke, at 34 GB/s where BLAKE2b makes 1.4. What must
not be forged is the key, which is BLAKE2b's.
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

BLOCK: Final = 4096  # bytes: what disks read at least
FORMAT_VERSION: Final = 2  # of records, segments and the index together
CHECKSUM_BYTES: Final = 16
MAX_DETAILS_BYTES: Final = 1 << 20
_MAGIC: Final = b"RLXRECD\n"
_FIELDS: Final = struct.Struct(f"<8sHHIQQQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{CHECKSUM_BYTES}sH{MAX_NAMESPACE_BYTES}s")

# Why a record cannot be read. `absent`: the index lacks it. `gone`: it was evicted or discarded just now. `short`: the
# file ends before it. `header`: its first blocks are no record's, or broke. `place`: it belongs elsewhere. `identity`,
# `namespace`, `parent`, `tokens`, `key`: whole, and another record. `payload`: keys and values broke. `index`: a row of
# the index broke. `io`: the disk failed. `off`: the store is off.
MissKind = Literal[
    "absent", "gone", "short", "header", "place", "identity", "namespace", "parent", "tokens", "key", "payload",
    "index", "io", "off",
]  # fmt: skip


class Kind(IntEnum):
    """What a record is."""

    PAGE = 1  # keys and values of 16 tokens; its parent is the page before
    DISCARDED = 2  # was something else; its bytes are gone
    RUN = 3  # the rows of several pages by importance; its parent is the last of them
    ALIAS = 4  # how a reply is rendered; its parent is the last full page of prompt and reply
    CALL = 5  # of a tool, that a client was given; its parent likewise
    SCORES = 6  # what was learned of the rows of several pages; its parent is the last of them
    STATE = 7  # of a recurrent model, after a page, which is its parent


@dataclass(frozen=True)
class Place:
    """Where a record lies: blocks of 4 KiB of a segment's file."""

    segment: int
    block: int
    num_blocks: int

    @property
    def stop(self) -> int:
        """The block after it."""
        return self.block + self.num_blocks

    @property
    def offset(self) -> int:
        """Bytes before it in the file."""
        return self.block * BLOCK


@dataclass(frozen=True)
class RecordHeader:
    """What a record is, whatever its kind: the same in its first blocks and in the index."""

    kind: Kind
    key: bytes
    parent_key: bytes
    namespace: bytes
    details: bytes

    @classmethod
    def of_page(cls, page: PageKey) -> RecordHeader:
        """The header of a page."""
        details = pack_tokens(page.token_ids) + page.generated
        return cls(Kind.PAGE, page.key, page.parent_key, page.namespace, details)

    @property
    def page(self) -> PageKey:
        """The key of a page, whose header this is."""
        assert self.kind == Kind.PAGE
        tokens, generated = unpack_tokens(self.details[:64]), self.details[64:]
        return PageKey(self.key, self.parent_key, self.namespace, tokens, generated)

    @property
    def num_bytes(self) -> int:
        """Bytes before the payload: whole blocks."""
        return header_bytes(len(self.details))

    def num_blocks(self, payload_bytes: int) -> int:
        """Blocks of a record with this header."""
        return (self.num_bytes + padded(payload_bytes)) // BLOCK


@dataclass(frozen=True)
class SingleRecord:
    """A large record to write: it gets a segment of its own."""

    header: RecordHeader
    payload_bytes: int
    body_of: Callable[[int], Iterable[Sequence[Buffer]]]  # the payload by the segment's number, a part at a time
    replaces: Callable[[RecordHeader], bool] | None = None  # which others of its kind, beside its pages, go for it

    @property
    def num_bytes(self) -> int:
        """Of header and payload, in whole blocks."""
        return self.header.num_blocks(self.payload_bytes) * BLOCK


@dataclass(frozen=True)
class Record:
    """What the first blocks of a whole record say."""

    header: RecordHeader
    segment: int
    block: int
    identity_digest: bytes
    payload_bytes: int
    payload_checksum: bytes

    @property
    def place(self) -> Place:
        """Where it says that it lies."""
        return Place(self.segment, self.block, self.header.num_blocks(self.payload_bytes))

    def encode(self) -> bytes:
        """The first blocks."""
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
        """How long the first blocks are that begin with the block `start`; None if no record begins there."""
        magic, version, _, details_bytes, *_ = _FIELDS.unpack_from(start)
        if magic != _MAGIC or version != FORMAT_VERSION or details_bytes > MAX_DETAILS_BYTES:
            return None
        return header_bytes(details_bytes)

    @classmethod
    def decode(cls, blocks: Buffer) -> Record | None:
        """What all first blocks of a record say; None if they are none, or broke."""
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

    def unlike(self, identity_digest: bytes, wanted: RecordHeader, place: Place, num_compared: int) -> MissKind | None:
        """What sets this record apart from the wanted one; None if nothing does.

        Args:
            num_compared: bytes of the details that must be equal: the flags of a page are not, for keys and values do
                not depend on them.
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
    """Bytes before the payload of a record with details of so many bytes: whole blocks."""
    return padded(_FIELDS.size + details_bytes + CHECKSUM_BYTES)


def discarded(place: Place, identity_digest: bytes) -> Record:
    """What stands in the place of a record that was taken out: it says nothing of it."""
    nothing = RecordHeader(Kind.DISCARDED, bytes(KEY_BYTES), NO_PARENT, b"", b"")
    payload_bytes = (place.num_blocks - 1) * BLOCK
    return Record(nothing, place.segment, place.block, identity_digest, payload_bytes, bytes(CHECKSUM_BYTES))


def mismatch(path: Path, version: int) -> StoreMismatch:
    """The error for a segment or an index that a radixlm with another format wrote."""
    return StoreMismatch(
        f"{path} has version {version}, this radixlm reads {FORMAT_VERSION}; give --store another directory, or remove "
        f"this one: its pages are computed again"
    )


def checksum(payload: Buffer) -> bytes:
    """16 bytes over keys and values."""
    return xxh3_128_digest(payload)


def sealed(content: bytes, num_bytes: int) -> bytes:
    """`content`, zeros, and at the very end of `num_bytes` a checksum of both."""
    body = content.ljust(num_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxh3_128_digest(body)


def is_sealed(block: Buffer) -> bool:
    """Whether a block ends with the checksum of what is before."""
    view = memoryview(block)
    return view[-CHECKSUM_BYTES:] == xxh3_128_digest(view[:-CHECKSUM_BYTES])


def padded(num_bytes: int) -> int:
    """The next multiple of a block.

    >>> padded(1), padded(4096)
    (4096, 4096)
    """
    return -(-num_bytes // BLOCK) * BLOCK
