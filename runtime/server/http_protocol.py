"""HTTP over one connection: uvicorn's, with a deadline for headers and errors in OpenAI's shape.

uvicorn waits for the rest of a header as long as the connection lasts. Knows connections, not the application.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from .replies import ErrorBody, ErrorReply

MAX_HEADER_BYTES = 32 << 10  # of all headers of a request and its first line
STEP_BYTES = 4 << 10


class HTTPProtocol(H11Protocol):
    """A connection whose client has `headers_s` seconds for each request's headers, from their first byte on.

    Give it to `uvicorn.Config(http=...)`, with `h11_max_incomplete_event_size=MAX_HEADER_BYTES`.
    """

    headers_s: ClassVar[float] = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            # h11 looks at the length of what is incomplete: headers that come whole, and too long, would pass.
            num_bytes = STEP_BYTES if self.conn.their_state is h11.IDLE else len(data)
            super().data_received(data[:num_bytes])
            data = data[num_bytes:]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Say that this was no HTTP, and close the connection."""
        message = f"this is not HTTP/1.1, or its headers have more than {MAX_HEADER_BYTES} bytes"
        body = msgspec.json.encode(ErrorReply(ErrorBody(message, "invalid_request_error", code="invalid_http")))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # not in the middle of another answer
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """See to it that the deadline runs exactly while headers are awaited."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
