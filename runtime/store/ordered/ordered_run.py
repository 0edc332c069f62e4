"""Sort the tokens of a run of pages by importance, and turn sorted runs into pages again.

Each layer and KV head has an order of its own. This module computes orders, copies bits, and says where rows lie in the
payload of a record. It knows how a page lies in memory. It does not know files, or where scores come from.

The most important token has rank 0. A chunk has tokens of successive ranks, of one layer and head. Block `b` has the
`b`th chunk of every layer and head. So one read from the start gets the most important tokens of all layers and heads,
and any one chunk is one read, too. Each block begins with what a reader needs to understand and check it::

    block 0   the order of its tokens, checksums | layer 0 head 0: ranks 0..C-1 | layer 0 head 1: ranks 0..C-1 | ...
    block 1   the order of its tokens, checksums | layer 0 head 0: ranks C..2C-1 | ...
    ...
    probe     the keys of one head, packed: layer 0: tokens as in the text | layer 1 | ...

Blocks begin at multiples of 4 KiB. So do chunks whose size is a multiple of 4 KiB: 16 tokens of SmolLM2 in f16 have
4,096 bytes. Two other layouts are worse. With layer and head outermost, the first tokens of SmolLM2's 90 groups take 90
reads. With the rows of all heads of a token side by side, 4 KiB hold 5 tokens of similar rank, not 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...artifact.manifest import PAGE_SIZE, SCALE_BYTES, KVLayout
from ...errors import StoreError
from ...model.kv_rows import ROW_DTYPES, KVRows, inverse_order, value_dtype
from ..record import BLOCK, CHECKSUM_BYTES, padded

MAX_RUN_TOKENS: Final = 1 << 16  # an order has 16 bits a token; a longer run is stored as several
UInt8Array = NDArray[np.uint8]
PackProbe = Callable[[NDArray[np.float32]], UInt8Array]  # of keys `[layers, tokens, head_dim]` a row of bytes a layer
RunOrder = NDArray[np.uint16]  # [layers, kv_heads, tokens]: which token of the run lies there
MIN_CHUNK, MAX_CHUNK = 16, 256  # tokens
BLOCK_FIELDS_BYTES: Final = 64  # before the checksums and orders of a block
SHORT_CHECKSUM_BYTES: Final = 8  # of a chunk, or the probe keys of a layer
_ORDER_BYTES: Final = 2  # a token


@dataclass(frozen=True)
class OrderedRun:
    """The rows of a run as they are stored, the most important tokens of each layer and head first.

    >>> run = OrderedRun.of_pages(layout, pages, scores)
    >>> (run.to_pages() == pages).all()
    True
    """

    kv: KVLayout
    order: RunOrder
    rows: UInt8Array  # [layers, kv_heads, tokens, row_bytes]: key, value, and of codes their scales
    probe_head: int
    probe_keys: UInt8Array  # [layers, n]: keys of one head, tokens as in the text, packed or as they lie in rows

    @classmethod
    def of_pages(
        cls,
        kv: KVLayout,
        pages: UInt8Array,
        scores: NDArray[Any],
        *,
        probe_head: int = 0,
        pack_probe: PackProbe | None = None,
    ) -> OrderedRun:
        """Order the tokens of whole `pages`, uint8 `[N, page_bytes]`, by `scores`, `[layers, kv_heads, 16 N]`.

        Tokens with equal scores keep the order of the text. Infinite scores put tokens first or last.

        Args:
            pack_probe: makes the bytes of the probe head's keys that are stored; None: as they lie in rows.

        Raises:
            StoreError: the scores have another shape or are not numbers, the model has no such head, or there are no
                pages or too many.
        """
        num_tokens = len(pages) * PAGE_SIZE
        if not 0 < num_tokens <= MAX_RUN_TOKENS:
            raise StoreError(f"a run has 1 to {MAX_RUN_TOKENS} tokens, not {num_tokens}; store it as several")
        if scores.shape != (kv.num_layers, kv.num_kv_heads, num_tokens):
            wanted = (kv.num_layers, kv.num_kv_heads, num_tokens)
            raise StoreError(f"the scores are {list(scores.shape)}, these pages need {list(wanted)}")
        if np.isnan(scores).any():
            raise StoreError("some scores are not numbers; score the pages again")
        if not 0 <= probe_head < kv.num_kv_heads:
            raise StoreError(f"there is no KV head {probe_head}, the model has {kv.num_kv_heads}")
        order = np.argsort(-scores, axis=-1, kind="stable")
        rows = KVRows.of_pages(kv, pages)
        probe_keys = _keys_in_rows(rows, probe_head) if pack_probe is None else pack_probe(rows.keys_of(probe_head))
        return cls(kv, order.astype(np.uint16), pack(rows.take(order)), probe_head, probe_keys)

    def to_pages(self) -> UInt8Array:
        """The pages as they were, uint8 `[N, page_bytes]`."""
        return restored(self.kv, self.order, self.rows)


def _keys_in_rows(rows: KVRows, head: int) -> UInt8Array:
    keys = [_bytes(rows.items[0, :, head])]
    if rows.scales is not None:
        keys.append(_bytes(rows.scales[0, :, head, :, None]))
    return np.concatenate(keys, axis=-1).reshape(rows.layout.num_layers, -1)


def restored(kv: KVLayout, order: RunOrder, rows: UInt8Array) -> UInt8Array:
    """The original pages of `rows`, `[layers, kv_heads, tokens, row_bytes]`, that lie in `order`."""
    return unpack(kv, rows).take(inverse_order(order)).to_pages()


def ranked_before_text(scores: NDArray[Any], num_ranked: int) -> NDArray[np.float64]:
    """Scores that put the `num_ranked` most important tokens of each layer and head first, by importance, and the other
    tokens behind them in the order of the text. A query picks mostly passages among the others.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    in_text = np.sort(order[..., num_ranked:], axis=-1)
    order = np.concatenate([order[..., :num_ranked], in_text], axis=-1)
    ranks = np.empty(scores.shape)
    np.put_along_axis(ranks, order, -np.broadcast_to(np.arange(scores.shape[-1], dtype=float), scores.shape), axis=-1)
    return ranks


