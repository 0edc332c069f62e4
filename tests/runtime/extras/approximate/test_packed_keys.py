"""Probe keys in four bits are near the keys in the numbers that they keep, and take 4 % of keys and values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import KVDType, KVLayout
from radixlm.runtime.extras.approximate.packed_keys import MEMORY_SHARE, JoinedKeys, PackedKeys, num_kept, slowest
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.ordered_record import BlockHead
from radixlm.runtime.extras.approximate.row_selection import probe, ranks_to_store

from .test_row_selection import Plain


@given(seed=st.integers(0, 2**32 - 1), num_tokens=st.integers(1, 40), count=st.sampled_from([4, 8, 12]))
def test_kept_numbers_are_near_and_others_are_zero(seed: int, num_tokens: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    keys = (rng.normal(size=(2, num_tokens, 12)) * 10 ** rng.uniform(-3, 3) + 5).astype(np.float32)
    dims = np.sort(np.array([rng.permutation(12)[:count] for _ in range(2)]))
    packed = PackedKeys.of(keys, dims)
    assert packed.shape == keys.shape
    for layer in range(2):
        kept = keys[layer][:, dims[layer]]
        spread = np.abs(kept - kept.mean(axis=0)).max(axis=1, keepdims=True)
        assert (np.abs(packed[layer][:, dims[layer]] - kept) <= spread / 14 * 1.01 + 1e-4 * np.abs(kept) + 1e-4).all()
        others = np.setdiff1d(np.arange(12), dims[layer])
        assert (packed[layer][:, others] == 0).all()


def test_what_turns_slowest_is_kept() -> None:
    frequencies = 10000.0 ** -(np.arange(64) % 32 / 32)  # of halves of 32
    [whole] = slowest([64], 64, 24)
    assert frequencies[whole].max() < np.delete(frequencies, whole).min()
    [part] = slowest([32], 64, 40)  # the last 32 do not turn at all
    assert part.tolist() == [*range(12, 16), *range(28, 64)]
    assert slowest([0, 64], 64, 64).tolist() == [list(range(64))] * 2


def test_runs_behind_one_another_are_keys_of_one_prefix() -> None:
    rng, dims = np.random.default_rng(0), np.array([[0, 1, 2, 3]] * 3)
    parts = [PackedKeys.of(rng.normal(size=(3, count, 4)) + shift, dims) for count, shift in ((5, 0), (9, 7))]
    joined = JoinedKeys(parts)
    assert joined.shape == (3, 14, 4)
    assert (joined[1] == np.concatenate([part[1] for part in parts])).all()
    queries = rng.normal(size=(3, 2, 2, 4)).astype(np.float32)
    whole = np.stack([joined[layer] for layer in range(3)])
    assert (probe(queries, joined).mean == probe(queries, Plain(whole)).mean).all()


def test_a_look_at_the_numbers_that_are_kept_is_one_at_keys_with_zeros_for_the_others() -> None:
    rng = np.random.default_rng(1)
    packed = PackedKeys.of(rng.normal(size=(3, 40, 12)) + 1, np.sort(rng.permuted([range(12)] * 3, axis=1)[:, :6]))
    queries = rng.normal(size=(3, 5, 2, 12)).astype(np.float32)
    whole = np.stack([packed[layer] for layer in range(3)])
    for mine, theirs in zip(
        (probe(queries, packed).mean, probe(queries, packed).largest),
        (probe(queries, Plain(whole)).mean, probe(queries, Plain(whole)).largest),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, 1e-4)


def test_keys_that_are_no_numbers_spoil_no_other_token() -> None:
    keys = np.ones((1, 3, 4), np.float32)
    keys[0, 1] = np.nan
    assert np.isfinite(PackedKeys.of(keys, np.arange(4)[None])[0]).all()


@pytest.mark.parametrize(("dtype", "least"), [("f16", 52), ("k12v8", 36)])
def test_a_run_of_smollm2_takes_a_25th_of_its_keys_and_values_in_memory(dtype: KVDType, least: int) -> None:
    kv = KVLayout.uniform(dtype, num_layers=30, num_kv_heads=3, head_dim=64)
    assert num_kept(kv, MEMORY_SHARE) == least
    num_tokens = 1024
    layout = OrderedLayout(kv, num_tokens, ranks_to_store(num_tokens, is_start=True))
    head = BlockHead(np.zeros((layout.num_groups, 16), np.uint16), np.zeros(layout.num_groups, np.uint64))
    assert layout.table_bytes == (head.order.nbytes + head.checksums.nbytes) * layout.num_blocks + 64 * 30 * 8
    keys = PackedKeys.of(np.zeros((30, num_tokens, 64)), slowest([64] * 30, 64, least))
    share = (keys.nbytes + layout.table_bytes) / (num_tokens / 16 * kv.page_bytes)
    assert 0.03 < share <= 0.0403, "with what all numbers of a run have in common"


def test_few_or_wide_heads_keep_what_fits() -> None:
    one = KVLayout.uniform("k12v8", num_layers=2, num_kv_heads=1, head_dim=64)
    many = KVLayout.uniform("f16", num_layers=2, num_kv_heads=32, head_dim=128)
    assert num_kept(one, MEMORY_SHARE) == 8 and num_kept(many, 0.05) == 128
    assert num_kept(one, 1e-6) == 8


def test_packed_keys_are_the_same_after_they_were_bytes() -> None:
    keys = np.random.default_rng(2).normal(size=(3, 32, 8)).astype(np.float32)
    packed = PackedKeys.of(keys, slowest([8] * 3, 8, 4))
    again = PackedKeys.decode(packed.encode())
    assert again is not None and again.shape == packed.shape and again.nbytes == packed.nbytes
    for layer in range(3):
        assert again[layer].tobytes() == packed[layer].tobytes()
    broken = packed.encode()
    broken[1, 8] = 8  # the first dim: a key has eight numbers
    assert PackedKeys.decode(broken) is None
    for cut in (0, 7, broken.shape[1] - 1):
        assert PackedKeys.decode(packed.encode()[:, :cut]) is None
