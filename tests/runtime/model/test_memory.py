"""Memory of the KV pool that is given back to the system."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.window_layers import WindowLayers
from radixlm.runtime.model.memory import WindowPool, can_release_memory, release_memory, zeros

pytestmark = pytest.mark.skipif(not can_release_memory(), reason="the system takes no memory back")


@given(start=st.integers(0, 40_000), stop=st.integers(0, 40_000))
def test_whole_pages_of_the_system_are_zeros_again_and_no_other_byte_changes(start: int, stop: int) -> None:
    array = zeros((40_000,), np.uint8)
    array[:] = 1
    assert release_memory(array, start, stop)
    page = mmap.PAGESIZE
    expected = np.ones_like(array)
    expected[-(-start // page) * page : max(-(-start // page) * page, stop // page * page)] = 0
    assert (array == expected).all()


def test_pages_that_are_dropped_take_no_memory() -> None:
    num_pages, layers = 64, WindowLayers(16, ((25_600, 25_600), (76_800, 25_600)))  # two of four layers
    pool = zeros((num_pages, 4 * 25_600), np.uint8, is_sparse=True)
    pool[:] = 1
    before = _resident_bytes()
    WindowPool(pool, num_pages, layers).drop([range(8, 32), range(48, 200)])
    freed = before - _resident_bytes()
    assert abs(freed - 2 * 40 * 25_600) <= 4 * 2 * mmap.PAGESIZE
    by_layer = pool.reshape(4, num_pages, 25_600)
    assert by_layer[0::2].all() and by_layer[1::2, :8].all() and by_layer[1::2, 32:48].all()
    assert not by_layer[1::2, 9:31].any() and not by_layer[1::2, 49:63].any()


def test_a_sparse_pool_may_be_larger_than_memory() -> None:
    pool = zeros((1 << 42,), np.uint8, is_sparse=True)
    pool[-1] = 1
    assert pool[-1] == 1 and pool[0] == 0


def _resident_bytes() -> int:
    """What this process has of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))
