"""A connection whose writes are gathered: what an application writes in one turn of the event loop is one packet.

Knows bytes and turns of the loop, not HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any


class CorkedTransport:
    """Stands for `transport`, and passes its writes on together when the running callbacks have ended.

    An answer's headers and body, or a stream's last events and its end, then take one call of the kernel instead of
    several. Closing the connection passes on first what was written.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Take `data`; it is passed on before the loop waits for anything."""
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written.append(data)

    def write_eof(self) -> None:
        """As the transport's, after what was written."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """As the transport's, after what was written."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Pass on what was written."""
        if self._written:
            data, self._written = b"".join(self._written), []
            self._transport.write(data)
