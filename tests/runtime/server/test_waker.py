"""What the engine's thread wakes: every task that has something to read, by one call a step."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

from radixlm.runtime.server.choices import Waker


def test_events_that_are_set_before_the_loop_looks_take_one_call() -> None:
    async def run() -> int:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe

        def counted(callback: Callable[[], None]) -> None:
            calls.append(callback)
            call(callback)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        waker, events = Waker(), [asyncio.Event() for _ in range(8)]
        thread = threading.Thread(target=lambda: [waker.set(event) for event in events])
        thread.start()
        thread.join()
        await asyncio.gather(*(event.wait() for event in events))
        return len(calls)

    assert asyncio.run(run()) == 1


def test_no_event_is_lost_however_threads_and_tasks_alternate() -> None:
    async def run() -> None:
        waker, chance = Waker(), random.Random(1)
        events = [asyncio.Event() for _ in range(2000)]

        def set_some(mine: list[asyncio.Event]) -> None:
            for event in mine:
                waker.set(event)

        threads = [threading.Thread(target=set_some, args=(events[number::4],)) for number in range(4)]
        for thread in threads:
            thread.start()
        for event in chance.sample(events, len(events)):
            await asyncio.wait_for(event.wait(), 30)

    asyncio.run(run())


def test_nothing_is_called_on_a_loop_that_was_closed() -> None:
    async def run() -> tuple[Waker, asyncio.Event]:
        return Waker(), asyncio.Event()

    waker, event = asyncio.run(run())
    waker.set(event)
