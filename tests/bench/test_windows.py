"""Windows count every token but the first once, after enough context, and log-probabilities are those of softmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.windows import cut, load, log_probs, save


@given(st.integers(1, 200), st.sampled_from([4, 16, 64]))
def test_every_token_but_the_first_is_counted_once_and_in_order(length: int, size: int) -> None:
    ids = list(range(length))
    windows = cut(ids, size)
    assert [int(i) for window in windows for i in window.targets] == ids[1:]


@given(st.integers(1, 200), st.sampled_from([4, 16, 64]))
def test_half_a_window_of_context_stands_before_all_but_the_first(length: int, size: int) -> None:
    for number, window in enumerate(cut(list(range(length)), size)):
        assert len(window.token_ids) <= size
        assert window.first == (size // 2 if number else 1)
        start = number * (size // 2)
        assert window.token_ids.tolist() == list(range(start, min(start + size, length)))


def test_bos_takes_the_first_place_and_moves_nothing() -> None:
    plain, with_bos = cut(list(range(10, 30)), 8), cut(list(range(10, 30)), 8, bos_token_id=1)
    assert [window.token_ids[0] for window in with_bos] == [1] * len(plain)
    assert [w.token_ids[1:].tolist() for w in with_bos] == [w.token_ids[1:].tolist() for w in plain]
    assert [w.targets.tolist() for w in with_bos] == [w.targets.tolist() for w in plain]


@given(st.integers(0, 150))
def test_log_probs_are_those_of_softmax(count: int) -> None:
    rng = np.random.default_rng(count)
    logits = (rng.standard_normal((count, 11)) * 30).astype(np.float32)
    targets = rng.integers(0, 11, count).astype(np.int32)
    rows = logits.astype(np.float64)
    normalized = [row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in rows]
    expected = [row[target] for row, target in zip(normalized, targets, strict=True)]
    np.testing.assert_allclose(log_probs(logits, targets), expected, rtol=1e-12, atol=1e-12)


def test_another_process_reads_the_same_windows(tmp_path: Path) -> None:
    windows = cut(list(range(50)), 16)
    save(tmp_path / "windows.npz", windows)
    read = list(load(tmp_path / "windows.npz"))
    assert [w.first for w in read] == [w.first for w in windows]
    for one, other in zip(read, windows, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_too_short_to_predict_has_no_targets(length: int) -> None:
    assert sum(len(window.targets) for window in cut(list(range(length)), 8)) == 0
