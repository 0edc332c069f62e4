"""What stands between the matrices: activations, rotary positions, the embedding, gathering and copying rows.

Their rows come from caches, as they do in a step, so the share of memory bandwidth may exceed one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from radixlm.compile.kernels.activation import ActivationSpec, Function, activation, gather_rows
from radixlm.compile.kernels.embedding import embedding
from radixlm.compile.kernels.layout import packed_shape
from radixlm.compile.kernels.pages import copy_rows
from radixlm.compile.kernels.quantized_rows import quantized_bytes
from radixlm.compile.kernels.rope import rope_angles, rope_append
from radixlm.compile.quantization import Q8
from radixlm.compile.targets import Target
from radixlm.runtime.manifest import PAGE_SIZE, KVLayout

from .kernel_case import Case, Work
from .native import aligned

ROWS = (1, 8, 64, 512)
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49_152, 30, 9, 3, 64
LAYOUT = KVLayout(dtype="f16", page_size=PAGE_SIZE, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
NUM_PAGES = 64


def row_cases(target: Target) -> Iterator[Case]:
    """Every kernel at every number of rows."""
    pool = aligned(np.zeros(LAYERS * NUM_PAGES * 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM, np.float16))
    for num_rows in ROWS:
        yield _activation(target, "rms_norm", HIDDEN, num_rows, wide=True)
        yield _activation(target, "rms_norm", HIDDEN, num_rows, wide=False)
        yield _activation(target, "silu_mul", INTERMEDIATE, num_rows, wide=False)
        yield _activation(target, "identity", HIDDEN, num_rows, wide=False)
        yield _embedding(num_rows)
        yield _rope_angles(num_rows)
        yield _rope_append(pool, num_rows)
        yield Case(
            "gather_rows",
            lambda: gather_rows(HIDDEN),
            f"{num_rows} rows",
            (_floats(num_rows, HIDDEN), _indices(num_rows), _floats(num_rows, HIDDEN), num_rows),
            Work(8.0 * num_rows * HIDDEN),
        )
    for num_copies in (1, 8):
        sources, destinations = _indices(num_copies), _indices(num_copies) + np.int32(num_copies)
        counts = np.full(num_copies, PAGE_SIZE - 1, np.int32)
        yield Case(
            "copy_rows",
            lambda: copy_rows(LAYOUT),
            f"{num_copies} pages",
            (pool, sources, destinations, counts, NUM_PAGES, num_copies),
            Work(2.0 * 2 * 2 * num_copies * LAYERS * KV_HEADS * HEAD_DIM * (PAGE_SIZE - 1)),
        )


def _activation(target: Target, function: Function, width: int, num_rows: int, wide: bool) -> Case:
    stride = 2 * width if function == "silu_mul" else width
    spec = ActivationSpec(function, width, stride, True, False, width, width, 1e-5, wide)
    sizes = quantized_bytes(num_rows, width, wide)
    codes, sums = (np.zeros(size // 4, np.int32) for size in (sizes[0], sizes[2]))
    return Case(
        f"activation {function} {width}{' wide' if wide else ''}",
        lambda: activation(spec, target),
        f"{num_rows} rows",
        (
            _floats(num_rows, stride),
            _floats(1, width),
            None,
            aligned(codes),
            _floats(1, sizes[1] // 4),
            aligned(sums),
            num_rows,
        ),
        Work(4.0 * num_rows * stride + sum(sizes)),
    )


def _embedding(num_rows: int) -> Case:
    shape = packed_shape(Q8, VOCABULARY, HIDDEN)
    token_ids = np.random.default_rng(0).integers(0, VOCABULARY, num_rows).astype(np.int32)
    codes = aligned(np.ones(shape.codes, np.uint8))
    scales = aligned(np.ones(shape.scales // 2, np.float16))
    return Case(
        "embedding q8_g32",
        lambda: embedding(Q8, HIDDEN, HIDDEN),
        f"{num_rows} rows",
        (aligned(token_ids), codes, scales, None, _floats(num_rows, HIDDEN), num_rows),
        Work(num_rows * HIDDEN * (1 + 2 / 32 + 4)),
    )


def _rope_angles(num_rows: int) -> Case:
    return Case(
        "rope_angles",
        lambda: rope_angles(HEAD_DIM),
        f"{num_rows} rows",
        (_indices(num_rows), _floats(1, HEAD_DIM // 2), _floats(num_rows, HEAD_DIM), num_rows),
        Work(4.0 * num_rows * HEAD_DIM),
    )


def _rope_append(pool: np.ndarray, num_rows: int) -> Case:
    columns = (0, HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)
    stride = columns[2] + KV_HEADS * HEAD_DIM
    width = HEADS * HEAD_DIM
    return Case(
        "rope_append f16",
        lambda: rope_append(LAYOUT, HEADS, *columns, stride),
        f"{num_rows} rows",
        (
            _floats(num_rows, stride),
            _floats(num_rows, HEAD_DIM),
            _indices(num_rows),
            _floats(num_rows, width),
            pool,
            0,
            NUM_PAGES,
            num_rows,
        ),
        Work(num_rows * (4.0 * stride + 4 * HEAD_DIM + 4 * width + 2 * 2 * KV_HEADS * HEAD_DIM)),
        (0, 0, 0, 0, 0, 1, 0, 0),
        LAYERS,
    )


def _floats(num_rows: int, width: int) -> np.ndarray:
    return aligned(np.full(num_rows * width, 1 / 64, np.float32))


def _indices(count: int) -> np.ndarray:
    return aligned(np.arange(count, dtype=np.int32))
