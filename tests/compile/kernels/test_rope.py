"""Rotary angles, and rotated rows in the pool, against NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.rope import rope_angles, rope_append
from radixlm.runtime.artifact.manifest import PAGE_SIZE

from .harness import TARGETS_HERE, built, by_rows, every_target
from .pairwise import pairwise
from .pool import KEYS, PARTS, VALUES, Pool, layout_of


@every_target
@pytest.mark.parametrize("num_rows", [1, 8, 9, 30])
def test_angles_are_cosines_and_sines_of_positions(target: Target, num_rows: int) -> None:
    frequencies = (10000.0 ** (-np.arange(12) / 12)).astype(np.float32)
    positions = np.random.default_rng(num_rows).integers(0, 100_000, num_rows).astype(np.int32)
    angles = np.zeros((num_rows, 24), np.float32)
    built(target, rope_angles, 24)(positions, frequencies, angles, num_rows)
    expected = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(angles, np.concatenate([np.cos(expected), np.sin(expected)], axis=1), 0, 1e-6)
    alone = np.zeros_like(angles)
    for i in range(num_rows):
        built(target, rope_angles, 24)(positions[i : i + 1], frequencies, alone[i : i + 1], 1)
    assert (alone == angles).all()


SPECS = pairwise(
    dtype=("f16", "f32", "k12v8"),
    heads=((4, 2, 8), (3, 3, 6), (2, 1, 2), (7, 1, 80)),  # query heads, KV heads, head_dim
    target=TARGETS_HERE,
)


@by_rows(SPECS)
def test_queries_and_keys_are_rotated_and_rows_appended(row: dict[str, Any]) -> None:
    dtype, target, (num_heads, num_kv_heads, head_dim) = row["dtype"], row["target"], row["heads"]
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
        kernel = built(target, rope_append, layout.of_layer(0), num_heads, *columns, stride)
        kernel(qkv, angles, slots, q, pool.array, layout.items_before(1), 5, num_rows)
        alone, q_alone = Pool(layout, 5), np.zeros_like(q)
        for i in range(num_rows):
            one = slice(i, i + 1)
            kernel(qkv[one], angles[one], slots[one], q_alone[one], alone.array, layout.items_before(1), 5, 1)
        assert (q_alone == q).all() and np.array_equal(alone.array, pool.array, equal_nan=not layout.has_codes)

        q = q.reshape(num_rows, num_heads, head_dim)
        np.testing.assert_allclose(q, rotated(qkv, 0, num_heads, angles), 0, 1e-6)
        turned = rotated(qkv, columns[1], num_kv_heads, angles)
        plain = qkv[:, columns[2] :].reshape(num_rows, num_kv_heads, head_dim)
        for number, slot in enumerate(slots):
            expected.write(KEYS, slot // PAGE_SIZE, 1, slot % PAGE_SIZE, turned[number])
            expected.write(VALUES, slot // PAGE_SIZE, 1, slot % PAGE_SIZE, plain[number])
        for page, part in itertools.product(range(5), PARTS):
            stored, wanted = pool.rows(part, page, 1), expected.rows(part, page, 1)
            assert (np.isnan(stored) == np.isnan(wanted)).all()
            np.testing.assert_allclose(stored, wanted, 0, {"f32": 1e-6, "f16": 2e-3}.get(dtype, 4e-2))
            written = ~np.isnan(wanted)
            if part == VALUES:  # they are rounded once
                assert (stored == wanted)[written].all()
            pool.items(part, page, 1)[written] = expected.items(part, page, 1)[written]
            if layout.has_codes:
                pool.scales(part, page, 1)[written[..., 0]] = expected.scales(part, page, 1)[written[..., 0]]
        assert np.array_equal(pool.array, expected.array, equal_nan=not layout.has_codes)  # nothing else was written


@every_target
@pytest.mark.parametrize("head_dim", [6, 48])
@pytest.mark.parametrize("number", [0.0, 1e-30, 1e37, np.inf, -np.inf, np.nan])
def test_a_row_of_codes_keeps_its_size_and_shows_what_is_not_finite(
    target: Target, number: float, head_dim: int
) -> None:
    layout = layout_of("k12v8", 1, 1, head_dim)
    row = np.random.default_rng(1).uniform(-1, 1, head_dim).astype(np.float32)
    if np.isfinite(number):
        row *= np.float32(number)
    else:
        row[head_dim // 2 + 1] = number
    qkv = np.concatenate([row, row, row])[None]
    angles = np.repeat(np.array([[1, 0]], np.float32), head_dim // 2, axis=1)  # no turn
    pool, slot, q = Pool(layout, 1), 3, np.zeros((1, head_dim), np.float32)
    kernel = built(target, rope_append, layout.of_layer(0), 1, 0, head_dim, 2 * head_dim, 3 * head_dim)
    kernel(qkv, angles, np.array([slot], np.int32), q, pool.array, 0, 1, 1)
    for part in PARTS:
        stored = pool.rows(part, 0, 0)[0, slot]
        if np.isfinite(number):
            np.testing.assert_allclose(stored, row, 0, max(np.abs(row).max(), 1e-30) / pool.limit(part) * 0.501)
        else:
            assert np.isnan(stored).all()


def rotated(qkv: np.ndarray, column: int, num_heads: int, angles: np.ndarray) -> np.ndarray:
    """Heads `[M, num_heads, head_dim]` from `column` on, turned in float64."""
    half = angles.shape[1] // 2
    heads = qkv[:, column : column + num_heads * 2 * half].reshape(len(qkv), num_heads, 2 * half).astype(np.float64)
    cos, sin = (part[:, None].astype(np.float64) for part in (angles[:, :half], angles[:, half:]))
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
