"""Conservative admission lets in what can be served to its end, so that no request gives pages back."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import AdmissionPolicy, SchedulerPolicy
from radixlm.runtime.errors import InvalidParameter

from ..eager_loads import load_always
from ..fake_model import Bench, alone
from ..fake_tier import Served, processes
from ..server.real_server import real_engine


def params(max_tokens: int | None, seed: int = 1) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


def bench_of(admission: AdmissionPolicy, num_pages: int, **policy: Any) -> Bench:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 24, **policy}
    return Bench(num_pages=num_pages, policy=SchedulerPolicy(admission=admission, **settings))


@pytest.mark.parametrize(("admission", "num_running"), [("optimistic", 4), ("conservative", 2)])
def test_pages_for_max_tokens_are_reserved_if_that_is_wanted(admission: AdmissionPolicy, num_running: int) -> None:
    bench = bench_of(admission, num_pages=10, max_num_batched_tokens=64)
    for i in range(4):
        bench.add(f"r{i}", [i] * 15, params(max_tokens=50))  # 64 rows: four pages, and one while the prompt is computed
    bench.step()
    assert bench.core.num_running == num_running
    bench.run()
    assert (bench.core.num_preemptions > 0) == (admission == "optimistic")
    for i in range(4):
        assert bench.tokens(f"r{i}") == alone([i] * 15, params(max_tokens=50))


def test_a_request_that_does_not_say_max_tokens_counts_as_the_whole_context() -> None:
    bench = bench_of("conservative", num_pages=11)
    for i in range(2):
        bench.add(f"r{i}", [i] * 5, params(max_tokens=None))
    bench.step()
    assert (bench.core.num_running, bench.core.num_waiting) == (1, 1)
    bench.run()
    assert bench.core.num_preemptions == 0


def test_what_others_reserved_and_did_not_need_is_given_to_those_who_wait() -> None:
    bench = bench_of("conservative", num_pages=8)
    bench.add("long", [1] * 15, params(max_tokens=60))
    bench.add("waits", [2] * 15, params(max_tokens=60))
    bench.step()
    assert bench.core.num_waiting == 1
    bench.abort("long")
    bench.step()
    assert bench.core.num_running == 1 and bench.core.num_waiting == 0


def work(bench: Bench, seed: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Requests that come at any time, share prefixes that end within pages, and sometimes leave early."""
    chance = random.Random(seed)
    prefixes = [[n] * chance.randrange(1, 50) for n in range(3)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for i in range(40):
        ids = [*chance.choice(prefixes), *(chance.randrange(6) for _ in range(chance.randrange(1, 20)))]
        asked[f"r{i}"] = ids, params(chance.choice([1, 5, 20, 60, None]), seed=i)
        bench.add(f"r{i}", *asked[f"r{i}"])
        for _ in range(chance.randrange(4)):
            bench.step()
        if chance.random() < 0.1:
            bench.abort(f"r{chance.randrange(i + 1)}")
    bench.run()
    return asked


@pytest.mark.parametrize("seed", [*range(8), 37, 38])
def test_no_request_is_preempted_whatever_comes(seed: int) -> None:
    """In 37 and 38 rows of a page that is reused in part lie there twice, and no page is left over for that."""
    num_pages = 7 + seed % 6
    bench = bench_of("conservative", num_pages)
    for name, (ids, wished) in work(bench, seed).items():
        expected = alone(ids, wished)
        completion = bench.outputs[name][-1].completion
        assert completion is not None
        if completion.finish_reason != "cancelled":
            assert completion.token_ids == expected
    assert bench.core.num_preemptions == 0
    optimistic = bench_of("optimistic", num_pages)
    work(optimistic, seed)
    assert optimistic.core.num_preemptions > 0, "there was no need for it"


def test_no_request_is_preempted_while_prefixes_come_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_always(monkeypatch)
    policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=24, admission="conservative")
    asked = {f"r{i}": ([i % 5] * (20 + i), params(max_tokens=5 + i, seed=i)) for i in range(20)}

    def ask(served: Served) -> None:
        for name, (ids, wished) in asked.items():
            served.bench.add(name, ids, wished)
        served.run()
        served.settle()

    with processes(tmp_path) as open_again:
        ask(open_again())
        served = open_again(num_pages=9, policy=policy)
        ask(served)
        assert served.bench.core.num_preemptions == 0
        assert sum(served.num_loaded(name) for name in asked) > 0
        for name, (ids, wished) in asked.items():
            assert served.bench.tokens(name) == alone(ids, wished)


def test_the_engine_takes_no_other_admission() -> None:
    with pytest.raises(InvalidParameter, match="admission is 'greedy'; use one of optimistic, conservative"):
        real_engine(admission="greedy")


def ended(bench: Bench, name: str) -> bool:
    return bool(bench.outputs.get(name)) and bench.outputs[name][-1].completion is not None


def fill(bench: Bench) -> None:
    """Step until every place is taken, if there are pages for it."""
    for _ in range(20):
        bench.step()


@pytest.mark.parametrize("admission", ["optimistic", "conservative"])
def test_a_client_with_one_request_does_not_wait_for_all_of_another(admission: AdmissionPolicy) -> None:
    """With 200 requests of one client before it, it waited until 64 of them had ended: 904 steps."""
    bench = bench_of(admission, num_pages=80)
    many = {f"many{i}": ([1, i] * 8, params(max_tokens=60, seed=i)) for i in range(40)}
    for name, (ids, wishes) in many.items():
        bench.add(name, ids, wishes, namespace=b"many")
    fill(bench)
    bench.add("one", [5] * 10, params(max_tokens=2), namespace=b"one")
    num_ended = []
    while not ended(bench, "one"):
        bench.step()
        num_ended.append(sum(ended(bench, name) for name in many))
        bench.core.check()
    if admission == "optimistic":
        assert len(num_ended) <= 4 and not num_ended[-1]  # a place is made for it
    else:
        assert num_ended[-1] <= 8 + 1  # it has the next one that is free
    bench.run()
    assert bench.core.num_preemptions == (admission == "optimistic")
    for name, (ids, wishes) in many.items():
        assert bench.tokens(name) == alone(ids, wishes)


def test_clients_that_all_wait_run_as_many_requests_each() -> None:
    bench = bench_of("optimistic", num_pages=200)
    for i in range(30):
        bench.add(f"a{i}", [1, i] * 4, params(max_tokens=None), namespace=b"a")
    fill(bench)
    for name in "bcd":
        for i in range(5):
            bench.add(f"{name}{i}", [i] * 8, params(max_tokens=None), namespace=name.encode())
    for _ in range(10):
        bench.step()
    running = Counter(request.client for request in bench.core._scheduler._running.values())
    assert running == {b"a": 2, b"b": 2, b"c": 2, b"d": 2}
    num_preemptions = bench.core.num_preemptions
    for _ in range(30):
        bench.step()
    assert bench.core.num_preemptions == num_preemptions == 6  # none goes back and forth


def test_a_client_that_waits_for_its_own_prefix_takes_no_place_meanwhile() -> None:
    bench = bench_of("optimistic", num_pages=200, max_num_batched_tokens=16)
    for i in range(12):
        bench.add(f"a{i}", [1, i] * 4, params(max_tokens=None), namespace=b"a")
    fill(bench)
    for i in range(3):
        bench.add(f"b{i}", [*[3] * 80, i], params(max_tokens=None), namespace=b"b")
    bench.step()
    bench.step()
    assert bench.core.num_preemptions == 1
