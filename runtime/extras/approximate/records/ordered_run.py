"""Order the tokens of some pages by importance, as a run, so that the most important ones can be read alone.

Each layer and KV head has its own order. This module computes orders and copies bits. It knows the layout of a page
in memory. It does not know files, or where scores come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....artifact.manifest import PAGE_SIZE, KVLayout
from ....errors import StoreError
from ....model.kv_rows import ROW_DTYPES, KVRows, value_dtype
from .ordered_layout import OrderedLayout, key_code_bytes, value_code_bytes

MAX_RUN_TOKENS: Final = 1 << 16  # an order has 16 bits per token; a longer run is stored as several
UInt8Array = NDArray[np.uint8]
PackProbe = Callable[[NDArray[np.float32]], UInt8Array]  # keys `[layers, tokens, head_dim]` -> a row of bytes per layer
RunOrder = NDArray[np.uint16]  # [layers, kv_heads, ranks]: the token of each rank


@dataclass(frozen=True)
class OrderedRun:
    """The data of a run that is stored besides its pages, the most important tokens of each layer and head first.

    >>> run = OrderedRun.of_pages(layout, pages, scores, num_ranks=64)
    >>> run.order.shape[-1]
    64
    """

    kv: KVLayout
    pages: UInt8Array  # [N, page_bytes]
    order: RunOrder
    rows: UInt8Array  # [layers, kv_heads, ranks, row_bytes]: key, value, and the scales of codes
    probe_head: int
    probe_keys: UInt8Array  # [layers, n]: keys of one head, tokens as in the text, packed or as in rows

    @classmethod
    def of_pages(
        cls,
        kv: KVLayout,
        pages: UInt8Array,
        scores: NDArray[Any],
        *,
        num_ranks: int | None = None,
        probe_head: int = 0,
        pack_probe: PackProbe | None = None,
    ) -> OrderedRun:
        """Order the tokens of whole `pages`, uint8 `[N, page_bytes]`, by `scores`, `[layers, kv_heads, 16 N]`.

        Tokens with equal scores keep the order of the text. Infinite scores put tokens first or last.

        Args:
            num_ranks: ranks of each layer and head in the run; None: all.
            pack_probe: packs the probe head's keys; None: stored as in rows.

        Raises:
            StoreError: the scores have another shape or are not numbers, the model has no such head, or there are no
                pages or ranks, or too many.
        """
        num_tokens = len(pages) * PAGE_SIZE
        if not 0 < num_tokens <= MAX_RUN_TOKENS:
            raise StoreError(f"a run has 1 to {MAX_RUN_TOKENS} tokens, not {num_tokens}; store it as several")
        if scores.shape != (kv.num_layers, kv.num_kv_heads, num_tokens):
            wanted = (kv.num_layers, kv.num_kv_heads, num_tokens)
            raise StoreError(f"the scores are {list(scores.shape)}, these pages need {list(wanted)}")
        num_ranks = num_tokens if num_ranks is None else num_ranks
        if not 0 < num_ranks <= num_tokens:
            raise StoreError(f"{num_ranks} ranks are wanted of a run of {num_tokens} tokens")
        if np.isnan(scores).any():
            raise StoreError("some scores are not numbers; score the pages again")
        if not 0 <= probe_head < kv.num_kv_heads:
            raise StoreError(f"there is no KV head {probe_head}, the model has {kv.num_kv_heads}")
        order = np.argsort(-scores, axis=-1, kind="stable")[..., :num_ranks]
        rows = KVRows.of_pages(kv, pages)
        probe_keys = _stored_keys(rows, probe_head) if pack_probe is None else pack_probe(rows.keys_of(probe_head))
        return cls(kv, pages, order.astype(np.uint16), pack_rows(rows.take(order)), probe_head, probe_keys)

    def layout(self, chunk_size: int) -> OrderedLayout:
        """Return the layout in chunks of `chunk_size` tokens."""
        num_tokens, num_ranks = len(self.pages) * PAGE_SIZE, self.order.shape[-1]
        return OrderedLayout(self.kv, num_tokens, num_ranks, chunk_size, self.probe_keys.shape[1])


def _stored_keys(rows: KVRows, head: int) -> UInt8Array:
    """Return the keys of one KV head as stored, with the scales of codes, a row of bytes per layer."""
    keys = [_bytes(rows.items[0, :, head])]
    if rows.scales is not None:
        keys.append(_bytes(rows.scales[0, :, head, :, None]))
    return np.concatenate(keys, axis=-1).reshape(rows.layout.num_layers, -1)


def pack_rows(rows: KVRows) -> UInt8Array:
    """Return rows as bytes, `[layers, kv_heads, tokens, row_bytes]`.

    The bytes of a row are the token's key, its value, then their scales, if any.
    """
    parts = [_bytes(rows.items[0]), _bytes(rows.items[1].astype(value_dtype(rows.layout), copy=False))]
    if rows.scales is not None:
        parts += [_bytes(rows.scales[part][..., None]) for part in range(2)]
    return np.concatenate(parts, axis=-1)


def unpack(kv: KVLayout, packed: UInt8Array) -> KVRows:
    """Unpack the bytes of `pack_rows`. Without scales the result is a view of `packed`."""
    dtype = ROW_DTYPES[kv.dtype]
    if not kv.has_codes:
        items = packed.view(dtype).reshape(*packed.shape[:-1], 2, kv.head_dim)
        return KVRows(kv, np.moveaxis(items, -2, 0), None)
    ends = key_code_bytes(kv), key_code_bytes(kv) + value_code_bytes(kv)
    keys, values, scales = (np.ascontiguousarray(part) for part in np.split(packed, ends, axis=-1))
    items = np.stack([keys.view(dtype), values.view(value_dtype(kv)).astype(dtype, copy=False)])
    return KVRows(kv, items, np.ascontiguousarray(np.moveaxis(scales.view(np.float32), -1, 0)))


def _bytes(items: NDArray[Any]) -> UInt8Array:
    return np.ascontiguousarray(items).view(np.uint8)
