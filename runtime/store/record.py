"""The bytes of a stored page: a block of 4 KiB that says all about it, then its keys and values.

Knows layouts and checksums, not files. Each record of a segment has the same size, so that the one after a broken one
is found again; and says where it belongs, so that one that was moved or left behind is never taken for another::

    0     magic, format version, kind, bytes of the payload, segment, number in the segment
    32    digest of the identity, key, parent's key
    128   16 token ids, 16 flags, checksum of the payload, length of the namespace, the namespace
          zeros
    4080  checksum of all before
    4096  the payload, and zeros up to a multiple of 4096

Checksums are XXH3-128: here they find what broke, at 34 GB/s where BLAKE2b makes 1.4. What must not be forged is the
key, which is BLAKE2b's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

from xxhash import xxh3_128_digest

from .files import Buffer
from .page_key import KEY_BYTES, MAX_NAMESPACE_BYTES, NO_PARENT, PageKey, pack_tokens, unpack_tokens

BLOCK: Final = 4096  # bytes: what disks read at least
FORMAT_VERSION: Final = 1
KIND_PAGE: Final = 1
KIND_DISCARDED: Final = 2  # was a page; its bytes are gone
CHECKSUM_BYTES: Final = 16
_MAGIC: Final = b"RLXPAGE\n"
_HEADER: Final = struct.Struct(f"<8sHHIQQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s64s16s16sH{MAX_NAMESPACE_BYTES}s")

# Why a page that was asked for cannot be had. `absent`: the index lacks it. `gone`: it was evicted or discarded just
# now. `short`: the file ends before it. `header`: the block is not a record's, or broke. `place`: it belongs
# elsewhere. `identity`, `namespace`, `parent`, `tokens`, `key`: whole, and another page's. `payload`: keys and values
# broke. `index`: a row of the index broke. `io`: the disk failed. `off`: the store is.
MissKind = Literal[
    "absent", "gone", "short", "header", "place", "identity", "namespace", "parent", "tokens", "key", "payload",
    "index", "io", "off",
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a record lies."""

    segment: int
    number: int


@dataclass(frozen=True)
class RecordHeader:
    """What the first block of a whole record says."""

    kind: int
    place: Place
    payload_bytes: int
    identity_digest: bytes
    head: PageKey
    payload_checksum: bytes

    def encode(self) -> bytes:
        """The block."""
        head = self.head
        fields = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.kind,
            self.payload_bytes,
            self.place.segment,
            self.place.number,
            self.identity_digest,
            head.key,
            head.parent_key,
            pack_tokens(head.token_ids),
            head.generated,
            self.payload_checksum,
            len(head.namespace),
            head.namespace,
        )
        return sealed(fields, BLOCK)

    @classmethod
    def decode(cls, block: Buffer) -> RecordHeader | None:
        """What a block of 4096 bytes says; None if it is not a record's, or broke."""
        if not is_sealed(block):
            return None
        fields = _HEADER.unpack_from(block)
        magic, version, kind, payload_bytes, segment, number, identity, key, parent, tokens, *rest = fields
        generated, checksum, namespace_bytes, namespace = rest
        if magic != _MAGIC or version != FORMAT_VERSION or namespace_bytes > MAX_NAMESPACE_BYTES:
            return None
        head = PageKey(key, parent, namespace[:namespace_bytes], unpack_tokens(tokens), generated)
        return cls(kind, Place(segment, number), payload_bytes, identity, head, checksum)

    def unlike(self, identity_digest: bytes, head: PageKey, place: Place) -> MissKind | None:
        """What sets this record apart from the one that is wanted; None: nothing. Flags are not compared, for keys
        and values do not depend on them."""
        if self.kind != KIND_PAGE:
            return "gone"
        if self.identity_digest != identity_digest:
            return "identity"
        if self.head.namespace != head.namespace:
            return "namespace"
        if self.head.parent_key != head.parent_key:
            return "parent"
        if self.head.token_ids != head.token_ids:
            return "tokens"
        if self.head.key != head.key:
            return "key"
        return None if self.place == place else "place"


def discarded(place: Place, payload_bytes: int, identity_digest: bytes) -> RecordHeader:
    """The header in place of a page that was taken out: it says nothing of it."""
    nothing = PageKey(bytes(KEY_BYTES), NO_PARENT, b"", (0,) * 16, bytes(16))
    return RecordHeader(KIND_DISCARDED, place, payload_bytes, identity_digest, nothing, bytes(CHECKSUM_BYTES))


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
