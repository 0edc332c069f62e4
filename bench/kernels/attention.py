"""Cases of attention with SmolLM2's heads: decode at a long context, a chunk of a prompt after earlier ones, and the
splitting of such steps into units of work.

A decoded token's KV comes from memory: each call attends to another sequence, in scattered pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.attention import attention, slots_floats
from radixlm.compile.kernels.attention_shape import AttentionShape
from radixlm.compile.kernels.attention_units import AttentionLimits, find_units, units_ints
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayout

from ..native import Native, aligned
from .case import Case, Work

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
WIDTH = HEADS * HEAD_DIM
KV_DTYPES: tuple[KVDType, ...] = ("f16", "f32", "k12v8")
COLD_BYTES = 160 << 20
CONTEXTS = (100, 2000, 8000)
CHUNK, PASTS = 512, (0, 1536, 7680)
LIMITS = AttentionLimits(CHUNK, max(*CONTEXTS, PASTS[-1] + CHUNK))


def attention_cases(target: Target, cold_bytes: int = COLD_BYTES) -> Iterator[Case]:
    """Yield decode at `CONTEXTS` and `CHUNK` tokens after `PASTS`, for each KV dtype; then cases of `find_units`."""
    for dtype in KV_DTYPES:
        layout = _layout(dtype)
        num_pages = cold_bytes // layout.page_bytes
        pool = _pool(layout, num_pages)
        for context in CONTEXTS:
            lengths = np.array([context], np.int32)
            yield _case(target, layout, pool, num_pages, lengths, f"decode after {context - 1:,}")
        for past in PASTS:
            lengths = np.arange(past + 1, past + CHUNK + 1, dtype=np.int32)
            yield _case(target, layout, pool, num_pages, lengths, f"{CHUNK} tokens after {past:,}")
    yield _find_units_case(target, CHUNK, f"a prompt of {CHUNK}", np.zeros(CHUNK))
    for num_rows in (1, 8, 64):
        yield _find_units_case(target, num_rows, f"{num_rows} rows", np.arange(1, num_rows + 1))


def _find_units_case(target: Target, num_rows: int, size: str, row_of_token: np.ndarray) -> Case:
    """Return the case of `find_units`, which divides a step's attention into units of work for threads.

    `size` names the case. It runs once per forward, on one thread, and its work excludes writing the units.
    """
    shape = AttentionShape.of(_layout("f16").of_layer(0), HEADS, target)
    lengths = np.arange(1, num_rows + 1) if row_of_token[-1] == 0 else np.full(num_rows, CONTEXTS[1])
    return Case(
        "find_units",
        lambda: find_units(LIMITS, shape.tokens),
        size,
        (
            aligned(row_of_token.astype(np.int32)),
            aligned(lengths.astype(np.int32)),
            aligned(np.zeros(units_ints(LIMITS), np.int32)),
            num_rows,
        ),
        Work(8.0 * num_rows),
    )


def _layout(dtype: KVDType) -> KVLayout:
    return KVLayout.uniform(dtype, num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def _pool(layout: KVLayout, num_pages: int) -> np.ndarray:
    """Return a pool in which all keys are equal and all values, both small."""
    shape = (num_pages, layout.page_items)
    if not layout.has_codes:
        return aligned(np.full(shape, 1 / 64, np.float32 if layout.dtype == "f32" else np.float16))
    pool, each = np.ones(shape, np.int8), layout.of_layer(0)
    for head in range(KV_HEADS):
        for start in (head * each.key_items, KV_HEADS * each.key_items + head * each.value_items):
            pool[:, start : start + each.num_scale_items].view(np.float32)[...] = 1 / 64
    return aligned(pool)


def _work(layout: KVLayout, num_bytes: float, num_products: float) -> Work:
    """Return the work of attention, with `num_products` operations for scores and as many for outputs.

    With 16-bit keys the scores count twice, as products of 8 bits.
    """
    if layout.of_layer(0).has_codes:
        return Work(num_bytes, integer_operations=3 * num_products, weight_bits=8)
    return Work(num_bytes, float_operations=2 * num_products)


def _case(target: Target, layout: KVLayout, pool: np.ndarray, num_pages: int, lengths: np.ndarray, size: str) -> Case:
    """Return the case of attention for one step, whose tokens see the KV rows `lengths`."""
    num_rows, longest = len(lengths), int(lengths[-1])
    width = -(-longest // PAGE_SIZE)
    sequences = num_pages // width
    pages = np.random.default_rng(0).permutation(num_pages)[: sequences * width].astype(np.int32)
    shape = AttentionShape.of(layout.of_layer(0), HEADS, target)
    rows, units = aligned(np.zeros(num_rows, np.int32)), aligned(np.zeros(units_ints(LIMITS), np.int32))
    finder = Native({"find_units": find_units(LIMITS, shape.tokens)}, target)
    finder.call("find_units", (rows, aligned(lengths), units, num_rows))
    values = (
        aligned(np.full(num_rows * WIDTH, 1 / 8, np.float32)),
        pool,
        aligned(pages),
        rows,
        aligned(lengths),
        units,
        aligned(np.zeros(slots_floats(shape, LIMITS), np.float32)),
        aligned(np.zeros(num_rows * WIDTH, np.float32)),
        aligned(np.zeros(num_rows * HEADS * 2, np.float32)),
        0,
        num_pages,
        width,
    )
    return Case(
        f"attention {layout.dtype}",
        lambda: attention(shape, WIDTH, LIMITS),
        size,
        values,
        _work(
            layout, longest * layout.page_bytes / PAGE_SIZE + 8 * num_rows * WIDTH, 2.0 * WIDTH * float(lengths.sum())
        ),
        (0, 0, width, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        sequences,
    )
