"""A hit is never planned to be slower than a miss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.prefix.load_planner import LoadPlanner, SplitPlan

RATES = st.floats(1e5, 1e10)
TOKENS_PER_S = 2000.0
TOKEN_BYTES = 20_000


def measured(disk_bytes_per_s: float, tokens_per_s: float = TOKENS_PER_S) -> LoadPlanner:
    planner = LoadPlanner()
    planner.observe_read(num_bytes=10_000_000, seconds=10_000_000 / disk_bytes_per_s)
    planner.observe_compute(num_tokens=512, position=256, seconds=512 / tokens_per_s)
    return planner


@given(rate=RATES, tokens_per_s=st.floats(10, 1e5), num_tokens=st.integers(16, 1 << 16), queued=st.integers(0, 1 << 32))
def test_what_is_loaded_is_expected_before_it_would_be_computed(
    rate: float, tokens_per_s: float, num_tokens: int, queued: int
) -> None:
    planner = measured(rate, tokens_per_s)
    num_bytes = num_tokens * TOKEN_BYTES
    plan = planner.plan(0, num_tokens, num_bytes=num_bytes, queued_bytes=queued)
    load_s, compute_s = (num_bytes + queued) / rate, num_tokens / tokens_per_s
    if plan is None:
        assert load_s * 1.2 > compute_s, "worth loading, and was not"
    else:
        assert plan.expected_s == pytest.approx(load_s)
        assert load_s < compute_s and load_s < plan.deadline_s <= compute_s + 0.06


def test_a_disk_that_becomes_slow_is_no_longer_read_from() -> None:
    planner = measured(500e6)
    assert planner.plan(0, 8000, num_bytes=8000 * TOKEN_BYTES) is not None
    for _ in range(3):
        planner.observe_read(num_bytes=1_000_000, seconds=0.1)
    assert planner.plan(0, 8000, num_bytes=8000 * TOKEN_BYTES) is None


@given(
    rate=RATES,
    tokens_per_s=st.floats(10, 1e5),
    num_pages=st.integers(1, 1 << 12),
    start=st.integers(0, 100),
    max_bytes=st.integers(0, 1 << 30),
    queued=st.integers(0, 1 << 28),
    num_tokens_ahead=st.integers(0, 10_000),
)
def test_both_ends_are_expected_to_meet_before_either_would_be_through(
    rate: float, tokens_per_s: float, num_pages: int, start: int, max_bytes: int, queued: int, num_tokens_ahead: int
) -> None:
    planner = measured(rate, tokens_per_s)
    start, num_tokens = start * PAGE_SIZE, num_pages * PAGE_SIZE
    stop = start + num_tokens
    num_bytes = num_tokens * TOKEN_BYTES
    plan = planner.plan_split(
        start,
        stop,
        num_bytes=num_bytes,
        max_bytes=max_bytes,
        queued_bytes=queued,
        num_tokens_ahead=num_tokens_ahead,
    )
    if plan is None:
        return
    assert start <= plan.meet < stop and plan.meet % PAGE_SIZE == 0
    assert (stop - plan.meet) * TOKEN_BYTES <= max_bytes
    computed_s = (num_tokens_ahead + plan.meet - start) / tokens_per_s
    loaded_s = (queued + (stop - plan.meet) * TOKEN_BYTES) / rate
    assert plan.expected_s == pytest.approx(max(computed_s, loaded_s))
    either_s = min((num_tokens_ahead + num_tokens) / tokens_per_s, (queued + num_bytes) / rate)
    assert plan.expected_s * 1.1 < either_s


def test_the_disk_gets_the_larger_end_since_tokens_far_back_cost_more() -> None:
    planner = LoadPlanner(disk_bytes_per_s=25e6)
    for position in (256, 7000):
        planner.observe_compute(num_tokens=512, position=position, seconds=512 * (0.0005 + 1.1e-7 * position))
    num_bytes = 8000 * 22_500
    plan = planner.plan_split(0, 8000, num_bytes=num_bytes, max_bytes=1 << 27)
    assert plan is not None and 4000 < plan.meet < 5000 and 3.0 < plan.expected_s < 4.0
    computed_s = planner.compute_s(0, plan.meet)
    assert computed_s == pytest.approx((8000 - plan.meet) * 22_500 / 25e6, abs=16 * 0.002)


def test_both_at_once_only_where_that_is_clearly_quicker() -> None:
    """Of 8,000 tokens of 20,000 bytes, computed in 4 s."""

    def split(rate: float, **others: int) -> SplitPlan | None:
        return measured(rate).plan_split(0, 8000, num_bytes=8000 * TOKEN_BYTES, **{"max_bytes": 1 << 30, **others})

    assert split(40e6) == SplitPlan(4000, 2.0)
    assert split(4e6) is None and split(4e9) is None
    assert split(40e6, num_tokens_ahead=8000) is None and split(40e6, queued_bytes=8000 * TOKEN_BYTES) is None
    assert split(40e6, max_bytes=1000 * TOKEN_BYTES) is None
    plan = split(40e6, max_bytes=2000 * TOKEN_BYTES)
    assert plan is not None and (plan.meet, plan.expected_s) == (6000, 3.0)
    assert LoadPlanner(40e6).plan_split(0, 8000, num_bytes=1, max_bytes=1) is None


def test_tokens_far_back_cost_more_to_compute_if_they_were_measured_to() -> None:
    planner = LoadPlanner()
    for position in (256, 1000, 4000, 7000):
        planner.observe_compute(num_tokens=512, position=position, seconds=512 * (0.0004 + 1e-7 * position))
    first, last = planner.compute_s(0, 1024), planner.compute_s(7168, 8192)
    assert first == pytest.approx(1024 * (0.0004 + 1e-7 * 512), rel=1e-6)
    assert last == pytest.approx(1024 * (0.0004 + 1e-7 * 7680), rel=1e-6)


def test_steps_of_a_few_tokens_are_no_measure() -> None:
    planner = LoadPlanner()
    planner.observe_compute(num_tokens=8, position=4000, seconds=0.1)
    assert planner.compute_s(0, 1000) is None


def test_what_was_never_measured_is_tried_for_a_while() -> None:
    unknown, half = LoadPlanner(), LoadPlanner()
    half.observe_compute(num_tokens=512, position=256, seconds=0.256)
    plans = [planner.plan(0, 1000, num_bytes=1) for planner in (unknown, half)]
    assert plans[0] is not None and plans[0].expected_s is None and plans[0].deadline_s == 1.0
    assert plans[1] is not None and plans[1].deadline_s == pytest.approx(0.3)


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
    planner, full_bytes = measured(rate, tokens_per_s), num_tokens * TOKEN_BYTES
    load_s, compute_s = full_bytes / rate, num_tokens / tokens_per_s
    part_s = (queued + share * full_bytes) / rate + num_query_tokens / tokens_per_s + 0.03
    both_s = load_s * compute_s / (load_s + compute_s) + 0.04
    better_s = min(queued / rate + min(load_s, both_s), compute_s)
    planned_s = planner.plan_partial(
        0,
        num_tokens,
        num_bytes=int(share * full_bytes),
        full_bytes=full_bytes,
        num_query_tokens=num_query_tokens,
        queued_bytes=queued,
    )
    if part_s != pytest.approx(0.9 * better_s, rel=1e-3):
        assert (planned_s is not None) == (part_s < 0.9 * better_s)
    assert planned_s is None or planned_s == pytest.approx(part_s, rel=1e-3)


def test_parts_that_take_longer_than_their_bytes_are_read_no_more_but_for_a_try_now_and_then() -> None:
    planner = measured(50e6, 2000.0)
    question: dict[str, int] = {"num_bytes": 10**7, "full_bytes": 10**8, "num_query_tokens": 16}
    expected_s = planner.plan_partial(0, 4000, **question)
    assert expected_s == pytest.approx(0.2 + 0.008 + 0.03, rel=1e-3)
    for _ in range(4):  # a disk that takes its time for each read
        expected_s = planner.plan_partial(0, 4000, **question) or 0.0
        planner.observe_partial(expected_s=expected_s, seconds=2.0)
    refused = 0
    while planner.plan_partial(0, 4000, **question) is None:
        refused += 1
    assert 2 < refused < 50


def test_no_part_is_read_before_disk_and_model_are_measured() -> None:
    question: dict[str, int] = {"num_bytes": 1, "full_bytes": 10**9, "num_query_tokens": 1}
    planner = LoadPlanner()
    assert planner.plan_partial(0, 1000, **question) is None
    planner.observe_read(num_bytes=10**6, seconds=1.0)
    assert planner.plan_partial(0, 1000, **question) is None
    planner.observe_compute(num_tokens=512, position=256, seconds=1.0)
    assert planner.plan_partial(0, 1000, **question)