def row_bytes(kv: KVLayout) -> int:
    """Bytes of a token's key and value in one layer and head."""
    return key_bytes(kv) + _value_code_bytes(kv) + (SCALE_BYTES if kv.has_codes else 0)


def key_bytes(kv: KVLayout) -> int:
    """Bytes of a token's key in one layer and head."""
    return _key_code_bytes(kv) + (SCALE_BYTES if kv.has_codes else 0)


def _key_code_bytes(kv: KVLayout) -> int:
    return int(kv.head_dim * np.dtype(ROW_DTYPES[kv.dtype]).itemsize)


def _value_code_bytes(kv: KVLayout) -> int:
    return kv.head_dim * kv.itemsize


def pack(rows: KVRows) -> UInt8Array:
    """Rows as bytes, `[layers, kv_heads, tokens, row_bytes]`."""
    parts = [_bytes(rows.items[0]), _bytes(rows.items[1].astype(value_dtype(rows.layout), copy=False))]
    if rows.scales is not None:
        parts += [_bytes(rows.scales[part][..., None]) for part in range(2)]
    return np.concatenate(parts, axis=-1)


def unpack(kv: KVLayout, packed: UInt8Array) -> KVRows:
    """Undo `pack`. Without scales the result is a view of `packed`."""
    dtype = ROW_DTYPES[kv.dtype]
    if not kv.has_codes:
        items = packed.view(dtype).reshape(*packed.shape[:-1], 2, kv.head_dim)
        return KVRows(kv, np.moveaxis(items, -2, 0), None)
    ends = _key_code_bytes(kv), _key_code_bytes(kv) + _value_code_bytes(kv)
    keys, values, scales = (np.ascontiguousarray(part) for part in np.split(packed, ends, axis=-1))
    items = np.stack([keys.view(dtype), values.view(value_dtype(kv)).astype(dtype, copy=False)])
    return KVRows(kv, items, np.ascontiguousarray(np.moveaxis(scales.view(np.float32), -1, 0)))


