"""Read an ordered run: its first tokens, chosen ones, the keys of its probe head, or all of it as pages.

Knows one open file; believes nothing in it before the checksums agree. Reads whole units of 4 KiB, in one read where
they lie together, and counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError
from ...model.kv_rows import KVRows, inverse_order
from ..files import Files, read_all
from ..record import MissKind
from .chunk_cache import ChunkIds, RunChunks
from .ordered_record import BlockHead, BlockHeads, RunHeader, chunk_checksum
from .ordered_run import (
    Extent,
    OrderedLayout,
    RunOrder,
    UInt8Array,
    restored,
    row_bytes,
    units,
    unpack,
)

P = ParamSpec("P")
T = TypeVar("T")


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


@dataclass
class _Missed(Exception):
    """Something of the run is wrong, or the disk failed."""

    kind: MissKind
    error: OSError | None = None


def _none_if_missed(method: Callable[Concatenate[OpenRun, P], T]) -> Callable[Concatenate[OpenRun, P], T | None]:
    @wraps(method)
    def read(run: OpenRun, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(run, *args, **kwargs)
        except _Missed as missed:
            run.on_miss(missed.kind, missed.error)
            return None

    return read


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
        on_miss: told what was wrong, with the error of a disk that failed.
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
        self.on_miss = on_miss
        self._chunks = chunks
        is_known = block_heads is not None and block_heads.number == header.number  # it was not written again since
        self._heads = block_heads if block_heads and is_known else BlockHeads(header.number, [None] * layout.num_blocks)
        # by rank, of the first blocks alone: with huge pages, memory is zeroed that is never used
        self._rows = np.empty((layout.num_groups, 0, row_bytes(layout.kv)), np.uint8)
        self._num_blocks = 0  # which are in `_rows`

    @_none_if_missed
    def first(self, num_tokens: int) -> TokenRows:
        """The `num_tokens` that matter most, of each layer and head, in that order: one read."""
        layout = self.layout
        if not 0 <= num_tokens <= layout.num_tokens:
            raise StoreError(f"{num_tokens} tokens are wanted of a run of {layout.num_tokens}")
        self._read_blocks(-(-num_tokens // layout.chunk_size))
        order = self._order(self._num_blocks)[:, :, :num_tokens]
        return TokenRows(order, unpack(layout.kv, self._by_head(self._rows[:, :num_tokens])))

    @_none_if_missed
    def at(self, tokens: NDArray[np.integer[Any]]) -> TokenRows:
        """The rows of `tokens`, `[layers, kv_heads, n]`, in that order, by reading the chunks that hold them, but for
        those that were read by `first`."""
        layout = self.layout
        self._read_heads()
        order = self._order(layout.num_blocks)
        is_inside = not tokens.size or 0 <= tokens.min() <= tokens.max() < layout.num_tokens
        if tokens.shape[:2] != order.shape[:2] or not is_inside:
            raise StoreError(f"tokens of {list(tokens.shape)} are wanted of a run of {list(order.shape)}")
        ranks = np.take_along_axis(inverse_order(order), tokens.astype(np.int64), axis=-1)
        ranks, groups = ranks.reshape(layout.num_groups, -1), np.arange(layout.num_groups)[:, None]
        chunk_ids = ranks // layout.chunk_size * layout.num_groups + groups  # as they lie in the payload
        is_there = ranks < self._num_blocks * layout.chunk_size
        wanted = np.unique(chunk_ids[~is_there])
        scattered = self._read_chunks(wanted)
        if not len(wanted):
            rows = self._rows[groups, ranks]
        else:
            places = np.searchsorted(wanted, np.where(is_there, wanted[0], chunk_ids))
            rows = scattered[places, ranks % layout.chunk_size]
            rows[is_there] = self._rows[np.broadcast_to(groups, ranks.shape)[is_there], ranks[is_there]]
        return TokenRows(tokens.astype(np.uint16), unpack(layout.kv, self._by_head(rows)))

    @_none_if_missed
    def order(self) -> RunOrder:
        """Which token of the run lies where, `[layers, kv_heads, tokens]`."""
        self._read_heads()
        return self._order(self.layout.num_blocks)

    @_none_if_missed
    def block_heads(self) -> BlockHeads:
        """What to open the run with the next time, so that the order is not read again."""
        self._read_heads()
        return self._heads

    @_none_if_missed
    def probe_keys(self) -> UInt8Array:
        """The keys of the probe head as they were packed, a row of bytes a layer: one read."""
        return self._read_probe_keys()

    @_none_if_missed
    def pages(self) -> UInt8Array:
        """All of the run in the order of the text, uint8 `[N, page_bytes]`: one read."""
        layout = self.layout
        self._read_blocks(layout.num_blocks)
        return restored(layout.kv, self._order(layout.num_blocks), self._by_head(self._rows))

    @_none_if_missed
    def check(self) -> Literal[True]:
        """Read everything, a block at a time, to find what is wrong."""
        for block in range(self.layout.num_blocks):
            self._read_whole(block, block + 1)
        self._read_probe_keys()
        return True

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)

    def _read_blocks(self, num_blocks: int) -> None:
        """Have the first blocks in memory."""
        layout, first, before = self.layout, self._num_blocks, self._rows
        if num_blocks <= first:
            return
        num_chunks = (num_blocks - first) * layout.num_groups
        blocks: Iterable[UInt8Array]
        if self._chunks is None:
            blocks = self._read_whole(first, num_blocks)
            self.counts.num_chunks += num_chunks
        else:
            self._read_heads(num_blocks)
            chunks = self._read_chunks(np.arange(num_chunks) + first * layout.num_groups)
            blocks = chunks.reshape(num_blocks - first, layout.num_groups, -1)
        num_tokens = min(num_blocks * layout.chunk_size, layout.num_tokens)
        rows = np.empty((layout.num_groups, num_tokens, before.shape[-1]), np.uint8)
        rows[:, : before.shape[1]] = before
        for block, chunks in enumerate(blocks, first):
            start, count = block * layout.chunk_size, layout.block_tokens(block)
            rows[:, start : start + count] = chunks.reshape(layout.num_groups, -1, rows.shape[-1])[:, :count]
        self._rows, self._num_blocks = rows, num_blocks

    def _read_whole(self, first: int, stop: int) -> list[UInt8Array]:
        """The chunks of blocks, `[groups, bytes of a chunk]` each, and their heads into memory: one read."""
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

    def _read_heads(self, num_blocks: int | None = None) -> None:
        """Have in memory what is in front of the first blocks, by default of all."""
        missing = [block for block, head in enumerate(self._heads.by_block[:num_blocks]) if head is None]
        read = self._read([self.layout.block_head(block) for block in missing])
        for block, part in zip(missing, read, strict=True):
            self._take_head(block, part)

    def _take_head(self, block: int, part: UInt8Array) -> BlockHead:
        head = self._heads.by_block[block] = BlockHead.decode(part.data, self.header, self.layout, block)
        if head is None:
            raise _Missed("header")
        return head

    def _read_probe_keys(self) -> UInt8Array:
        (read,) = self._read([self.layout.probe])
        num_layers = self.layout.kv.num_layers
        keys = read[: num_layers * self.layout.probe_bytes].reshape(num_layers, -1)
        if tuple(chunk_checksum(layer) for layer in keys) != self.header.probe_checksums:
            raise _Missed("payload")
        return keys

    def _read_chunks(self, ids: ChunkIds) -> UInt8Array:
        """Chunks by their ids: `[len(ids), chunk_size, row_bytes]`. The heads of their blocks are in memory."""
        layout = self.layout
        places = [divmod(i, layout.num_groups) for i in ids.tolist()]
        checksums = np.array([self._checksum(*place) for place in places], np.uint64)
        chunks: list[UInt8Array | None] = [None] * len(places)
        if self._chunks is not None:
            chunks = self._chunks.take(ids, checksums)
        missing = [i for i, chunk in enumerate(chunks) if chunk is None]
        read = self._read([layout.chunk(*places[i]) for i in missing])
        for i, part in zip(missing, read, strict=True):
            if chunk_checksum(part) != int(checksums[i]):
                raise _Missed("payload")
            chunks[i] = part
        if self._chunks is not None:
            self._chunks.put(ids[missing], checksums[missing], [part.copy() for part in read])
        out = np.empty((len(places), layout.chunk_size, self._rows.shape[-1]), np.uint8)
        for i, ((block, _), chunk) in enumerate(zip(places, chunks, strict=True)):
            assert chunk is not None
            out[i, : layout.block_tokens(block)] = chunk.reshape(-1, out.shape[-1])
        self.counts.num_chunks += len(missing)
        return out

    def _checksum(self, block: int, group: int) -> int:
        head = self._heads.by_block[block]
        assert head is not None
        return int(head.checksums[group])

    def _read(self, extents: Sequence[Extent]) -> list[UInt8Array]:
        """The bytes of `extents`, which ascend."""
        parts: list[UInt8Array] = []
        for whole in units(extents):
            buffer = np.empty(whole.num_bytes, np.uint8)
            try:
                got = read_all(self._files, self._fd, [buffer.data], self._start + whole.start)
                self._files.drop_cache(self._fd, self._start + whole.start, whole.num_bytes)
            except OSError as error:
                raise _Missed("io", error) from error
            if got < whole.num_bytes:
                raise _Missed("short")
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
