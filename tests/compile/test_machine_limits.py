"""The loops that measure a machine do the work that rates are computed from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target, find_target
from radixlm.compile.machine_limits import STRIDE, launch_threads, multiply_integers, read_memory, touch_memory

from .kernels.harness import built, every_target, examples

LANES = 16
PAGE = 1024  # int32


@examples(20)
@given(st.integers(1, 5), st.integers(0, 40_000), st.integers(0, 1 << 30))
def test_reading_adds_up_all_that_the_parts_divide(parts: int, count: int, seed: int) -> None:
    memory = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, count).astype(np.int32)
    sums = np.zeros(parts * LANES, np.int32)
    built(find_target("native"), read_memory)(memory, sums, count, parts)
    whole = count // (parts * STRIDE) * STRIDE
    for part, found in enumerate(sums.reshape(parts, LANES)):
        read = memory[part * whole : (part + 1) * whole].reshape(-1, LANES)
        assert found.tolist() == read.sum(axis=0, dtype=np.int32).tolist()


@examples(20)
@given(st.integers(1, 5), st.integers(0, 40_000))
def test_touching_writes_to_each_page_that_is_read_and_to_no_other(parts: int, count: int) -> None:
    memory = np.zeros(count, np.int32)
    built(find_target("native"), touch_memory)(memory, np.zeros(LANES, np.int32), count, parts)
    whole = count // (parts * STRIDE) * STRIDE
    expected = np.zeros(count, np.int32)
    for part in range(parts):
        expected[part * whole : (part + 1) * whole : PAGE] = 1
    assert memory.tolist() == expected.tolist()


@every_target
@pytest.mark.parametrize(("parts", "max_level"), [(1, 15), (3, 15), (2, 255)])
def test_as_many_integers_are_multiplied_as_were_asked_for(target: Target, parts: int, max_level: int) -> None:
    """With weights of c + 1 in chain c and inputs of the turn's number, whose upper bytes are 0."""
    num_turns = 11
    for num_chains in (12, 8, 6, 4, 3, 2):
        sums = np.full(parts * LANES, 7, np.int32)
        built(target, multiply_integers, target, max_level)(sums, num_chains * LANES * 4 * num_turns, parts)
        chains, turns = divmod(int(sums[0]), sum(range(num_turns)))
        assert sums.tolist() == [sums[0]] * parts * LANES
        if turns == 0 and chains == num_chains * (num_chains + 1) // 2:
            return
    pytest.fail("no number of chains explains the sums")


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_threads_are_launched_as_often_as_was_asked_for(parts: int) -> None:
    sums = np.zeros(parts * LANES, np.int32)
    built(find_target("native"), launch_threads)(sums, 9, parts)
    assert sums.tolist() == [9] * parts * LANES