def unpack_keys(kv: KVLayout, packed: UInt8Array) -> NDArray[np.float32]:
    """Keys with their scales as numbers: of uint8 `[..., key_bytes]` float32 `[..., head_dim]`."""
    num_code_bytes = _key_code_bytes(kv)
    codes = np.ascontiguousarray(packed[..., :num_code_bytes]).view(ROW_DTYPES[kv.dtype])
    keys: NDArray[np.float32] = codes.astype(np.float32)
    return keys * np.ascontiguousarray(packed[..., num_code_bytes:]).view(np.float32) if kv.has_codes else keys


def _bytes(items: NDArray[Any]) -> UInt8Array:
    return np.ascontiguousarray(items).view(np.uint8)


@dataclass(frozen=True)
class Extent:
    """Bytes of a payload: one read."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class OrderedLayout:
    """Where the rows of a run of `num_tokens` lie, in chunks of `chunk_size` tokens.

    A group is one KV head of one layer; the heads of a layer are neighbours.

    Raises:
        StoreError: the chunks are smaller than 16 tokens or larger than 256.
    """

    kv: KVLayout
    num_tokens: int
    chunk_size: int = 16
    packed_probe_bytes: int | None = None  # of a layer's probe keys; None: they are as in rows

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
    def probe(self) -> Extent:
        """The probe keys, up to the end of their last unit of 4 KiB."""
        start = self.block_start(self.num_blocks)
        return Extent(start, start + padded(self.kv.num_layers * self.probe_bytes))

    @property
    def probe_bytes(self) -> int:
        """Of a layer's probe keys."""
        packed = self.packed_probe_bytes
        return self.num_tokens * key_bytes(self.kv) if packed is None else packed

    @property
    def num_bytes(self) -> int:
        """Of the payload, whole blocks."""
        return self.probe.stop

    def block_tokens(self, block: int) -> int:
        """Ranks in a block; the last block may have fewer than the others."""
        return min(self.chunk_size, self.num_tokens - block * self.chunk_size)

    def block_head_bytes(self, block: int) -> int:
        """Bytes before the chunks of a block."""
        each = SHORT_CHECKSUM_BYTES + _ORDER_BYTES * self.block_tokens(block)
        return padded(BLOCK_FIELDS_BYTES + self.num_groups * each + CHECKSUM_BYTES)

    def chunk_bytes(self, block: int) -> int:
        """Bytes of each chunk in a block."""
        return self.block_tokens(block) * row_bytes(self.kv)

    def block_bytes(self, block: int) -> int:
        """Bytes of a whole block."""
        return self.block_head_bytes(block) + padded(self.num_groups * self.chunk_bytes(block))

    def block_start(self, block: int) -> int:
        """Where a block begins; `num_blocks` stands for the end of the last one."""
        if block < self.num_blocks:
            return block * self.block_bytes(0)
        return self.block_start(block - 1) + self.block_bytes(block - 1)

    def blocks(self, first: int, stop: int) -> Extent:
        """The blocks `[first, stop)`."""
        return Extent(self.block_start(first), self.block_start(stop))

    def block_head(self, block: int) -> Extent:
        """The beginning of a block: its orders and checksums."""
        start = self.block_start(block)
        return Extent(start, start + self.block_head_bytes(block))

    def chunk(self, block: int, group: int) -> Extent:
        """The exact bytes of a chunk; `units` gives the bytes to ask of the disk."""
        num_bytes = self.chunk_bytes(block)
        start = self.block_start(block) + self.block_head_bytes(block) + group * num_bytes
        return Extent(start, start + num_bytes)


def units(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Whole units of 4 KiB that hold the ascending `extents`; units that touch are one read.

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
