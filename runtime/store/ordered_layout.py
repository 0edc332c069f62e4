"""Where the rows of an ordered run lie in its file.

Knows sizes and places, no bytes. Tokens are cut into chunks by rank, and the rank is outermost: block `b` has the `b`th
chunk of every layer and head, so that the tokens that matter most, of all layers and heads, are one read from the start
of the file on; and one chunk is one read, too. What a block needs to be understood and checked lies in front of it::

    header    what the run is of: identity, namespace, parent, tokens; checksums of the probe keys
    block 0   the order of its tokens, checksums | layer 0 head 0: ranks 0..C-1 | layer 0 head 1: ranks 0..C-1 | ...
    block 1   the order of its tokens, checksums | layer 0 head 0: ranks C..2C-1 | ...
    ...
    probe     the keys of one head: layer 0: tokens as in the text | layer 1 | ...

Blocks begin at a multiple of 4 KiB, and their chunks, too, where one has so many bytes: 16 tokens of SmolLM2 in f16
have 4096. With layer and head outermost the first tokens of SmolLM2's 90 groups would be 90 reads; with the rows of all
heads of a token together a unit of 4 KiB would hold 5 tokens that rank alike, not 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..artifact.manifest import PAGE_SIZE, KVLayout
from ..errors import StoreError
from .ordered_run import key_bytes, row_bytes
from .page_key import MAX_NAMESPACE_BYTES
from .record import BLOCK, CHECKSUM_BYTES, padded

MIN_CHUNK, MAX_CHUNK = 16, 256  # tokens
HEADER_FIELDS_BYTES: Final = 160 + MAX_NAMESPACE_BYTES  # before the tokens of the run
BLOCK_FIELDS_BYTES: Final = 64  # before the checksums and orders of a block
SHORT_CHECKSUM_BYTES: Final = 8  # of a chunk, or the probe keys of a layer
_ORDER_BYTES: Final = 2  # a token
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True)
class Extent:
    """Bytes of a file: one read."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class OrderedLayout:
    """The file of a run of `num_tokens` in chunks of `chunk_size`; a group is a layer and a KV head, heads innermost.

    Raises:
        StoreError: the chunks are smaller than 16 tokens or larger than 256.
    """

    kv: KVLayout
    num_tokens: int
    chunk_size: int = 16

    def __post_init__(self) -> None:
        if not MIN_CHUNK <= self.chunk_size <= MAX_CHUNK:
            raise StoreError(f"a chunk has {MIN_CHUNK} to {MAX_CHUNK} tokens, not {self.chunk_size}")

    @property
    def num_groups(self) -> int:
        """Layers times KV heads."""
        return self.kv.num_layers * self.kv.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Chunks of each group."""
        return -(-self.num_tokens // self.chunk_size)

    @property
    def num_pages(self) -> int:
        """Of the run."""
        return self.num_tokens // PAGE_SIZE

    @property
    def header_bytes(self) -> int:
        """Before block 0."""
        tokens, checksums = _TOKEN_BYTES * self.num_tokens, SHORT_CHECKSUM_BYTES * self.kv.num_layers
        return padded(HEADER_FIELDS_BYTES + tokens + checksums + CHECKSUM_BYTES)

    @property
    def probe(self) -> Extent:
        """Where the probe keys lie, with what fills up their last unit."""
        start = self.block_start(self.num_blocks)
        return Extent(start, start + padded(self.kv.num_layers * self.num_tokens * key_bytes(self.kv)))

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.probe.stop

    def block_tokens(self, block: int) -> int:
        """Ranks in a block: the last one may have fewer."""
        return min(self.chunk_size, self.num_tokens - block * self.chunk_size)

    def block_head_bytes(self, block: int) -> int:
        """Before the chunks of a block."""
        each = SHORT_CHECKSUM_BYTES + _ORDER_BYTES * self.block_tokens(block)
        return padded(BLOCK_FIELDS_BYTES + self.num_groups * each + CHECKSUM_BYTES)

    def chunk_bytes(self, block: int) -> int:
        """Of each chunk in a block."""
        return self.block_tokens(block) * row_bytes(self.kv)

    def block_bytes(self, block: int) -> int:
        """Of all of a block."""
        return self.block_head_bytes(block) + padded(self.num_groups * self.chunk_bytes(block))

    def block_start(self, block: int) -> int:
        """Where a block begins; `num_blocks` stands for the end of the last one."""
        if block < self.num_blocks:
            return self.header_bytes + block * self.block_bytes(0)
        return self.block_start(block - 1) + self.block_bytes(block - 1)

    def blocks(self, first: int, stop: int) -> Extent:
        """Blocks one behind the other."""
        return Extent(self.block_start(first), self.block_start(stop))

    def block_head(self, block: int) -> Extent:
        """What says how a block is to be read."""
        start = self.block_start(block)
        return Extent(start, start + self.block_head_bytes(block))

    def chunk(self, block: int, group: int) -> Extent:
        """A chunk to the byte; what the disk is asked for, `units` tells."""
        num_bytes = self.chunk_bytes(block)
        start = self.block_start(block) + self.block_head_bytes(block) + group * num_bytes
        return Extent(start, start + num_bytes)


def units(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Whole units of 4 KiB that hold `extents`, which ascend; those that touch are one read.

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
