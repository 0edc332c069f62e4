"""Rows are chosen as the slow and obvious version would: as many, the right ones, whatever the scores are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from radixlm.runtime.extras.approximate import row_selection
from radixlm.runtime.extras.approximate.row_selection import (
    MAX_PROBE_TOKENS,
    NUM_FIRST,
    NUM_RECENT,
    PASSAGE,
    WINDOW,
    always,
    dropped_attention,
    largest,
    num_rows,
    probe,
    ranks_to_store,
    scores_to_store,
    stored_rows,
    stored_shares,
    widened,
    with_probed,
    worth,
)

SEEDS = st.integers(0, 2**32 - 1)


class Plain:
    """All numbers of keys, `[layers, tokens, head_dim]`, are kept."""

    def __init__(self, keys: NDArray[np.floating[Any]]) -> None:
        self.keys, self.shape = keys.astype(np.float32), keys.shape
        self.dims = np.tile(np.arange(keys.shape[-1]), (len(keys), 1))

    def kept(self, layer: int) -> NDArray[np.float32]:
        return self.keys[layer]


def slow_weights(queries: NDArray[np.float32], keys: NDArray[np.float32], layer: int) -> NDArray[np.float64]:
    rows = queries[layer].reshape(-1, keys.shape[-1]).astype(np.float64)
    scores = np.exp([[row @ key / np.sqrt(len(key)) for key in keys[layer].astype(np.float64)] for row in rows])
    return np.asarray(scores / scores.sum(axis=-1, keepdims=True))


@given(num_tokens=st.integers(1, 3000), budget=st.floats(0.001, 1.0))
def test_a_share_is_whole_pages_and_never_more_than_all(num_tokens: int, budget: float) -> None:
    count = num_rows(num_tokens, budget)
    assert count == num_tokens or (count % 16 == 0 and count >= max(32, budget * num_tokens - 0.01))
    assert count < budget * num_tokens + 16 or count == min(32, num_tokens)
    assert num_rows(num_tokens, 1.0) == num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_before", "wanted"),
    [
        (100, 0, [*range(4), *range(84, 100)]),
        (100, 16, list(range(84, 100))),
        (18, 0, list(range(18))),
        (16, 2, list(range(16))),
        (1, 0, [0]),
    ],
)
def test_the_first_of_a_prompt_and_the_last_are_always_chosen(
    num_tokens: int, num_before: int, wanted: list[int]
) -> None:
    assert always(num_tokens, num_before).tolist() == wanted
    assert (NUM_FIRST, NUM_RECENT) == (4, 16)


@given(lengths=st.lists(st.integers(1, 40).map(lambda pages: 16 * pages), min_size=1, max_size=9), data=st.data())
def test_shares_of_runs_are_about_half_and_hold_what_is_always_read(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    count = num_rows(total, data.draw(st.floats(0.01, 1.0)))
    ends = np.cumsum(lengths)
    counted = [
        int(((always(total) >= end - n) & (always(total) < end)).sum()) for n, end in zip(lengths, ends, strict=True)
    ]
    shares = stored_shares(lengths, counted, count)
    assert all(some <= share <= length for some, share, length in zip(counted, shares, lengths, strict=True))
    assert sum(shares) <= count
    if count == total:
        assert shares == lengths
    else:
        assert count / 2 <= sum(shares) <= max(count / 2 + 16, 48)
        assert all(share % 16 == 0 for share in shares)
        wanted = [sum(shares) * length / total for length in lengths]
        assert all(share <= max(want + 32, 32) for share, want in zip(shares, wanted, strict=True))


@given(lengths=st.lists(st.integers(1, 40).map(lambda pages: 16 * pages), min_size=1, max_size=9), data=st.data())
def test_no_share_is_more_than_a_run_has(lengths: list[int], data: st.DataObject) -> None:
    count = num_rows(sum(lengths), data.draw(st.floats(0.01, 1.0)))
    most = [data.draw(st.integers(1, length)) for length in lengths]
    counted = [data.draw(st.integers(0, min(20, length))) for length in lengths]
    shares = stored_shares(lengths, counted, count, most)
    for share, limit, fixed in zip(shares, most, counted, strict=True):
        assert fixed <= share <= max(limit, fixed), "what is always read is read from pages if it has to be"
    assert sum(shares) == sum(map(max, most, counted)) or sum(shares) >= min(count, 16 * (count // 32))


@given(
    seed=SEEDS,
    num_tokens=st.integers(20, 70),
    count=st.integers(20, 70),
    num_before=st.sampled_from([0, 16]),
    num_missing=st.integers(0, 20),
)
def test_stored_rows_are_those_always_read_and_the_first_in_order(
    seed: int, num_tokens: int, count: int, num_before: int, num_missing: int
) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.broadcast_to(np.arange(num_tokens, dtype=np.uint16), (2, 3, num_tokens)), axis=-1)
    count, fixed = min(count, num_tokens), always(num_tokens, num_before)
    order = order[..., : max(count, num_tokens - num_missing)]
    chosen = stored_rows(order, fixed, count, num_tokens)
    for rows, ranked in zip(chosen.reshape(6, -1).tolist(), order.reshape(6, -1).tolist(), strict=True):
        wanted = [*fixed.tolist(), *(token for token in ranked if token not in fixed)]
        assert rows == sorted(wanted[:count])


@given(seed=SEEDS, rows=st.integers(1, 5), num_tokens=st.integers(1, 40))
def test_a_look_is_a_softmax_over_the_prefix(seed: int, rows: int, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(2, rows, 3, 8)).astype(np.float32) * 3
    keys = rng.normal(size=(2, num_tokens, 8)).astype(np.float16)
    seen = probe(queries, Plain(keys))
    for layer in range(2):
        weights = slow_weights(queries, keys.astype(np.float32), layer)
        np.testing.assert_allclose(seen.largest[layer], weights.max(axis=0), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(seen.mean[layer], weights.mean(axis=0), rtol=1e-3, atol=1e-6)


@given(seed=SEEDS, num_tokens=st.integers(2, 40))
def test_a_look_for_what_is_not_there_is_a_softmax_over_the_others(seed: int, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(2, 3, 3, 8)).astype(np.float32)
    keys = rng.normal(size=(2, num_tokens, 8)).astype(np.float32)
    there = largest(rng.random((2, num_tokens)), num_tokens // 2)
    seen = probe(queries, Plain(keys), there)
    np.testing.assert_array_equal(seen.mean, probe(queries, Plain(keys)).mean)
    for layer in range(2):
        others = np.setdiff1d(np.arange(num_tokens), there[layer])
        weights = slow_weights(queries, keys[:, others], layer)
        np.testing.assert_allclose(seen.largest[layer, others], weights.max(axis=0), rtol=1e-3, atol=1e-6)
        assert (seen.largest[layer, there[layer]] == 0).all()


def test_of_a_long_query_the_last_rows_look() -> None:
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(1, MAX_PROBE_TOKENS + 30, 2, 4)).astype(np.float32)
    keys = rng.normal(size=(1, 50, 4)).astype(np.float32)
    assert (probe(queries, Plain(keys)).mean == probe(queries[:, 30:], Plain(keys)).mean).all()


def test_two_threads_look_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(5, 30, 2, 4)).astype(np.float32), Plain(rng.normal(size=(5, 50, 4)))
    there = largest(rng.random((5, 50)), 20)
    alone = probe(queries, keys, there)
    monkeypatch.setattr(row_selection, "_MANY_WEIGHTS", 0)
    monkeypatch.setattr(row_selection, "default_num_threads", lambda: 2)
    both = probe(queries, keys, there)
    assert (both.mean == alone.mean).all() and (both.largest == alone.largest).all()
    monkeypatch.setattr(keys, "kept", lambda layer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(queries, keys, there)


def test_scores_too_large_for_an_exponential_are_no_overflow() -> None:
    keys = np.eye(4)[None] * [[[1], [1], [1], [2]]]
    seen = probe(np.full((1, 1, 1, 4), 1e4, np.float32), Plain(keys))
    assert seen.mean[0].tolist() == [0, 0, 0, 1]


@given(seed=SEEDS, num_tokens=st.integers(24, 80), data=st.data())
def test_what_is_seen_best_is_added_to_what_was_chosen_in_whole_pages(
    seed: int, num_tokens: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    num_stored = data.draw(st.integers(1, num_tokens))
    count = data.draw(st.integers(num_stored, num_tokens))
    stored = largest(rng.random((2, 3, num_tokens)), num_stored)
    seen = rng.integers(0, 9, (2, num_tokens)).astype(np.float32)
    chosen = with_probed(stored, seen, count)
    assert chosen.shape == (2, 3, count) and (np.diff(chosen, axis=-1) > 0).all()
    for layer in range(2):
        beside = [max(seen[layer, max(0, at - WINDOW // 2) : at + WINDOW // 2 + 1]) for at in range(num_tokens)]
        assert widened(seen)[layer].tolist() == beside
        around = [sum(seen[layer, max(0, at - PASSAGE // 2) : at + PASSAGE // 2 + 1]) for at in range(num_tokens)]
        beside = [near * far / PASSAGE for near, far in zip(beside, around, strict=True)]
        assert worth(seen)[layer].tolist() == pytest.approx(beside, rel=1e-6)
        pages = [range(start, min(start + 16, num_tokens)) for start in range(0, num_tokens, 16)]
        means = [sum(beside[token] for token in page) / len(page) for page in pages]
        for head in range(3):
            mine, before = set(chosen[layer, head].tolist()), set(stored[layer, head].tolist())
            assert before <= mine
            taken = [number for number, page in enumerate(pages) if mine & set(page) - before]
            left = [number for number, page in enumerate(pages) if set(page) - mine]
            assert len(set(taken) & set(left)) <= 1, "of one page a part may have to do"
            assert not left or all(means[one] >= max(means[each] for each in left) * (1 - 1e-6) for one in taken)


def test_dropped_mass_is_what_the_chosen_tokens_do_not_hold() -> None:
    mean = np.array([[0.5, 0.25, 0.125, 0.125], [0.0, 0.0, 1.0, 0.0]], np.float32)
    assert dropped_attention(mean, np.array([[0, 1], [0, 2]])) == pytest.approx(0.125)
    assert dropped_attention(mean, np.array([[0, 1, 2, 3]] * 2)) == 0.0
    assert np.isnan(dropped_attention(mean * np.float32(np.nan), np.array([[0], [1]])))


@given(seed=SEEDS, num_pages=st.integers(1, 60), is_start=st.booleans(), budget=st.sampled_from([0.1, 0.25, 0.5]))
def test_a_run_has_the_rows_that_are_read_by_its_order(
    seed: int, num_pages: int, is_start: bool, budget: float
) -> None:
    num_tokens = 16 * num_pages
    scores = np.random.default_rng(seed).integers(0, 9, (2, 3, num_tokens)).astype(np.float32)
    before = scores.copy()
    order = np.argsort(-scores_to_store(scores, is_start=is_start), axis=-1, kind="stable")
    assert (scores == before).all()
    fixed = always(num_tokens, 0 if is_start else 16).tolist()
    for mine, given_scores in zip(order.reshape(6, -1).tolist(), scores.reshape(6, -1), strict=True):
        others = [token for token in range(num_tokens) if token not in fixed]
        assert mine == [*fixed, *sorted(others, key=lambda token: -given_scores[token])]
    num_ranks = ranks_to_store(num_tokens, is_start=is_start)
    [share] = stored_shares([num_tokens], [len(fixed)], num_rows(num_tokens, budget))
    assert share <= num_ranks <= max(num_tokens / 4 + 16, 32)
