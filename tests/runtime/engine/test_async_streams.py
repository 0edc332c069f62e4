"""A stream can be read from event loops, of which it stops none; a reader that stops ends its request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from radixlm.runtime.engine.completion import Delta
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.errors import EngineError, StepFailed

from ..server.real_server import WAIT_S
from .test_engine_loop import Running, drawn, endless


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(num_pages=60)
    yield running
    running.loop.close()


def require_idle(running: Running, num_cancelled: int) -> None:
    running.loop.call(lambda core: core.check())
    core = running.bench.core
    assert core.num_running == core.num_waiting == 0
    assert core.counters.finished_by_reason["cancelled"] == num_cancelled


def held(running: Running) -> threading.Event:
    """The model computes the first step, and more when this is set."""
    go_on = threading.Event()
    steps: list[None] = []

    def hold(batch: object) -> None:
        steps.append(None)
        assert len(steps) == 1 or go_on.wait(WAIT_S)

    running.bench.model.before = hold
    return go_on


def test_async_for_gives_the_deltas_of_for(running: Running) -> None:
    async def read(stream: GenerationStream) -> list[Delta]:
        return [delta async for delta in stream]

    deltas = list(running.stream("a", [1, 2], drawn(1)))
    assert asyncio.run(read(running.stream("b", [1, 2], drawn(1)))) == deltas
    stream = running.stream("c", [1, 2], drawn(1))
    asyncio.run(read(stream))
    assert stream.result().token_ids == tuple(token for delta in deltas for token in delta.token_ids)


def test_many_streams_are_read_in_one_loop_and_in_loops_of_several_threads(running: Running) -> None:
    wanted = {name: running.stream(name, [1, 2], drawn(ord(name))).result().text for name in "abcdef"}
    found: dict[str, str] = {}

    async def read(name: str) -> None:
        stream = running.stream(f"again {name}", [1, 2], drawn(ord(name)))
        found[name] = "".join([delta.text async for delta in stream])

    async def read_all(names: str) -> None:
        await asyncio.gather(*map(read, names))

    threads = [threading.Thread(target=lambda names=names: asyncio.run(read_all(names))) for names in ("abc", "def")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == wanted


def test_the_loop_goes_on_while_a_stream_waits(running: Running) -> None:
    go_on = held(running)

    async def read() -> int:
        async for _ in running.stream("a", [1, 2], drawn(1, max_tokens=2)):
            asyncio.get_running_loop().call_soon(go_on.set)  # the second delta needs the loop
        return 1

    assert asyncio.run(asyncio.wait_for(read(), WAIT_S)) == 1


def test_a_task_that_is_cancelled_ends_its_request(running: Running) -> None:
    go_on = held(running)

    async def read_one_and_wait() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in running.stream("a", [1, 2], endless()):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read_one_and_wait())
    go_on.set()
    require_idle(running, num_cancelled=1)


def test_leaving_the_loop_early_ends_the_request(running: Running) -> None:
    go_on = held(running)

    async def read_one() -> None:
        async for _ in running.stream("a", [1, 2], endless()):
            break

    asyncio.run(read_one())
    go_on.set()
    require_idle(running, num_cancelled=1)


def test_a_stream_that_is_read_to_its_end_was_not_cancelled(running: Running) -> None:
    async def read() -> list[str]:
        return [delta.text async for delta in running.stream("a", [1, 2], drawn(1))]

    assert asyncio.run(read())
    require_idle(running, num_cancelled=0)


def test_an_error_is_raised_where_the_stream_is_read(running: Running) -> None:
    def broken(batch: object) -> None:
        raise MemoryError("no room")

    async def read() -> None:
        async for _ in running.stream("a", [1, 2], drawn(1)):
            pass

    running.bench.model.before = broken
    with pytest.raises(StepFailed, match="no room"):
        asyncio.run(read())


def test_an_engine_that_is_closed_ends_the_reading(running: Running) -> None:
    go_on = held(running)

    async def read() -> list[str | None]:
        reasons: list[str | None] = []
        async for delta in running.stream("a", [1, 2], endless()):
            reasons.append(delta.finish_reason)
            closing = threading.Thread(target=running.loop.close)
            closing.start()
            go_on.set()
        return reasons

    assert asyncio.run(read())[-1] == "cancelled"
    with pytest.raises(EngineError):
        running.stream("b", [1, 2], drawn(1))


def test_a_stream_that_has_ended_has_nothing_more(running: Running) -> None:
    stream = running.stream("a", [1, 2], drawn(1))
    stream.result()

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    assert asyncio.run(read()) == []
