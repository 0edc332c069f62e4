"""Read an ordered run: its first tokens, the keys of its probe head, and other rows from its pages.

Knows one open file, and the run's pages; uses nothing in them before checksums are verified. Reads whole units of 4
KiB, adjacent ones in one read, and counts them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....errors import StoreError
from ....model.kv_rows import KVRows
from ....store.files import Files
from ....store.record import MissKind
from .chunk_cache import ChunkIds, RunChunks
from .ordered_layout import Extent, OrderedLayout, row_bytes
from .ordered_record import BlockHead, Checksums, RunHeader, RunTables, chunk_checksum
from .ordered_run import RunOrder, UInt8Array, unpack
from .page_parts import PageParts, ReadCounts, read_extents

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class TokenRows:
    """Rows of a run: their tokens, `[layers, kv_heads, n]`, and their KV."""

    tokens: RunOrder
    rows: KVRows


@dataclass
class _Missed(Exception):
    """An invalid part of the run, or a failed disk."""

    kind: MissKind
    error: Exception | None = None


def _none_if_missed(method: Callable[Concatenate[OpenRun, P], T]) -> Callable[Concatenate[OpenRun, P], T | None]:
    """Make a method of OpenRun return None where it raises `_Missed`, after it called `on_miss`."""

    @wraps(method)
    def read(run: OpenRun, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(run, *args, **kwargs)
        except _Missed as missed:
            run.on_miss(missed.kind, missed.error)
            return None

    return read


class OpenRun:
    """A run whose file is open; for one thread. Methods return None if something is invalid or the disk fails: then
    `on_miss` was called, and the caller reads the exact pages instead.

    Args:
        start: bytes of the file before the payload; whole units.
        pages: the pages of the run; None: `page_rows` is not used.
        tables: cached tables of this run.
        chunks: cache of chunks, which are not read again.

    Attributes:
        header: identifies the run.
        tables: orders and checksums read so far; pass them to open the run the next time.
        counts: what was requested from disk for it.
        on_miss: called with the kind of miss, and the error of a disk that failed.
    """

    def __init__(
        self,
        files: Files,
        fd: int,
        layout: OrderedLayout,
        header: RunHeader,
        *,
        start: int,
        pages: PageParts | None = None,
        tables: RunTables | None = None,
        chunks: RunChunks | None = None,
        on_miss: Callable[[MissKind, Exception | None], None],
    ) -> None:
        self.layout = layout
        self.counts = ReadCounts()
        self._files = files
        self._fd = fd
        self._start = start
        self.header = header
        self.on_miss = on_miss
        self._pages = pages
        self._chunks = chunks
        is_known = tables is not None and tables.number == header.number  # it was not rewritten since
        self.tables = tables if tables and is_known else RunTables(header.number, [None] * layout.num_blocks)
        # by rank, of the first blocks only: with huge pages, unused memory would be zeroed
        self._rows = np.empty((layout.num_groups, 0, row_bytes(layout.kv)), np.uint8)
        self._num_blocks = 0  # blocks in `_rows`

    @_none_if_missed
    def first(self, num_tokens: int) -> TokenRows:
        """Read the `num_tokens` most important tokens of each layer and head, in that order: one read."""
        layout = self.layout
        if not 0 <= num_tokens <= layout.num_ranks:
            raise StoreError(f"{num_tokens} tokens are wanted of a run that has {layout.num_ranks}")
        self._read_blocks(-(-num_tokens // layout.chunk_size))
        order = self._order(self._num_blocks)[:, :, :num_tokens]
        return TokenRows(order, unpack(layout.kv, self._by_head(self._rows[:, :num_tokens])))

    @_none_if_missed
    def page_rows(self, is_wanted: NDArray[np.bool_]) -> KVRows:
        """Read all rows of the run's pages where `is_wanted`, `[layers, pages]`, is true.

        The result has the pages of each layer one after the other, then zeros if a layer wants fewer than others.
        """
        layout, (num_layers, num_pages) = self.layout, is_wanted.shape
        if (num_layers, num_pages) != (layout.kv.num_layers, layout.num_pages) or not is_wanted.any():
            raise StoreError(f"pages of {list(is_wanted.shape)} are wanted of a run of {layout.num_pages}, and some")
        if self.tables.parts is None:
            self._read_tail()
        assert self.tables.parts is not None
        numbers, layers = np.nonzero(is_wanted.T)
        ids = layout.num_chunks + numbers * num_layers + layers
        parts = self._pieces(ids, self.tables.parts[numbers, layers], self._read_parts)
        place = np.cumsum(is_wanted, axis=1) - 1
        pages = np.zeros((int(place.max()) + 1, num_layers, layout.part_bytes), np.uint8)
        for number, layer, part in zip(numbers, layers, parts, strict=True):
            pages[place[layer, number], layer] = part
        return KVRows.of_pages(layout.kv, pages.reshape(len(pages), -1))

    @_none_if_missed
    def order(self) -> RunOrder:
        """Return the token of each rank, `[layers, kv_heads, ranks]`."""
        self._read_heads()
        return self._order(self.layout.num_blocks)

    @_none_if_missed
    def probe_keys(self) -> UInt8Array:
        """Read the packed keys of the probe head, a row of bytes per layer.

        It is one read, which also loads the checksums that `page_rows` needs.
        """
        return self._read_tail()

    @_none_if_missed
    def check(self) -> Literal[True]:
        """Read everything except the pages, a block at a time, to find invalid data."""
        for block in range(self.layout.num_blocks):
            self._read_whole(block, block + 1)
        self._read_tail()
        return True

    def close(self) -> None:
        """Close the files."""
        self._files.close(self._fd)
        if self._pages is not None:
            self._pages.close()

    def _read_blocks(self, num_blocks: int) -> None:
        """Load the rows of the first `num_blocks` blocks into memory, as far as they are not there yet."""
        layout, first, before = self.layout, self._num_blocks, self._rows
        if num_blocks <= first:
            return
        num_tokens = min(num_blocks * layout.chunk_size, layout.num_ranks)
        rows = np.empty((layout.num_groups, num_tokens, before.shape[-1]), np.uint8)
        rows[:, : before.shape[1]] = before
        for block, chunks in enumerate(self._blocks(first, num_blocks), first):
            start, count = block * layout.chunk_size, layout.block_tokens(block)
            rows[:, start : start + count] = chunks.reshape(layout.num_groups, count, -1)
        self._rows, self._num_blocks = rows, num_blocks

    def _blocks(self, first: int, stop: int) -> list[UInt8Array]:
        """Return the chunks of blocks `[first, stop)`, `[groups, bytes of a chunk]` each.

        Chunks in the cache are not read again, if their checksums are known.
        """
        num_groups = self.layout.num_groups
        ids, cache = np.arange(first * num_groups, stop * num_groups), self._chunks
        if cache is None or None in self.tables.by_block[first:stop]:
            blocks = self._read_whole(first, stop)
            self.counts.num_chunks += len(ids)
            if cache is not None:
                checksums, whole = self._checksums(first, stop), [chunk for block in blocks for chunk in block]
                missing = [i for i, chunk in enumerate(cache.take(ids, checksums)) if chunk is None]
                cache.put(ids[missing], checksums[missing], [whole[i].copy() for i in missing])
            return blocks
        pieces = self._pieces(ids, self._checksums(first, stop), self._read_chunks)
        return [np.stack(pieces[start : start + num_groups]) for start in range(0, len(pieces), num_groups)]

    def _read_whole(self, first: int, stop: int) -> list[UInt8Array]:
        """Read the chunks of blocks, `[groups, bytes of a chunk]` each, and their heads into memory: one read."""
        layout, whole = self.layout, self.layout.blocks(first, stop)
        (read,) = self._read([whole])
        blocks: list[UInt8Array] = []
        for block in range(first, stop):
            at = layout.block_start(block) - whole.start
            head_bytes, chunk_bytes = layout.block_head_bytes(block), layout.chunk_bytes(block)
            head = self._take_head(block, read[at : at + head_bytes])
            chunks = read[at + head_bytes :][: layout.num_groups * chunk_bytes].reshape(layout.num_groups, -1)
            if [chunk_checksum(chunk) for chunk in chunks] != head.checksums.tolist():
                raise _Missed("payload")
            blocks.append(chunks)
        return blocks

    def _read_heads(self) -> None:
        """Read from disk the heads of blocks that are not in memory yet."""
        missing = [block for block, head in enumerate(self.tables.by_block) if head is None]
        read = self._read([self.layout.block_head(block) for block in missing])
        for block, part in zip(missing, read, strict=True):
            self._take_head(block, part)

    def _take_head(self, block: int, part: UInt8Array) -> BlockHead:
        """Decode the head of a block into the tables, and return it.

        Raises:
            _Missed: it is damaged.
        """
        head = self.tables.by_block[block] = BlockHead.decode(part.data, self.header, self.layout, block)
        if head is None:
            raise _Missed("header")
        return head

    def _read_tail(self) -> UInt8Array:
        """Read the probe keys, and the checksums of parts of pages into memory."""
        layout, num_layers = self.layout, self.layout.kv.num_layers
        (read,) = self._read([layout.tail])
        keys, rest = np.split(read, [num_layers * layout.probe_bytes])
        keys, parts = keys.reshape(num_layers, -1), rest[: 8 * num_layers * layout.num_pages]
        if tuple(chunk_checksum(each) for each in (*keys, parts)) != self.header.tail_checksums:
            raise _Missed("payload")
        self.tables.parts = parts.copy().view("<u8").reshape(layout.num_pages, num_layers)
        return keys

    def _pieces(
        self,
        ids: ChunkIds,
        checksums: Checksums,
        read: Callable[[ChunkIds, Checksums], Sequence[UInt8Array | None]],
    ) -> list[UInt8Array]:
        """Return chunks or parts of pages, from the cache or else by `read`, which returns None for invalid ones."""
        there: list[UInt8Array | None] = [None] * len(ids)
        if self._chunks is not None:
            there = self._chunks.take(ids, checksums)
        missing = [i for i, piece in enumerate(there) if piece is None]
        found = read(ids[missing], checksums[missing]) if missing else []
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) < len(missing):
            raise _Missed("payload")
        if self._chunks is not None:
            self._chunks.put(ids[missing], checksums[missing], [piece.copy() for piece in pieces])
        self.counts.num_chunks += len(missing)
        read_now = iter(pieces)
        return [next(read_now) if piece is None else piece for piece in there]

    def _read_chunks(self, ids: ChunkIds, checksums: Checksums) -> list[UInt8Array | None]:
        """Read chunks from the run's record, verified; None in place of one with another checksum.

        Args:
            ids: `block * num_groups + group`, where a group is one layer and KV head.
        """
        read = self._read([self.layout.chunk(*divmod(i, self.layout.num_groups)) for i in ids.tolist()])
        pairs = zip(read, checksums.tolist(), strict=True)
        return [chunk if chunk_checksum(chunk) == checksum else None for chunk, checksum in pairs]

    def _read_parts(self, ids: ChunkIds, checksums: Checksums) -> list[UInt8Array | None]:
        """Read each layer's part of pages from the pages' own records; None in place of an invalid one.

        Args:
            ids: `num_chunks + page * num_layers + layer`.
        """
        assert self._pages is not None, "it was opened without its pages"
        places = [divmod(i, self.layout.kv.num_layers) for i in (ids - self.layout.num_chunks).tolist()]
        try:
            return self._pages.read(places, checksums, self.counts)
        except (OSError, sqlite3.Error) as error:
            raise _Missed("io", error) from error

    def _checksums(self, first: int, stop: int) -> Checksums:
        """Return the checksums of chunks of blocks whose heads are in memory."""
        return np.concatenate([head.checksums for head in self.tables.by_block[first:stop] if head is not None])

    def _read(self, extents: Sequence[Extent]) -> list[UInt8Array]:
        """Read byte ranges of the payload, in ascending order.

        Raises:
            _Missed: the disk failed, or the file ends before.
        """
        there = [Extent(self._start + extent.start, self._start + extent.stop) for extent in extents]
        try:
            parts = read_extents(self._files, self._fd, there, self.counts)
        except OSError as error:
            raise _Missed("io", error) from error
        if any(len(part) < extent.num_bytes for part, extent in zip(parts, there, strict=True)):
            raise _Missed("short")
        return parts

    def _order(self, num_blocks: int) -> RunOrder:
        """Return the token of each rank in the first blocks, whose heads are in memory, `[layers, kv_heads, ranks]`."""
        heads = [head.order for head in self.tables.by_block[:num_blocks] if head is not None]
        order: RunOrder = np.concatenate(heads, axis=1) if heads else np.empty((self.layout.num_groups, 0), np.uint16)
        return self._by_head(order)

    def _by_head(self, by_group: NDArray[Any]) -> NDArray[Any]:
        """Split the first axis, of groups, into layers and KV heads."""
        kv = self.layout.kv
        return by_group.reshape(kv.num_layers, kv.num_kv_heads, *by_group.shape[1:])
