"""A hit is never planned to be slower than a miss. Numbers only: no disk, no model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan, plan
from radixlm.runtime.prefix.rates import Rates

RATES = st.floats(1e5, 1e10)
TOKENS_PER_S = 2000.0
TOKEN_BYTES = 20_000
ROOM_BYTES = 1 << 30


def measured(disk_bytes_per_s: float, tokens_per_s: float = TOKENS_PER_S) -> Rates:
    rates = Rates()
    rates.observe_read(num_bytes=10_000_000, seconds=10_000_000 / disk_bytes_per_s)
    rates.observe_compute(num_tokens=512, position=256, seconds=512 / tokens_per_s)
    return rates


def source(planned: PrefixPlan) -> str:
    return "computed" if planned.load is None else planned.load.source


@given(
    rate=RATES,
    tokens_per_s=st.floats(10, 1e5),
    start=st.integers(0, 1 << 10),
    num_tokens=st.integers(1, 1 << 12),
    queued=st.integers(0, 1 << 30),
    room=st.integers(0, 1 << 30),
    ahead=st.none() | st.integers(0, 10_000),
)
def test_a_plan_has_each_token_once_and_what_memory_has_comes_from_there(
    rate: float, tokens_per_s: float, start: int, num_tokens: int, queued: int, room: int, ahead: int | None
) -> None:
    start, stop = start * PAGE_SIZE, (start + num_tokens) * PAGE_SIZE
    budget = LoadBudget(TOKEN_BYTES, queued, room, ahead)
    for rates in (measured(rate, tokens_per_s), Rates(), Rates(disk_bytes_per_s=rate)):
        segments = plan(start, stop, rates, budget).segments
        assert [segment.start for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
        assert segments[-1].stop == stop and all(segment.start < segment.stop for segment in segments)
        sources = [segment.source for segment in segments]
        assert sources[: int(start > 0)] == ["memory"] * (start > 0)
        assert tuple(sources[start > 0 :]) in {("front",), ("computed",), ("back",), ("computed", "back")}
        assert "back" not in sources or ahead is not None, "it is not known what is computed before"


@given(rate=RATES, tokens_per_s=st.floats(10, 1e5), num_tokens=st.integers(16, 1 << 16), queued=st.integers(0, 1 << 32))
def test_what_is_loaded_is_expected_before_it_would_be_computed(
    rate: float, tokens_per_s: float, num_tokens: int, queued: int
) -> None:
    planned = plan(0, num_tokens, measured(rate, tokens_per_s), LoadBudget(TOKEN_BYTES, queued))
    load_s, compute_s = (num_tokens * TOKEN_BYTES + queued) / rate, num_tokens / tokens_per_s
    if planned.load is None:
        assert load_s * 1.2 > compute_s, "worth loading, and was not"
    else:
        assert planned.expected_s == pytest.approx(load_s)
        assert load_s < compute_s and load_s < planned.deadline_s <= compute_s + 0.06


def test_a_disk_that_becomes_slow_is_no_longer_read_from() -> None:
    rates = measured(500e6)
    assert source(plan(0, 8000, rates, LoadBudget(TOKEN_BYTES))) == "front"
    for _ in range(3):
        rates.observe_read(num_bytes=1_000_000, seconds=0.1)
    assert source(plan(0, 8000, rates, LoadBudget(TOKEN_BYTES))) == "computed"


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
    start, num_tokens = start * PAGE_SIZE, num_pages * PAGE_SIZE
    stop = start + num_tokens
    budget = LoadBudget(TOKEN_BYTES, queued, max_bytes, num_tokens_ahead)
    planned = plan(start, stop, measured(rate, tokens_per_s), budget)
    if planned.load is None or planned.load.source != "back":
        return
    met = planned.load.start
    assert start <= met < stop and met % PAGE_SIZE == 0
    assert (stop - met) * TOKEN_BYTES <= max_bytes
    computed_s = (num_tokens_ahead + met - start) / tokens_per_s
    loaded_s = (queued + (stop - met) * TOKEN_BYTES) / rate
    assert planned.expected_s == pytest.approx(max(computed_s, loaded_s))
    either_s = min((num_tokens_ahead + num_tokens) / tokens_per_s, (queued + num_tokens * TOKEN_BYTES) / rate)
    assert planned.expected_s is not None and planned.expected_s * 1.1 < either_s
    assert planned.deadline_s == 0.0, "the request does not wait"


def test_the_disk_gets_the_larger_end_since_tokens_far_back_cost_more() -> None:
    rates = Rates(disk_bytes_per_s=25e6)
    for position in (256, 7000):
        rates.observe_compute(num_tokens=512, position=position, seconds=512 * (0.0005 + 1.1e-7 * position))
    planned = plan(0, 8000, rates, LoadBudget(22_500, room_bytes=1 << 27, num_tokens_ahead=0))
    assert planned.load is not None and planned.load.source == "back" and planned.expected_s is not None
    assert 4000 < planned.load.start < 5000 and 3.0 < planned.expected_s < 4.0
    computed_s = rates.compute_s(0, planned.load.start)
    assert computed_s == pytest.approx((8000 - planned.load.start) * 22_500 / 25e6, abs=16 * 0.002)


def test_both_at_once_only_where_that_is_clearly_quicker() -> None:
    """Of 8,000 tokens of 20,000 bytes, computed in 4 s."""

    def split(rate: float, queued: int = 0, room: int = ROOM_BYTES, ahead: int = 0) -> PrefixPlan:
        return plan(0, 8000, measured(rate), LoadBudget(TOKEN_BYTES, queued, room, ahead))

    assert split(40e6) == PrefixPlan.of((0, 4000, "computed"), (4000, 8000, "back"), expected_s=2.0)
    assert source(split(4e6)) == "computed" and source(split(4e9)) == "front"
    assert source(split(40e6, ahead=8000)) == source(split(40e6, queued=8000 * TOKEN_BYTES)) == "computed"
    assert source(split(40e6, room=1000 * TOKEN_BYTES)) == "computed"
    assert split(40e6, room=2000 * TOKEN_BYTES) == PrefixPlan.of(
        (0, 6000, "computed"), (6000, 8000, "back"), expected_s=3.0
    )
    assert source(plan(0, 8000, Rates(40e6), LoadBudget(1, room_bytes=1, num_tokens_ahead=0))) == "front"


def test_beside_other_requests_nothing_is_computed_that_can_as_well_be_loaded() -> None:
    budgets = [LoadBudget(TOKEN_BYTES, 0, ROOM_BYTES, ahead) for ahead in (0, 10, None)]
    assert [source(plan(0, 8000, measured(80e6), budget)) for budget in budgets] == ["back", "front", "front"]
    assert [source(plan(0, 8000, measured(40e6), budget)) for budget in budgets] == ["back", "back", "computed"]


def test_tokens_far_back_cost_more_to_compute_if_they_were_measured_to() -> None:
    rates = Rates()
    for position in (256, 1000, 4000, 7000):
        rates.observe_compute(num_tokens=512, position=position, seconds=512 * (0.0004 + 1e-7 * position))
    first, last = rates.compute_s(0, 1024), rates.compute_s(7168, 8192)
    assert first == pytest.approx(1024 * (0.0004 + 1e-7 * 512), rel=1e-6)
    assert last == pytest.approx(1024 * (0.0004 + 1e-7 * 7680), rel=1e-6)


def test_steps_of_a_few_tokens_are_no_measure() -> None:
    rates = Rates()
    rates.observe_compute(num_tokens=8, position=4000, seconds=0.1)
    assert rates.compute_s(0, 1000) is None


def test_what_was_never_measured_is_tried_for_a_while() -> None:
    unknown, half = Rates(), Rates()
    half.observe_compute(num_tokens=512, position=256, seconds=0.256)
    plans = [plan(0, 1000, rates, LoadBudget(1)) for rates in (unknown, half)]
    assert [source(planned) for planned in plans] == ["front"] * 2 and plans[0].expected_s is None
    assert plans[0].deadline_s == 1.0 and plans[1].deadline_s == pytest.approx(0.3)
