"""Ctrl-C, or any exception, in a thread that waits for a reply ends the request, too."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.engine.engine_loop import EngineLoop
from radixlm.runtime.model.batch import Batch

from ..server.real_server import WAIT_S, SlowModel, real_engine

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


class TooLate(Exception):
    """What a caller's own timer throws."""


@pytest.fixture(params=[KeyboardInterrupt, TooLate])
def interrupt(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What the first SIGINT raises in the main thread; later ones raise nothing."""
    kinds = [request.param]

    def handle(signal_number: int, frame: object) -> None:
        if kinds:
            raise kinds.pop()

    before = signal.signal(signal.SIGINT, handle)
    yield request.param
    signal.signal(signal.SIGINT, before)


def interrupts(model: SlowModel) -> threading.Event:
    """Have the third step interrupt the main thread, and wait until the event is set."""
    goes_on, num_steps = threading.Event(), 0

    def before(batch: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        deadline = time.monotonic() + WAIT_S
        while num_steps == 3 and not goes_on.wait(0.05):  # a signal that comes just before a wait does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert time.monotonic() < deadline

    model.before = before
    return goes_on


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.generate("once there was", ENDLESS),
        lambda engine: engine.chat([{"role": "user", "content": "once there was"}], ENDLESS),
    ],
    ids=["generate", "chat"],
)
def test_an_interrupt_while_a_reply_is_awaited_ends_the_request(
    ask: Callable[[Engine], object], interrupt: type[BaseException]
) -> None:
    engine, model = real_engine()
    with engine:
        goes_on = interrupts(model)
        with pytest.raises(interrupt):
            ask(engine)
        goes_on.set()
        engine.check()
        stats = engine.stats()
        assert stats.finished_by_reason == {"cancelled": 1} and stats.num_running == stats.num_used_pages == 0


def test_an_interrupt_while_a_request_is_handed_over_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = real_engine()
    with engine:
        goes_on = threading.Event()
        submit = EngineLoop.submit

        def before(batch: Batch) -> None:
            assert goes_on.wait(WAIT_S)

        def submit_and_be_interrupted(loop: EngineLoop, request: Any, listener: Any) -> None:
            submit(loop, request, listener)
            raise KeyboardInterrupt

        model.before = before
        monkeypatch.setattr(EngineLoop, "submit", submit_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate("once there was", ENDLESS)
        goes_on.set()
        engine.check()
        assert engine.stats().finished_by_reason == {"cancelled": 1}


def test_a_stream_that_is_not_left_goes_on_after_an_interrupt(interrupt: type[BaseException]) -> None:
    """It is its owner's: the reply can still be read."""
    engine, model = real_engine()
    with engine:
        goes_on = interrupts(model)
        stream = engine.stream("once there was", ENDLESS)
        with pytest.raises(interrupt):
            stream.result()
        goes_on.set()
        assert stream.result().finish_reason == "length"
