"""A part is never planned to be slower than the whole. Numbers only: no disk, no model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.extras.approximate.row_rates import RowRates, plan_chosen
from radixlm.runtime.prefix.rates import Rates

from ...prefix.test_prefix_plan import RATES, TOKEN_BYTES, measured


@given(
    rate=RATES,
    tokens_per_s=st.floats(10, 1e5),
    num_tokens=st.integers(16, 1 << 14),
    share=st.floats(0.01, 1.5),
    num_query_tokens=st.integers(1, 512),
    queued=st.integers(0, 1 << 30),
)
def test_a_part_is_read_only_where_it_is_clearly_quicker_than_all(
    rate: float, tokens_per_s: float, num_tokens: int, share: float, num_query_tokens: int, queued: int
) -> None:
    rates, full_bytes = RowRates(measured(rate, tokens_per_s)), num_tokens * TOKEN_BYTES
    load_s, compute_s = full_bytes / rate, num_tokens / tokens_per_s
    part_s = (queued + share * full_bytes) / rate + num_query_tokens / tokens_per_s + 0.03
    both_s = load_s * compute_s / (load_s + compute_s) + 0.04
    better_s = min(queued / rate + min(load_s, both_s), compute_s)
    planned_s = plan_chosen(
        0,
        num_tokens,
        rates,
        num_bytes=int(share * full_bytes),
        full_bytes=full_bytes,
        num_query_tokens=num_query_tokens,
        queued_bytes=queued,
    )
    if part_s != pytest.approx(0.9 * better_s, rel=1e-3):
        assert (planned_s is not None) == (part_s < 0.9 * better_s)
    assert planned_s is None or planned_s == pytest.approx(part_s, rel=1e-3)


def test_parts_that_take_longer_than_their_bytes_are_read_no_more_but_for_a_try_now_and_then() -> None:
    rates = RowRates(measured(50e6, 2000.0))
    question: dict[str, int] = {"num_bytes": 10**7, "full_bytes": 10**8, "num_query_tokens": 16}
    expected_s = plan_chosen(0, 4000, rates, **question)
    assert expected_s == pytest.approx(0.2 + 0.008 + 0.03, rel=1e-3)
    for _ in range(4):  # a disk that takes its time for each read
        expected_s = plan_chosen(0, 4000, rates, **question) or 0.0
        rates.observe(expected_s=expected_s, seconds=2.0)
    for _ in range(1000):  # requests of one moment
        rates.forget(10.0)
        assert plan_chosen(0, 4000, rates, **question) is None
    now = 10.0
    while plan_chosen(0, 4000, rates, **question) is None:
        rates.forget(now := now + 1)
    assert 60 < now < 600
    rates.forget(now + 1e6)
    assert rates.extra_s == pytest.approx(0.03), "no less than was expected before the first try"


def test_no_part_is_read_before_disk_and_model_are_measured() -> None:
    question: dict[str, int] = {"num_bytes": 1, "full_bytes": 10**9, "num_query_tokens": 1}
    exact = Rates()
    rates = RowRates(exact)
    assert plan_chosen(0, 1000, rates, **question) is None
    exact.observe_read(num_bytes=10**6, seconds=1.0)
    assert plan_chosen(0, 1000, rates, **question) is None
    exact.observe_compute(num_tokens=512, position=256, seconds=1.0)
    assert plan_chosen(0, 1000, rates, **question)
