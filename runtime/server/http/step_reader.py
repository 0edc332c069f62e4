"""Feed the bytes of a connection in steps, one a turn of the event loop, so that no client can hold the loop.

The bytes that wait are bounded: nothing more is read from the socket meanwhile. Knows a transport, not what the bytes
mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StepReader:
    """Gives `feed` the bytes that are `received`, at most `step_bytes()` a turn, and none while reading is paused.

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
