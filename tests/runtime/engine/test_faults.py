"""An exception thrown inside each stage of a step: only what must fail fails, and no page is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.radix_tree import RadixTree
from radixlm.runtime.engine.background_work import CacheExpiry
from radixlm.runtime.engine.completion import RequestOutput
from radixlm.runtime.engine.engine_loop import EngineLoop
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.scheduler import Scheduler
from radixlm.runtime.engine.step import readers
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.errors import EngineError, RadixLMError, StepFailed

from ..fake_model import Bench, alone

PARAMS = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
PROMPTS = {"a": [3] * 20, "b": [4] * 25, "waits": [5] * 18}
TWO_AT_ONCE = SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=24)


class Broken(Exception):
    """What is thrown; no error of ours, as a bug would be."""


def once(wrapped: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """Throws at the first call, before or after the work is done; later calls are as ever."""
    thrown = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if thrown:
            return wrapped(*args, **kwargs)
        thrown.append(True)
        if after:
            wrapped(*args, **kwargs)
        raise Broken("thrown on purpose")

    return call


def bench_at_work() -> Bench:
    """Two requests in the middle of their replies, and one that waits."""
    bench = Bench(num_pages=24, policy=TWO_AT_ONCE)
    for name, ids in PROMPTS.items():
        bench.add(name, ids, PARAMS)
    for _ in range(6):
        bench.step()
    assert bench.core.num_running == 2 and bench.core.num_waiting == 1
    return bench


def finish(bench: Bench, failed: Sequence[str]) -> None:
    """The others get their tokens, the next request works, and all pages are accounted for."""
    bench.run()
    for name, ids in PROMPTS.items():
        if name in failed:
            assert isinstance(bench.error(name), EngineError), name
        else:
            assert bench.tokens(name) == alone(ids, PARAMS), name
    for name, ids in PROMPTS.items():
        bench.add(f"again {name}", ids, PARAMS)
    bench.run()
    for name, ids in PROMPTS.items():
        assert bench.tokens(f"again {name}") == alone(ids, PARAMS)
    assert bench.core.counters.num_failed == len(failed)
    bench.cache.clear()
    assert bench.cache.pool.num_free == bench.num_pages


@pytest.mark.parametrize("stage", ["forward", "top_logits"])
def test_computing_fails_the_requests_of_the_step_alone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    monkeypatch.setattr(bench.model, stage, once(getattr(bench.model, stage)))
    bench.step()
    counters = bench.core.counters
    assert (counters.num_failed_steps, counters.num_failed_steps_in_a_row, counters.last_failure) == (1, 1, "Broken")
    assert all(isinstance(bench.error(name), StepFailed) for name in "ab")
    finish(bench, ["a", "b"])
    assert (counters.num_failed_steps, counters.num_failed_steps_in_a_row) == (1, 0)


def test_copying_rows_fails_the_requests_of_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_pages=24, policy=TWO_AT_ONCE)
    bench.add("first", [*PROMPTS["a"][:-2], 7], SamplingParams(temperature=0.0, max_tokens=1))
    bench.run()
    for name, ids in PROMPTS.items():
        bench.add(name, ids, PARAMS)
    monkeypatch.setattr(bench.model, "copy_rows", once(bench.model.copy_rows))
    bench.step()
    finish(bench, ["a", "b"])


def test_sampling_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed all requests of its step."""
    bench = bench_at_work()
    monkeypatch.setattr(readers, "sample_row", once(readers.sample_row))
    bench.step()
    assert isinstance(bench.error("a"), EngineError) and bench.core.counters.num_failed_steps == 0
    finish(bench, ["a"])


def test_accepting_a_token_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    reply = bench.requests["a"].reply
    monkeypatch.setattr(reply, "accept", once(reply.accept))
    finish(bench, ["a"])


def test_handing_out_a_token_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    monkeypatch.setattr(bench.requests["a"], "with_readings", once(bench.requests["a"].with_readings))
    finish(bench, ["a"])


def test_finishing_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    monkeypatch.setattr(bench.requests["b"], "completion", once(bench.requests["b"].completion))
    finish(bench, ["b"])


