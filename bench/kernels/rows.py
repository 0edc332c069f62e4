"""Cases of kernels between the matrices: activations, rotary positions, embedding, gathering rows, largest logits.

Their rows come from caches, as in a step, so the share of memory bandwidth can exceed one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.activation import ActivationSpec, Function, activation, gather_rows
from radixlm.compile.kernels.embedding import embedding
from radixlm.compile.kernels.quantized_rows import quantized_bytes
from radixlm.compile.kernels.rope import rope_angles, rope_append
from radixlm.compile.kernels.sampling.top_k import num_maxima, top_k
from radixlm.compile.weights.kinds import WeightKind
from radixlm.compile.weights.packing import packed_shape
from radixlm.runtime.artifact.manifest import PAGE_SIZE, TOP_LOGITS, KVDType, KVLayout

from ..native import aligned
from .case import Case, Work
from .linear import FLOAT_KINDS, INTEGER_KINDS, Arena

ROWS = (1, 8, 64, 512)
LOGIT_ROWS = (1, 8, 64)
KV_DTYPES: tuple[KVDType, ...] = ("f16", "f32", "k12v8")
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49_152, 30, 9, 3, 64
NUM_PAGES = 64


def row_cases(target: Target, arena: Arena) -> Iterator[Case]:
    """Yield every kernel with every number of rows."""
    pool = aligned(np.zeros(NUM_PAGES * layout_of("f32").page_bytes, np.uint8))
    for num_rows in ROWS:
        yield _activation(target, "rms_norm", HIDDEN, num_rows, wide=True)
        yield _activation(target, "rms_norm", HIDDEN, num_rows, wide=False)
        yield _activation(target, "silu_mul", INTERMEDIATE, num_rows, wide=False)
        yield _activation(target, "identity", HIDDEN, num_rows, wide=False)
        for kind in (*INTEGER_KINDS, *FLOAT_KINDS):
            yield _embedding(arena, kind, num_rows)
        yield _rope_angles(num_rows)
        for dtype in KV_DTYPES:
            yield _rope_append(layout_of(dtype), pool, num_rows)
        yield Case(
            "gather_rows",
            lambda: gather_rows(HIDDEN),
            f"{num_rows} rows",
            (_floats(num_rows, HIDDEN), _indices(num_rows), _floats(num_rows, HIDDEN), num_rows),
            Work(8.0 * num_rows * HIDDEN),
        )
    for num_rows in LOGIT_ROWS:
        yield _top_k(num_rows)


def layout_of(dtype: KVDType) -> KVLayout:
    """Return SmolLM2-135M's layout."""
    return KVLayout.uniform(dtype, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def _activation(target: Target, function: Function, width: int, num_rows: int, wide: bool) -> Case:
    """Return the case of an activation function whose result is quantized, in 16 bits if `wide`."""
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
            None,
            aligned(codes),
            _floats(1, sizes[1] // 4),
            aligned(sums),
            num_rows,
        ),
        Work(4.0 * num_rows * stride + sum(sizes)),
    )


def _embedding(arena: Arena, kind: WeightKind, num_rows: int) -> Case:
    """Return the case of the embedding, for as much of the vocabulary as the arena holds."""
    codes = arena.codes if kind.is_quantized else arena.floats[kind.codes]
    scales = arena.floats["f16"]
    shape = packed_shape(kind, VOCABULARY, HIDDEN)
    vocabulary = min(VOCABULARY, VOCABULARY * codes.nbytes // shape.codes)
    token_ids = np.random.default_rng(0).integers(0, vocabulary, num_rows).astype(np.int32)
    row_bytes = (shape.codes + shape.scales + shape.offsets) / VOCABULARY
    return Case(
        f"embedding {kind.label}",
        lambda: embedding(kind, HIDDEN, HIDDEN),
        f"{num_rows} rows",
        (aligned(token_ids), codes, scales, scales, _floats(num_rows, HIDDEN), num_rows),
        Work(num_rows * (row_bytes + 4 * HIDDEN)),
    )


def _top_k(num_rows: int) -> Case:
    """Return the case of the largest logits of `num_rows` rows."""
    logits = np.random.default_rng(0).standard_normal(num_rows * VOCABULARY, np.float32)
    return Case(
        f"top_k {TOP_LOGITS}",
        lambda: top_k(TOP_LOGITS),
        f"{num_rows} rows",
        (
            aligned(logits),
            _floats(num_rows, num_maxima(VOCABULARY)),
            _floats(num_rows, TOP_LOGITS),
            aligned(np.zeros(num_rows * TOP_LOGITS, np.int32)),
            _indices(num_rows),
            VOCABULARY,
            VOCABULARY,
            num_rows,
        ),
        Work(num_rows * (4.0 * VOCABULARY + 8 * TOP_LOGITS + 4)),
    )


def _rope_angles(num_rows: int) -> Case:
    """Return the case of the angles of RoPE at `num_rows` positions."""
    return Case(
        "rope_angles",
        lambda: rope_angles(HEAD_DIM),
        f"{num_rows} rows",
        (_indices(num_rows), _floats(1, HEAD_DIM // 2), _floats(num_rows, HEAD_DIM), num_rows),
        Work(4.0 * num_rows * HEAD_DIM),
    )


def _rope_append(layout: KVLayout, pool: np.ndarray, num_rows: int) -> Case:
    """Return the case of rotating keys and appending them with values to the KV pool."""
    columns = (0, HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)
    stride = columns[2] + KV_HEADS * HEAD_DIM
    width = HEADS * HEAD_DIM
    return Case(
        f"rope_append {layout.dtype}",
        lambda: rope_append(layout.of_layer(0), HEADS, *columns, stride),
        f"{num_rows} rows",
        (
            _floats(num_rows, stride),
            _floats(num_rows, HEAD_DIM),
            _indices(num_rows),
            _floats(num_rows, width),
            pool[: NUM_PAGES * layout.page_bytes],
            0,
            NUM_PAGES,
            num_rows,
        ),
        Work(num_rows * (4.0 * stride + 4 * HEAD_DIM + 4 * width + layout.page_bytes / PAGE_SIZE / LAYERS)),
        (0, 0, 0, 0, 0, layout.items_before(1), 0, 0),
        LAYERS,
    )


def _floats(num_rows: int, width: int) -> np.ndarray:
    return aligned(np.full(num_rows * width, 1 / 64, np.float32))


def _indices(count: int) -> np.ndarray:
    return aligned(np.arange(count, dtype=np.int32))
