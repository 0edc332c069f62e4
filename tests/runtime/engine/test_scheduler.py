"""Which requests run, wait, and give pages back."""

from __future__ import annotations

import collections.abc
from dataclasses import replace
from typing import Any

import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.engine.completion import PrefixReuse
from radixlm.runtime.engine.reply import Reply
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.request_options import RequestOptions, RequestSpec
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.scheduler import Scheduler
from radixlm.runtime.engine.step.pace import PromptTime, StepPace
from radixlm.runtime.engine.step.plan import SchedulerPolicy, StepPlan
from radixlm.runtime.engine.waiting_request import WaitingRequest

from ..fake_model import VOCAB_SIZE, LetterDecoder, generate_one, prompt
from ..sparse_rows import loaded_rows


class Bench:
    """A scheduler whose steps always succeed and whose requests always generate token 1."""

    def __init__(self, num_pages: int, policy: SchedulerPolicy, context_length: int = 160) -> None:
        self.cache = PrefixCache(PagePool(num_pages))
        self.scheduler = Scheduler(self.cache, policy, context_length=context_length)
        self.now = 0.0

    def add(
        self, name: str, ids: collections.abc.Sequence[int], span: SparseSpan | None = None, *, idle: bool = False
    ) -> Request:
        params = SamplingParams(temperature=0.0)
        reply = Reply(params, ids, decoder=LetterDecoder(), vocab_size=VOCAB_SIZE)
        options = RequestOptions(idle=idle, client="batch" if idle else None)
        request = Request(RequestSpec(name, prompt(ids), params, options, arrived_at=self.now), reply)
        self.scheduler.add(request, rows=None if span is None else loaded_rows(ids, span))
        return request

    def step(self) -> dict[str, int]:
        """Tokens that each request computes, in order."""
        with self.cache.begin() as step:
            plan: StepPlan = self.scheduler.schedule(step, self.now)
            shares = {item.request.request_id: item.reservation.num_tokens for item in plan.scheduled}
            step.commit()
        for item in plan.scheduled:
            if item.samples:
                generate_one(item.request, self.now)
        self.scheduler.check()
        self.cache.check()
        return shares

    def finish(self, name: str) -> None:
        self.cache.close(self.scheduler.remove(name).admitted)

    def remember(self, ids: collections.abc.Sequence[int]) -> None:
        """Leave a prompt in the cache."""
        sequence = self.cache.open(self.cache.match(ids), context_length=len(ids) + 80)
        with self.cache.begin() as step:
            step.reserve(sequence, sequence.num_uncomputed)
            step.commit()
        self.cache.close(sequence)


def policy(max_num_seqs: int = 8, max_num_batched_tokens: int = 32, **more: float) -> SchedulerPolicy:
    return SchedulerPolicy(max_num_seqs, max_num_batched_tokens, **more)  # type: ignore[arg-type]


def test_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    bench = Bench(40, policy(max_num_batched_tokens=32))
    bench.add("short", [1, 2, 3])
    assert bench.step() == {"short": 3}
    bench.add("long", [4] * 80)
    assert bench.step() == {"short": 1, "long": 31}
    assert bench.step() == {"short": 1, "long": 31}
    assert bench.step() == {"short": 1, "long": 18}
    assert bench.step() == {"short": 1, "long": 1}


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(40, policy(max_num_seqs=2))
    for name in "abc":
        bench.add(name, [ord(name) % 30] * 4)
    assert list(bench.step()) == ["a", "b"]
    bench.finish("a")
    assert list(bench.step()) == ["b", "c"]


def test_longest_cached_prefix_goes_first() -> None:
    bench = Bench(40, policy(max_num_seqs=1))
    bench.remember([7] * 64)
    bench.add("cold", [8] * 60)
    bench.add("warm", [7] * 60)
    assert list(bench.step()) == ["warm"]


def test_age_outweighs_any_cached_prefix_so_that_no_request_starves() -> None:
    bench = Bench(60, policy(max_num_seqs=1, ageing_tokens_per_s=10.0))
    bench.remember([7] * 64)
    bench.add("cold", [8] * 20)
    for i in range(20):
        bench.now += 1.0
        bench.add(f"warm{i}", [7] * 60)
        (name,) = bench.step()
        bench.finish(name)
        if name == "cold":
            assert i >= 5, "overtaken less than its cached prefix is worth"
            return
    raise AssertionError("starved")


def test_shared_prefix_is_computed_once_and_does_not_hold_up_others() -> None:
    bench = Bench(40, policy(max_num_batched_tokens=20))
    bench.add("first", [7] * 49)
    bench.add("same", [7] * 49)
    bench.add("other", [9] * 8)
    assert bench.step() == {"first": 20}
    assert bench.step() == {"first": 20}
    assert bench.step() == {"first": 9, "other": 8}
    assert bench.step() == {"first": 1, "other": 1, "same": 1}


