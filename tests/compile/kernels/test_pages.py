"""Rows and pages move as asked, in every layer, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.kv_pool import copy_rows, move_pages
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayer, KVLayout

from .harness import built, every_target, runnable
from .pool import DTYPES, KEYS, PARTS, VALUES, Interleaved, Pool, layout_of

NUM_PAGES = 7
every_dtype = pytest.mark.parametrize("dtype", ["f16", "f32", "k12v8"])


def filled(layout: KVLayout) -> Pool:
    pool = Pool(layout, NUM_PAGES)
    pool.array[...] = 30 * np.random.default_rng(0).standard_normal(pool.array.shape)
    return pool


@every_target
@every_dtype
@pytest.mark.parametrize("head_dim", [6, 64])
def test_copied_rows_are_the_first_of_their_page(target: Target, dtype: KVDType, head_dim: int) -> None:
    layout = layout_of(dtype, 2, 3, head_dim)
    pool, expected = filled(layout), filled(layout)
    copies = np.array([(0, 5, 16), (6, 1, 1), (3, 4, 11), (2, 2, 9), (5, 0, 0)], np.int32)
    for source, destination, count in copies[:-1]:  # none of them reads what another writes; the last copies nothing
        for layer in range(2):
            for part in PARTS:
                for view in (expected.items, expected.scales) if layout.has_codes else (expected.items,):
                    view(part, destination, layer)[:, :count] = view(part, source, layer)[:, :count]
    built(target, copy_rows, layout)(pool.array, *(column.copy() for column in copies.T), NUM_PAGES, len(copies))
    assert (pool.array == expected.array).all()


@every_target
@every_dtype
def test_pages_read_out_and_written_elsewhere_are_the_same(target: Target, dtype: KVDType) -> None:
    layout = layout_of(dtype, 3, 2, 10)
    pool, original = filled(layout), filled(layout).array
    buffer = np.zeros((3, 3, *original.shape[2:]), original.dtype)
    source, destination = np.array([6, 0, 2], np.int32), np.array([1, 3, 5], np.int32)
    built(target, move_pages, layout, into_pool=False)(pool.array, source, buffer, NUM_PAGES, 3)
    assert (pool.array == original).all()
    assert (buffer == original[:, source].swapaxes(0, 1)).all()
    built(target, move_pages, layout, into_pool=True)(pool.array, destination, buffer, NUM_PAGES, 3)
    original[:, destination] = original[:, source]
    assert (pool.array == original).all()


@every_dtype
def test_layers_of_unequal_shape_move_whole_and_by_rows(dtype: KVDType) -> None:
    shapes = ((2, 8, 8), (2, 8, 8), (1, 24, 12), (2, 8, 8))  # KV heads, numbers of a key and of a value
    layers = tuple(KVLayer(num_kv_heads=heads, key_dim=key, value_dim=value) for heads, key, value in shapes)
    layout, target = KVLayout(dtype=dtype, page_size=PAGE_SIZE, layers=layers), runnable()[-1]
    pool = (30 * np.random.default_rng(0).standard_normal((NUM_PAGES, layout.page_items))).astype(DTYPES[dtype])
    original = pool.copy()
    buffer = np.zeros((2, layout.page_items), pool.dtype)
    built(target, move_pages, layout, into_pool=False)(pool, np.array([6, 2], np.int32), buffer, NUM_PAGES, 2)
    for layer in range(len(layers)):
        items, before = layout.of_layer(layer).page_items, layout.items_before(layer)
        expected = _layer(layout, original, layer)[[6, 2]]
        assert (buffer[:, before : before + items] == expected.reshape(2, -1)).all()
    built(target, move_pages, layout, into_pool=True)(pool, np.array([1, 3], np.int32), buffer, NUM_PAGES, 2)
    for layer in range(len(layers)):
        expected = _layer(layout, original, layer).copy()
        expected[[1, 3]] = expected[[6, 2]]
        assert (_layer(layout, pool, layer) == expected).all()

    pool, count = original.copy(), 5
    sizes = [np.array([number], np.int32) for number in (6, 1, count)]
    built(target, copy_rows, layout)(pool, *sizes, NUM_PAGES, 1)
    for layer, (heads, key, value) in enumerate(shapes):
        one, expected = layout.of_layer(layer), _layer(layout, original, layer).copy()
        num_keys, start = heads * one.key_items, one.num_scale_items
        for part, first, size, dim in ((KEYS, 0, one.key_items, key), (VALUES, num_keys, one.value_items, value)):
            parts = expected[:, first : first + heads * size].reshape(NUM_PAGES, heads, size)
            parts[1, :, : count * start // PAGE_SIZE] = parts[6, :, : count * start // PAGE_SIZE]
            if one.has_codes:
                source, copy = (Interleaved(parts[page], part, dim, one.value_columns) for page in (6, 1))
                copy[:, :count] = source[:, :count]
                continue
            codes = parts[:, :, start : start + PAGE_SIZE * dim]
            tokens = codes.reshape(NUM_PAGES, heads, dim, -1).swapaxes(2, 3) if first == 0 else codes
            tokens = tokens.reshape(NUM_PAGES, heads, PAGE_SIZE, dim) if first else tokens
            tokens[1, :, :count] = tokens[6, :, :count]
        assert (_layer(layout, pool, layer) == expected).all()


def _layer(layout: KVLayout, pool: np.ndarray, layer: int) -> np.ndarray:
    """A view of one layer's part of all pages, `[pages, items]`."""
    items, before = layout.of_layer(layer).page_items, layout.items_before(layer)
    return pool.reshape(-1)[before * NUM_PAGES :][: items * NUM_PAGES].reshape(NUM_PAGES, items)
