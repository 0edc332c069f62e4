"""The bytes of an ordered run's file: its header, what is in front of each block, and all of it to write.

Knows layouts and checksums, not files. The header is valid last of all, so a file with a whole header is whole. A
checksum for each chunk, XXH3-64: it lies in the head of its block, which has one of its own, is bound to file and run,
and is as small as that for the order and the checksums of 90 chunks of 16 tokens to fit into one unit of 4 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .files import Buffer
from .ordered_layout import BLOCK_FIELDS_BYTES, HEADER_FIELDS_BYTES, OrderedLayout
from .ordered_run import OrderedRun, RunOrder, UInt8Array
from .page_key import KEY_BYTES, MAX_NAMESPACE_BYTES, PageKey, pack_tokens
from .record import BLOCK, CHECKSUM_BYTES, MissKind, is_sealed, padded, sealed

FORMAT_VERSION: Final = 1
_HEADER_MAGIC: Final = b"RLXORDR\n"
_BLOCK_MAGIC: Final = b"RLXORDB\n"
_HEADER: Final = struct.Struct(f"<8sHHHHIQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sH{MAX_NAMESPACE_BYTES}s")
_BLOCK: Final = struct.Struct(f"<8sIIQ{KEY_BYTES}s")
_PAGE_TOKENS_BYTES: Final = 64
_MAX_PAGES, _MAX_LAYERS = 4096, 1024
Checksums = NDArray[np.uint64]


@dataclass(frozen=True)
class RunHeader:
    """What a file says of itself."""

    number: int  # of the file
    identity_digest: bytes
    namespace: bytes
    parent_key: bytes  # of the page before the run
    key: bytes  # of the run's last page, over all before it
    tokens: bytes  # 64 a page
    chunk_size: int
    probe_head: int
    probe_checksums: tuple[int, ...]  # of each layer's

    @property
    def num_pages(self) -> int:
        """Of the run."""
        return len(self.tokens) // _PAGE_TOKENS_BYTES

    def encode(self) -> bytes:
        """Whole units of 4 KiB."""
        fields = _HEADER.pack(
            _HEADER_MAGIC,
            FORMAT_VERSION,
            self.chunk_size,
            self.probe_head,
            len(self.probe_checksums),
            self.num_pages,
            self.number,
            self.identity_digest,
            self.parent_key,
            self.key,
            len(self.namespace),
            self.namespace,
        ).ljust(HEADER_FIELDS_BYTES, b"\0")
        content = fields + self.tokens + np.array(self.probe_checksums, "<u8").tobytes()
        return sealed(content, padded(len(content) + CHECKSUM_BYTES))

    @classmethod
    def num_bytes(cls, start: Buffer) -> int | None:
        """How long the header is whose first 4 KiB are `start`; None if that is none."""
        magic, version, _, _, num_layers, num_pages, *_ = _HEADER.unpack_from(start)
        if magic != _HEADER_MAGIC or version != FORMAT_VERSION:
            return None
        if not 0 < num_pages <= _MAX_PAGES or not 0 < num_layers <= _MAX_LAYERS:
            return None
        content = HEADER_FIELDS_BYTES + _PAGE_TOKENS_BYTES * num_pages + 8 * num_layers
        return padded(content + CHECKSUM_BYTES)

    @classmethod
    def decode(cls, header: Buffer) -> RunHeader | None:
        """What a header says; None if it is none, or broke."""
        if len(header) < BLOCK or cls.num_bytes(header) != len(header) or not is_sealed(header):
            return None
        _, _, chunk_size, probe_head, num_layers, num_pages, *rest = _HEADER.unpack_from(header)
        number, identity, parent_key, key, namespace_bytes, namespace = rest
        if namespace_bytes > MAX_NAMESPACE_BYTES:
            return None
        end = HEADER_FIELDS_BYTES + _PAGE_TOKENS_BYTES * num_pages
        return cls(
            number,
            identity,
            namespace[:namespace_bytes],
            parent_key,
            key,
            bytes(header[HEADER_FIELDS_BYTES:end]),
            chunk_size,
            probe_head,
            tuple(np.frombuffer(header, "<u8", num_layers, end).tolist()),
        )

    def unlike(self, identity_digest: bytes, heads: Sequence[PageKey]) -> MissKind | None:
        """What sets this run apart from the one of the pages `heads`; None: nothing."""
        if self.identity_digest != identity_digest:
            return "identity"
        if any(self.namespace != head.namespace for head in heads):
            return "namespace"
        if self.parent_key != heads[0].parent_key:
            return "parent"
        if self.tokens != b"".join(pack_tokens(head.token_ids) for head in heads):
            return "tokens"
        return None if self.key == heads[-1].key else "key"


@dataclass(frozen=True)
class BlockHead:
    """What is in front of a block: which tokens its chunks hold, and their checksums."""

    order: RunOrder  # [groups, tokens of the block]
    checksums: Checksums  # [groups]

    def encode(self, header: RunHeader, block: int, num_bytes: int) -> bytes:
        """Whole units of 4 KiB."""
        fields = _BLOCK.pack(_BLOCK_MAGIC, block, self.order.shape[1], header.number, header.key)
        content = fields.ljust(BLOCK_FIELDS_BYTES, b"\0") + self.checksums.astype("<u8").tobytes()
        return sealed(content + self.order.astype("<u2").tobytes(), num_bytes)

    @classmethod
    def decode(cls, head: Buffer, header: RunHeader, layout: OrderedLayout, block: int) -> BlockHead | None:
        """What is in front of block `block` of that very run; None if it broke, or belongs elsewhere."""
        num_groups, count = layout.num_groups, layout.block_tokens(block)
        if not is_sealed(head):
            return None
        if _BLOCK.unpack_from(head) != (_BLOCK_MAGIC, block, count, header.number, header.key):
            return None
        checksums = np.frombuffer(head, "<u8", num_groups, BLOCK_FIELDS_BYTES)
        order = np.frombuffer(head, "<u2", num_groups * count, BLOCK_FIELDS_BYTES + 8 * num_groups)
        return cls(order.reshape(num_groups, count).copy(), checksums.copy())


def header_of(
    run: OrderedRun, layout: OrderedLayout, number: int, identity_digest: bytes, heads: Sequence[PageKey]
) -> RunHeader:
    """The header of a file that holds `run`, which is of the pages `heads`."""
    return RunHeader(
        number,
        identity_digest,
        heads[0].namespace,
        heads[0].parent_key,
        heads[-1].key,
        b"".join(pack_tokens(head.token_ids) for head in heads),
        layout.chunk_size,
        run.probe_head,
        tuple(chunk_checksum(keys) for keys in run.probe_keys),
    )


def body_of(run: OrderedRun, layout: OrderedLayout, header: RunHeader) -> Iterator[list[Buffer]]:
    """All that follows the header, in order, a part at a time."""
    for block in range(layout.num_blocks):
        first = block * layout.chunk_size
        some = slice(first, first + layout.block_tokens(block))
        chunks = np.ascontiguousarray(run.rows[:, :, some]).reshape(layout.num_groups, -1)
        order = run.order[:, :, some].reshape(layout.num_groups, -1)
        checksums = np.array([chunk_checksum(chunk) for chunk in chunks], np.uint64)
        head = BlockHead(order, checksums).encode(header, block, layout.block_head_bytes(block))
        yield [head, chunks.reshape(-1).data, bytes(padded(chunks.nbytes) - chunks.nbytes)]
    keys = np.ascontiguousarray(run.probe_keys)
    yield [keys.reshape(-1).data, bytes(padded(keys.nbytes) - keys.nbytes)]


def chunk_checksum(chunk: UInt8Array) -> int:
    """Of a chunk, or the probe keys of a layer."""
    return xxh3_64_intdigest(np.ascontiguousarray(chunk).data)
