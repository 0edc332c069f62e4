"""Idle requests run in what the others leave: these compute what they would without them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.engine.sampling_params import SamplingParams

from ..server.real_server import real_engine, wait_until
from .test_scheduler import Bench, policy

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "idle", "step", "step", "end", "end idle"]), st.integers(1, 60)), max_size=50
)


def ids_of(number: int, num_tokens: int) -> list[int]:
    """A prompt that begins like no other, of the first nine hundred."""
    return [number % 30, number // 30, *[7] * num_tokens]


@settings(max_examples=60)
@given(actions=ACTIONS, num_pages=st.integers(12, 40), num_seqs=st.integers(1, 4), budget=st.sampled_from([8, 32]))
def test_other_requests_compute_what_they_would_without_idle_ones(
    actions: Sequence[tuple[str, int]], num_pages: int, num_seqs: int, budget: int
) -> None:
    rules = policy(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    bench, without = Bench(num_pages, rules), Bench(num_pages, rules)
    live: dict[str, list[str]] = {"ask": [], "idle": []}
    for number, (action, size) in enumerate(actions):
        name = f"{action}{number}"
        if action in live:
            bench.add(name, ids_of(number, size), idle=action == "idle")
            live[action].append(name)
            if action == "ask":
                without.add(name, ids_of(number, size))
        elif action == "step" and bench.scheduler.has_work:
            shares = bench.step()
            if live["ask"]:
                assert shares == without.step()
            else:
                assert shares, "idle requests run where there is no other"
        elif action in ("end", "end idle"):
            kind = "ask" if action == "end" else "idle"
            if live[kind]:
                ended = live[kind].pop(size % len(live[kind]))
                for each in (bench, without) if kind == "ask" else (bench,):
                    request = each.scheduler.remove(ended)
                    if request.sequence is not None:
                        each.cache.close(request.sequence)
    bench.scheduler.check()
    bench.cache.check()


def test_an_idle_request_stops_for_another_and_resumes_from_the_cache() -> None:
    bench = Bench(20, policy())
    bench.add("batch", ids_of(1, 40), idle=True)
    assert bench.step() == {"batch": 32} and bench.step() == {"batch": 10} and bench.step() == {"batch": 1}
    bench.add("now", ids_of(2, 3))
    assert bench.step() == {"now": 5} and bench.step() == {"now": 1}
    bench.finish("now")
    assert bench.step() == {"batch": 1}, "all of it was kept"


def test_a_reply_that_was_interrupted_is_the_same() -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine, _ = real_engine()
    with engine:
        whole = engine.generate("once there was a tree", params)
        with engine.stream("once there was a tree", params, idle=True, cache_match="off") as stream:
            next(stream)
            engine.generate("a bird sang", params)
            assert stream.result().token_ids == whole.token_ids
        wait_until(lambda: engine.stats().num_running == 0)
        engine.check()
