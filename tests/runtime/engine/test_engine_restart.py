"""An engine whose thread dies is started again with a fresh pool; a second death soon after is final."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.radix_tree import RadixTree
from radixlm.runtime.cache.reply_alias import ReplyAlias
from radixlm.runtime.engine.completion import RequestOutput
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.engine_loop import FORGIVEN_S, EngineLoop
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.engine.reply import Reply
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.scheduler import Scheduler
from radixlm.runtime.engine.step import readers
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.errors import EngineClosed, EngineDied
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.prefix.disk_reader import DiskReader
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.page_saver import PageSaver
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.transfer import PageInserter, Transfer

from ..eager_loads import load_always
from ..fake_model import Bench, alone
from ..fake_tier import processes

WAIT_S = 60.0  # only a hang takes that long
PARAMS = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
PROMPTS = {"a": [3] * 20, "b": [4] * 25, "waits": [5] * 18}


class Killed(BaseException):
    """What ends a thread: no Exception, so that nothing below the loop catches it."""


class Running:
    """A loop over a fake model, whose steps wait for `may_step`."""

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench or Bench(num_pages=24, policy=SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=24))
        self.may_step, self.closed = threading.Event(), threading.Event()
        self.bench.model.before = self.hold
        self.loop = EngineLoop(self.bench.core, clock=time.monotonic, on_exit=self.closed.set)

    def hold(self, batch: Batch) -> None:
        assert self.may_step.wait(WAIT_S)

    def die(self, batch: Batch) -> None:
        self.hold(batch)
        self.bench.model.before = self.hold
        raise Killed("on purpose")

    def stream(self, name: str, ids: Sequence[int]) -> GenerationStream:
        stream = GenerationStream(name, tuple(ids), cancel=self.loop.cancel)
        self.loop.submit(self.bench.request(name, ids, PARAMS), stream.deliver)
        return stream

    def kill(self) -> None:
        """Have a step of one request end the thread."""

        def die(batch: Batch) -> None:  # no step of others before it
            (self.die if "killer" in self.bench.core._scheduler else self.hold)(batch)

        self.bench.model.before = die
        self.may_step.set()
        with pytest.raises(EngineDied):
            self.stream("killer", [9] * 17).result()

    def expect_sound(self) -> None:
        """Every prompt gets its tokens, and no page is lost."""
        self.may_step.set()
        streams = {name: self.stream(f"again {name}", ids) for name, ids in PROMPTS.items()}
        for name, stream in streams.items():
            assert stream.result().token_ids == alone(PROMPTS[name], PARAMS)
        self.loop.call(lambda core: core.check())
        assert self.loop.call(lambda core: (core.num_running, core.num_waiting)) == (0, 0)
        self.loop.close()
        self.bench.cache.clear()
        assert self.bench.cache.pool.num_free == self.bench.num_pages


def test_requests_in_flight_get_a_typed_error_and_later_ones_are_served() -> None:
    running = Running()
    running.bench.model.before = running.die
    streams = [running.stream(name, ids) for name, ids in PROMPTS.items()]
    running.may_step.set()
    errors = [failure(stream) for stream in streams]
    assert any(errors)
    for error in filter(None, errors):
        assert "died of Killed: on purpose" in str(error) and "started again" in str(error)
    counters = running.bench.core.counters
    assert (running.loop.is_alive, running.loop.crash, counters.num_restarts) == (True, None, 1)
    running.expect_sound()


def test_a_second_death_is_final() -> None:
    running = Running()
    running.kill()
    running.kill()
    assert running.closed.wait(WAIT_S)
    assert not running.loop.is_alive and running.loop.crash == "Killed"
    for _ in range(2):
        with pytest.raises(EngineDied, match="died of Killed: on purpose; open it again"):
            running.stream("late", [1])
        with pytest.raises(EngineDied):
            running.loop.call(lambda core: None)


def failure(stream: GenerationStream) -> EngineDied | None:
    try:
        stream.result()
    except EngineDied as died:
        return died
    return None


def throwing(wrapped: Callable[..., Any], at: int, *, after: bool) -> Callable[..., Any]:
    """Kills the thread at call number `at`, before or after the work is done."""
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != at:
            return wrapped(*args, **kwargs)
        if after:
            wrapped(*args, **kwargs)
        raise Killed("on purpose")

    return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (readers, "sample_row"),
        (RadixTree, "insert_after"),
        (PagePool, "add_to_tree"),
        (PagePool, "release"),
        (PrefixCache, "match"),
        (PrefixCache, "open"),
        (Scheduler, "add"),
        (Scheduler, "schedule"),
        (Scheduler, "remove"),
        (Request, "admit"),
        (Reply, "accept"),
        (Request, "completion"),
    ],
)
def test_wherever_it_dies_nothing_is_lost(
    owner: Any, method: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running()
    monkeypatch.setattr(owner, method, throwing(getattr(owner, method), at, after=after))
    running.may_step.set()
    streams = {name: running.stream(name, ids) for name, ids in PROMPTS.items()}
    for name, stream in streams.items():
        if failure(stream) is None:
            assert stream.result().token_ids == alone(PROMPTS[name], PARAMS)
    running.expect_sound()
    assert running.bench.core.counters.num_restarts == 1, "nothing was thrown"


def test_a_listener_that_kills_the_thread_is_no_reason_to_forget_others() -> None:
    running = Running()

    def deadly(output: RequestOutput) -> None:
        if output.error is None:
            raise Killed("on purpose")

    running.loop.submit(running.bench.request("deadly", [1] * 20, PARAMS), deadly)
    stream = running.stream("a", PROMPTS["a"])
    running.may_step.set()
    assert failure(stream) is not None or stream.result().token_ids == alone(PROMPTS["a"], PARAMS)
    running.expect_sound()


def test_a_listener_that_raises_when_it_is_told_of_a_death_keeps_it_from_no_other() -> None:
    running = Running()

    def deadly(output: RequestOutput) -> None:
        raise Killed("on purpose")

    running.loop.submit(running.bench.request("deadly", [1] * 20, PARAMS), deadly)
    stream = running.stream("a", PROMPTS["a"])
    running.may_step.set()
    told = threading.Thread(target=failure, args=(stream,), daemon=True)
    told.start()
    told.join(5.0)
    assert not told.is_alive(), "it waits for ever"
    running.expect_sound()


def test_a_death_makes_room_in_the_queue() -> None:
    running = Running()
    running.loop.queue.max_num_requests = 3
    running.kill()
    running.expect_sound()


def test_a_call_that_kills_the_thread_raises_what_it_raised_and_the_next_is_done() -> None:
    running = Running()

    def die(core: object) -> None:
        raise Killed("on purpose")

    with pytest.raises(Killed):
        running.loop.call(die)
    assert running.loop.call(lambda core: core.num_running) == 0
    running.expect_sound()


@pytest.mark.parametrize("reads", [False, True])
def test_what_waits_for_the_disk_is_told_and_what_is_stored_is_found(
    tmp_path: Path, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_always(monkeypatch, WAIT_S)
    ids = [7] * 70
    with processes(tmp_path) as open_again:
        served = open_again()
        served.bench.add("first", ids, PARAMS)
        served.run()
        served.settle()
        served = open_again()
        store = served.store
        if not reads:
            store.may_read.clear()
        running = Running(served.bench)
        waiting = running.stream("waits for the disk", ids)
        running.kill()
        assert not served.tier.stats().num_waiting
        store.may_read.set()
        if not reads:
            assert failure(waiting) is not None
        again = running.stream("again", ids).result()
        assert again.token_ids == alone(ids, PARAMS)
        assert sum(again.usage.disk_tokens_by_kind.values()) == 64
        running.expect_sound()


@pytest.mark.parametrize("is_thread", [False, True])
def test_how_replies_are_rendered_is_known_again_after_a_start_over(tmp_path: Path, is_thread: bool) -> None:
    """It was loaded from disk, then dropped with all that memory had."""
    ids, alias = [7] * 70, ReplyAlias((8,) * 12, b" Sure.", b" ")
    with processes(tmp_path) as open_again:
        served = open_again()
        served.bench.add("first", ids, PARAMS)
        served.run()
        served.bench.cache.aliases.record(b"", ids[:20], ReplyAlias(tuple(ids[20:]), b" Sure.", b" "))
        served.bench.cache.aliases.record(b"", ids, alias)  # of a reply whose pages are not stored
        served.settle()
        served = open_again()
        assert served.bench.cache.aliases.num_aliases(b"") == 1
        if is_thread:
            served.bench.core.start_over(Killed())
        else:
            served.bench.core._outputs._start_over([], AssertionError("pages are in disorder"))
        assert served.bench.cache.aliases.num_aliases(b"") == 1


def test_a_death_long_after_another_is_not_final() -> None:
    running = Running()
    now = time.monotonic()
    running.loop._clock = lambda: now  # type: ignore[method-assign]
    running.kill()
    now += FORGIVEN_S
    running.kill()
    running.expect_sound()


def test_a_forked_child_is_told_that_the_engine_is_another_process_s() -> None:
    running = Running()
    running.may_step.set()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for use in (lambda: running.stream("child", [1]), lambda: running.loop.call(lambda core: None)):
                with pytest.raises(EngineClosed, match="belongs to process"):
                    use()
            running.loop.close()
            os.write(writer, b"told" if not running.loop.is_alive else b"alive")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 9) == b"told"
    running.expect_sound()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (DiskTier, "begin"),
        (PrefixLoader, "before_step"),
        (PrefixLoader, "_arrived"),
        (PrefixLoader, "_end"),
        (PrefixLoader, "_continue"),
        (Transfer, "take"),
        (PageInserter, "insert_after"),
        (DiskReader, "_finish"),
        (EngineCore, "_go_on"),
        (PageSaver, "advance"),
        (PageSaver, "save"),
    ],
)
def test_wherever_loading_and_saving_die_what_is_stored_is_found_again(
    owner: type, method: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_always(monkeypatch, WAIT_S)
    ids = [7] * 70
    with processes(tmp_path) as open_again:
        served = open_again()
        served.bench.add("first", ids, PARAMS)
        served.run()
        served.settle()
        served = open_again()
        running = Running(served.bench)
        running.may_step.set()
        monkeypatch.setattr(owner, method, throwing(getattr(owner, method), 1, after=after))
        streams = [running.stream(f"loads {i}", ids) for i in range(2)]
        for stream in streams:
            assert failure(stream) is not None or stream.result().token_ids == alone(ids, PARAMS)
        assert running.stream("again", ids).result().token_ids == alone(ids, PARAMS)
        running.expect_sound()
        assert running.bench.core.counters.num_restarts == 1, "nothing was thrown"
        assert served.tier.stats().num_waiting == 0
