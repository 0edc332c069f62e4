"""Bound what the client of a connection may take: the event loop's time, memory for bytes that wait, connections.

`StepReader` feeds bytes in steps, one a turn of the event loop. `GuardedWriter` drops a connection whose client stops
reading. `connection_to_close` makes room where there are as many connections as there may be. Knows transports, times
and addresses, not what the bytes mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

ABOUT_TO_ASK_S = 1.0  # a connection that was opened, or got an answer, so shortly ago may be about to be used
MIN_TAKEN_BYTES = 16 << 10  # of what waits for a client, in the time that it has; all of it, if that is less
_LOOKS = 4  # of a writer in that time


class StepReader:
    """Gives `feed` the bytes that are `received`, at most `step_bytes()` a turn, and none while reading is paused.

    The bytes that wait are bounded: nothing more is read from the socket meanwhile.
    uvicorn's flow control gets this object in place of the transport.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        feed: Callable[[bytes], None],
        step_bytes: Callable[[], int],
    ) -> None:
        self._transport, self._loop, self._feed, self._step_bytes = transport, loop, feed, step_bytes
        self._waiting = bytearray()
        self._is_paused = False
        self._drops = False
        self._turn: asyncio.Handle | None = None

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that were received and not fed yet."""
        return len(self._waiting)

    @property
    def drops(self) -> bool:
        """Whether nothing is fed any more."""
        return self._drops

    def received(self, data: bytes) -> None:
        """Take bytes; the first step of them is fed at once if no others wait."""
        if self._drops:
            return
        self._waiting += data
        if self._turn is None and not self._is_paused:
            self.take_turn()

    def pause_reading(self) -> None:
        """Feed nothing until `resume_reading`."""
        self._is_paused = True
        self._settle()

    def resume_reading(self) -> None:
        """Feed again, from the next turn on."""
        self._is_paused = False
        self._settle()

    def drop(self) -> None:
        """Feed nothing any more: bytes that wait or arrive are read and forgotten."""
        self._drops = True
        self._waiting.clear()
        self._settle()

    def take_turn(self) -> None:
        """Feed the next few bytes; the event loop calls it again while some wait."""
        self._turn = None
        if self._is_paused or not self._waiting or self._transport.is_closing():  # no bytes would be read as the end
            return
        num_bytes = self._step_bytes()
        step = bytes(self._waiting[:num_bytes])
        del self._waiting[:num_bytes]
        self._feed(step)
        self._settle()

    def _settle(self) -> None:
        """Read from the socket exactly while no bytes wait and reading is not paused."""
        if self._drops or not (self._is_paused or self._waiting):
            self._transport.resume_reading()
            return
        self._transport.pause_reading()
        if self._turn is None and not self._is_paused:
            self._turn = self._loop.call_soon(self.take_turn)


class GuardedWriter:
    """Writes to `transport`, and aborts it unless `MIN_TAKEN_BYTES` of what waits, or all of it, is taken in `write_s`
    seconds: a client that takes one byte a minute would hold its answer for years.

    A timer runs only while bytes wait, also after the transport was closed: until then it would wait for ever.
    """

    def __init__(self, transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop, write_s: float) -> None:
        self._transport, self._loop, self._write_s = transport, loop, write_s
        self._num_written = self._num_taken = 0
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Write bytes."""
        self._transport.write(data)
        self._num_written += len(data)
        if self._timer is None and (num_waiting := self._transport.get_write_buffer_size()):
            self._num_taken, self._taken_at = self._num_written - num_waiting, self._loop.time()
            self._timer = self._loop.call_later(self._write_s / _LOOKS, self._look)

    def stop(self) -> None:
        """Look no more: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        num_waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        if not num_waiting:
            return
        if (num_taken := self._num_written - num_waiting) - self._num_taken >= MIN_TAKEN_BYTES:
            self._num_taken, self._taken_at = num_taken, now
        if now - self._taken_at >= self._write_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._write_s / _LOOKS, self._look)


class Connection(Protocol):
    """A connection whose client has yet to send a request, or the rest of one."""

    @property
    def host(self) -> str | None:
        """The client's address."""
        ...

    @property
    def idle_since(self) -> float:
        """When it was opened, or its last answer ended."""
        ...

    @property
    def has_request(self) -> bool:
        """Whether a part of a request's body is still to come."""
        ...


C = TypeVar("C", bound=Connection)


def connection_to_close(waiting: Sequence[C], newest: C, *, now: float) -> C:
    """The connection that makes room for the newest one, which counts as its client's: of the address that has most of
    those that wait for their client. One without a request goes first, unless it is about to be used, then the oldest.

    Returns:
        `newest` if its address has most, and no other that waits.
    """
    by_host = Counter(each.host for each in waiting)
    by_host[newest.host] += 1
    greediest = max(by_host, key=by_host.__getitem__)

    def order(connection: C) -> tuple[bool, float]:
        is_idle = not connection.has_request and now - connection.idle_since > ABOUT_TO_ASK_S
        return not is_idle, connection.idle_since

    return min((each for each in waiting if each.host == greediest), key=order, default=newest)
