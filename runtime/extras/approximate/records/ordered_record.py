"""Encode an ordered run: the details of its record's header, the head of each block, and the payload.

Knows layouts and checksums, not files. Each chunk has a checksum, XXH3-64, in the head of its block. The head has its
own checksum, and is bound to run and segment. It is so small that the order and the checksums of 90 chunks of 16 tokens
fit into one unit of 4 KiB. After the blocks there are checksums of each layer's part of the run's pages, because a
page's own checksum covers the whole page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from ....artifact.manifest import PAGE_SIZE, KVLayout
from ....errors import StoreError
from ....store.files import Buffer
from ....store.page_key import KEY_BYTES, PageKey, pack_tokens
from ....store.record import Kind, MissKind, Record, RecordHeader, SingleRecord, header_bytes, is_sealed, padded, sealed
from .ordered_layout import BLOCK_FIELDS_BYTES, MAX_CHUNK, MIN_CHUNK, OrderedLayout
from .ordered_run import OrderedRun, RunOrder, UInt8Array

_BLOCK_MAGIC: Final = b"RLXORDB\n"
_VERSION: Final = 2  # of details and payload; a run of another version is ignored, and its pages are read
# chunk size, probe head, layers, version, pages, ranks, bytes of a layer's probe keys, key of the page before
_DETAILS: Final = struct.Struct(f"<HHHHIII{KEY_BYTES}s")
_BLOCK: Final = struct.Struct(f"<8sIIQ{KEY_BYTES}s")
_TOKENS_BYTES: Final = 64  # per page
Checksums = NDArray[np.uint64]


@dataclass(frozen=True)
class RunHeader:
    """The header of a run's record."""

    number: int  # of its segment: a new one each time the run is rewritten
    namespace: bytes
    parent_key: bytes  # of the page before the run
    key: bytes  # of the run's last page, which covers all pages before it
    tokens: bytes  # 64 bytes per page
    chunk_size: int
    num_ranks: int
    probe_head: int
    probe_bytes: int  # of a layer's keys
    tail_checksums: tuple[int, ...]  # of each layer's keys, and of the checksums of parts

    @classmethod
    def of(cls, record: Record) -> RunHeader | None:
        """Read the header of a record; None if it is no run, of another version, or has invalid numbers."""
        header, details = record.header, record.header.details
        if header.kind != Kind.RUN or len(details) < _DETAILS.size:
            return None
        chunk_size, probe_head, num_layers, version, *numbers, parent_key = _DETAILS.unpack_from(details)
        num_pages, num_ranks, probe_bytes = numbers
        end = _DETAILS.size + _TOKENS_BYTES * num_pages
        if version != _VERSION or len(details) != end + 8 * (num_layers + 1):
            return None
        if not 0 < num_ranks <= num_pages * PAGE_SIZE or not MIN_CHUNK <= chunk_size <= MAX_CHUNK:
            return None
        checksums = np.frombuffer(details, "<u8", num_layers + 1, end).tolist()
        tokens = details[_DETAILS.size : end]
        return cls(
            *(record.segment, header.namespace, parent_key, header.parent_key, tokens),
            *(chunk_size, num_ranks, probe_head, probe_bytes, tuple(checksums)),
        )

    @staticmethod
    def num_bytes(num_pages: int, kv: KVLayout) -> int:
        """Return the bytes before the payload of a run of this many pages."""
        return header_bytes(_DETAILS.size + _TOKENS_BYTES * num_pages + 8 * (kv.num_layers + 1))

    def layout(self, kv: KVLayout) -> OrderedLayout:
        """Return the layout of the run."""
        return OrderedLayout(kv, self.num_pages * PAGE_SIZE, self.num_ranks, self.chunk_size, self.probe_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages of the run."""
        return len(self.tokens) // _TOKENS_BYTES

    def first_difference(self, page_keys: Sequence[PageKey]) -> MissKind | None:
        """Return the first field in which this run is not that of these pages; None if it is."""
        if any(self.namespace != page.namespace for page in page_keys):
            return "namespace"
        if self.parent_key != page_keys[0].parent_key:
            return "parent"
        if self.tokens != b"".join(pack_tokens(page.token_ids) for page in page_keys):
            return "tokens"
        return None if self.key == page_keys[-1].key else "key"


@dataclass(frozen=True)
class BlockHead:
    """The head of a block: the tokens of its chunks, and their checksums."""

    order: RunOrder  # [groups, tokens of the block]
    checksums: Checksums  # [groups]

    def encode(self, number: int, key: bytes, block: int, num_bytes: int) -> bytes:
        """Encode in whole units of 4 KiB, bound to a segment, a run by its last page, and a block."""
        fields = _BLOCK.pack(_BLOCK_MAGIC, block, self.order.shape[1], number, key)
        content = fields.ljust(BLOCK_FIELDS_BYTES, b"\0") + self.checksums.astype("<u8").tobytes()
        return sealed(content + self.order.astype("<u2").tobytes(), num_bytes)

    @classmethod
    def decode(cls, head: Buffer, header: RunHeader, layout: OrderedLayout, block: int) -> BlockHead | None:
        """Decode the head of block `block` of this run; None if it is damaged, or belongs elsewhere."""
        num_groups, count = layout.num_groups, layout.block_tokens(block)
        if not is_sealed(head):
            return None
        if _BLOCK.unpack_from(head) != (_BLOCK_MAGIC, block, count, header.number, header.key):
            return None
        checksums = np.frombuffer(head, "<u8", num_groups, BLOCK_FIELDS_BYTES)
        order = np.frombuffer(head, "<u2", num_groups * count, BLOCK_FIELDS_BYTES + 8 * num_groups)
        return cls(order.reshape(num_groups, count).copy(), checksums.copy())


@dataclass
class RunTables:
    """The orders and checksums of a run read so far. Caching them saves the next query that read.

    In chunks of 16 tokens they take 2.5 bytes per rank, layer and KV head, and half a byte per token and layer: for a
    quarter of SmolLM2's rows 71 bytes per token, 0.4 % of its KV.
    """

    number: int  # of the run's segment
    by_block: list[BlockHead | None]
    parts: Checksums | None = None  # [pages, layers], of each page's part of each layer


def run_key(parent_key: bytes, last_key: bytes) -> bytes:
    """Return the key of the record of a run after the page `parent_key` that ends with the page `last_key`."""
    return blake2b(parent_key + last_key, digest_size=KEY_BYTES, person=b"radixlm/run/1").digest()


def ordered_record(kv: KVLayout, page_keys: Sequence[PageKey], run: OrderedRun, chunk_size: int) -> SingleRecord:
    """Return the record of a run of the given pages.

    Raises:
        StoreError: the run has other pages, or another layout.
    """
    layout, keys = run.layout(chunk_size), run.probe_keys
    is_chain = all(page.parent_key == before.key for before, page in pairwise(page_keys))
    if run.kv != kv or layout.num_pages != len(page_keys) or not is_chain:
        raise StoreError(f"{len(page_keys)} page keys and a run of {layout.num_pages} pages are not of the same pages")
    first, last, parts = page_keys[0], page_keys[-1], part_checksums(run)
    numbers = chunk_size, run.probe_head, len(keys), _VERSION, len(page_keys), layout.num_ranks, keys.shape[1]
    fields = _DETAILS.pack(*numbers, first.parent_key)
    tokens = b"".join(pack_tokens(page.token_ids) for page in page_keys)
    checksums = np.array([chunk_checksum(each) for each in (*keys, parts.view(np.uint8))], "<u8").tobytes()
    key, details = run_key(first.parent_key, last.key), fields + tokens + checksums
    header = RecordHeader(Kind.RUN, key, last.key, first.namespace, details)
    return SingleRecord(header, layout.num_bytes, partial(_body_of, run, layout, parts, last.key))


def is_outdated(header: RecordHeader) -> bool:
    """Return whether a record is a run of another version of radixlm, which is never used."""
    return header.kind == Kind.RUN and header.details[6:8] != _VERSION.to_bytes(2, "little")


def part_checksums(run: OrderedRun) -> Checksums:
    """Return the checksums of each page's part of each layer, `[pages, layers]`."""
    parts = np.ascontiguousarray(run.pages).reshape(len(run.pages), run.kv.num_layers, -1)
    return np.array([[chunk_checksum(part) for part in page] for page in parts], "<u8")


def _body_of(
    run: OrderedRun, layout: OrderedLayout, parts: Checksums, key: bytes, number: int
) -> Iterator[list[Buffer]]:
    """Yield the payload in order, a part at a time, bound to the run's last page `key` and to segment `number`."""
    for block in range(layout.num_blocks):
        first = block * layout.chunk_size
        some = slice(first, first + layout.block_tokens(block))
        chunks = np.ascontiguousarray(run.rows[:, :, some]).reshape(layout.num_groups, -1)
        order = run.order[:, :, some].reshape(layout.num_groups, -1)
        checksums = np.array([chunk_checksum(chunk) for chunk in chunks], np.uint64)
        head = BlockHead(order, checksums).encode(number, key, block, layout.block_head_bytes(block))
        yield [head, chunks.reshape(-1).data, bytes(padded(chunks.nbytes) - chunks.nbytes)]
    keys = np.ascontiguousarray(run.probe_keys)
    num_bytes = keys.nbytes + parts.nbytes
    yield [keys.reshape(-1).data, parts.reshape(-1).view(np.uint8).data, bytes(padded(num_bytes) - num_bytes)]


def chunk_checksum(chunk: UInt8Array) -> int:
    """Return the checksum of a chunk, of the probe keys of a layer, or of a part of a page."""
    return xxh3_64_intdigest(np.ascontiguousarray(chunk).data)
