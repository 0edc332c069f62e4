"""Rotary angles, and rotated rows in the pool, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.kernels.rope import rope_angles, rope_append
from radixlm.compile.targets import Target
from radixlm.runtime.manifest import PAGE_SIZE, KVDType

from .harness import built, every_target
from .pool import Pool, layout_of


@every_target
@pytest.mark.parametrize("num_rows", [1, 8, 9, 30])
def test_angles_are_cosines_and_sines_of_positions(target: Target, num_rows: int) -> None:
    frequencies = (10000.0 ** (-np.arange(12) / 12)).astype(np.float32)
    positions = np.random.default_rng(num_rows).integers(0, 100_000, num_rows).astype(np.int32)
    angles = np.zeros((num_rows, 24), np.float32)
    built(target, rope_angles, 24)(positions, frequencies, angles, num_rows)
    expected = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(angles, np.concatenate([np.cos(expected), np.sin(expected)], axis=1), 0, 1e-6)


@every_target
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 6), (2, 1, 2), (7, 1, 80)])
def test_queries_and_keys_are_rotated_and_rows_appended(
    target: Target, dtype: KVDType, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    layout = layout_of(dtype, 2, num_kv_heads, head_dim)
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    columns = (0, queries + 16, queries + keys + 32)
    stride = columns[2] + keys
    half = head_dim // 2
    for num_rows in (1, 5, 20):
        rng = np.random.default_rng(num_rows)
        qkv = rng.standard_normal((num_rows, stride)).astype(np.float32)
        turn = rng.random((num_rows, half))
        angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
        slots = rng.permutation(5 * PAGE_SIZE)[:num_rows].astype(np.int32)
        pool, expected = Pool(layout, 5), Pool(layout, 5)
        q = np.zeros((num_rows, queries), np.float32)
        kernel = built(target, rope_append, layout, num_heads, *columns, stride)
        kernel(qkv, angles, slots, q, pool.array, 1, 5, num_rows)

        q = q.reshape(num_rows, num_heads, head_dim)
        np.testing.assert_allclose(q, rotated(qkv, 0, num_heads, angles), 0, 1e-6)
        turned = rotated(qkv, columns[1], num_kv_heads, angles)
        plain = qkv[:, columns[2] :].reshape(num_rows, num_kv_heads, head_dim)
        for row, slot in enumerate(slots):
            expected.keys(slot // PAGE_SIZE, 1)[:, slot % PAGE_SIZE] = turned[row]
            expected.values(slot // PAGE_SIZE, 1)[:, slot % PAGE_SIZE] = plain[row]
            written = pool.values(slot // PAGE_SIZE, 1)[:, slot % PAGE_SIZE]
            assert (written == plain[row].astype(written.dtype)).all()  # values are rounded once
        assert (np.isnan(pool.array) == np.isnan(expected.array)).all()  # and nothing else was written
        np.testing.assert_allclose(pool.array, expected.array, 0, 1e-6 if dtype == "f32" else 2e-3)


def rotated(qkv: np.ndarray, column: int, num_heads: int, angles: np.ndarray) -> np.ndarray:
    """Heads `[M, num_heads, head_dim]` from `column` on, turned in float64."""
    half = angles.shape[1] // 2
    heads = qkv[:, column : column + num_heads * 2 * half].reshape(len(qkv), num_heads, 2 * half).astype(np.float64)
    cos, sin = (part[:, None].astype(np.float64) for part in (angles[:, :half], angles[:, half:]))
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