def test_newest_running_request_gives_its_pages_back_and_comes_back_from_the_cache() -> None:
    bench = Bench(7, policy(), context_length=96)
    old, new = bench.add("old", [1] * 33), bench.add("new", [2] * 16)
    bench.step()
    bench.step()
    while not new.num_preemptions:
        bench.step()
    num_generated = new.num_generated
    assert num_generated > 0 and old.num_preemptions == 0
    bench.step()
    assert new.num_generated == num_generated and not new.admitted.page_ids
    bench.finish("old")
    shares = bench.step()
    assert 1 <= shares["new"] < 16 + num_generated, "computed again what the cache still had"
    assert new.num_generated == num_generated + 1


def test_older_prompt_takes_pages_that_a_newer_decoder_was_given_in_the_same_step() -> None:
    bench = Bench(5, policy(max_num_batched_tokens=17), context_length=96)
    bench.add("old", [1] * 80)
    assert bench.step() == {"old": 17}
    new = bench.add("new", [2])
    bench.scheduler._running["new"] = bench.scheduler._waiting.pop("new").request  # as if it had come in too early
    new.admit(bench.cache.open(match := bench.cache.match([2]), context_length=96), match, PrefixReuse())
    assert bench.step() == {"new": 1, "old": 16}
    assert bench.step() == {"new": 1, "old": 16}
    assert bench.step() == {"old": 17}, "the fifth page, and the budget, of the newer"
    assert (new.num_preemptions, new.num_generated) == (1, 2)


def test_a_request_that_is_taken_out_of_a_plan_gives_its_time_back() -> None:
    """What its prompt would have taken was lost to those that stay."""
    pace = StepPace(limit_s=0.05)
    pace.observe(num_streams=0, chunks=[(0, 100)], seconds=0.1)
    bench = Bench(64, SchedulerPolicy(), context_length=500)
    first, second = bench.add("a", [1] * 400), bench.add("b", [2] * 400)
    for request in (first, second):
        match = bench.cache.match(request.prompt.ids)
        request.sequence = bench.cache.open(match, context_length=500)
    with bench.cache.begin() as step:
        plan = StepPlan(step, 512, time=PromptTime(pace, 0.05))
        assert plan.reserve(first) and not plan.has_room_for(second)
        plan.drop(first)
        assert plan.has_room_for(second) and plan.budget == 512


def test_pages_that_running_requests_need_next_are_not_given_away() -> None:
    bench = Bench(8, policy(max_num_batched_tokens=64), context_length=112)
    bench.add("runs", [1] * 64)
    bench.step()
    bench.add("large", [2] * 50)  # 4 pages are free, but the next token of the other takes one
    assert bench.step() == {"runs": 1}


def test_request_that_does_not_fit_yet_waits_and_no_other_overtakes_it_for_that() -> None:
    bench = Bench(8, policy(), context_length=112)
    bench.add("runs", [1] * 60)
    bench.step()
    bench.add("large", [2] * 64)
    bench.add("small", [3] * 4)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.num_running == 1 and bench.scheduler.num_waiting == 2
    bench.finish("runs")
    assert list(bench.step()) == ["large"]


@pytest.mark.parametrize("num_tokens", [1, PAGE_SIZE, PAGE_SIZE + 1])
def test_request_that_does_not_fit_even_alone_is_named(num_tokens: int) -> None:
    bench = Bench(1, policy())
    bench.add("large", [1] * (PAGE_SIZE + num_tokens))
    with bench.cache.begin() as step:
        plan = bench.scheduler.schedule(step, 0.0)
        assert plan.unservable is not None and plan.unservable.request_id == "large"
        assert plan.scheduled == []


def sparse(ids: collections.abc.Sequence[int], num_rows: int, start: int = 0) -> SparseSpan:
    return SparseSpan(start, num_rows, tuple(ids))


def test_request_with_a_sparse_span_computes_what_is_behind_it_and_takes_pages_for_its_rows() -> None:
    bench = Bench(8, policy(max_num_batched_tokens=64), context_length=112)
    bench.add("runs", [1] * 64)
    bench.step()
    request = bench.add("sparse", [2] * 100, sparse([2] * 96, 20))  # its tokens would take 7 pages: there are 3
    assert bench.step() == {"runs": 1, "sparse": 4}
    assert (request.admitted.num_rows, len(request.admitted.page_ids)) == (24, 2)
    assert bench.step() == {"runs": 1, "sparse": 1}


def test_request_whose_sparse_span_finds_no_pages_waits_until_it_does() -> None:
    bench = Bench(8, policy(max_num_batched_tokens=64), context_length=112)
    bench.add("runs", [1] * 64)
    bench.step()
    bench.add("sparse", [2] * 100, sparse([2] * 96, 48))
    assert bench.step() == {"runs": 1}
    bench.finish("runs")
    assert bench.step() == {"sparse": 4}


