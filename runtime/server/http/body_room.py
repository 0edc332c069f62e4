"""Bound the bytes of all request bodies that are read at a time; the client that has most of them makes room.

Knows bytes and names of clients, not what the bytes say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import HTTPError

RETRY_AFTER_S = 1
MAX_BODIES = 16  # of the largest size that a server reads at a time


@dataclass(eq=False)
class BodyReading:
    """One body that is read, or was read and is not decoded yet."""

    client: str
    room: BodyRoom
    num_bytes: int = 0
    is_refused: bool = False
    deadline: asyncio.Timeout | None = None  # of its reading: brought forward where the body is refused

    def add(self, num_bytes: int) -> None:
        """Take room for more bytes.

        Raises:
            HTTPError: 503, there is none, and no client has more of it.
        """
        self.room.take(self, num_bytes)
        self.require_room()

    def require_room(self) -> None:
        """Raise HTTPError, 503, if the body's room was given to another client."""
        if self.is_refused:
            raise HTTPError(
                503,
                f"the bodies of requests that arrive now have more than {self.room.max_bytes} bytes together, and most "
                "of them are yours; send fewer large ones at a time",
                code="too_many_bytes",
                headers={"connection": "close", "Retry-After": str(RETRY_AFTER_S)},
            )


class BodyRoom:
    """Room for `max_bytes` of bodies. Where it is full, the client with most bytes loses its largest body.

    >>> room = BodyRoom(max_bytes=10)
    >>> with room.reading("a client") as reading:
    ...     reading.add(4)
    ...     room.num_bytes
    4
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._readings: set[BodyReading] = set()
        self._by_client = Counter[str]()

    @contextmanager
    def reading(self, client: str) -> Iterator[BodyReading]:
        """Have room for one body of a client until the block ends."""
        reading = BodyReading(client, self)
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.discard(reading)
            self._count(reading, -reading.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return self._by_client.total()

    def take(self, reading: BodyReading, num_bytes: int) -> None:
        """Count more bytes of a body, and refuse bodies until the others fit: its own, if no client has more."""
        self._count(reading, num_bytes)
        while self.num_bytes > self.max_bytes:
            greediest = max(self._by_client, key=self._by_client.__getitem__)
            refused = reading
            if self._by_client[greediest] > self._by_client[reading.client]:
                own = (each for each in self._readings if each.client == greediest)
                refused = max(own, key=lambda each: each.num_bytes)
            refused.is_refused = True
            self._count(refused, -refused.num_bytes)
            if refused.deadline is not None and refused is not reading:
                refused.deadline.reschedule(asyncio.get_running_loop().time())

    def _count(self, reading: BodyReading, num_bytes: int) -> None:
        reading.num_bytes += num_bytes
        self._by_client[reading.client] += num_bytes
        if not self._by_client[reading.client]:
            del self._by_client[reading.client]