@pytest.mark.parametrize("at", [*range(1, 4)])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "method"), [(RadixTree, "insert_after"), (PagePool, "add_to_tree"), (PagePool, "release")]
)
def test_committing_never_leaves_pages_in_disorder(
    owner: type, method: str, after: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thrown in the middle of what belongs together, whatever is half done is undone, or all is forgotten."""
    bench = Bench(num_pages=24, policy=TWO_AT_ONCE)
    for name, ids in PROMPTS.items():
        bench.add(name, ids, PARAMS)
    wrapped = getattr(owner, method)
    fails = once(wrapped, after=after)
    num_calls = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return (fails if num_calls >= at else wrapped)(*args, **kwargs)

    monkeypatch.setattr(owner, method, count)
    for _ in range(60):
        bench.step()  # which checks
    assert num_calls >= at
    failed = [name for name in PROMPTS if bench.outputs[name][-1].error]
    assert failed, "nothing was thrown"
    finish(bench, failed)


def test_a_request_that_cannot_be_matched_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    match = bench.cache.match

    def matching(ids: Sequence[int], **kwargs: Any) -> Any:
        if tuple(ids) == tuple(PROMPTS["waits"]) and bench.core.num_waiting:
            raise Broken("thrown on purpose")
        return match(ids, **kwargs)

    monkeypatch.setattr(bench.cache, "match", matching)
    bench.core._scheduler._waiting["waits"].match = None
    bench.step()
    while not bench.outputs.get("waits"):
        bench.step()
    monkeypatch.undo()
    finish(bench, ["waits"])


def test_a_request_that_cannot_be_admitted_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_at_work()
    waiting = bench.requests["waits"]
    monkeypatch.setattr(waiting, "admit", once(waiting.admit, after=True))
    finish(bench, ["waits"])


@pytest.mark.parametrize("after", [False, True])
def test_a_scheduler_that_fails_fails_all_requests_and_the_next_one_works(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_at_work()
    monkeypatch.setattr(Scheduler, "schedule", once(Scheduler.schedule, after=after))
    finish(bench, list(PROMPTS))


@contextmanager
def running(bench: Bench) -> Iterator[EngineLoop]:
    loop = EngineLoop(bench.core, clock=time.monotonic, on_exit=lambda: None)
    yield loop
    assert loop.is_alive
    loop.call(lambda core: core.check())
    loop.close()
    bench.cache.clear()
    assert bench.cache.pool.num_free == bench.num_pages


def test_a_listener_that_raises_loses_its_request_alone() -> None:
    bench = Bench(num_pages=24)
    heard = threading.Event()

    def deaf(output: RequestOutput) -> None:
        heard.set()
        raise Broken("thrown on purpose")

    with running(bench) as loop:
        loop.submit(bench.request("deaf", [1] * 20, SamplingParams(ignore_eos=True, seed=1)), deaf)
        stream = GenerationStream("a", (), cancel=loop.cancel)
        loop.submit(bench.request("a", PROMPTS["a"], PARAMS), stream.deliver)
        assert stream.result().token_ids == alone(PROMPTS["a"], PARAMS)
        assert heard.wait(60)
        loop.call(lambda core: None)
        assert bench.core.num_running == 0, "nobody listens, and it is computed all the same"


def test_a_callback_that_raises_hurts_no_other() -> None:
    bench = Bench(num_pages=24)

    def ready() -> None:
        raise Broken("thrown on purpose")

    with running(bench) as loop:
        stream = GenerationStream("a", (), cancel=loop.cancel, on_ready=ready)
        loop.submit(bench.request("a", PROMPTS["a"], PARAMS), stream.deliver)
        assert stream.result().token_ids == alone(PROMPTS["a"], PARAMS)


def test_dropping_old_prefixes_may_fail_and_the_loop_goes_on() -> None:
    failed = threading.Semaphore(0)

    def fail(since: float) -> None:
        failed.release()
        raise RadixLMError("thrown on purpose")

    bench = Bench(clock=time.monotonic)
    CacheExpiry(0.01, clock=time.monotonic, drop=fail).keep_up(bench.core.queue)
    loop = EngineLoop(bench.core, clock=time.monotonic, on_exit=lambda: None)
    for _ in range(3):  # it is tried again
        assert failed.acquire(timeout=60)
    stream = GenerationStream("a", (), cancel=loop.cancel)
    loop.submit(bench.request("a", PROMPTS["a"], PARAMS), stream.deliver)
    assert stream.result().token_ids == alone(PROMPTS["a"], PARAMS)
    loop.close()


def test_a_step_that_never_gets_on_shows_as_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end, but nothing is computed: existence is no progress."""
    bench = Bench(policy=SchedulerPolicy(max_num_seqs=1))
    monkeypatch.setattr(bench.core, "step", lambda: time.sleep(0.001) or [])
    loop = EngineLoop(bench.core, clock=time.monotonic, on_exit=lambda: None)
    loop.submit(bench.request("a", PROMPTS["a"], PARAMS), lambda output: None)
    before = time.monotonic()
    while loop.queue.stalled_s < 0.05:
        assert time.monotonic() - before < 60
        time.sleep(0.005)
    loop.close()