@pytest.mark.parametrize("reason", ["of another prompt", "goes on from nothing", "no pages"])
def test_request_whose_sparse_span_cannot_be_computes_all_of_its_prompt(reason: str) -> None:
    bench = Bench(6, policy(max_num_batched_tokens=100), context_length=160)
    prefix = {
        "of another prompt": sparse([3] * 40, 8),
        "goes on from nothing": sparse([2] * 40, 8, start=32),
        "no pages": sparse([2] * 144, 110),
    }[reason]
    request = bench.add("sparse", [2] * (60 if reason != "no pages" else 150), prefix)
    if reason == "no pages":  # not even for its rows: it fails as it would have without
        with bench.cache.begin() as step:
            assert bench.scheduler.schedule(step, 0.0).unservable is request
    else:
        assert bench.step() == {"sparse": 60}
        assert bench.cache.match([2] * 60).num_tokens == 48
    assert request.admitted.sparse is None


def test_prefix_that_memory_has_by_now_is_not_opened_sparse() -> None:
    bench = Bench(20, policy())
    bench.remember([2] * 80)
    request = bench.add("sparse", [2] * 90, sparse([2] * 60, 8))
    assert bench.step() == {"sparse": 10}
    assert request.admitted.sparse is None


def test_no_request_waits_for_what_is_computed_over_a_sparse_span_or_finds_it() -> None:
    bench = Bench(40, policy(max_num_batched_tokens=20))
    bench.add("sparse", [7] * 100, sparse([7] * 50, 8))
    bench.add("same", [7] * 100)
    assert bench.step() == {"sparse": 20}
    assert bench.step() == {"sparse": 20}
    assert bench.step() == {"sparse": 10, "same": 10}
    assert bench.cache.match([7] * 100).num_tokens == 0
    bench.finish("sparse")
    assert bench.cache.match([7] * 100).num_tokens == 0
    assert bench.step() == {"same": 20}
    assert bench.cache.match([7] * 100).num_tokens == 16


def test_request_with_a_sparse_span_does_not_wait_for_one_that_computes_it_exactly() -> None:
    bench = Bench(40, policy(max_num_batched_tokens=40))
    bench.add("exact", [7] * 100)
    assert bench.step() == {"exact": 40}
    bench.add("sparse", [7] * 100, sparse([7] * 96, 8, start=32))
    bench.add("waits", [7] * 100)
    assert bench.step() == {"exact": 40}
    assert bench.step() == {"exact": 20, "sparse": 4}
    assert bench.step() == {"exact": 1, "sparse": 1, "waits": 4}


def test_preempted_request_loses_its_sparse_span_and_computes_it_exactly() -> None:
    bench = Bench(7, policy(), context_length=112)
    bench.add("old", [1] * 33)
    new = bench.add("new", [2] * 60, sparse([2] * 56, 8))
    bench.step()
    bench.step()
    assert new.admitted.num_rows == 12 + new.num_generated - 1
    while not new.num_preemptions:
        bench.step()
    num_tokens = len(new.admitted)
    assert new.admitted.sparse is None
    bench.finish("old")
    num_computed = 0
    while new.admitted.num_uncomputed != 1 or not num_computed:
        num_computed += bench.step()["new"]
    assert num_computed == num_tokens and new.admitted.num_rows == num_tokens
    assert bench.cache.match(new.admitted.token_ids).num_tokens == num_tokens // 16 * 16


def test_pages_are_promised_for_rows_and_not_for_what_is_missing() -> None:
    bench = Bench(8, policy(max_num_batched_tokens=100), context_length=112)
    bench.add("sparse", [2] * 100, sparse([2] * 96, 8))
    bench.step()
    bench.add("large", [3] * 80)  # 6 pages, and 7 are free
    assert bench.step() == {"sparse": 1, "large": 80}


class CountedIds(tuple[int, ...]):
    """Token ids that count how many of them were looked at."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        CountedIds.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_prompts_that_share_a_long_cached_prefix_are_compared_after_it() -> None:
    """Each waiting prompt was compared with each running one from its first token on: streams waited for that."""
    shared = [7] * 1600
    bench = Bench(400, policy(max_num_batched_tokens=64), context_length=2000)
    bench.remember(shared)
    running = bench.add("runs", [*shared, *[8] * 100])
    assert bench.step() == {"runs": 64}
    match = bench.cache.match([*shared, *[9] * 100])
    CountedIds.num_read = 0
    counted = replace(match, prompt_ids=CountedIds(match.prompt_ids))
    assert not WaitingRequest(running, match=counted).waits_for(running.admitted)
    assert CountedIds.num_read <= 2 * PAGE_SIZE
    same = bench.cache.match([*shared, *[8] * 120])
    assert WaitingRequest(running, match=same).waits_for(running.admitted), "the other computes more of it"
