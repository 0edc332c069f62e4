"""The layout of an ordered run's rows in its record, and of its pages' parts in theirs.

The most important token has rank 0. A run has the first ranks; other rows are read from the pages, a layer at a time. A
chunk has tokens of successive ranks, of one layer and KV head. Block `b` has the `b`th chunk of every layer and head.
So one read from the start gets the most important tokens of all layers and heads. Each block begins with what a reader
needs to understand and verify it::

    block 0   the order of its tokens, checksums | layer 0 head 0: ranks 0..C-1 | layer 0 head 1: ranks 0..C-1 | ...
    block 1   the order of its tokens, checksums | layer 0 head 0: ranks C..2C-1 | ...
    ...
    tail      the keys of one head, packed: layer 0: all tokens as in the text | layer 1 | ... | checksums of the parts
              of pages: page 0 layer 0 | page 0 layer 1 | ...

Blocks begin at multiples of 4 KiB. So do chunks whose size is a multiple of 4 KiB: 16 tokens of SmolLM2 in f16 have
4,096 bytes. Two other layouts are worse. With layer and head outermost, the first tokens of SmolLM2's 90 groups take 90
reads. With the rows of all heads of a token side by side, 4 KiB hold 5 tokens of similar rank, not 16.

Knows sizes and offsets, no rows and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ....artifact.manifest import PAGE_SIZE, SCALE_BYTES, KVLayout
from ....errors import StoreError
from ....model.kv_rows import ROW_DTYPES
from ....store.record import BLOCK, CHECKSUM_BYTES, padded

MIN_CHUNK, MAX_CHUNK = 16, 256  # tokens
BLOCK_FIELDS_BYTES: Final = 64  # before the checksums and orders of a block
SHORT_CHECKSUM_BYTES: Final = 8  # of a chunk, the probe keys of a layer, or a part of a page
_ORDER_BYTES: Final = 2  # per token


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a payload: one read."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class OrderedLayout:
    """The layout of the first `num_ranks` of `num_tokens` in the payload of a run, in chunks of `chunk_size` tokens.

    A group is one KV head of one layer; the heads of a layer are adjacent. Pieces are the units of reading and
    caching: the chunks in order, then the parts of the run's pages, page by page, which are stored elsewhere.

    Raises:
        StoreError: the chunks are smaller than 16 tokens or larger than 256.
    """

    kv: KVLayout
    num_tokens: int
    num_ranks: int
    chunk_size: int = 16
    packed_probe_bytes: int | None = None  # of a layer's probe keys; None: they are as in rows

    def __post_init__(self) -> None:
        if not MIN_CHUNK <= self.chunk_size <= MAX_CHUNK:
            raise StoreError(f"a chunk has {MIN_CHUNK} to {MAX_CHUNK} tokens, not {self.chunk_size}")

    @cached_property
    def num_groups(self) -> int:
        """Number of layers times number of KV heads."""
        return self.kv.num_layers * self.kv.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Number of chunks of each group."""
        return -(-self.num_ranks // self.chunk_size)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all groups."""
        return self.num_blocks * self.num_groups

    @property
    def num_pages(self) -> int:
        """Number of pages of the run."""
        return self.num_tokens // PAGE_SIZE

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of a page's part of one layer."""
        return self.kv.page_bytes // self.kv.num_layers

    @property
    def num_pieces(self) -> int:
        """Number of chunks and parts of pages."""
        return self.num_chunks + self.num_pages * self.kv.num_layers

    @property
    def tail(self) -> Extent:
        """The extent of the probe keys and the checksums of parts, after all chunks, padded to units of 4 KiB."""
        start = self.block_start(self.num_blocks)
        num_bytes = self.kv.num_layers * (self.probe_bytes + SHORT_CHECKSUM_BYTES * self.num_pages)
        return Extent(start, start + padded(num_bytes))

    @property
    def probe_bytes(self) -> int:
        """Bytes of a layer's probe keys."""
        packed = self.packed_probe_bytes
        return self.num_tokens * key_bytes(self.kv) if packed is None else packed

    @property
    def table_bytes(self) -> int:
        """Bytes of all orders and checksums, without padding."""
        each = _ORDER_BYTES * self.num_ranks + SHORT_CHECKSUM_BYTES * self.num_blocks
        return self.num_groups * each + SHORT_CHECKSUM_BYTES * self.num_pages * self.kv.num_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload, in whole blocks."""
        return self.tail.stop

    def block_tokens(self, block: int) -> int:
        """Return the number of ranks in a block; the last block can have fewer than the others."""
        return min(self.chunk_size, self.num_ranks - block * self.chunk_size)

    def block_head_bytes(self, block: int) -> int:
        """Return the bytes before the chunks of a block."""
        each = SHORT_CHECKSUM_BYTES + _ORDER_BYTES * self.block_tokens(block)
        return padded(BLOCK_FIELDS_BYTES + self.num_groups * each + CHECKSUM_BYTES)

    def chunk_bytes(self, block: int) -> int:
        """Return the bytes of each chunk in a block."""
        return self.block_tokens(block) * row_bytes(self.kv)

    def piece_bytes(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of pieces, given their numbers."""
        first_of_last = (self.num_blocks - 1) * self.num_groups
        chunks = np.where(pieces < first_of_last, self.chunk_bytes(0), self.chunk_bytes(self.num_blocks - 1))
        return np.where(pieces < self.num_chunks, chunks, self.part_bytes)

    def block_bytes(self, block: int) -> int:
        """Return the bytes of a whole block."""
        return self.block_head_bytes(block) + padded(self.num_groups * self.chunk_bytes(block))

    def block_start(self, block: int) -> int:
        """Return the start of a block; for `num_blocks`, the end of the last one."""
        if block < self.num_blocks:
            return block * self.block_bytes(0)
        return self.block_start(block - 1) + self.block_bytes(block - 1)

    def blocks(self, first: int, stop: int) -> Extent:
        """Return the extent of the blocks `[first, stop)`."""
        return Extent(self.block_start(first), self.block_start(stop))

    def block_head(self, block: int) -> Extent:
        """Return the extent of a block's head: its orders and checksums."""
        start = self.block_start(block)
        return Extent(start, start + self.block_head_bytes(block))

    def chunk(self, block: int, group: int) -> Extent:
        """Return the exact extent of a chunk; `units` gives the bytes to read from disk."""
        num_bytes = self.chunk_bytes(block)
        start = self.block_start(block) + self.block_head_bytes(block) + group * num_bytes
        return Extent(start, start + num_bytes)

    def part(self, layer: int) -> Extent:
        """Return the extent of a layer's part in the record of any page: after the block that identifies the record."""
        start = BLOCK + layer * self.part_bytes
        return Extent(start, start + self.part_bytes)


def row_bytes(kv: KVLayout) -> int:
    """Return the bytes of a token's key and value in one layer and head."""
    return key_bytes(kv) + value_code_bytes(kv) + (SCALE_BYTES if kv.has_codes else 0)


def key_bytes(kv: KVLayout) -> int:
    """Return the bytes of a token's key in one layer and head."""
    return key_code_bytes(kv) + (SCALE_BYTES if kv.has_codes else 0)


def key_code_bytes(kv: KVLayout) -> int:
    """Return the bytes of a token's key in one layer and head, without its scale."""
    return int(kv.head_dim * np.dtype(ROW_DTYPES[kv.dtype]).itemsize)


def value_code_bytes(kv: KVLayout) -> int:
    """Return the bytes of a token's value in one layer and head, without its scale."""
    return kv.head_dim * kv.itemsize


def units(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Yield whole units of 4 KiB that hold the ascending `extents`; adjacent units are one read.

    >>> list(units([Extent(0, 100), Extent(4000, 5000), Extent(90_000, 90_001)]))
    [Extent(start=0, stop=8192), Extent(start=86016, stop=90112)]
    """
    start = stop = -1
    for extent in extents:
        first, end = extent.start // BLOCK * BLOCK, padded(extent.stop)
        if first > stop:
            if stop > start:
                yield Extent(start, stop)
            start = first
        stop = max(stop, end)
    if stop > start:
        yield Extent(start, stop)
