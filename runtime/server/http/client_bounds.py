"""Limits on a client's use of the event loop's time, of buffer memory and of connections.

`StepReader` feeds bytes in steps, one per turn of the event loop. `GuardedWriter` drops a connection whose client stops
reading. `connection_to_close` chooses a connection to close when there are too many. Knows transports, times and
addresses, not what the bytes mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

ABOUT_TO_ASK_S = 1.0  # a connection opened or answered less than this ago may be about to be used
MIN_TAKEN_BYTES = 16 << 10  # that a client must read in `write_s`, or all that is buffered if that is less
_LOOKS = 4  # checks of a writer in that time


class StepReader:
    """Passes received bytes on to `feed`, at most `step_bytes()` per turn, and none while reading is paused.

    The buffer is bounded, because nothing more is read from the socket while bytes wait. uvicorn's flow control gets
    this object in place of the transport.
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
        """Number of bytes that were received and not fed yet."""
        return len(self._waiting)

    @property
    def drops(self) -> bool:
        """Return whether all bytes are dropped from now on."""
        return self._drops

    def received(self, data: bytes) -> None:
        """Take bytes, and feed the first step at once if no others wait."""
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
        """Resume feeding with the next turn."""
        self._is_paused = False
        self._settle()

    def drop(self) -> None:
        """Drop all bytes that wait or arrive from now on."""
        self._drops = True
        self._waiting.clear()
        self._settle()

    def take_turn(self) -> None:
        """Feed the next step. The event loop calls this again while bytes wait."""
        self._turn = None
        if self._is_paused or not self._waiting or self._transport.is_closing():  # feeding no bytes would mean the end
            return
        num_bytes = self._step_bytes()
        step = bytes(self._waiting[:num_bytes])
        del self._waiting[:num_bytes]
        self._feed(step)
        self._settle()

    def _settle(self) -> None:
        """Read from the socket if and only if no bytes wait and reading is not paused."""
        if self._drops or not (self._is_paused or self._waiting):
            self._transport.resume_reading()
            return
        self._transport.pause_reading()
        if self._turn is None and not self._is_paused:
            self._turn = self._loop.call_soon(self.take_turn)


class GuardedWriter:
    """Writes to a transport, and aborts it if its client reads too slowly.

    The client must read `MIN_TAKEN_BYTES`, or all that is buffered, every `write_s` seconds. Otherwise a client that
    reads one byte a minute would hold a response for years. A timer runs only while bytes wait, also after the
    transport was closed, because a closed transport waits for its buffer without a limit.
    """

    def __init__(self, transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop, write_s: float) -> None:
        self._transport, self._loop, self._write_s = transport, loop, write_s
        self._num_written = self._num_taken = 0
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Write bytes, and start the timer if they are buffered."""
        self._transport.write(data)
        self._num_written += len(data)
        if self._timer is None and (num_waiting := self._transport.get_write_buffer_size()):
            self._num_taken, self._taken_at = self._num_written - num_waiting, self._loop.time()
            self._timer = self._loop.call_later(self._write_s / _LOOKS, self._check_progress)

    def stop(self) -> None:
        """Stop the timer, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_progress(self) -> None:
        """Abort the connection if its client has taken too few bytes for too long; else check again later."""
        self._timer = None
        num_waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        if not num_waiting:
            return
        if (num_taken := self._num_written - num_waiting) - self._num_taken >= MIN_TAKEN_BYTES:
            self._num_taken, self._taken_at = num_taken, now
        if now - self._taken_at >= self._write_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._write_s / _LOOKS, self._check_progress)


class Connection(Protocol):
    """A connection whose client has yet to send a request, or the rest of one."""

    @property
    def host(self) -> str | None:
        """The client's address."""
        ...

    @property
    def idle_since(self) -> float:
        """Time of the loop at which it was opened, or its last response ended."""
        ...

    @property
    def has_request(self) -> bool:
        """Return whether a request has begun, and the rest of its body is still to come."""
        ...


C = TypeVar("C", bound=Connection)


def connection_to_close(waiting: Sequence[C], newest: C, *, now: float) -> C:
    """Return the connection to close so that the newest one fits.

    It belongs to the address with the most waiting connections, `newest` included. A connection without a request comes
    first, unless it may be about to be used, then the oldest.

    Args:
        waiting: connections whose client has yet to send something.

    Returns:
        `newest` if its address has most, and no other waiting connection.
    """
    by_host = Counter(each.host for each in waiting)
    by_host[newest.host] += 1
    greediest = max(by_host, key=by_host.__getitem__)

    def order(connection: C) -> tuple[bool, float]:
        is_idle = not connection.has_request and now - connection.idle_since > ABOUT_TO_ASK_S
        return not is_idle, connection.idle_since

    return min((each for each in waiting if each.host == greediest), key=order, default=newest)
