"""One thread owns the core; fifty may call, and no caller waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from radixlm.runtime.engine.background_work import CacheExpiry
from radixlm.runtime.engine.engine_loop import EngineLoop
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EngineClosed, EngineDied, EngineOverloaded, InvalidParameter, StepFailed
from radixlm.runtime.model.batch import Batch

from ..fake_model import EOS, Bench, alone, text_of

WAIT_S = 60.0  # only a hang takes that long


class Running:
    """A loop over a fake model."""

    def __init__(self, num_pages: int = 24, max_num_requests: int | None = None) -> None:
        self.bench = Bench(num_pages)
        self.closed = threading.Event()
        self.loop = EngineLoop(
            self.bench.core, clock=time.monotonic, on_exit=self.closed.set, max_num_requests=max_num_requests
        )

    def stream(
        self,
        name: str,
        ids: Sequence[int],
        params: SamplingParams,
        on_ready: Callable[[], None] | None = None,
        namespace: bytes = b"",
    ) -> GenerationStream:
        stream = GenerationStream(name, tuple(ids), cancel=self.loop.cancel, on_ready=on_ready)
        self.loop.submit(self.bench.request(name, ids, params, namespace), stream.deliver)
        return stream


@pytest.fixture
def running() -> Running:
    return Running()


def drawn(seed: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


def endless() -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True)


def test_fifty_threads_get_what_running_alone_gives(running: Running) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        stream = running.stream(f"r{i}", [i % EOS] * 18, drawn(i))
        if i % 5 == 0:
            next(stream)
            stream.cancel()
        results[i] = stream.result().token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(results) == 50
    for i, token_ids in results.items():
        expected = alone([i % EOS] * 18, drawn(i))
        assert token_ids == (expected if i % 5 else expected[: len(token_ids)])
    running.loop.close()
    running.bench.core.check()
    assert running.closed.is_set() and not running.bench.core.has_work


def test_deltas_join_to_the_text(running: Running) -> None:
    stream = running.stream("a", [1, 2], drawn(1))
    assert "".join(delta.text for delta in stream) == stream.result().text == text_of(alone([1, 2], drawn(1)))
    running.loop.close()


def test_leaving_a_stream_early_cancels_it(running: Running) -> None:
    with running.stream("a", [1], endless()) as stream:
        next(stream)
    assert stream.result().finish_reason in ("cancelled", "length")
    stream.cancel()
    running.loop.close()


def test_poll_never_waits_and_on_ready_tells_when_to(running: Running) -> None:
    ready = threading.Event()
    stream = running.stream("a", [1, 2], drawn(1), on_ready=ready.set)
    texts = []
    with pytest.raises(StopIteration):
        while True:
            ready.clear()
            while (delta := stream.poll()) is not None:
                texts.append(delta.text)
            assert ready.wait(WAIT_S)
    assert "".join(texts) == stream.result().text
    running.loop.close()


def test_on_ready_that_raises_hurts_no_other(running: Running) -> None:
    def on_ready() -> None:
        raise RuntimeError("loop is closed")

    assert running.stream("a", [1], drawn(1), on_ready).result().token_ids == alone([1], drawn(1))
    running.loop.close()


def test_failing_step_fails_its_requests_and_later_ones_succeed(running: Running) -> None:
    def fail(batch: Batch) -> None:
        running.bench.model.before = lambda batch: None
        raise ValueError("broken kernel")

    running.bench.model.before = fail
    with pytest.raises(StepFailed, match="broken kernel"):
        running.stream("a", [1], drawn(1)).result()
    assert running.stream("b", [1], drawn(1)).result().token_ids == alone([1], drawn(1))
    assert running.loop.is_alive
    running.loop.close()


def test_refused_request_gets_its_error(running: Running) -> None:
    with pytest.raises(InvalidParameter):
        running.stream("a", [1000], drawn(1)).result()
    assert running.loop.is_alive
    running.loop.close()


def test_second_crash_of_the_loop_fails_everybody_who_waits_or_comes_later(running: Running) -> None:
    """What becomes of the first is in test_engine_restart.py."""
    entered, crash = threading.Event(), threading.Event()

    def die(batch: Batch) -> None:
        entered.set()
        assert crash.wait(WAIT_S)
        raise SystemExit("out of everything")  # not an Exception: nothing below the loop catches it

    running.bench.model.before = die
    streams = [running.stream("runs", [1], endless())]
    assert entered.wait(WAIT_S)
    streams.append(running.stream("in the inbox", [2], endless()))  # it kills the thread that was started again
    crash.set()
    for stream in streams:
        with pytest.raises(EngineDied, match="out of everything"):
            stream.result()
    with pytest.raises(EngineDied, match="died"):
        running.stream("late", [1], endless())
    assert not running.loop.is_alive and running.closed.wait(WAIT_S)
    streams[0].cancel()
    running.loop.close()


def test_close_cancels_what_runs_and_refuses_what_comes(running: Running) -> None:
    entered = threading.Event()
    running.bench.model.before = lambda batch: entered.set()
    streams = [running.stream(f"r{i}", [i], endless()) for i in range(12)]
    assert entered.wait(WAIT_S)
    running.loop.close()
    running.loop.close()
    assert {stream.result().finish_reason for stream in streams} <= {"cancelled", "length"}
    with pytest.raises(EngineClosed):
        running.stream("late", [1], endless())
    running.bench.core.check()


def test_idle_loop_sleeps_and_a_hanging_step_shows_as_stalled(running: Running) -> None:
    running.stream("a", [1], drawn(1)).result()
    entered, go_on = threading.Event(), threading.Event()

    def hang(batch: Batch) -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    running.bench.model.before = hang
    num_steps = running.bench.core.counters.num_steps
    time.sleep(0.02)
    assert running.bench.core.counters.num_steps == num_steps
    assert running.loop.queue.stalled_s == 0.0
    stream = running.stream("b", [1], drawn(1))
    assert entered.wait(WAIT_S)
    before = running.loop.queue.stalled_s
    time.sleep(0.02)
    assert running.loop.queue.stalled_s >= before + 0.02
    go_on.set()
    stream.result()
    running.loop.close()
    assert running.loop.queue.stalled_s == 0.0


def test_a_call_is_done_between_steps_on_the_loops_thread_and_answers(running: Running) -> None:
    running.stream("a", [1, 2], endless())
    thread, num_running = running.loop.call(lambda core: (threading.current_thread().name, core.num_running))
    assert thread == "radixlm-engine" and num_running in (0, 1)
    running.loop.call(lambda core: core.check())


def test_a_call_that_fails_fails_alone(running: Running) -> None:
    stream = running.stream("a", [1, 2], drawn(1))
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda core: core.num_running // 0)
    assert stream.result().token_ids == alone([1, 2], drawn(1))


def test_a_call_to_a_closed_or_dead_loop_is_refused(running: Running) -> None:
    running.loop.close()
    with pytest.raises(EngineClosed):
        running.loop.call(lambda core: None)

    dying = Running()

    def die(core: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            dying.loop.call(die)
    dying.loop.close()
    with pytest.raises(EngineDied):
        dying.loop.call(lambda core: None)


def test_what_expires_is_dropped_while_nothing_is_to_be_done() -> None:
    now, dropped = [0.0], threading.Event()
    expiry = CacheExpiry(0.01, clock=time.monotonic, drop=lambda since: dropped.set() if now[0] else None)
    bench = Bench(clock=time.monotonic)
    expiry.keep_up(bench.core.queue)
    loop = EngineLoop(bench.core, clock=time.monotonic, on_exit=lambda: None)
    now[0] = 1.0
    assert dropped.wait(WAIT_S)
    loop.close()


def test_a_full_queue_refuses_and_every_end_of_a_request_makes_room() -> None:
    running = Running(max_num_requests=3)
    begun, go_on = threading.Event(), threading.Event()

    def wait(batch: object) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    running.bench.model.before = wait
    streams = [running.stream("ends", [1], drawn(1))]
    assert begun.wait(WAIT_S), "the core looks at the others only after this step"
    streams.append(running.stream("cancelled", [2], drawn(2)))
    streams.append(running.stream("refused by the core", [1000], drawn(1)))
    for _ in range(2):
        with pytest.raises(EngineOverloaded, match="has 3 requests, at most 3") as refused:
            running.stream("too many", [4], drawn(1))
    assert 1 <= refused.value.retry_after_s <= 60 and running.loop.queue.num_rejected == 2
    with pytest.raises(EngineOverloaded):
        running.loop.queue.require_room()
    streams[1].cancel()
    go_on.set()
    assert streams[0].result().token_ids == alone([1], drawn(1))
    streams[1].result()
    with pytest.raises(InvalidParameter):
        streams[2].result()
    again = [running.stream(f"again {i}", [i], drawn(i)) for i in range(3)]
    assert [stream.result().token_ids for stream in again] == [alone([i], drawn(i)) for i in range(3)]
    running.loop.queue.require_room()
    running.loop.close()


def test_of_a_full_queue_the_client_with_most_requests_loses_its_newest() -> None:
    """One key filled the queue, and another got 39 times 429."""
    running = Running(max_num_requests=6)
    begun, go_on = threading.Event(), threading.Event()

    def wait(batch: object) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    running.bench.model.before = wait
    many = [running.stream("many 0", [1], drawn(0), namespace=b"many")]
    assert begun.wait(WAIT_S), "the core looks at the others only after this step"
    many += [running.stream(f"many {i}", [1], drawn(i), namespace=b"many") for i in range(1, 6)]
    few = [running.stream(f"few {i}", [2], drawn(i), namespace=b"few") for i in range(3)]
    for namespace in (b"many", b"few"):  # each has half of it
        with pytest.raises(EngineOverloaded):
            running.stream("too many", [3], drawn(1), namespace=namespace)
    go_on.set()
    assert [stream.result().token_ids for stream in few] == [alone([2], drawn(i)) for i in range(3)]
    assert [stream.result().token_ids for stream in many[:3]] == [alone([1], drawn(i)) for i in range(3)]
    for stream in many[3:]:
        with pytest.raises(EngineOverloaded):
            stream.result()
    assert running.loop.queue.room == 6
    again = [running.stream(f"again {i}", [1], drawn(i), namespace=b"many") for i in range(6)]
    assert [stream.result().token_ids for stream in again] == [alone([1], drawn(i)) for i in range(6)]
    running.loop.close()


def assert_(condition: bool) -> None:
    assert condition
