"""The kernels of latent attention: rows that hold their values, and what is written into them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.kv_pool import copy_rows
from radixlm.compile.kernels.latent import LatentShape, every_head, latent_append
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType

from .attention_case import LAYER, AttentionCase, Features
from .harness import TARGETS_HERE, built, by_rows, every_target, of_each_size
from .pairwise import pairwise
from .pool import KEYS, Pool, layout_of

SHAPES: list[tuple[KVDType, int, int, int]] = [  # query heads, numbers of a key, of a value
    ("f32", 4, 80, 64),
    ("f16", 20, 48, 32),
    ("f16", 9, 80, 48),
]
LENGTHS = (1, 16, 17, 128, 129, 300, 531)


def case_of(shape: tuple[KVDType, int, int, int], lengths: tuple[int, ...]) -> AttentionCase:
    dtype, num_heads, key_dim, value_dim = shape
    return AttentionCase(dtype, num_heads, 1, key_dim, lengths, Features(scale=0.1), value_dim)


@by_rows(of_each_size(shape=SHAPES))
def test_a_row_is_key_and_value_in_every_batch(row: dict[str, Any]) -> None:
    target, case = row["target"], case_of(row["shape"], LENGTHS)
    tokens = case.tokens(np.repeat(np.arange(len(LENGTHS)), 2), [n for length in LENGTHS for n in (length, 1)])
    together = case.run(target, tokens)
    np.testing.assert_allclose(together, case.expected(tokens), 0, 1e-5)
    for i in (0, 4, len(tokens) - 2):
        assert (case.run(target, tokens[i : i + 1]) == together[i]).all()
    for garbage in (np.inf, 0.0):
        assert (case.run(target, tokens, pool=case.pool.with_unwritten(garbage)) == together).all()


@by_rows(of_each_size(shape=SHAPES))
def test_a_prompt_is_the_same_whole_in_chunks_and_token_by_token(row: dict[str, Any]) -> None:
    target, case = row["target"], case_of(row["shape"], (300, 200))
    tokens = case.tokens([1, *[0] * 140], [200, *range(161, 301)])
    whole = case.run(target, tokens)
    np.testing.assert_allclose(whole, case.expected(tokens), 0, 1e-5)
    cuts = [0, 1, 50, 51, 70, 103, len(tokens)]
    assert (np.concatenate([case.run(target, tokens[a:b]) for a, b in itertools.pairwise(cuts)]) == whole).all()
    for i in (1, 33, len(tokens) - 1):
        assert (case.run(target, tokens[i : i + 1]) == whole[i]).all()


@by_rows(pairwise(dtype=("f32", "f16"), has_temperatures=(False, True), target=TARGETS_HERE))
def test_queries_and_rows_are_what_numpy_makes_of_them(row: dict[str, Any]) -> None:
    target, dtype, has_temperatures = row["target"], row["dtype"], row["has_temperatures"]
    num_rows, heads, plain, latent, turning, column = 5, 3, 24, 48, 12, 16
    shape = LatentShape(heads, plain, latent, turning, heads * (plain + turning), 80, column, 1e-5, has_temperatures)
    rng, layout = np.random.default_rng(0), layout_of(dtype, 2, 1, latent + turning, latent)
    queries, stored, angles, gain, temperatures = (
        rng.standard_normal(size).astype(np.float32)
        for size in ((num_rows, shape.queries_stride), (num_rows, 80), (num_rows, turning), latent, num_rows)
    )
    q = rng.standard_normal((num_rows, heads, shape.row_dim)).astype(np.float32)
    pool, slots, before = Pool(layout, 3), np.array([0, 17, 33, 5, 47], np.int32), q.copy()
    warm = (temperatures,) if has_temperatures else ()
    built(target, latent_append, layout.of_layer(LAYER), shape)(
        queries, stored, angles, gain, *warm, slots, q, pool.array, layout.items_before(LAYER), 3, num_rows
    )

    def turned(x: np.ndarray) -> np.ndarray:
        """Numbers `[rows, ..., turning]` turned."""
        table = angles.astype(np.float64).reshape(num_rows, *[1] * (x.ndim - 2), turning)
        (first, second), (cos, sin) = np.split(x, 2, axis=-1), np.split(table, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    own = queries.astype(np.float64).reshape(num_rows, heads, plain + turning)
    expected = np.concatenate([before[..., :latent], turned(own[..., plain:])], axis=-1)
    expected *= temperatures[:, None, None] if has_temperatures else 1
    np.testing.assert_allclose(q, expected, 0, 1e-5)
    vectors, key = np.split(stored.astype(np.float64)[:, column : column + shape.row_dim], [latent], axis=1)
    vectors = vectors / np.sqrt(np.mean(vectors**2, axis=1, keepdims=True) + 1e-5) * gain
    rows = np.concatenate([vectors, turned(key)], axis=1)
    for slot, wanted in zip(slots, rows, strict=True):
        found = pool.rows(KEYS, slot // PAGE_SIZE, LAYER)[0, slot % PAGE_SIZE]
        np.testing.assert_allclose(found, wanted, 1e-3 if dtype == "f16" else 0, 1e-5)
    assert np.isnan(pool.rows(KEYS, 0, 0)).all()  # the other layer's


@every_target
def test_every_token_has_all_heads(target: Target) -> None:
    heads = np.full((4, 3), -1, np.int32)
    built(target, every_head, 3)(heads, 4)
    assert (heads == np.arange(3)).all()


@every_target
def test_copied_rows_are_the_first_of_their_page(target: Target) -> None:
    layout = layout_of("f16", 2, 1, 80, 64)
    pool, rng = Pool(layout, 4), np.random.default_rng(0)
    for page in range(4):
        for layer in range(2):
            pool.write(KEYS, page, layer, slice(PAGE_SIZE), rng.standard_normal((1, PAGE_SIZE, 80)))
    before = [[pool.rows(KEYS, page, layer).copy() for layer in range(2)] for page in range(4)]
    source, destination, counts = (np.array(ids, np.int32) for ids in ([0, 1], [2, 3], [16, 5]))
    built(target, copy_rows, layout)(pool.array, source, destination, counts, 4, 2)
    for old, new, count in zip(source, destination, counts, strict=True):
        for layer in range(2):
            found = pool.rows(KEYS, int(new), layer)
            assert (found[:, :count] == before[old][layer][:, :count]).all()
            assert (found[:, count:] == before[new][layer][:, count:]).all()
