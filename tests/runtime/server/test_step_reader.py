"""Bytes are fed whole and in order, a step a turn, and nothing is read meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from radixlm.runtime.server.http.client_bounds import StepReader


class FakeTransport:
    def __init__(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Fed:
    """A reader of four bytes a step, and what it fed."""

    def __init__(self) -> None:
        self.transport: Any = FakeTransport()
        self.steps: list[bytes] = []
        self.reader = StepReader(self.transport, asyncio.get_running_loop(), self.steps.append, lambda: 4)


async def turn() -> None:
    await asyncio.sleep(0)


def test_each_turn_feeds_one_step_and_the_socket_is_read_when_all_is_fed() -> None:
    async def run() -> None:
        fed = Fed()
        fed.reader.received(b"abcdefghij")
        assert fed.steps == [b"abcd"] and not fed.transport.is_reading
        await turn()
        assert fed.steps == [b"abcd", b"efgh"] and not fed.transport.is_reading
        await turn()
        assert fed.steps[2:] == [b"ij"] and fed.transport.is_reading
        fed.reader.received(b"k")
        assert fed.steps[3:] == [b"k"] and fed.transport.is_reading

    asyncio.run(run())


def test_what_is_paused_waits() -> None:
    async def run() -> None:
        fed = Fed()
        fed.reader.received(b"abcdef")
        fed.reader.pause_reading()
        await turn()
        assert fed.steps == [b"abcd"] and fed.reader.num_waiting_bytes == 2
        fed.reader.resume_reading()
        assert not fed.transport.is_reading
        await turn()
        assert fed.steps == [b"abcd", b"ef"] and fed.transport.is_reading

    asyncio.run(run())


def test_what_is_dropped_is_read_and_never_fed_not_even_as_no_bytes() -> None:
    """To h11, no bytes are the end of the connection; a turn was under way when the rest was dropped."""

    async def run() -> None:
        fed = Fed()
        fed.reader.received(b"abcdefgh")
        fed.reader.drop()
        await turn()
        fed.reader.received(b"more")
        await turn()
        assert fed.steps == [b"abcd"] and fed.transport.is_reading and fed.reader.drops

    asyncio.run(run())
