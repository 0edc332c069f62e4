"""Write to a connection whose client may stop reading: what it does not take in time is dropped, with the connection.

Knows a transport and a clock, not what is written.
"""

from __future__ import annotations

import asyncio

_LOOKS = 4  # in the time that a client has


class GuardedWriter:
    """Writes to `transport`, and aborts it when none of the bytes that wait were taken for `write_s` seconds.

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
        if (num_taken := self._num_written - num_waiting) > self._num_taken:
            self._num_taken, self._taken_at = num_taken, now
        if now - self._taken_at >= self._write_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._write_s / _LOOKS, self._look)
