"""Rows and pages move as asked, in every layer, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.kv_pool import copy_rows, move_pages
from radixlm.runtime.artifact.manifest import KVDType, KVLayout

from .harness import built, every_target
from .pool import PARTS, Pool, layout_of

NUM_PAGES = 7
every_dtype = pytest.mark.parametrize("dtype", ["f16", "f32", "int8"])


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
                for view in (expected.items, expected.scales) if dtype == "int8" else (expected.items,):
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
