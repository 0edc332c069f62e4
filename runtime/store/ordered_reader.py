"""Read an ordered run: its first tokens, chosen ones, the keys of its probe head, or all of it as pages.

Knows one open file; believes nothing in it before the checksums agree. Reads whole units of 4 KiB, in one read where
they lie together, and counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from ..model.kv_rows import KVRows, inverse_order
from .chunk_cache import ChunkIds, RunChunks
from .files import Files, read_all
from .ordered_record import BlockHead, BlockHeads, Checksums, RunHeader, chunk_checksum
from .ordered_run import (
    Extent,
    OrderedLayout,
    RunOrder,
    UInt8Array,
    key_bytes,
    restored,
    row_bytes,
    units,
    unpack,
    unpack_keys,
)
from .record import MissKind


@dataclass(frozen=True)
class TokenRows:
    """Rows of a run: which tokens they are, `[layers, kv_heads, n]`, and their keys and values."""

    tokens: RunOrder
    rows: KVRows


@dataclass
class ReadCounts:
    """What was asked of the disk."""

    num_bytes: int = 0  # whole units
    num_reads: int = 0
    num_chunks: int = 0


class OpenRun:
    """A run whose file is open; for one thread. Methods return None where something is wrong or the disk fails: then
    `on_miss` was told, and the caller reads the exact pages instead.

    Args:
        start: bytes of the file before the payload.
        block_heads: of this very run, if the caller kept them.
        chunks: those in memory are not read again.

    Attributes:
        header: what the run is of.
        counts: what was asked of the disk for it.
    """

    def __init__(
        self,
        files: Files,
        fd: int,
        layout: OrderedLayout,
        header: RunHeader,
        *,
        start: int,
        block_heads: BlockHeads | None = None,
        chunks: RunChunks | None = None,
        on_miss: Callable[[MissKind, OSError | None], None],
    ) -> None:
        self.layout = layout
        self.counts = ReadCounts()
        self._files = files
        self._fd = fd
        self._start = start
        self.header = header
        self._on_miss = on_miss
        self._chunks = chunks
        is_known = block_heads is not None and block_heads.number == header.number  # it was not written again since
        self._heads = block_heads if block_heads and is_known else BlockHeads(header.number, [None] * layout.num_blocks)
        # by rank, of the first blocks alone: with huge pages, memory is zeroed that is never used
        self._rows = np.empty((layout.num_groups, 0, row_bytes(layout.kv)), np.uint8)
        self._num_blocks = 0  # which are in `_rows`

    def first(self, num_tokens: int) -> TokenRows | None:
        """The `num_tokens` that matter most, of each layer and head, in that order: one read."""
        layout = self.layout
        if not 0 <= num_tokens <= layout.num_tokens:
            raise StoreError(f"{num_tokens} tokens are wanted of a run of {layout.num_tokens}")
        if not self._read_blocks(-(-num_tokens // layout.chunk_size)):
            return None
        order = self._order(self._num_blocks)[:, :, :num_tokens]
        return TokenRows(order, unpack(layout.kv, self._by_head(self._rows[:, :num_tokens])))

    def at(self, tokens: NDArray[np.integer[Any]]) -> TokenRows | None:
        """The rows of `tokens`, `[layers, kv_heads, n]`, in that order, by reading the chunks that hold them, but for
        those that were read by `first`."""
        layout = self.layout
        order = self.order()
        if order is None:
            return None
        if tokens.shape[:2] != order.shape[:2] or (
            tokens.size and not 0 <= tokens.min() <= tokens.max() < layout.num_tokens
        ):
            raise StoreError(f"tokens of {list(tokens.shape)} are wanted of a run of {list(order.shape)}")
        ranks = np.take_along_axis(inverse_order(order), tokens.astype(np.int64), axis=-1).reshape(
            layout.num_groups, -1
        )
        groups = np.arange(layout.num_groups)[:, None]
        chunk_ids = ranks // layout.chunk_size * layout.num_groups + groups  # as they lie in the payload
        wanted = np.unique(chunk_ids[ranks >= self._num_blocks * layout.chunk_size])
        scattered = self._read_chunks(wanted)
        if scattered is None:
            return None
        is_there = ranks < self._num_blocks * layout.chunk_size
        if not len(wanted):
            rows = self._rows[groups, ranks]
        else:
            places = np.searchsorted(wanted, np.where(is_there, wanted[0], chunk_ids))
            rows = scattered[places, ranks % layout.chunk_size]
            rows[is_there] = self._rows[np.broadcast_to(groups, ranks.shape)[is_there], ranks[is_there]]
        return TokenRows(tokens.astype(np.uint16), unpack(layout.kv, self._by_head(rows)))

    def order(self) -> RunOrder | None:
        """Which token of the run lies where, `[layers, kv_heads, tokens]`."""
        return self._order(self.layout.num_blocks) if self._read_heads() else None

    def block_heads(self) -> BlockHeads | None:
        """What to open the run with the next time, so that the order is not read again."""
        return self._heads if self._read_heads() else None

    def probe_keys(self) -> NDArray[np.float32] | None:
        """The keys of the probe head as numbers, `[layers, tokens, head_dim]`, tokens as in the text: one read."""
        read = self._read([self.layout.probe])
        if read is None:
            return None
        kv, num_tokens = self.layout.kv, self.layout.num_tokens
        keys = read[0][: kv.num_layers * num_tokens * key_bytes(kv)].reshape(kv.num_layers, num_tokens, -1)
        if tuple(chunk_checksum(layer) for layer in keys) != self.header.probe_checksums:
            self._on_miss("payload", None)
            return None
        return unpack_keys(kv, keys)

    def pages(self) -> UInt8Array | None:
        """All of the run in the order of the text, uint8 `[N, page_bytes]`: one read."""
        layout = self.layout
        if not self._read_blocks(layout.num_blocks):
            return None
        return restored(layout.kv, self._order(layout.num_blocks), self._by_head(self._rows))

    def is_right(self) -> bool:
        """Read everything, a block at a time, and say whether it is what was written."""
        return all(self._read_whole(block, block + 1) for block in range(self.layout.num_blocks)) and (
            self.probe_keys() is not None
        )

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)

    def _read_blocks(self, num_blocks: int) -> bool:
        """Have the first blocks in memory."""
        layout, first = self.layout, self._num_blocks
        if num_blocks <= first:
            return True
        if self._chunks is not None:
            return self._read_blocks_by_chunk(num_blocks)
        read = self._read_whole(first, num_blocks)
        if read is None:
            return False
        rows = self._grown(num_blocks)
        for block, chunks in enumerate(read, first):
            some = slice(block * layout.chunk_size, block * layout.chunk_size + layout.block_tokens(block))
            rows[:, some] = chunks.reshape(layout.num_groups, -1, rows.shape[-1])
        self._rows, self._num_blocks = rows, num_blocks
        self.counts.num_chunks += (num_blocks - first) * layout.num_groups
        return True

    def _read_whole(self, first: int, stop: int) -> list[UInt8Array] | None:
        """The chunks of blocks, `[groups, bytes of a chunk]` each, and their heads into memory: one read."""
        layout, whole = self.layout, self.layout.blocks(first, stop)
        read = self._read([whole])
        if read is None:
            return None
        blocks: list[UInt8Array] = []
        for block in range(first, stop):
            at = layout.block_start(block) - whole.start
            head_bytes, chunk_bytes = layout.block_head_bytes(block), layout.chunk_bytes(block)
            head = self._take_head(block, read[0][at : at + head_bytes])
            if head is None:
                return None
            chunks = read[0][at + head_bytes :][: layout.num_groups * chunk_bytes].reshape(layout.num_groups, -1)
            if [chunk_checksum(chunk) for chunk in chunks] != head.checksums.tolist():
                self._on_miss("payload", None)
                return None
            blocks.append(chunks)
        return blocks

    def _read_blocks_by_chunk(self, num_blocks: int) -> bool:
        """The same without those chunks that are kept in memory."""
        layout, first = self.layout, self._num_blocks
        if not self._read_heads(num_blocks):
            return False
        chunks = self._read_chunks(np.arange(first * layout.num_groups, num_blocks * layout.num_groups))
        if chunks is None:
            return False
        by_group = chunks.reshape(num_blocks - first, layout.num_groups, *chunks.shape[1:]).swapaxes(0, 1)
        rows = self._grown(num_blocks)
        num_more = rows.shape[1] - self._rows.shape[1]
        rows[:, self._rows.shape[1] :] = by_group.reshape(layout.num_groups, -1, chunks.shape[-1])[:, :num_more]
        self._rows, self._num_blocks = rows, num_blocks
        return True

    def _grown(self, num_blocks: int) -> UInt8Array:
        """The rows of the first blocks, and room for more."""
        layout, before = self.layout, self._rows
        num_tokens = min(num_blocks * layout.chunk_size, layout.num_tokens)
        rows = np.empty((layout.num_groups, num_tokens, before.shape[-1]), np.uint8)
        rows[:, : before.shape[1]] = before
        return rows

    def _read_heads(self, num_blocks: int | None = None) -> bool:
        """Have in memory what is in front of the first blocks, by default of all."""
        missing = [block for block, head in enumerate(self._heads.by_block[:num_blocks]) if head is None]
        extents = [self.layout.block_head(block) for block in missing]
        read = self._read(extents)
        if read is None:
            return False
        return all(self._take_head(block, part) is not None for block, part in zip(missing, read, strict=True))

    def _take_head(self, block: int, part: UInt8Array) -> BlockHead | None:
        head = BlockHead.decode(part.data, self.header, self.layout, block)
        if head is None:
            self._on_miss("header", None)
        else:
            self._heads.by_block[block] = head
        return head

    def _read_chunks(self, ids: ChunkIds) -> UInt8Array | None:
        """Chunks by their ids: `[len(ids), chunk_size, row_bytes]`. The heads of their blocks are in memory."""
        layout = self.layout
        places = [divmod(i, layout.num_groups) for i in ids.tolist()]
        checksums = self._checksums(places)
        chunks: list[UInt8Array | None] = [None] * len(places)
        if self._chunks is not None:
            chunks = self._chunks.take(ids, checksums)
        missing = [i for i, chunk in enumerate(chunks) if chunk is None]
        read = self._read([layout.chunk(*places[i]) for i in missing])
        if read is None:
            return None
        for i, part in zip(missing, read, strict=True):
            if chunk_checksum(part) != int(checksums[i]):
                self._on_miss("payload", None)
                return None
            chunks[i] = part
        if self._chunks is not None:
            self._chunks.put(ids[missing], checksums[missing], [part.copy() for part in read])
        out = np.empty((len(places), layout.chunk_size, self._rows.shape[-1]), np.uint8)
        for i, ((block, _), chunk) in enumerate(zip(places, chunks, strict=True)):
            assert chunk is not None
            out[i, : layout.block_tokens(block)] = chunk.reshape(-1, out.shape[-1])
        self.counts.num_chunks += len(missing)
        return out

    def _checksums(self, places: Sequence[tuple[int, int]]) -> Checksums:
        """Of chunks, by block and group."""
        checksums = np.empty(len(places), np.uint64)
        for i, (block, group) in enumerate(places):
            head = self._heads.by_block[block]
            assert head is not None
            checksums[i] = head.checksums[group]
        return checksums

    def _read(self, extents: Sequence[Extent]) -> list[UInt8Array] | None:
        """The bytes of `extents`, which ascend."""
        parts: list[UInt8Array] = []
        for whole in units(extents):
            buffer = np.empty(whole.num_bytes, np.uint8)
            try:
                got = read_all(self._files, self._fd, [buffer.data], self._start + whole.start)
                self._files.drop_cache(self._fd, self._start + whole.start, whole.num_bytes)
            except OSError as error:
                self._on_miss("io", error)
                return None
            if got < whole.num_bytes:
                self._on_miss("short", None)
                return None
            self.counts.num_bytes += whole.num_bytes
            self.counts.num_reads += 1
            while len(parts) < len(extents) and extents[len(parts)].stop <= whole.stop:
                extent = extents[len(parts)]
                parts.append(buffer[extent.start - whole.start : extent.stop - whole.start])
        return parts

    def _order(self, num_blocks: int) -> RunOrder:
        heads = [head.order for head in self._heads.by_block[:num_blocks] if head is not None]
        order: RunOrder = np.concatenate(heads, axis=1) if heads else np.empty((self.layout.num_groups, 0), np.uint16)
        return self._by_head(order)

    def _by_head(self, by_group: NDArray[Any]) -> NDArray[Any]:
        kv = self.layout.kv
        return by_group.reshape(kv.num_layers, kv.num_kv_heads, *by_group.shape[1:])
